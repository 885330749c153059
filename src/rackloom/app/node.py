"""What every node plugin has as a process: the API server, signals, and pages for probes and Prometheus."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import msgspec
from starlette.responses import Response

from rackloom.app.listeners import listening
from rackloom.app.plain_pages import PlainPages, metrics, unwell, well
from rackloom.app.stopping import told_to_stop
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.lightkube_api import connect
from rackloom.claim.node.health import probe_handler
from rackloom.claim.node.run import Host, Places, Running
from rackloom.claim.node.tasks import beside
from rackloom.errors import Refused

BOOT_ID = Path("proc/sys/kernel/random/boot_id")


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is alike for every plugin."""

    node: str
    places: Places
    sysroot: Path = Path("/")
    """Where the host's /proc is found."""
    listen: str | None = None
    """`host:port` of /metrics, /healthz and /readyz; None for none."""
    health_listen: str | None = None
    """`host:port` of the gRPC health service, which kubelet probes at the pod's address; None for none."""
    kubeconfig: Path | None = None
    """None: the cluster that this pod runs in."""


async def until_stopped(
    common: NodeOptions,
    driver: str,
    serve: Callable[[KubeApi], AbstractAsyncContextManager[Running]],
    announce: Callable[[str], None],
) -> None:
    """Serve one driver's plugin until SIGTERM or SIGINT, or until its own work fails."""
    stopped = told_to_stop()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(connect(common.kubeconfig, user_agent=f"rackloom-{driver}"))
        one = await stack.enter_async_context(serve(api))
        announce(f"rackloom: serving {driver} on node {common.node}")
        async with beside(_failing(one, stopped)):
            await stopped.wait()


async def _failing(one: Running, stopped: asyncio.Event) -> None:
    """Stop when the plugin's own work fails; leaving it raises why."""
    with suppress(Exception):
        await one.background.fails()
    stopped.set()


def host_of(common: NodeOptions) -> Host:
    """What the framework has to know of this machine."""
    boot_id = (common.sysroot / BOOT_ID).read_text().strip()
    return Host(node=common.node, boot_id=boot_id, places=common.places, wall=time.time)


@asynccontextmanager
async def pages(common: NodeOptions, one: Running) -> AsyncIterator[None]:
    """Serve what probes and Prometheus ask for."""
    async with AsyncExitStack() as stack:
        if common.listen is not None:
            await stack.enter_async_context(listening(PluginPages(one), common.listen))
        if common.health_listen is not None:
            await stack.enter_async_context(_probes(common.health_listen, one))
        yield


@asynccontextmanager
async def _probes(listen: str, one: Running) -> AsyncIterator[None]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((probe_handler(one.is_serving),))
    try:
        server.add_insecure_port(listen)
    except RuntimeError as error:
        raise Refused(
            f"cannot listen on {listen} for health probes", nearest_fix="choose another --healthcheck-port"
        ) from error
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


class PluginPages(PlainPages):
    """An ASGI application: /metrics, /readyz, and /healthz, which asks the plugin over its own sockets."""

    def __init__(self, one: Running) -> None:
        super().__init__({"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._ready})
        self._one = one

    async def _metrics(self) -> Response:
        return metrics(self._one.metrics())

    async def _ready(self) -> Response:
        trouble = self._one.not_ready()
        return well() if trouble is None else unwell(trouble)

    async def _health(self) -> Response:
        serves = await self._one.is_serving()
        return well() if serves else unwell("the plugin does not answer on its sockets")
