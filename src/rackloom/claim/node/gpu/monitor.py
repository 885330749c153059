"""The GPUs of a node over time: conditions, the taints and health that follow, and when to publish.

`update_conditions` and `record_xids` are pure: they turn the conditions so far and a new observation into
new conditions. A GPU that was known and does not answer is lost; it stays published, with a NoSchedule
taint. An XID that is not harmless (errors of the program that uses the GPU) gives a NoSchedule taint, a
harmless one a taint without effect for people to read. A recovery action that the driver asks for and an
unhealthy fabric also give taints.

A taint goes with its reason. A GPU that answers again is not lost. An XID is over when the driver asks
for no recovery and the error did not come again for 300 s. A driver that does not tell whether it asks
for recovery is believed only once the GPU was away in between, as after a reset. An unmonitored GPU has
unknown health.

`published_devices` and `devices_by_name` derive the slice and the meaning of each device name. A GPU in
MIG mode is not published whole. A lost GPU gives way to one that came with its minor number, as after a
swap.

`GpuMonitor` holds the newest state: `look` reads the GPUs (every 10 s), `listen` waits for XIDs. When
nothing can be read it keeps what was known. It calls back only when the published devices change.

Source of the taint keys and of the harmless XIDs: NVIDIA's DRA driver for GPUs, 0.5.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import structlog

from rackloom.claim.node.gpu import inventory
from rackloom.claim.node.gpu.inventory import (
    UNKNOWN_LOCATION,
    GpuInventory,
    GpuLocation,
    GpuSource,
    MigDevice,
    NodeGpu,
    RecoveryAction,
    VfioGpu,
    XidError,
    gpu_locations,
)
from rackloom.claim.node.plugin import DeviceHealth, DevicePool, Health, NodeValue
from rackloom.core.allocate.objects import Device, DeviceTaint
from rackloom.errors import Refused, Retry
from rackloom.topology.machine import Machine

# Conditions, taints and health. Pure.


XID_TAINT = "gpu.nvidia.com/xid"
LOST_TAINT = "gpu.nvidia.com/gpu-lost"
UNMONITORED_TAINT = "gpu.nvidia.com/unmonitored"
FABRIC_TAINT = "gpu.nvidia.com/fabric"
RECOVERY_TAINT = "gpu.nvidia.com/recovery"
HARMLESS_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors of the program that uses the GPU, not of the GPU."""
QUIET_SECONDS = 300.0
"""Without the error, before it is over."""
NO_SCHEDULE = "NoSchedule"
NO_EFFECT = "None"
"""For people to read; nothing is kept off the device."""


class GpuCondition(NodeValue, frozen=True, kw_only=True):
    """What is known of one GPU. Times are seconds since the epoch."""

    gpu: NodeGpu
    """As it last answered."""
    lost_since: float | None = None
    xids: Mapping[int, float] = {}
    """When each error was last seen, until it is over."""
    monitored: bool = True


GpuConditions = Mapping[str, GpuCondition]
"""By UUID."""


class PublishedGpu(NodeValue, frozen=True, kw_only=True):
    """What a device's name stands for: a whole GPU, a MIG device of one, or one that is passed through."""

    condition: GpuCondition | None = None
    mig: MigDevice | None = None
    vfio: VfioGpu | None = None

    @property
    def uuid(self) -> str:
        """By which the driver's programs name the device; nothing for one that is passed through."""
        if self.mig is not None:
            return self.mig.uuid
        return "" if self.condition is None else self.condition.gpu.uuid


class InventorySnapshot(NodeValue, frozen=True, kw_only=True):
    """What one look found. `unmonitored` are the UUIDs of GPUs whose errors cannot be listened to."""

    inventory: GpuInventory
    unmonitored: frozenset[str] = frozenset()
    at: float


def update_conditions(
    known: GpuConditions, look: InventorySnapshot, harmless: frozenset[int]
) -> GpuConditions:
    """After a look. A GPU that was there before and does not answer is lost."""
    answering = {
        gpu.uuid: _condition_of_answering(known.get(gpu.uuid), gpu, look, harmless)
        for gpu in look.inventory.gpus
    }
    silent = {
        uuid: _condition_of_silent(one, look.at) for uuid, one in known.items() if uuid not in answering
    }
    return {**answering, **silent}


def record_xids(known: GpuConditions, xids: Iterable[XidError], now: float) -> GpuConditions:
    """After errors. One of a GPU that is not known says nothing: the next look finds the GPU."""
    found = dict(known)
    for xid in xids:
        one = found.get(xid.uuid)
        if one is not None:
            found[xid.uuid] = msgspec.structs.replace(one, xids={**one.xids, xid.number: now})
    return found


def gpu_taints(gpu_condition: GpuCondition, harmless: frozenset[int]) -> tuple[DeviceTaint, ...]:
    """The marks of a device; at most one for each key and effect."""
    return tuple(_taints(gpu_condition, harmless))


def gpu_health(gpu_condition: GpuCondition, harmless: frozenset[int]) -> tuple[Health, str]:
    """Health as kubelet is told, and why."""
    if gpu_condition.lost_since is not None:
        return Health.UNHEALTHY, "the GPU does not answer any more"
    critical = _critical_xids(gpu_condition, harmless)
    if critical:
        return Health.UNHEALTHY, f"XID {', '.join(map(str, critical))}"
    if gpu_condition.gpu.recovery:
        return Health.UNHEALTHY, f"the driver asks for {_recovery_name(gpu_condition.gpu.recovery)}"
    if gpu_condition.gpu.fabric_health is Health.UNHEALTHY:
        return Health.UNHEALTHY, gpu_condition.gpu.fabric_message
    if not gpu_condition.monitored:
        return Health.UNKNOWN, "the errors of this GPU cannot be listened to"
    return Health.HEALTHY, ""


def _condition_of_answering(
    before: GpuCondition | None, gpu: NodeGpu, look: InventorySnapshot, harmless: frozenset[int]
) -> GpuCondition:
    xids = {} if before is None else _lasting_xids(before, gpu.recovery, look.at, harmless)
    return GpuCondition(gpu=gpu, xids=xids, monitored=gpu.uuid not in look.unmonitored)


def _condition_of_silent(gpu_condition: GpuCondition, now: float) -> GpuCondition:
    return (
        gpu_condition
        if gpu_condition.lost_since is not None
        else msgspec.structs.replace(gpu_condition, lost_since=now)
    )


def _lasting_xids(
    before: GpuCondition, recovery: RecoveryAction | None, now: float, harmless: frozenset[int]
) -> Mapping[int, float]:
    """Errors of before that are not over."""
    if recovery:
        return before.xids
    if before.lost_since is not None:
        return {}
    return {
        xid: at
        for xid, at in before.xids.items()
        if now - at < QUIET_SECONDS or (recovery is None and xid not in harmless)
    }


def _taints(gpu_condition: GpuCondition, harmless: frozenset[int]) -> Iterator[DeviceTaint]:
    if gpu_condition.lost_since is not None:
        yield DeviceTaint(key=LOST_TAINT, effect=NO_SCHEDULE)
    critical = _critical_xids(gpu_condition, harmless)
    if critical:
        yield DeviceTaint(key=XID_TAINT, value=str(critical[0]), effect=NO_SCHEDULE)
    ignored = [xid for xid in _newest_xids(gpu_condition) if xid not in critical]
    if ignored:
        yield DeviceTaint(key=XID_TAINT, value=str(ignored[0]), effect=NO_EFFECT)
    if gpu_condition.gpu.recovery:
        yield DeviceTaint(
            key=RECOVERY_TAINT, value=_recovery_name(gpu_condition.gpu.recovery), effect=NO_SCHEDULE
        )
    if gpu_condition.gpu.fabric_health is Health.UNHEALTHY:
        yield DeviceTaint(key=FABRIC_TAINT, value="unhealthy", effect=NO_SCHEDULE)
    if not gpu_condition.monitored:
        yield DeviceTaint(key=UNMONITORED_TAINT, effect=NO_EFFECT)


def _critical_xids(gpu_condition: GpuCondition, harmless: frozenset[int]) -> list[int]:
    return [xid for xid in _newest_xids(gpu_condition) if xid not in harmless]


def _newest_xids(gpu_condition: GpuCondition) -> list[int]:
    return sorted(gpu_condition.xids, key=lambda xid: (-gpu_condition.xids[xid], xid))


def _recovery_name(recovery: RecoveryAction) -> str:
    return recovery.name.lower().replace("_", "-")


# From conditions to devices. Pure.


class NodeGpus(NodeValue, frozen=True, kw_only=True):
    """All that is known of a node's GPUs: conditions by UUID, locations by PCI address."""

    conditions: Mapping[str, GpuCondition] = {}
    inventory: GpuInventory = GpuInventory()
    locations: Mapping[str, GpuLocation] = {}
    vfio: tuple[VfioGpu, ...] = ()


def published_devices(node: NodeGpus, harmless: frozenset[int]) -> tuple[Device, ...]:
    """What to publish; a GPU that does not answer any more stays, with a taint."""
    return tuple(_devices(node, harmless))


def devices_by_name(node: NodeGpus) -> Mapping[str, PublishedGpu]:
    """What each published name stands for."""
    found: dict[str, PublishedGpu] = {}
    for one in _by_minor(node.conditions):
        if not one.gpu.mig_mode:
            found[inventory.gpu_name(one.gpu)] = PublishedGpu(condition=one)
        found.update(
            {inventory.mig_name(one.gpu, mig): PublishedGpu(condition=one, mig=mig) for mig in one.gpu.migs}
        )
    found.update({inventory.vfio_name(vfio): PublishedGpu(vfio=vfio) for vfio in node.vfio})
    return found


def gpu_answers(node: NodeGpus, uuid: str) -> bool:
    """Whether a GPU was there at the last look."""
    return any(gpu.uuid == uuid for gpu in node.inventory.gpus)


def _devices(node: NodeGpus, harmless: frozenset[int]) -> Iterator[Device]:
    for one in _by_minor(node.conditions):
        taints = gpu_taints(one, harmless)
        for device in _devices_of_gpu(one, node):
            yield msgspec.structs.replace(device, taints=taints)
    yield from map(inventory.vfio_device, node.vfio)


def _devices_of_gpu(gpu_condition: GpuCondition, node: NodeGpus) -> Iterator[Device]:
    """A GPU in MIG mode is not published whole."""
    location = node.locations.get(gpu_condition.gpu.pci_address, UNKNOWN_LOCATION)
    if not gpu_condition.gpu.mig_mode:
        yield inventory.gpu_device(gpu_condition.gpu, node.inventory, location)
    for mig in gpu_condition.gpu.migs:
        yield inventory.mig_device(gpu_condition.gpu, mig, node.inventory, location)


def _by_minor(conditions: GpuConditions) -> list[GpuCondition]:
    """By minor. A lost GPU gives way to one that came with its minor, as after a swap."""
    lost_first = sorted(conditions.values(), key=lambda condition: condition.lost_since is None)
    by_minor = {one.gpu.minor: one for one in lost_first}
    return [by_minor[minor] for minor in sorted(by_minor)]


# Reading, and the newest state.


log = structlog.get_logger(__name__)

LOOK_SECONDS = 10.0
LISTEN_SECONDS = 1.0


class GpuReader:
    """Everything that is read from the machine, in calls that block."""

    def __init__(
        self,
        source: GpuSource,
        machine: Callable[[], Machine],
        vfio: Callable[[], tuple[VfioGpu, ...]] = tuple,
    ) -> None:
        self.source = source
        self._machine = machine
        self._vfio = vfio

    def read(self) -> "GpuObservation":
        """Raises `Retry` or `Refused` with why nothing can be said.

        Without a driver there are no GPUs but those that are passed through, which need none here.
        """
        vfio = self._vfio()
        try:
            inventory = self.source.read()
        except Refused as refused:
            return GpuObservation(vfio=vfio, missing=None if vfio else str(refused))
        return GpuObservation(inventory=inventory, locations=gpu_locations(self._machine()), vfio=vfio)


class GpuObservation(NodeValue, frozen=True, kw_only=True):
    """What one look found. `missing` is what keeps the node from having GPUs at all."""

    inventory: GpuInventory = GpuInventory()
    locations: Mapping[str, GpuLocation] = {}
    vfio: tuple[VfioGpu, ...] = ()
    missing: str | None = None


class GpuMonitor:
    """All that is known of the GPUs, kept up to date by `look` and `listen`."""

    def __init__(self, reading: GpuReader, harmless: frozenset[int], wall: Callable[[], float]) -> None:
        self._reading = reading
        self._harmless = harmless
        self._wall = wall
        self._tell: Callable[[], None] = lambda: None
        self._node = NodeGpus()
        self._devices: tuple[Device, ...] = ()
        self._observed_at: float | None = None
        self._trouble = "the GPUs were not looked at yet"
        self.missing: str | None = None
        """What has to appear before this node has GPUs; None for nothing."""

    def when_changed(self, tell: Callable[[], None]) -> None:
        """Have `tell` called whenever the published devices become others."""
        self._tell = tell

    async def pool(self, name: str) -> DevicePool:
        """The devices to publish. Raises `Retry` until the GPUs were once read."""
        await self.need()
        return DevicePool(name=name, devices=self._devices)

    async def need(self) -> None:
        """Make sure that the GPUs were read once. Raises `Retry` where that cannot be done now."""
        if self._observed_at is None:
            await self.look()
        if self._observed_at is None:
            raise Retry(self._trouble, after=1.0)

    async def look(self) -> None:
        """Read again. What was known stays when nothing can be read."""
        try:
            found = await asyncio.to_thread(self._reading.read)
        except (Retry, Refused) as trouble:
            self._trouble = trouble.reason
            log.warning("gpu.unknown", reason=trouble.reason)
            return
        if found.missing != self.missing:
            log.warning("gpu.driver", missing=found.missing)
        now = self._wall()
        self._trouble, self._observed_at, self.missing = "", now, found.missing
        look = InventorySnapshot(
            inventory=found.inventory, unmonitored=self._reading.source.unmonitored(), at=now
        )
        conditions = update_conditions(self._node.conditions, look, self._harmless)
        self._become(
            NodeGpus(
                conditions=conditions,
                inventory=found.inventory,
                locations=found.locations,
                vfio=found.vfio,
            )
        )

    async def listen(self) -> None:
        """Wait a moment for errors, and take note of them. Raises `Retry`."""
        xids = await asyncio.to_thread(self._reading.source.wait, LISTEN_SECONDS)
        for xid in xids:
            log.warning("gpu.xid", gpu=xid.uuid, xid=xid.number)
        conditions: GpuConditions = record_xids(self._node.conditions, xids, self._wall())
        self._become(msgspec.structs.replace(self._node, conditions=conditions))

    def device(self, name: str) -> PublishedGpu | None:
        """What a published name stands for; None for a name that is not published."""
        return devices_by_name(self._node).get(name)

    def answers(self, uuid: str) -> bool:
        """Whether a GPU was there at the last look."""
        return gpu_answers(self._node, uuid)

    def health(self, pool: str) -> tuple[DeviceHealth, ...]:
        """Health of every published device."""
        names = devices_by_name(self._node)
        return tuple(self._health(pool, name, known) for name, known in names.items())

    def _become(self, node: NodeGpus) -> None:
        self._node = node
        devices = published_devices(node, self._harmless)
        if devices != self._devices:
            self._devices = devices
            self._tell()

    def _health(self, pool: str, name: str, known: PublishedGpu) -> DeviceHealth:
        health, message = Health.UNKNOWN, self._trouble
        if not message and known.condition is not None:
            health, message = gpu_health(known.condition, self._harmless)
        elif not message:
            message = "the driver of a GPU that is passed through is in its virtual machine"
        return DeviceHealth(
            pool=pool, device=name, health=health, observed_at=self._observed_at or 0.0, message=message
        )
