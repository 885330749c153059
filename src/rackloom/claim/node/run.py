"""A plugin as a running process: the gRPC services that kubelet calls, health, and garbage collection.

kubelet finds a plugin by a registration socket in its plugins_registry directory, calls GetInfo, and then
calls DRAPlugin on the plugin's own socket. DRAPlugin is served as v1 and v1beta1. The messages differ
only in share ids, which are new in v1. A request's own deadline, less one second for the answer's way
back, bounds the work. Sockets belong to root alone (mode 0600). A path has at most 107 bytes (sockaddr_un).
If a driver name is too long for it, a hash replaces the name.

`run_plugin` takes an exclusive lock (flock) in the plugin's directory: two processes with one checkpoint
would undo each other's work. It opens the DRA socket before the registration socket, so that the plugin
answers before kubelet can find it, and closes them in reverse. When a server stops, its socket goes first,
so that no new call arrives while calls under way get two seconds to finish. Background retries end last,
after the last call.

`PluginProcess.not_ready` gives the reason why pods cannot be served: the node lacks a part, kubelet
has not registered the plugin, or the slices were never published. An API server that goes away later does
not make a plugin unready, because prepared devices stay usable.

The DRAResourceHealth service (v1alpha1) streams the health of all devices every 10 s. A device that was
not read for 60 s is unknown to kubelet. The standard gRPC health service answers probes of the
plugin's own pod: it calls both sockets as kubelet would.

kubelet unprepares the claims that it saw prepared. If a pod went away while the prepare of its claim had
only started, only the plugin knows of the claim. So `ClaimSweeper` checks with the API server, at the
start and every ten minutes, whether the claims of such entries still exist, unprepares those that are gone,
and removes CDI specs without an entry. It decides nothing while the API server does not answer.
"""

import asyncio
import hashlib
import os
from base64 import urlsafe_b64encode
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import structlog
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.plugin import DeviceHealth, Health, NodePlugin, PrepareState, ReadyDevice
from rackloom.claim.node.prepare import ClaimPreparer, PluginMetrics
from rackloom.claim.node.requests import ANSWER_SECONDS, PodSync, Requests
from rackloom.claim.node.slices import SlicePublisher
from rackloom.claim.node.sockets import answering
from rackloom.claim.node.storage import Checkpoint, StillRunning, plugin_lock
from rackloom.claim.node.tasks import BackgroundTasks, run_background
from rackloom.claim.node.wire import (
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    health_v1alpha1_pb2,
    registration_pb2,
    registration_pb2_grpc,
)
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.objects import RESOURCE_CLAIM, uid_of
from rackloom.errors import Refused, Retry
from rackloom.serving.grpc_server import grpc_options
from rackloom.serving.limits import PLUGIN_SOCKET

# gRPC handlers from coroutines.


UnaryMethod = Callable[[Any, Any], Awaitable[Message]]


def unary_service(
    service: str, methods: Mapping[str, tuple[UnaryMethod, type[Message]]]
) -> grpc.GenericRpcHandler:
    """The unary methods of `service`: name -> (coroutine of request and context, type of the request)."""
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(
                answer, request_deserializer=request.FromString, response_serializer=serialize_message
            )
            for name, (answer, request) in methods.items()
        },
    )


def serialize_message(message: Message) -> bytes:
    """The bytes of a reply."""
    return message.SerializeToString()


# Servers on unix sockets.


MAX_SOCKET_PATH = 107
"""Bytes of a unix socket's path: sockaddr_un has 108, of which the last is NUL."""
GRACE_SECONDS = 2.0
"""The time that calls under way get when the plugin stops. The checkpoint has the work they began."""


@asynccontextmanager
async def serve_on_socket(path: Path, handlers: tuple[grpc.GenericRpcHandler, ...]) -> AsyncIterator[None]:
    """Serve on the socket `path` while the context is entered. The socket is removed afterwards."""
    check_socket_path(path)
    # A process that was killed leaves its socket behind.
    _remove_socket(path)
    server = grpc.aio.server(options=grpc_options(PLUGIN_SOCKET, PLUGIN_SOCKET.connections))
    server.add_generic_rpc_handlers(handlers)
    # The socket that is bound here gets mode 0600.
    umask = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise Refused(
            f"cannot listen on {path}",
            nearest_fix="does its directory exist, and may this user write to it?",
        ) from error
    finally:
        os.umask(umask)
    try:
        await server.start()
        yield
    finally:
        # The socket goes first: no new call may arrive while calls under way are finished.
        _remove_socket(path)
        await server.stop(GRACE_SECONDS)


def check_socket_path(path: Path) -> None:
    """Raise `Refused` for a path that no unix socket can have."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise Refused(
            f"socket path {path} has {length} bytes; the kernel takes {MAX_SOCKET_PATH}",
            nearest_fix="choose a shorter plugins directory",
        )


def _remove_socket(path: Path) -> None:
    path.unlink(missing_ok=True)


# DRAPlugin: NodePrepareResources and NodeUnprepareResources.


_MARGIN = 1.0
"""Seconds for the answer's way back."""


def dra_handlers(requests: Requests) -> tuple[grpc.GenericRpcHandler, ...]:
    """The service `DRAPlugin` of v1 and of v1beta1."""
    return tuple(_dra_handler(wire, requests) for wire in (dra_v1_pb2, dra_v1beta1_pb2))


def _dra_handler(wire: Any, requests: Requests) -> grpc.GenericRpcHandler:
    """One version: the messages of `wire`, which differ only in that shares are new in v1."""
    has_shares = "share_id" in wire.Device.DESCRIPTOR.fields_by_name

    def device(ready: ReadyDevice) -> Any:
        return wire.Device(
            request_names=ready.requests,
            pool_name=ready.pool,
            device_name=ready.device,
            cdi_device_ids=ready.cdi_ids,
            **({"share_id": ready.share_id} if has_shares else {}),
        )

    async def prepare(request: Any, context: Any) -> Any:
        answers = await requests.prepare(_claim_refs(request.claims), _answer_within(context))
        claims = {}
        for uid, answer in answers.items():
            devices = [device(ready) for ready in answer.devices]
            claims[uid] = wire.NodePrepareResourceResponse(devices=devices, error=answer.error)
        return wire.NodePrepareResourcesResponse(claims=claims)

    async def unprepare(request: Any, context: Any) -> Any:
        answers = await requests.unprepare(_claim_refs(request.claims), _answer_within(context))
        claims = {
            uid: wire.NodeUnprepareResourceResponse(error=answer.error) for uid, answer in answers.items()
        }
        return wire.NodeUnprepareResourcesResponse(claims=claims)

    return unary_service(
        f"{wire.DESCRIPTOR.package}.DRAPlugin",
        {
            "NodePrepareResources": (prepare, wire.NodePrepareResourcesRequest),
            "NodeUnprepareResources": (unprepare, wire.NodeUnprepareResourcesRequest),
        },
    )


def _claim_refs(claims: Iterable[Any]) -> list[ClaimRef]:
    return [ClaimRef(namespace=claim.namespace, name=claim.name, uid=claim.uid) for claim in claims]


def _answer_within(context: Any) -> float:
    """Less than the caller's own deadline, so that the reason still reaches it."""
    remaining = context.time_remaining()
    return ANSWER_SECONDS if remaining is None else max(0.0, min(ANSWER_SECONDS, remaining - _MARGIN))


# Registration with kubelet.


log = structlog.get_logger(__name__)

SUPPORTED_SERVICES = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1alpha1.DRAResourceHealth")


def registrar_path(directory: Path, driver: str) -> Path:
    """The socket path where kubelet looks for `driver`, with a hash in place of a name that is too long."""
    path = directory / f"{driver}-reg.sock"
    if len(str(path).encode()) <= MAX_SOCKET_PATH:
        return path
    digest = urlsafe_b64encode(hashlib.sha256(driver.encode()).digest()[:16]).rstrip(b"=").decode()
    return directory / f"dra-{digest}-reg.sock"


class Registrar:
    """The registration service of one plugin.

    `registered` is kubelet's last answer, or None before the first. `refusal` is its reason for refusing.

    `on_registered` is called whenever kubelet registers the plugin, also after a restart of kubelet.
    """

    def __init__(self, driver: str, endpoint: Path, on_registered: Callable[[], None] = lambda: None) -> None:
        self._info = registration_pb2.PluginInfo(
            type="DRAPlugin", name=driver, endpoint=str(endpoint), supported_versions=SUPPORTED_SERVICES
        )
        self.registered: bool | None = None
        self.refusal = ""
        self._on_registered = on_registered

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler of the registration service."""
        return unary_service(
            "pluginregistration.Registration",
            {
                "GetInfo": (self._info_of, registration_pb2.InfoRequest),
                "NotifyRegistrationStatus": (self._note_status, registration_pb2.RegistrationStatus),
            },
        )

    async def _info_of(
        self, _request: registration_pb2.InfoRequest, _context: Any
    ) -> registration_pb2.PluginInfo:
        return self._info

    async def _note_status(
        self, status: registration_pb2.RegistrationStatus, _context: Any
    ) -> registration_pb2.RegistrationStatusResponse:
        self.registered, self.refusal = status.plugin_registered, status.error
        if status.plugin_registered:
            log.info("node.registered", driver=self._info.name)
            self._on_registered()
        else:
            log.error("node.not-registered", driver=self._info.name, reason=status.error)
        return registration_pb2.RegistrationStatusResponse()


# Health of devices and of the process.


HEALTH_SECONDS = 10.0
"""Between two reports of the devices."""
HEALTH_TIMEOUT_SECONDS = 60
"""kubelet takes the health of a device as unknown when it is older than this."""
PROBE_SECONDS = 5.0
_STATUS = {
    Health.HEALTHY: health_v1alpha1_pb2.HEALTHY,
    Health.UNHEALTHY: health_v1alpha1_pb2.UNHEALTHY,
    Health.UNKNOWN: health_v1alpha1_pb2.UNKNOWN,
}


def device_health_handler(plugin: NodePlugin) -> grpc.GenericRpcHandler:
    """The DRAResourceHealth service: all devices in each message, one message every `HEALTH_SECONDS`."""

    async def watch(
        _request: Any, _context: Any
    ) -> AsyncIterator[health_v1alpha1_pb2.NodeWatchResourcesResponse]:
        while True:
            yield health_v1alpha1_pb2.NodeWatchResourcesResponse(
                devices=[_health_message(health) for health in await plugin.health()]
            )
            await asyncio.sleep(HEALTH_SECONDS)

    method = grpc.unary_stream_rpc_method_handler(
        watch,
        request_deserializer=health_v1alpha1_pb2.NodeWatchResourcesRequest.FromString,
        response_serializer=serialize_message,
    )
    return grpc.method_handlers_generic_handler("v1alpha1.DRAResourceHealth", {"NodeWatchResources": method})


def probe_handler(is_serving: Callable[[], Any]) -> grpc.GenericRpcHandler:
    """The standard health service for the names "" and "liveness". `is_serving` is a coroutine function."""

    async def check(request: Any, context: Any) -> Any:
        if request.service not in ("", "liveness"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        serving = await is_serving()
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if serving else status.NOT_SERVING)

    return unary_service("grpc.health.v1.Health", {"Check": (check, health_pb2.HealthCheckRequest)})


async def answers_kubelet(registrar: Path, dra: Path) -> bool:
    """Whether a call on each of the plugin's own sockets comes back, as kubelet's would."""
    try:
        async with grpc.aio.insecure_channel(f"unix:{registrar}") as channel:
            registration = registration_pb2_grpc.RegistrationStub(channel)
            await registration.GetInfo(registration_pb2.InfoRequest(), timeout=PROBE_SECONDS)
        async with grpc.aio.insecure_channel(f"unix:{dra}") as channel:
            plugin = dra_v1_pb2_grpc.DRAPluginStub(channel)
            await plugin.NodePrepareResources(dra_v1_pb2.NodePrepareResourcesRequest(), timeout=PROBE_SECONDS)
    except grpc.aio.AioRpcError:
        return False
    return True


def _health_message(device_health: DeviceHealth) -> health_v1alpha1_pb2.DeviceHealth:
    return health_v1alpha1_pb2.DeviceHealth(
        device=health_v1alpha1_pb2.DeviceIdentifier(
            pool_name=device_health.pool, device_name=device_health.device
        ),
        health=_STATUS[device_health.health],
        last_updated_time=int(device_health.observed_at),
        health_check_timeout_seconds=HEALTH_TIMEOUT_SECONDS,
        message=device_health.message,
    )


# Garbage collection of claims that kubelet never mentions again.


SWEEP_SECONDS = 600.0
SWEEP_AGAIN_SECONDS = 10.0
"""After a sweep that could not decide everything, as when a node boots before its network is up."""
READ_SECONDS = 20.0


@dataclass(eq=False)
class ClaimSweeper:
    """Unprepares claims that kubelet will never mention again, at the start and every ten minutes."""

    plugin: NodePlugin
    api: KubeApi
    checkpoint: Checkpoint
    preparer: ClaimPreparer
    requests: Requests

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            complete = await self.sweep()
            await asyncio.sleep(SWEEP_SECONDS if complete else SWEEP_AGAIN_SECONDS)

    async def sweep(self) -> bool:
        """One sweep. Returns whether it decided and did everything. The next sweep does the rest."""
        self.preparer.forget_aborted()
        self.preparer.sweep_specs()
        entries = list(self.checkpoint.claims.values())
        started = [entry.ref for entry in entries if entry.state is PrepareState.STARTED]
        gone = [await self._is_gone(ref) for ref in started]
        orphans = [ref for ref, is_gone in zip(started, gone, strict=True) if is_gone]
        answers = {}
        if orphans:
            log.info("node.self-initiated-unprepare", claims=[ref.uid for ref in orphans])
            answers = await self.requests.unprepare(orphans)
        try:
            await self.plugin.tidy(tuple(self.checkpoint.claims.values()))
        except (KubeError, Retry) as trouble:
            log.info("node.tidy-later", driver=self.plugin.driver, reason=str(trouble))
            return False
        return None not in gone and not any(answer.error for answer in answers.values())

    async def _is_gone(self, ref: ClaimRef) -> bool | None:
        """None while the API server does not answer."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                found = await self.api.get(RESOURCE_CLAIM, ref.name, ref.namespace)
        except NotFound:
            return True
        except (KubeError, TimeoutError):
            return None
        return uid_of(found) != ref.uid


# The process.


class PluginDirectories(msgspec.Struct, frozen=True, kw_only=True):
    """The directories that a plugin shares with kubelet and the container runtime."""

    registry: Path
    """kubelet's plugins_registry directory."""
    plugins: Path
    """kubelet's plugins directory, with a directory for each plugin."""
    cdi: Path
    """The directory from which runtimes read transient CDI specs."""

    def home(self, driver: str) -> Path:
        """The plugin's own directory."""
        return self.plugins / driver


class PluginHost(msgspec.Struct, frozen=True, kw_only=True):
    """The data about its machine that a plugin needs."""

    node: str
    boot_id: str
    directories: PluginDirectories
    wall: Callable[[], float]
    """Seconds since the epoch."""


class PluginProcess:
    """A plugin that answers kubelet."""

    def __init__(self, plugin: NodePlugin, api: KubeApi, host: PluginHost) -> None:
        home = host.directories.home(plugin.driver)
        self._plugin = plugin
        self.registrar_socket = registrar_path(host.directories.registry, plugin.driver)
        self.dra_socket = home / "dra.sock"
        self.checkpoint = Checkpoint(home / "checkpoint.json", host.boot_id)
        self.metrics = PluginMetrics(plugin.driver, host.node, plugin.kinds)
        plugin.resume(lambda: tuple(self.checkpoint.claims.values()))
        cdi = CdiDirectory(host.directories.cdi, plugin.driver)
        preparing = ClaimPreparer(plugin, self.checkpoint, cdi, host.wall)
        self.pods = PodSync(api, host.node, plugin.driver, lambda: self.checkpoint.claims, host.wall)
        self.requests = Requests(plugin, api, preparing, self.metrics, self.pods)
        self.publisher = SlicePublisher(plugin, api, host.node, self.metrics, on_recovery=self.pods.wake)
        self.registrar = Registrar(plugin.driver, self.dra_socket, on_registered=self.pods.wake)
        self.sweeper = ClaimSweeper(plugin, api, self.checkpoint, preparing, self.requests)
        self.background = BackgroundTasks([])

    def work(self) -> tuple[Coroutine[None, None, None], ...]:
        """The background work, for as long as the plugin runs."""
        return (
            self.publisher.run(),
            self.sweeper.run(),
            self.pods.run(),
            self._plugin.run(self.publisher.wake),
        )

    def metrics_page(self) -> bytes:
        """The page that Prometheus reads."""
        return self.metrics.page(self.checkpoint.claims)

    async def fails(self) -> None:
        """Wait until background work fails, and raise why."""
        await self.background.fails()

    def not_ready(self) -> str | None:
        """The reason why pods with claims cannot be served now, or None if they can.

        A plugin is ready if kubelet has registered it, the node has everything that the devices need, and the
        slices were published once. An API server that is away later keeps no pod from its prepared devices.
        """
        missing = self._plugin.missing()
        if missing is not None:
            return missing
        if not self.registrar_socket.is_socket():
            return f"kubelet does not find the plugin: {self.registrar_socket} is gone"
        if self.registrar.registered is None:
            return "kubelet has not registered the plugin yet"
        if not self.registrar.registered:
            return f"kubelet does not register the plugin: {self.registrar.refusal}"
        trouble = self.publisher.trouble
        return None if trouble is None else f"the slices are not published: {trouble}"

    async def is_serving(self) -> bool:
        """Whether kubelet would get an answer now."""
        return await answers_kubelet(self.registrar_socket, self.dra_socket)


@asynccontextmanager
async def run_plugin(plugin: NodePlugin, api: KubeApi, host: PluginHost) -> AsyncIterator[PluginProcess]:
    """Serve `plugin` while the context is entered.

    The plugin answers before kubelet can find it, and cannot be found any more before it stops. Raises
    `Refused` if another process serves the driver here, also of another project, or if the checkpoint or a
    socket cannot be used.
    """
    home = host.directories.home(plugin.driver)
    check_socket_path(home / "dra.sock")
    home.mkdir(parents=True, exist_ok=True, mode=0o750)
    host.directories.registry.mkdir(parents=True, exist_ok=True)
    with plugin_lock(home, plugin.driver):
        # A driver of another project knows nothing of the lock: its sockets would be taken away from it.
        for what in answering(home, host.directories.registry, plugin.driver):
            raise StillRunning(
                f"another driver serves {plugin.driver} on this node: {what}",
                nearest_fix="keep one of the two off this node; rackloom takeover plan shows what is there",
            )
        plugin_process = PluginProcess(plugin, api, host)
        async with AsyncExitStack() as stack:
            # After the last call has ended: a call that is cut off leaves its claims to the background.
            stack.push_async_callback(plugin_process.requests.close)
            handlers = (*dra_handlers(plugin_process.requests), device_health_handler(plugin))
            await stack.enter_async_context(serve_on_socket(plugin_process.dra_socket, handlers))
            await stack.enter_async_context(
                serve_on_socket(plugin_process.registrar_socket, (plugin_process.registrar.handler(),))
            )
            plugin_process.background = await stack.enter_async_context(
                run_background(*plugin_process.work())
            )
            yield plugin_process
