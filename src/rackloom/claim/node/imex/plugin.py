"""The driver compute-domain.nvidia.com: preparing IMEX channels and daemons.

Preparing a channel in domain mode takes these steps: check the ComputeDomain, label the node with it,
wait until its daemon is READY here, add the channel's device file. The label brings the daemon's pod,
and this plugin prepares the claim of that pod too. So an attempt never waits but raises `Retry`,
and the framework repeats it when a clique object changes. A node without a clique gets no device file:
there is no memory to share.

An isolated channel needs no label: the daemon of its clique is kept warm. The channel's pool must be that
of the clique that the node is in now. A daemon gets its ComputeDomain, clique and boot id in the
environment, the IMEX management device, its own directory as /imexd, and the driver's files.

`unprepare` removes the node label, unless another channel of the ComputeDomain is still in use here.
`tidy` removes directories of ComputeDomains that are gone.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

import msgspec

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.cdi import DRIVER_SECONDS, DriverSpec, channel_node
from rackloom.claim.node.fabric import FabricMonitor
from rackloom.claim.node.imex.devices import (
    ImexDeviceKind,
    ImexRequest,
    ImexSettings,
    imex_device_health,
    imex_pool,
    imex_request,
)
from rackloom.claim.node.imex.domains import (
    ComputeDomains,
    HostImexDaemon,
    ImexDaemons,
    clique_selector,
    domain_selector,
)
from rackloom.claim.node.imex.labels import ComputeDomainLabel, NodeIsolation
from rackloom.claim.node.plugin import (
    CheckpointEntry,
    ContainerEdits,
    ContainerMount,
    DeviceHealth,
    DevicePool,
    NodePlugin,
    PreparedClaim,
    PreparedDevice,
)
from rackloom.core.cluster import names
from rackloom.core.cluster.claims import AllocatedClaim
from rackloom.core.cluster.names import ImexMode
from rackloom.errors import Refused, Retry

FABRIC_SECONDS = 600.0
"""Between two observations of the fabric."""


class ImexPlugin(NodePlugin):
    """IMEX channels and daemons of one node."""

    driver = names.IMEX_DRIVER
    kinds = (ImexDeviceKind.CHANNEL.value, ImexDeviceKind.DAEMON.value, ImexDeviceKind.ISOLATED_CHANNEL.value)

    def __init__(
        self,
        api: KubeApi,
        settings: ImexSettings,
        fabric: FabricMonitor,
        host_daemon: HostImexDaemon,
        driver: DriverSpec | None = None,
    ) -> None:
        self._settings = settings
        self._mode = NodeIsolation(api, settings.node, settings.isolation)
        self._fabric = fabric
        self._host_daemon = host_daemon
        self._driver = driver
        self._domains = ComputeDomains(api)
        self._label = ComputeDomainLabel(api, settings.node)
        self._daemons = ImexDaemons(api, settings)

    async def start(self) -> None:
        """Read the node's mode before anything is published or prepared. Raises `KubeError`."""
        await self._mode.read()

    def missing(self) -> str | None:
        """NVIDIA's driver with its IMEX channels, in a sufficient version."""
        return self._fabric.missing

    async def pools(self) -> tuple[DevicePool, ...]:
        """The node's pool, empty without a driver. Raises `Retry` until the node's clique is known."""
        try:
            clique = await self._fabric.clique()
        except Retry:
            if self._fabric.missing is None:
                raise
            return (DevicePool(name=self._settings.node, devices=()),)
        return (imex_pool(self._now(), clique, self._fabric.fabric),)

    def intent(self, claim: AllocatedClaim) -> Mapping[str, Any]:
        """The device and its ComputeDomain: enough to remove the label."""
        wanted = imex_request(claim, self._now())
        return {"kind": wanted.kind.value, "domain": wanted.domain}

    async def prepare(self, claim: AllocatedClaim) -> PreparedClaim:
        """One attempt."""
        wanted = imex_request(claim, self._now())
        await self._fabric.need_driver()
        match wanted.kind:
            case ImexDeviceKind.DAEMON:
                device = await self._daemon(wanted)
            case ImexDeviceKind.CHANNEL:
                device = await self._channel(claim, wanted)
            case ImexDeviceKind.ISOLATED_CHANNEL:
                device = await self._isolated(claim, wanted)
        return PreparedClaim(devices=(device,))

    async def changes(self, claim: AllocatedClaim) -> AsyncIterator[None]:
        """Whenever a daemon that a channel may wait for is READY here."""
        wanted = imex_request(claim, self._now())
        if wanted.kind is ImexDeviceKind.DAEMON or self._settings.mode is ImexMode.HOST_MANAGED:
            return
        clique = await self._fabric.clique()
        isolated = wanted.kind is ImexDeviceKind.ISOLATED_CHANNEL
        labels = clique_selector(clique) if isolated else domain_selector(wanted.domain)
        async for _ in self._daemons.changes(labels):
            yield

    async def unprepare(self, entry: CheckpointEntry, others: Collection[CheckpointEntry]) -> None:
        """Remove the node label, unless another channel of the ComputeDomain is still in use here."""
        if not _is_channel(entry):
            return
        domain = entry.record["domain"]
        if not any(_is_channel(other) and other.record.get("domain") == domain for other in others):
            await self._label.release(domain)

    async def tidy(self, claims: Collection[CheckpointEntry]) -> None:
        """Remove the directories of ComputeDomains that are gone."""
        here = {path.name: path for path in self._settings.domains.glob("*/")}
        unused = here.keys() - {entry.record.get("domain") for entry in claims}
        if unused:
            for uid in unused - await self._domains.living():
                shutil.rmtree(here[uid], ignore_errors=True)

    async def run(self, wake: Callable[[], None]) -> None:
        """Follow the node's mode, and the fabric, which may be partitioned again under a running node."""
        self._fabric.on_change(wake)
        await asyncio.gather(self._follow_driver(), self._mode.follow(wake))

    async def health(self) -> tuple[DeviceHealth, ...]:
        """As the GPUs' fabric is now."""
        await self._fabric.observe()
        (pool,) = await self.pools()
        return imex_device_health(pool, self._fabric)

    async def _follow_driver(self) -> None:
        """Check for a missing driver, and observe the fabric: at once when the driver changes."""
        loop = asyncio.get_running_loop()
        observed_at = loop.time()
        while True:
            await asyncio.sleep(DRIVER_SECONDS)
            changed = self._driver is not None and await self._driver.refresh()
            waits = self._fabric.missing is not None or not self._settings.kernel.has_channels()
            if changed or waits or loop.time() >= observed_at + FABRIC_SECONDS:
                observed_at = loop.time()
                await self._fabric.observe()

    def _now(self) -> ImexSettings:
        """The settings with the mode that the node is in at present."""
        return msgspec.structs.replace(self._settings, isolation=self._mode.isolation)

    async def _channel(self, claim: AllocatedClaim, wanted: ImexRequest) -> PreparedDevice:
        await self._domains.of_workload(wanted.domain, claim.ref.namespace)
        if self._settings.mode is ImexMode.HOST_MANAGED:
            await self._host_daemon.need_ready()
            return self._channels(wanted)
        await self._label.acquire(wanted.domain)
        clique = await self._fabric.clique()
        if not clique:
            # No NVLink beyond the node, and so no memory to share through a channel.
            return PreparedDevice(result=wanted.result, kind=wanted.kind)
        await self._daemons.need_own(wanted.domain, clique)
        return self._channels(wanted)

    async def _isolated(self, claim: AllocatedClaim, wanted: ImexRequest) -> PreparedDevice:
        await self._domains.of_workload(wanted.domain, claim.ref.namespace)
        clique = await self._fabric.clique()
        if wanted.result.pool != names.channel_pool_name(clique):
            raise Refused(
                f"channel {wanted.channel} is of pool {wanted.result.pool}, but node {self._settings.node} is"
                f" in clique {clique or 'none'}",
                nearest_fix="delete the pod: its claim is allocated anew where the fabric is now",
            )
        await self._daemons.need_warm(clique)
        return self._channels(wanted)

    def _channels(self, wanted: ImexRequest) -> PreparedDevice:
        major = self._settings.kernel.channel_major()
        numbers = range(names.CHANNELS_PER_NODE) if wanted.every_channel else (wanted.channel,)
        nodes = tuple(channel_node(major, number) for number in numbers)
        return PreparedDevice(
            result=wanted.result, kind=wanted.kind, edits=ContainerEdits(device_nodes=nodes)
        )

    async def _daemon(self, wanted: ImexRequest) -> PreparedDevice:
        domain = await self._domains.find(wanted.domain)
        clique = await self._fabric.clique()
        home = self._settings.domains / wanted.domain
        home.mkdir(parents=True, exist_ok=True, mode=0o750)
        edits = ContainerEdits(
            env=(
                f"CLIQUE_ID={clique}",
                f"COMPUTE_DOMAIN_UUID={wanted.domain}",
                f"COMPUTE_DOMAIN_NAME={domain.name}",
                f"COMPUTE_DOMAIN_NAMESPACE={domain.namespace}",
                f"{names.BOOT_ID_VARIABLE}={self._settings.boot_id}",
            ),
            device_nodes=(self._settings.kernel.management_node(),) if clique else (),
            mounts=(
                ContainerMount(
                    host_path=str(home), container_path="/imexd", options=("rw", "nosuid", "nodev", "bind")
                ),
            ),
        )
        return PreparedDevice(
            result=wanted.result,
            kind=wanted.kind,
            edits=edits,
            shared_cdi_ids=() if self._driver is None else await self._driver.ids(),
        )


def _is_channel(entry: CheckpointEntry) -> bool:
    return entry.record.get("kind") == ImexDeviceKind.CHANNEL
