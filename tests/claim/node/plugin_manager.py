"""A kubelet's plugin manager over real Unix sockets: registration, prepare, unprepare, health.

`KubeletPluginManager` watches the registry directory. It dials each new socket, requests its info, and
notifies the plugin whether it is registered. A socket that vanishes, or has a new inode, unregisters the
plugin. Its ResourceSlices are deleted when it stays away for 30 s.

`PluginClient` speaks DRA v1 or v1beta1 to one plugin and fails (`NotPrepared`) unless every claim was
answered without an error. `SocketDraManager` connects these plugins to simulated nodes.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc.aio
import msgspec

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.node.tasks import beside
from rackloom.claim.node.wire import (
    dra_v1_pb2,
    dra_v1_pb2_grpc,
    dra_v1beta1_pb2,
    dra_v1beta1_pb2_grpc,
    health_v1alpha1_pb2,
    health_v1alpha1_pb2_grpc,
    registration_pb2,
    registration_pb2_grpc,
)
from rackloom.core.cluster.objects import RESOURCE_SLICE
from rackloom.errors import Retry
from rackloom.lab.nodes.dra_manager import DraManager, PodClaim

# The client of one plugin.


_DRA_VERSIONS: dict[str, tuple[ModuleType, ModuleType]] = {
    "v1": (dra_v1_pb2, dra_v1_pb2_grpc),
    "v1beta1": (dra_v1beta1_pb2, dra_v1beta1_pb2_grpc),
}


class NotPrepared(Retry):
    """Shown on a pod as FailedPrepareDynamicResources. kubelet retries after any answer of the plugin."""

    def __init__(self, message: str) -> None:
        super().__init__(message, after=1.0)


class PreparedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device as the plugin names it to kubelet."""

    requests: tuple[str, ...]
    pool: str
    name: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


class PluginClient:
    """A connection to the plugin that serves `endpoint`, in one version of the protocol."""

    def __init__(self, endpoint: Path, version: str, timeout: float) -> None:
        self._wire: Any
        self._wire, stubs = _DRA_VERSIONS[version]
        self._channel = grpc.aio.insecure_channel(
            f"unix:{endpoint}", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        self._stub: Any = stubs.DRAPluginStub(self._channel)
        self._timeout = timeout

    async def prepare(self, claims: Sequence[PodClaim]) -> dict[str, tuple[PreparedDevice, ...]]:
        """Devices by claim UID. Raises `NotPrepared` unless every claim was."""
        request = self._wire.NodePrepareResourcesRequest(claims=self._named(claims))
        reply = await self._call(self._stub.NodePrepareResources, request)
        self._check(reply, claims)
        return {
            uid: tuple(_prepared_device(device) for device in answer.devices)
            for uid, answer in reply.claims.items()
        }

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        """Give claims back. Raises `NotPrepared` unless every one was."""
        request = self._wire.NodeUnprepareResourcesRequest(claims=self._named(claims))
        self._check(await self._call(self._stub.NodeUnprepareResources, request), claims)

    async def health(self) -> AsyncIterator[dict[str, tuple[int, str]]]:
        """Device -> (status number, message), each time the plugin reports."""
        stub = health_v1alpha1_pb2_grpc.DRAResourceHealthStub(self._channel)
        async for update in stub.NodeWatchResources(health_v1alpha1_pb2.NodeWatchResourcesRequest()):
            yield {device.device.device_name: (device.health, device.message) for device in update.devices}

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=self._timeout)
        except grpc.aio.AioRpcError as error:
            raise NotPrepared(f"{error.code().name}: {error.details()}") from error

    def _named(self, claims: Sequence[PodClaim]) -> list[Any]:
        refs = (claim.ref for claim in claims)
        return [self._wire.Claim(namespace=ref.namespace, name=ref.name, uid=ref.uid) for ref in refs]

    def _check(self, reply: Any, claims: Sequence[PodClaim]) -> None:
        missing = [claim.uid for claim in claims if claim.uid not in reply.claims]
        if missing:
            raise NotPrepared(f"the reply left out {len(missing)} claims")
        errors = [answer.error for answer in reply.claims.values() if answer.error]
        if errors:
            raise NotPrepared("; ".join(errors))


def _prepared_device(device: Any) -> PreparedDevice:
    has_share = "share_id" in device.DESCRIPTOR.fields_by_name and device.HasField("share_id")
    return PreparedDevice(
        requests=tuple(device.request_names),
        pool=device.pool_name,
        name=device.device_name,
        cdi_ids=tuple(device.cdi_device_ids),
        share_id=device.share_id if has_share else None,
    )


# Registration.


DIAL_SECONDS = 5.0


class PluginManagerTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. The defaults are kubelet's, but tests are in more of a hurry."""

    scan: float = 0.05
    """Between two scans of the registry directory (kubelet is notified instead)."""
    call: float = 45.0
    """Timeout of a prepare or unprepare call."""
    wipe: float = 30.0
    """Until the slices of a plugin that went away are deleted."""


KUBELET_TIMING = PluginManagerTiming()


class KubeletPluginManager:
    """The kubelet of one node, without containers. `plugins` are the registered ones, by driver."""

    def __init__(
        self,
        registry: Path,
        api: KubeApi,
        node: str,
        *,
        timing: PluginManagerTiming = KUBELET_TIMING,
        version: str = "v1",
    ) -> None:
        self._registry = registry
        self._api = api
        self._node = node
        self._timing = timing
        self._version = version
        self._sockets: dict[Path, tuple[int, str]] = {}
        self._wiping: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self.plugins: dict[str, PluginClient] = {}

    async def prepare(self, *claims: PodClaim) -> dict[str, tuple[PreparedDevice, ...]]:
        """Prepare the claims of one pod, once: devices by claim UID. Raises `NotPrepared`."""
        devices: dict[str, tuple[PreparedDevice, ...]] = {claim.uid: () for claim in claims}
        for driver in sorted({driver for claim in claims for driver in claim.drivers}):
            mine = [claim for claim in claims if driver in claim.drivers]
            for uid, found in (await self._plugin(driver).prepare(mine)).items():
                devices[uid] += found
        return devices

    async def unprepare(self, *claims: PodClaim) -> None:
        """Give back the claims of a pod that ended. Raises `NotPrepared`."""
        for driver in sorted({driver for claim in claims for driver in claim.drivers}):
            await self._plugin(driver).unprepare([claim for claim in claims if driver in claim.drivers])

    async def registered(self, driver: str) -> PluginClient:
        """The plugin of `driver`, once it is registered."""
        async with self._changed:
            await self._changed.wait_for(lambda: driver in self.plugins)
        return self.plugins[driver]

    async def gone(self, driver: str) -> None:
        """Return once the plugin of `driver` is not registered any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: driver not in self.plugins)

    async def scan(self) -> None:
        """Scan the registry directory once: register new sockets, unregister those that went."""
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
        """Scan until cancelled."""
        while True:
            # A socket may vanish between the scan and the call.
            with suppress(FileNotFoundError, grpc.aio.AioRpcError):
                await self.scan()
            await asyncio.sleep(self._timing.scan)

    async def close(self) -> None:
        """Stop wiping and hang up."""
        for task in self._wiping.values():
            task.cancel()
        for plugin in self.plugins.values():
            await plugin.close()

    def _plugin(self, driver: str) -> PluginClient:
        plugin = self.plugins.get(driver)
        if plugin is None:
            raise NotPrepared(f"DRA driver {driver} is not registered")
        return plugin

    async def _find(self, path: Path, inode: int) -> None:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            stub = registration_pb2_grpc.RegistrationStub(channel)
            info = await stub.GetInfo(registration_pb2.InfoRequest(), timeout=DIAL_SECONDS)
            refusal = _registration_refusal(info, self._version)
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
        self.plugins[info.name] = PluginClient(Path(info.endpoint), self._version, self._timing.call)

    def _lose(self, path: Path, driver: str) -> None:
        del self._sockets[path]
        self.plugins.pop(driver, None)
        self._wiping[driver] = asyncio.get_running_loop().create_task(self._wipe(driver))

    async def _wipe(self, driver: str) -> None:
        await asyncio.sleep(self._timing.wipe)
        ours = f"spec.driver={driver},spec.nodeName={self._node}"
        for item in (await self._api.list(RESOURCE_SLICE, fields=ours)).items:
            with suppress(NotFound):
                await self._api.delete(RESOURCE_SLICE, item["metadata"]["name"])


@asynccontextmanager
async def plugin_manager_on(
    registry: Path,
    api: KubeApi,
    node: str,
    *,
    timing: PluginManagerTiming = KUBELET_TIMING,
    version: str = "v1",
) -> AsyncIterator[KubeletPluginManager]:
    """A kubelet that watches `registry` while the context is entered."""
    kubelet = KubeletPluginManager(registry, api, node, timing=timing, version=version)
    try:
        async with beside(kubelet.watch()):
            yield kubelet
    finally:
        await kubelet.close()


def _registration_refusal(info: registration_pb2.PluginInfo, version: str) -> str | None:
    if info.type != "DRAPlugin":
        return f"plugin type {info.type!r} is not DRAPlugin"
    if f"{version}.DRAPlugin" not in info.supported_versions:
        return f"none of {list(info.supported_versions)} is {version}.DRAPlugin"
    return None


# Plugins over sockets as the devices of simulated nodes.


class SocketDraManager(DraManager):
    """A `DeviceManager` over the plugins that are registered with each node's kubelet."""

    def __init__(self, kubelets: Mapping[str, KubeletPluginManager]) -> None:
        super().__init__(lambda node: _RegisteredPlugins(kubelets[node]))


class _RegisteredPlugins:
    def __init__(self, kubelet: KubeletPluginManager) -> None:
        self._kubelet = kubelet

    @property
    def drivers(self) -> Collection[str]:
        return self._kubelet.plugins.keys()

    async def prepare(self, claims: Sequence[PodClaim]) -> None:
        await self._kubelet.prepare(*claims)

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        await self._kubelet.unprepare(*claims)
