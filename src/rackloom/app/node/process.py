"""The process of every node plugin: the API server, signals, metrics and health probes.

`serve_plugin` connects to the API server, serves one driver's plugin, and ends on SIGTERM or SIGINT, or
when a background task of the plugin fails. Leaving the plugin's context then raises the error.

`plugin_listeners` opens up to two listeners. The HTTP listener has /metrics, /readyz, and /healthz, which
calls the plugin over its own sockets as kubelet does. kubelet probes the gRPC health service at
the pod's address. The boot id of the host decides whether checkpoints of an earlier plugin process are
still valid.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.responses import Response

from rackloom.app.listeners import (
    PlainEndpoints,
    metrics_response,
    ok_response,
    serve_http,
    unavailable_response,
)
from rackloom.app.process import allow_open_files, freeze_loaded_objects, stop_on_signals
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.client import connect
from rackloom.claim.node.run import PluginDirectories, PluginHost, probe_handler
from rackloom.claim.node.tasks import beside
from rackloom.errors import Refused
from rackloom.serving.acceptor import bound_socket, split_listen
from rackloom.serving.grpc_server import GrpcServer
from rackloom.serving.limits import HEALTH, PROBES, Process, files_needed

BOOT_ID = Path("proc/sys/kernel/random/boot_id")


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that all plugins share."""

    node: str
    directories: PluginDirectories
    sysroot: Path = Path("/")
    """The path of the host's root, for its /proc."""
    listen: str | None = None
    """`host:port` of /metrics, /healthz and /readyz, or None to serve none."""
    health_listen: str | None = None
    """`host:port` of the gRPC health service, which kubelet probes at the pod's address, or None."""
    kubeconfig: Path | None = None
    context: str | None = None
    """None stands for the cluster that this pod runs in."""


class NodeService(Protocol):
    """One plugin, or several, as probes and Prometheus see it."""

    def metrics_page(self) -> bytes:
        """The page that Prometheus reads."""
        ...

    def not_ready(self) -> str | None:
        """The reason why pods with claims cannot be served here now, or None if they can."""
        ...

    async def is_serving(self) -> bool:
        """Whether kubelet would get an answer now."""
        ...

    async def fails(self) -> None:
        """Wait until background work fails, and raise why."""
        ...


async def serve_plugin(
    common: NodeOptions,
    driver: str,
    serve: Callable[[KubeApi], AbstractAsyncContextManager[NodeService]],
    announce: Callable[[str], None],
) -> None:
    """Serve one driver's plugin until SIGTERM or SIGINT, or until its own work fails."""
    allow_open_files(files_needed(Process.NODE))
    stopped = stop_on_signals()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(
            connect(common.kubeconfig, common.context, user_agent=f"rackloom-{driver}")
        )
        service = await stack.enter_async_context(serve(api))
        freeze_loaded_objects()
        announce(f"rackloom: serving {driver} on node {common.node}")
        async with beside(_stop_on_failure(service, stopped)):
            await stopped.wait()


async def _stop_on_failure(service: NodeService, stopped: asyncio.Event) -> None:
    """Stop when the plugin's own work fails. Leaving its context raises the error."""
    with suppress(Exception):
        await service.fails()
    stopped.set()


def host_of(common: NodeOptions) -> PluginHost:
    """The facts of this machine that the framework needs."""
    boot_id = (common.sysroot / BOOT_ID).read_text().strip()
    return PluginHost(node=common.node, boot_id=boot_id, directories=common.directories, wall=time.time)


@asynccontextmanager
async def plugin_listeners(common: NodeOptions, plugin_process: NodeService) -> AsyncIterator[None]:
    """Serve health probes and Prometheus."""
    async with AsyncExitStack() as stack:
        if common.listen is not None:
            await stack.enter_async_context(
                serve_http(PluginEndpoints(plugin_process), common.listen, limits=PROBES)
            )
        if common.health_listen is not None:
            await stack.enter_async_context(_health_service(common.health_listen, plugin_process))
        yield


@asynccontextmanager
async def _health_service(listen: str, plugin_process: NodeService) -> AsyncIterator[None]:
    server = GrpcServer((probe_handler(plugin_process.is_serving),), HEALTH)
    try:
        listener = bound_socket(*split_listen(listen))
    except (OSError, OverflowError) as error:
        raise Refused(
            f"cannot listen on {listen} for health probes", nearest_fix="choose another --healthcheck-port"
        ) from error
    await server.start(listener)
    try:
        yield
    finally:
        await server.stop(0)


class PluginEndpoints(PlainEndpoints):
    """An ASGI application: /metrics, /readyz, and /healthz, which calls the plugin over its own sockets."""

    def __init__(self, plugin_process: NodeService) -> None:
        super().__init__({"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._ready})
        self._process = plugin_process

    async def _metrics(self) -> Response:
        return metrics_response(self._process.metrics_page())

    async def _ready(self) -> Response:
        trouble = self._process.not_ready()
        return ok_response() if trouble is None else unavailable_response(trouble)

    async def _health(self) -> Response:
        serves = await self._process.is_serving()
        return ok_response() if serves else unavailable_response("the plugin does not answer on its sockets")
