"""A plugin as a running process: one driver with the framework around it, health, and cleaning up.

`run_plugin` takes an exclusive lock (flock) in the plugin's directory: two processes with one checkpoint
would undo each other's work. It opens the DRA socket before the registration socket, so that the plugin
answers before kubelet can find it, and closes them in reverse. Background retries end last, after the
last call.

`PluginProcess.not_ready` says why pods cannot be served: the driver misses something on the node, kubelet
has not registered the plugin, or the slices were never published. An API server that goes away later does
not make a plugin unready, because prepared devices stay usable.

The DRAResourceHealth service (v1alpha1) streams the health of all devices every 10 s. A device that was
not looked at for 60 s is unknown to kubelet. The standard gRPC health service answers probes of the
plugin's own pod: it calls both sockets as kubelet would.

kubelet unprepares what it saw prepared. A claim whose prepare only started when its pod went away is
known to the plugin alone. `ClaimSweeper` therefore asks the API server, at the start and every ten
minutes, whether the claims of such entries still exist, unprepares those that are gone, and removes CDI
specs without an entry. It decides nothing while the API server does not answer.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import structlog
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.claim.node import service
from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.checkpoint import Checkpoint
from rackloom.claim.node.metrics import PluginMetrics
from rackloom.claim.node.plugin import ClaimRef, DeviceHealth, Health, NodePlugin, PrepareState
from rackloom.claim.node.prepare import ClaimPreparer
from rackloom.claim.node.requests import PodSync, Requests
from rackloom.claim.node.service import (
    Registrar,
    check_socket_path,
    registrar_path,
    serialize_message,
    serve_on_socket,
    unary_service,
)
from rackloom.claim.node.slices import SlicePublisher
from rackloom.claim.node.tasks import BackgroundTasks, run_background
from rackloom.claim.node.wire import dra_v1_pb2, dra_v1_pb2_grpc, registration_pb2, registration_pb2_grpc
from rackloom.claim.node.wire import health_v1alpha1_pb2 as wire
from rackloom.core.kubernetes.objects import RESOURCE_CLAIM
from rackloom.errors import Refused, Retry

# Health of devices and of the process.


HEALTH_SECONDS = 10.0
"""Between two looks at the devices."""
HEALTH_TIMEOUT_SECONDS = 60
"""A device that was not looked at for so long is unknown to kubelet."""
PROBE_SECONDS = 5.0
_STATUS = {
    Health.HEALTHY: wire.HEALTHY,
    Health.UNHEALTHY: wire.UNHEALTHY,
    Health.UNKNOWN: wire.UNKNOWN,
}


def device_health_handler(plugin: NodePlugin) -> grpc.GenericRpcHandler:
    """The DRAResourceHealth service: all devices at once, again at every look."""

    async def watch(_request: Any, _context: Any) -> AsyncIterator[wire.NodeWatchResourcesResponse]:
        while True:
            yield wire.NodeWatchResourcesResponse(
                devices=[_health_message(one) for one in await plugin.health()]
            )
            await asyncio.sleep(HEALTH_SECONDS)

    method = grpc.unary_stream_rpc_method_handler(
        watch,
        request_deserializer=wire.NodeWatchResourcesRequest.FromString,
        response_serializer=serialize_message,
    )
    return grpc.method_handlers_generic_handler("v1alpha1.DRAResourceHealth", {"NodeWatchResources": method})


def probe_handler(is_serving: Callable[[], Any]) -> grpc.GenericRpcHandler:
    """The standard health service for the names "" and "liveness"; `is_serving` is a coroutine function."""

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


def _health_message(device_health: DeviceHealth) -> wire.DeviceHealth:
    return wire.DeviceHealth(
        device=wire.DeviceIdentifier(pool_name=device_health.pool, device_name=device_health.device),
        health=_STATUS[device_health.health],
        last_updated_time=int(device_health.observed_at),
        health_check_timeout_seconds=HEALTH_TIMEOUT_SECONDS,
        message=device_health.message,
    )


# Garbage collection of claims that kubelet never mentions again.


log = structlog.get_logger(__name__)

SWEEP_SECONDS = 600.0
SWEEP_AGAIN_SECONDS = 10.0
"""After a sweep that could not decide everything, as when a node boots before its network is up."""
READ_SECONDS = 20.0


class ClaimSweeper:
    """Looks at the start and every ten minutes for claims that kubelet will never mention again.

    Kubelet gives back what it saw prepared. A claim that was only begun when its pod went away is ours alone.
    """

    def __init__(
        self,
        plugin: NodePlugin,
        api: KubeApi,
        checkpoint: Checkpoint,
        preparing: ClaimPreparer,
        requests: Requests,
    ) -> None:
        self._plugin = plugin
        self._api = api
        self._checkpoint = checkpoint
        self._preparing = preparing
        self._requests = requests

    async def run(self) -> None:
        """Sweep for ever."""
        while True:
            complete = await self.sweep()
            await asyncio.sleep(SWEEP_SECONDS if complete else SWEEP_AGAIN_SECONDS)

    async def sweep(self) -> bool:
        """One sweep; whether everything could be decided and done. What could not is left to the next."""
        self._preparing.forget_aborted()
        self._preparing.sweep_specs()
        begun = self._begun()
        gone = [await self._is_gone(ref) for ref in begun]
        orphans = [ref for ref, is_gone in zip(begun, gone, strict=True) if is_gone]
        answers = {}
        if orphans:
            log.info("node.self-initiated-unprepare", claims=[ref.uid for ref in orphans])
            answers = await self._requests.unprepare(orphans)
        try:
            await self._plugin.tidy(tuple(self._checkpoint.claims.values()))
        except (KubeError, Retry) as trouble:
            log.info("node.tidy-later", driver=self._plugin.driver, reason=str(trouble))
            return False
        return None not in gone and not any(answer.error for answer in answers.values())

    def _begun(self) -> Sequence[ClaimRef]:
        entries = self._checkpoint.claims.values()
        return [entry.ref for entry in entries if entry.state is PrepareState.STARTED]

    async def _is_gone(self, ref: ClaimRef) -> bool | None:
        """None while the API server does not say."""
        try:
            async with asyncio.timeout(READ_SECONDS):
                found = await self._api.get(RESOURCE_CLAIM, ref.name, ref.namespace)
        except NotFound:
            return True
        except (KubeError, TimeoutError):
            return None
        return bool(found["metadata"]["uid"] != ref.uid)


# The process.


class PluginDirectories(msgspec.Struct, frozen=True, kw_only=True):
    """Where a plugin meets kubelet and the container runtime."""

    registry: Path
    """kubelet's plugins_registry directory."""
    plugins: Path
    """kubelet's plugins directory; the plugin has one of its own below it."""
    cdi: Path
    """Where runtimes read transient CDI specs."""

    def home(self, driver: str) -> Path:
        """The plugin's own directory."""
        return self.plugins / driver


class PluginHost(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin has to know of the machine it runs on."""

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
        cdi = CdiDirectory(host.directories.cdi, plugin.driver)
        preparing = ClaimPreparer(plugin, self.checkpoint, cdi, host.wall)
        self.pods = PodSync(api, host.node, plugin.driver, lambda: self.checkpoint.claims, host.wall)
        self.requests = Requests(plugin, api, preparing, self.metrics, self.pods)
        self.publisher = SlicePublisher(plugin, api, host.node, self.metrics, on_recovery=self.pods.wake)
        self.registrar = Registrar(plugin.driver, self.dra_socket, on_registered=self.pods.wake)
        self.sweeper = ClaimSweeper(plugin, api, self.checkpoint, preparing, self.requests)
        self.background = BackgroundTasks([])
        self._plugin = plugin

    def work(self) -> tuple[Coroutine[None, None, None], ...]:
        """What goes on for as long as the plugin runs."""
        return (
            self.publisher.run(),
            self.sweeper.run(),
            self.pods.run(),
            self._plugin.run(self.publisher.wake),
        )

    def metrics_page(self) -> bytes:
        """The page that Prometheus reads."""
        return self.metrics.page(self.checkpoint.claims)

    def not_ready(self) -> str | None:
        """Why pods with claims cannot be served here yet, or any more; None once they can.

        Ready is a plugin that kubelet has registered, on a node that has what the devices need, and whose
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
    `Refused` when another process serves the driver here, or the checkpoint or a socket cannot be used.
    """
    home = host.directories.home(plugin.driver)
    check_socket_path(home / "dra.sock")
    home.mkdir(parents=True, exist_ok=True, mode=0o750)
    host.directories.registry.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(home / "plugin.lock", plugin.driver):
        plugin_process = PluginProcess(plugin, api, host)
        async with AsyncExitStack() as stack:
            # After the last call has ended: a call that is cut off leaves its claims to the background.
            stack.push_async_callback(plugin_process.requests.close)
            handlers = (*service.dra_handlers(plugin_process.requests), device_health_handler(plugin))
            await stack.enter_async_context(serve_on_socket(plugin_process.dra_socket, handlers))
            await stack.enter_async_context(
                serve_on_socket(plugin_process.registrar_socket, (plugin_process.registrar.handler(),))
            )
            plugin_process.background = await stack.enter_async_context(
                run_background(*plugin_process.work())
            )
            yield plugin_process


@contextmanager
def _exclusive_lock(path: Path, driver: str) -> Iterator[None]:
    """Two processes with one checkpoint would undo each other's work. The kernel ends the lock with us."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise Refused(
            f"another process serves {driver} on this node (it holds {path})",
            nearest_fix="stop it, or wait until it has ended",
        ) from error
    try:
        yield
    finally:
        os.close(handle)
