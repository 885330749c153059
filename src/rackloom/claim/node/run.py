"""One plugin as a running process: sockets, slices, sweeps, health and metrics around a `Plugin`."""

import fcntl
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node import dra
from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.checkpoint import Checkpoint
from rackloom.claim.node.health import answers_kubelet, device_health_handler
from rackloom.claim.node.meter import Meter
from rackloom.claim.node.plugin import Plugin
from rackloom.claim.node.pod_sync import PodSync
from rackloom.claim.node.preparing import Preparing
from rackloom.claim.node.publisher import Publisher
from rackloom.claim.node.registration import Registrar, registrar_path
from rackloom.claim.node.requests import Requests
from rackloom.claim.node.sockets import check_length, serving
from rackloom.claim.node.sweeper import Sweeper
from rackloom.claim.node.tasks import Background, background
from rackloom.errors import Refused


class Places(msgspec.Struct, frozen=True, kw_only=True):
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


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin has to know of the machine it runs on."""

    node: str
    boot_id: str
    places: Places
    wall: Callable[[], float]
    """Seconds since the epoch."""


class Running:
    """A plugin that answers kubelet."""

    def __init__(self, plugin: Plugin, api: KubeApi, host: Host) -> None:
        home = host.places.home(plugin.driver)
        self._plugin = plugin
        self.registrar_socket = registrar_path(host.places.registry, plugin.driver)
        self.dra_socket = home / "dra.sock"
        self.checkpoint = Checkpoint(home / "checkpoint.json", host.boot_id)
        self.meter = Meter(plugin.driver, host.node, plugin.kinds)
        cdi = CdiDirectory(host.places.cdi, plugin.driver)
        preparing = Preparing(plugin, self.checkpoint, cdi, host.wall)
        self.pods = PodSync(api, host.node, plugin.driver, lambda: self.checkpoint.claims, host.wall)
        self.requests = Requests(plugin, api, preparing, self.meter, self.pods)
        self.publisher = Publisher(plugin, api, host.node, self.meter, on_recovery=self.pods.wake)
        self.registrar = Registrar(plugin.driver, self.dra_socket, on_registered=self.pods.wake)
        self.sweeper = Sweeper(plugin, api, self.checkpoint, preparing, self.requests)
        self.background = Background([])
        self._plugin = plugin

    def work(self) -> tuple[Coroutine[None, None, None], ...]:
        """What goes on for as long as the plugin runs."""
        return (
            self.publisher.run(),
            self.sweeper.run(),
            self.pods.run(),
            self._plugin.run(self.publisher.wake),
        )

    def metrics(self) -> bytes:
        """The page that Prometheus reads."""
        return self.meter.page(self.checkpoint.claims)

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
async def running(plugin: Plugin, api: KubeApi, host: Host) -> AsyncIterator[Running]:
    """Serve `plugin` while the context is entered.

    The plugin answers before kubelet can find it, and cannot be found any more before it stops. Raises
    `Refused` when another process serves the driver here, or the checkpoint or a socket cannot be used.
    """
    home = host.places.home(plugin.driver)
    check_length(home / "dra.sock")
    home.mkdir(parents=True, exist_ok=True, mode=0o750)
    host.places.registry.mkdir(parents=True, exist_ok=True)
    with _alone(home / "plugin.lock", plugin.driver):
        one = Running(plugin, api, host)
        async with AsyncExitStack() as stack:
            # After the last call has ended: a call that is cut off leaves its claims to the background.
            stack.push_async_callback(one.requests.close)
            handlers = (*dra.handlers(one.requests), device_health_handler(plugin))
            await stack.enter_async_context(serving(one.dra_socket, handlers))
            await stack.enter_async_context(serving(one.registrar_socket, (one.registrar.handler(),)))
            one.background = await stack.enter_async_context(background(*one.work()))
            yield one


@contextmanager
def _alone(path: Path, driver: str) -> Iterator[None]:
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
