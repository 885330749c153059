"""A node plugin as a process: the API server, the plugin and its pages for probes and Prometheus."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import grpc.aio
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from rackloom.app.listeners import listening
from rackloom.app.stopping import told_to_stop
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.domain.names import IMEX_DRIVER
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.lightkube_api import connect
from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.health import probe_handler
from rackloom.claim.node.imex.base import base_edits
from rackloom.claim.node.imex.clique_label import CliqueLabel
from rackloom.claim.node.imex.declared import read_declared
from rackloom.claim.node.imex.fabric import NodeFabric, check_driver
from rackloom.claim.node.imex.host import Kernel
from rackloom.claim.node.imex.nvml import read_nvml
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.imex.readiness import HostDaemon
from rackloom.claim.node.imex.settings import ImexSettings
from rackloom.claim.node.imex.view import FabricView
from rackloom.claim.node.run import Host, Places, Running, running
from rackloom.claim.node.tasks import background, beside
from rackloom.claim.node.values import Edits
from rackloom.errors import Refused

BOOT_ID = Path("proc/sys/kernel/random/boot_id")


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is alike for every plugin."""

    node: str
    places: Places
    sysroot: Path = Path("/")
    """Where the host's /proc is found."""
    listen: str | None = None
    """`host:port` of /metrics and /healthz; None for none."""
    health_listen: str | None = None
    """`host:port` of the gRPC health service, which kubelet probes at the pod's address; None for none."""
    kubeconfig: Path | None = None
    """None: the cluster that this pod runs in."""


class ImexOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only the IMEX plugin has."""

    namespace: str
    mode: ImexMode = ImexMode.DRIVER_MANAGED
    isolation: Isolation = Isolation.DOMAIN
    clique_label: bool = False
    fabric_file: Path | None = None
    driver_root: Path = Path("/")
    """Where NVIDIA's driver is seen from here."""
    host_driver_root: Path = Path("/")
    """Where the host has it."""
    proc_devices: Path | None = None
    host_socket: str = "/etc/nvidia-imex/imex_ctrl.sock"


def run_imex(common: NodeOptions, options: ImexOptions, announce: Callable[[str], None]) -> None:
    """Serve IMEX channels until SIGTERM or SIGINT."""
    asyncio.run(until_stopped(common, IMEX_DRIVER, partial(imex_node, common, options), announce))


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


@asynccontextmanager
async def imex_node(common: NodeOptions, options: ImexOptions, api: KubeApi) -> AsyncIterator[Running]:
    """The IMEX plugin of one node, serving while the context is entered."""
    read = (
        partial(read_nvml, options.driver_root)
        if options.fabric_file is None
        else partial(read_declared, options.fabric_file)
    )
    settings = await _settings(common, options, read)
    view = FabricView(read, time.time)
    plugin = ImexPlugin(api, settings, view, HostDaemon(root=options.driver_root, socket=options.host_socket))
    await plugin.start()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running(plugin, api, host_of(common)))
        if options.clique_label:
            keep = settings.isolation is Isolation.CHANNEL
            label = CliqueLabel(api, common.node, view, keep=keep)
            await stack.enter_async_context(background(label.run()))
        await stack.enter_async_context(pages(common, one))
        yield one


async def _settings(
    common: NodeOptions, options: ImexOptions, read: Callable[[], NodeFabric]
) -> ImexSettings:
    """Raises `Refused` for a node that cannot serve IMEX as it is."""
    if options.mode is ImexMode.DRIVER_MANAGED:
        check_driver(await asyncio.to_thread(read))
    home = common.places.home(IMEX_DRIVER)
    kernel = _kernel(common.sysroot, options)
    kernel.channel_major()
    return ImexSettings(
        node=common.node,
        namespace=options.namespace,
        domains=home / "domains",
        mode=options.mode,
        isolation=options.isolation,
        kernel=kernel,
        daemon_cdi_ids=driver_spec(
            common, IMEX_DRIVER, base_edits(options.driver_root, options.host_driver_root)
        ),
    )


def _kernel(sysroot: Path, options: ImexOptions) -> Kernel:
    return Kernel(
        proc_devices=options.proc_devices or sysroot / "proc/devices",
        imex_capability=sysroot / "proc/driver/nvidia/capabilities/fabric-imex-mgmt",
    )


def driver_spec(common: NodeOptions, driver: str, edits: Edits) -> tuple[str, ...]:
    """Write down what every container of a driver's devices gets, and return its CDI ids."""
    return CdiDirectory(common.places.cdi, driver).write_shared("device_base", "device", "all", edits)


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


class PluginPages:
    """An ASGI application: /metrics, and /healthz, which asks the plugin over its own sockets."""

    def __init__(self, one: Running) -> None:
        self._one = one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            reply = await self._page(Request(scope, receive).url.path)
            await reply(scope, receive, send)

    async def _page(self, path: str) -> Response:
        if path == "/metrics":
            return Response(self._one.metrics(), media_type=CONTENT_TYPE_LATEST)
        if path != "/healthz":
            return PlainTextResponse("not found\n", 404)
        if await self._one.is_serving():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the plugin does not answer on its sockets\n", 503)
