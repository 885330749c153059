"""A stand-in for kubelet: it finds plugins as kubelet does, and calls them as kubelet does.

It looks into the registry directory, dials every socket there, asks who it is and says that the plugin is
registered; a socket that went away unregisters its plugin, whose slices are wiped when it stays away.

It has no pods. When a pod whose claims were not prepared is tried again is the business of
`twin.nodes.pod_life`, which calls it through `twin.nodes.plugins`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import msgspec

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.kinds import RESOURCE_SLICE
from rackloom.claim.node.tasks import beside
from rackloom.claim.node.wire import registration_pb2, registration_pb2_grpc
from rackloom.twin.kubelet.calls import Device, NotPrepared, PluginCalls
from rackloom.twin.kubelet.claims import PodClaim

DIAL_SECONDS = 5.0


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; the defaults are kubelet's, tests are in more of a hurry."""

    look: float = 0.05
    """Between two looks into the registry directory (kubelet is notified instead)."""
    call: float = 45.0
    """Timeout of a prepare or unprepare call."""
    wipe: float = 30.0
    """Until the slices of a plugin that went away are deleted."""


KUBELETS = Timing()


class Kubelet:
    """The kubelet of one node, without containers. `plugins` are the registered ones, by driver."""

    def __init__(
        self, registry: Path, api: KubeApi, node: str, *, timing: Timing = KUBELETS, version: str = "v1"
    ) -> None:
        self._registry = registry
        self._api = api
        self._node = node
        self._timing = timing
        self._version = version
        self._sockets: dict[Path, tuple[int, str]] = {}
        self._wiping: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self.plugins: dict[str, PluginCalls] = {}

    async def prepare(self, *claims: PodClaim) -> dict[str, tuple[Device, ...]]:
        """Prepare the claims of one pod, once: devices by claim UID. Raises `NotPrepared`."""
        devices: dict[str, tuple[Device, ...]] = {one.uid: () for one in claims}
        for driver in sorted({driver for one in claims for driver in one.drivers}):
            mine = [one for one in claims if driver in one.drivers]
            for uid, found in (await self._plugin(driver).prepare(mine)).items():
                devices[uid] += found
        return devices

    async def unprepare(self, *claims: PodClaim) -> None:
        """Give back the claims of a pod that ended. Raises `NotPrepared`."""
        for driver in sorted({driver for one in claims for driver in one.drivers}):
            await self._plugin(driver).unprepare([one for one in claims if driver in one.drivers])

    async def registered(self, driver: str) -> PluginCalls:
        """The plugin of `driver`, once it is registered."""
        async with self._changed:
            await self._changed.wait_for(lambda: driver in self.plugins)
        return self.plugins[driver]

    async def gone(self, driver: str) -> None:
        """Return once the plugin of `driver` is not registered any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: driver not in self.plugins)

    async def look(self) -> None:
        """One look into the registry directory."""
        present = {path: path.stat().st_ino for path in self._registry.glob("*.sock")}
        for path, (inode, driver) in list(self._sockets.items()):
            if present.get(path) != inode:
                self._lose(path, driver)
        for path, inode in present.items():
            if path not in self._sockets:
                await self._find(path, inode)
        async with self._changed:
            self._changed.notify_all()

    async def watch(self) -> None:
        """Look for ever."""
        while True:
            # A socket may vanish between the look and the call.
            with suppress(FileNotFoundError, grpc.aio.AioRpcError):
                await self.look()
            await asyncio.sleep(self._timing.look)

    async def close(self) -> None:
        """Stop wiping and hang up."""
        for task in self._wiping.values():
            task.cancel()
        for plugin in self.plugins.values():
            await plugin.close()

    def _plugin(self, driver: str) -> PluginCalls:
        plugin = self.plugins.get(driver)
        if plugin is None:
            raise NotPrepared(f"DRA driver {driver} is not registered")
        return plugin

    async def _find(self, path: Path, inode: int) -> None:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub = registration_pb2_grpc.RegistrationStub(channel)
            info = await stub.GetInfo(registration_pb2.InfoRequest(), timeout=DIAL_SECONDS)
            refusal = _refusal(info, self._version)
            if refusal is None:
                self._keep(path, inode, info)
            status = registration_pb2.RegistrationStatus(
                plugin_registered=refusal is None, error=refusal or ""
            )
            await stub.NotifyRegistrationStatus(status, timeout=DIAL_SECONDS)

    def _keep(self, path: Path, inode: int, info: registration_pb2.PluginInfo) -> None:
        wiping = self._wiping.pop(info.name, None)
        if wiping is not None:
            wiping.cancel()
        self._sockets[path] = (inode, info.name)
        self.plugins[info.name] = PluginCalls(Path(info.endpoint), self._version, self._timing.call)

    def _lose(self, path: Path, driver: str) -> None:
        del self._sockets[path]
        self.plugins.pop(driver, None)
        self._wiping[driver] = asyncio.get_running_loop().create_task(self._wipe(driver))

    async def _wipe(self, driver: str) -> None:
        await asyncio.sleep(self._timing.wipe)
        ours = f"spec.driver={driver},spec.nodeName={self._node}"
        for one in (await self._api.list(RESOURCE_SLICE, fields=ours)).items:
            with suppress(NotFound):
                await self._api.delete(RESOURCE_SLICE, one["metadata"]["name"])


@asynccontextmanager
async def kubelet_on(
    registry: Path, api: KubeApi, node: str, *, timing: Timing = KUBELETS, version: str = "v1"
) -> AsyncIterator[Kubelet]:
    """A kubelet that watches `registry` while the context is entered."""
    kubelet = Kubelet(registry, api, node, timing=timing, version=version)
    try:
        async with beside(kubelet.watch()):
            yield kubelet
    finally:
        await kubelet.close()


def _refusal(info: registration_pb2.PluginInfo, version: str) -> str | None:
    if info.type != "DRAPlugin":
        return f"plugin type {info.type!r} is not DRAPlugin"
    if f"{version}.DRAPlugin" not in info.supported_versions:
        return f"none of {list(info.supported_versions)} is {version}.DRAPlugin"
    return None
