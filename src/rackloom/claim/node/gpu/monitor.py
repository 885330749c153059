"""The GPUs of a node over time: conditions, the taints and health that follow, and when to publish.

`update_conditions` and `record_errors` are pure: they turn the conditions so far and a new observation into
new conditions. A GPU that was known and does not answer is lost. It stays published, with a NoSchedule
taint. `xids` judges errors and ends them: those of a program, and those that cannot be judged here, give a
taint without effect, which names the missing source. A recovery action that the driver requests and an
unhealthy fabric also give taints. The recovery of an IMEX domain is no fault of the GPU, so its taint has
no effect.

A taint goes with its reason. A GPU that answers again is not lost. It was reset, so its errors from before
the newest look that missed it are over. Links train after a boot, so the summary of the fabric counts only
once the GPU has registered, or after 10 min without. The newest recovery action counts, whether XID 154
named it or NVML reported it. An unmonitored GPU has unknown health.

`published_devices` and `devices_by_name` derive the slice and the meaning of each device name. A GPU in
MIG mode is not published whole, unless its MIG devices are made on demand (`partitions`). A lost GPU gives
way to one that came with its minor number, as after a swap.

`GpuMonitor` holds the newest state: `observe` reads the GPUs (every 10 s), `listen` waits for XIDs and then
reads the kernel log. Until a GPU is known, the kernel keeps the lines. When nothing can be read, the monitor
keeps the previous state. It calls back only when the published devices change. Ages come from a clock that
no administrator sets.

Source of the taint keys: NVIDIA's DRA driver for GPUs, 0.5.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from rackloom.claim.node.gpu import inventory
from rackloom.claim.node.gpu.inventory import (
    UNKNOWN_LOCATION,
    GpuInventory,
    GpuLocation,
    GpuSource,
    MigDevice,
    MigPartition,
    NodeGpu,
    RecoveryAction,
    XidError,
    gpu_locations,
    made_by_others,
    passed_through,
)
from rackloom.claim.node.gpu.kernel_log import KernelLogReading
from rackloom.claim.node.gpu.partitions import counter_set, partition_name, partitionable_devices
from rackloom.claim.node.gpu.passthrough import (
    VfioGpu,
    by_address,
    drawing_unit,
    switch_counters,
    switchable,
    switchable_device,
    vfio_device,
    vfio_name,
)
from rackloom.claim.node.gpu.xids import (
    RECOVERY_CHANGED,
    UNREPORTED_SECONDS,
    KernelXid,
    XidFinding,
    XidRules,
    XidsSeen,
    judge_xids,
    keep_xids,
)
from rackloom.claim.node.plugin import CheckpointEntry, DeviceHealth, DevicePool, Health, NodeValue
from rackloom.core.allocate.objects import CounterSet, Device, DeviceTaint
from rackloom.errors import Refused, Retry
from rackloom.topology.machine import Machine

# Conditions, taints and health. Pure.


XID_TAINT = "gpu.nvidia.com/xid"
LOST_TAINT = "gpu.nvidia.com/gpu-lost"
UNMONITORED_TAINT = "gpu.nvidia.com/unmonitored"
FABRIC_TAINT = "gpu.nvidia.com/fabric"
RECOVERY_TAINT = "gpu.nvidia.com/recovery"
REGISTRATION_SECONDS = 600.0
"""How long a GPU may register with its NVLink fabric before the summary of its health counts."""
NO_SCHEDULE = "NoSchedule"
NO_EFFECT = "None"
"""For people to read. It keeps nothing off the device."""


class AnnouncedRecovery(NodeValue, frozen=True, kw_only=True):
    """The recovery action of the newest XID 154. `sequence` is that of its record in the kernel log."""

    sequence: int
    action: RecoveryAction
    at: float


class GpuCondition(NodeValue, frozen=True, kw_only=True):
    """The known state of one GPU. Times are those of a monotonic clock."""

    gpu: NodeGpu
    """As it last answered, at `seen_at`."""
    seen_at: float = 0.0
    lost_since: float | None = None
    missed_at: float | None = None
    """The newest look that missed it. None if the newest look found it."""
    unregistered_since: float | None = None
    """When it was first seen to register with its NVLink fabric. None once it has."""
    xids: XidsSeen = XidsSeen()
    announced: AnnouncedRecovery | None = None
    monitored: bool = True

    def recovery(self, now: float) -> RecoveryAction | None:
        """The action that the driver requests, or None if it does not report that."""
        announced, reported = self.announced, self.gpu.recovery
        if announced is None or (reported is not None and announced.at < self.seen_at):
            return reported
        # If the driver does not report actions, a reset may go unseen.
        is_current = reported is not None or now - announced.at < UNREPORTED_SECONDS
        return announced.action if is_current else None

    def fabric(self, now: float) -> tuple[Health, str]:
        """Health of its NVLink fabric, and why."""
        since = self.unregistered_since
        if since is not None and now - since < REGISTRATION_SECONDS:
            return Health.UNKNOWN, "the GPU has not joined its NVLink fabric yet"
        return self.gpu.fabric_health, self.gpu.fabric_message


GpuConditions = Mapping[str, GpuCondition]
"""By UUID."""


class PublishedGpu(NodeValue, frozen=True, kw_only=True):
    """The device behind a name: a whole GPU, one that is passed through, or a MIG device.

    A MIG device exists (`mig`) or is made for a claim (`partition`).
    """

    condition: GpuCondition | None = None
    mig: MigDevice | None = None
    partition: MigPartition | None = None
    vfio: VfioGpu | None = None

    @property
    def uuid(self) -> str:
        """The UUID by which the driver's programs name the device.

        Empty for one that is passed through, and for a MIG device that is made for its claim.
        """
        if self.partition is not None:
            return ""
        if self.mig is not None:
            return self.mig.uuid
        return "" if self.condition is None else self.condition.gpu.uuid


class InventorySnapshot(NodeValue, frozen=True, kw_only=True):
    """The result of one observation. `unmonitored` are the UUIDs of GPUs without error events.

    `away` are PCI addresses of GPUs that claims have given to virtual machines.
    """

    inventory: GpuInventory
    away: frozenset[str] = frozenset()
    unmonitored: frozenset[str] = frozenset()
    at: float


def update_conditions(previous: GpuConditions, snapshot: InventorySnapshot, rules: XidRules) -> GpuConditions:
    """The conditions after an observation. A GPU that was there before and does not answer is lost."""
    conditions = {}
    for uuid, condition in previous.items():
        since = snapshot.at if condition.lost_since is None else condition.lost_since
        lost = None if condition.gpu.pci_address in snapshot.away else since
        conditions[uuid] = msgspec.structs.replace(condition, lost_since=lost, missed_at=snapshot.at)
    for gpu in snapshot.inventory.gpus:
        monitored = gpu.uuid not in snapshot.unmonitored
        seen = GpuCondition(gpu=gpu, seen_at=snapshot.at, monitored=monitored)
        before = previous.get(gpu.uuid, seen)
        if before.missed_at is not None:
            before = _since_return(before, before.missed_at)
        since = snapshot.at if before.unregistered_since is None else before.unregistered_since
        joining = since if gpu.fabric_joining else None
        seen = msgspec.structs.replace(seen, announced=before.announced, unregistered_since=joining)
        driver = snapshot.inventory.driver_version
        xids = keep_xids(before.xids, rules, seen.recovery(rules.now), driver)
        conditions[gpu.uuid] = msgspec.structs.replace(seen, xids=xids)
    return conditions


def _since_return(condition: GpuCondition, missed_at: float) -> GpuCondition:
    """A GPU that answers again without the errors from before: it was reset."""
    announced = condition.announced
    kept = {
        "announced": None if announced is None or announced.at <= missed_at else announced,
        "xids": condition.xids.after(missed_at),
    }
    return msgspec.structs.replace(condition, unregistered_since=None, **kept)


def record_errors(
    previous: GpuConditions, events: Iterable[XidError], lines: Iterable[KernelXid], now: float
) -> GpuConditions:
    """The conditions after errors. Errors of unknown GPUs are dropped: the next observation finds the GPU.

    Events and lines may come in every order.
    """
    conditions = dict(previous)
    # A GPU that answers comes last, so that it has the lines of a lost one that it replaced.
    lost_first = sorted(previous.items(), key=lambda known: known[1].missed_at is None)
    uuids = {condition.gpu.pci_address.rpartition(".")[0]: uuid for uuid, condition in lost_first}
    for event in events:
        if event.uuid in conditions and event.number != RECOVERY_CHANGED:
            conditions[event.uuid] = _with_xid(conditions[event.uuid], {event.number: now}, {})
    for line in lines:
        uuid = uuids.get(line.pci_address)
        if uuid is None:
            continue
        before, at = conditions[uuid], now if line.at is None else line.at
        if line.finding is not None:
            conditions[uuid] = _with_xid(before, {}, {line.finding: at})
        elif line.number != RECOVERY_CHANGED:
            conditions[uuid] = _with_xid(before, {line.number: at}, {})
        elif line.recovery is not None and (
            before.announced is None or before.announced.sequence < line.sequence
        ):
            announced = AnnouncedRecovery(sequence=line.sequence, action=line.recovery, at=at)
            conditions[uuid] = msgspec.structs.replace(before, announced=announced)
    return conditions


def _with_xid(
    condition: GpuCondition, events: Mapping[int, float], findings: Mapping[XidFinding, float]
) -> GpuCondition:
    xids = condition.xids
    seen = XidsSeen(events={**xids.events, **events}, findings={**xids.findings, **findings})
    return msgspec.structs.replace(condition, xids=seen)


def gpu_health(condition: GpuCondition, rules: XidRules) -> tuple[Health, str]:
    """Health as reported to kubelet, and why."""
    if condition.lost_since is not None:
        return Health.UNHEALTHY, "the GPU does not answer any more"
    verdicts = judge_xids(condition.xids, rules)
    if critical := [verdict.reason for verdict in verdicts if verdict.keeps_off]:
        return Health.UNHEALTHY, "; ".join(critical)
    recovery = condition.recovery(rules.now)
    if recovery and recovery is not RecoveryAction.RECOVER_IMEX_DOMAIN:
        return Health.UNHEALTHY, f"the driver requests {_recovery_name(recovery)}"
    fabric, why = condition.fabric(rules.now)
    if fabric is Health.UNHEALTHY:
        return Health.UNHEALTHY, why
    if unknown := [verdict.reason for verdict in verdicts if not verdict.is_known]:
        return Health.UNKNOWN, "; ".join(unknown)
    if condition.unregistered_since is not None and fabric is Health.UNKNOWN:
        return Health.UNKNOWN, why
    if not condition.monitored:
        return Health.UNKNOWN, "the errors of this GPU cannot be listened to"
    return Health.HEALTHY, ""


def gpu_taints(condition: GpuCondition, rules: XidRules) -> tuple[DeviceTaint, ...]:
    """The taints of a device. The API server allows one for each key and effect."""
    verdicts, recovery = judge_xids(condition.xids, rules), condition.recovery(rules.now)
    critical = [verdict.label for verdict in verdicts if verdict.keeps_off]
    # One taint has room for one error. One that cannot be judged needs a reader more than a harmless one.
    quiet = sorted((other for other in verdicts if not other.keeps_off), key=lambda other: other.is_known)
    taints = []
    if condition.lost_since is not None:
        taints.append(DeviceTaint(key=LOST_TAINT, effect=NO_SCHEDULE))
    if critical:
        taints.append(DeviceTaint(key=XID_TAINT, value=critical[0], effect=NO_SCHEDULE))
    if quiet:
        taints.append(DeviceTaint(key=XID_TAINT, value=quiet[0].label, effect=NO_EFFECT))
    if recovery:
        is_elsewhere = recovery is RecoveryAction.RECOVER_IMEX_DOMAIN
        effect = NO_EFFECT if is_elsewhere else NO_SCHEDULE
        taints.append(DeviceTaint(key=RECOVERY_TAINT, value=_recovery_name(recovery), effect=effect))
    if condition.fabric(rules.now)[0] is Health.UNHEALTHY:
        taints.append(DeviceTaint(key=FABRIC_TAINT, value="unhealthy", effect=NO_SCHEDULE))
    if not condition.monitored:
        taints.append(DeviceTaint(key=UNMONITORED_TAINT, effect=NO_EFFECT))
    return tuple(taints)


def _recovery_name(recovery: RecoveryAction) -> str:
    return recovery.name.lower().replace("_", "-")


# From conditions to devices. Pure.


class GpuObservation(NodeValue, frozen=True, kw_only=True):
    """The result of one reading of the machine, with locations by PCI address.

    `missing` is the reason why the node has no GPUs at all.
    """

    inventory: GpuInventory = GpuInventory()
    locations: Mapping[str, GpuLocation] = {}
    vfio: tuple[VfioGpu, ...] = ()
    missing: str | None = None


class NodeGpus(NodeValue, frozen=True, kw_only=True):
    """All that is known of a node's GPUs: conditions by UUID, and the newest observation."""

    conditions: Mapping[str, GpuCondition] = {}
    newest: GpuObservation = GpuObservation()


def devices_by_name(node: NodeGpus) -> Mapping[str, PublishedGpu]:
    """The device behind each published name."""
    found: dict[str, PublishedGpu] = {}
    for condition in _by_minor(node.conditions):
        gpu = condition.gpu
        if gpu.is_published_whole:
            found[inventory.gpu_name(gpu)] = PublishedGpu(condition=condition)
        if gpu.is_partitionable:
            for partition in gpu.partitions:
                device = PublishedGpu(condition=condition, partition=partition)
                found[partition_name(gpu, partition)] = device
        for mig in gpu.migs:
            found[inventory.mig_name(gpu, mig)] = PublishedGpu(condition=condition, mig=mig)
    offered = (vfio for vfio in node.newest.vfio if vfio.bound or vfio.switchable)
    found.update({vfio_name(vfio): PublishedGpu(vfio=vfio) for vfio in offered})
    return found


def published_devices(node: NodeGpus, rules: XidRules, *, partitioned: bool = True) -> tuple[Device, ...]:
    """The devices to publish. A GPU that does not answer any more stays, with a taint.

    Unless `partitioned`, no GPU is offered in parts that would have to be made.
    """
    devices: list[Device] = []
    newest, switched = node.newest, _switchable(node) if partitioned else {}
    for condition in _by_minor(node.conditions):
        gpu, taints = condition.gpu, gpu_taints(condition, rules)
        location = newest.locations.get(gpu.pci_address, UNKNOWN_LOCATION)
        if gpu.is_partitionable and partitioned:
            found = partitionable_devices(gpu, newest.inventory, location)
        else:
            whole = [inventory.gpu_device(gpu, newest.inventory, location)] if gpu.is_published_whole else []
            parts = (inventory.mig_device(gpu, mig, newest.inventory, location) for mig in gpu.migs)
            found = (*whole, *parts)
        if gpu.pci_address in switched:
            found = tuple(drawing_unit(device, switched[gpu.pci_address]) for device in found)
        devices += [msgspec.structs.replace(device, taints=taints) for device in found]
    bound = [vfio_device(vfio) for vfio in newest.vfio if vfio.bound and not vfio.switchable]
    return (*devices, *bound, *map(switchable_device, switched.values()))


def counter_sets(node: NodeGpus) -> tuple[CounterSet, ...]:
    """The counters that published devices consume: of divided GPUs, and of GPUs for virtual machines."""
    gpus = [condition.gpu for condition in _by_minor(node.conditions)]
    divided = (counter_set(gpu) for gpu in gpus if gpu.is_partitionable)
    return (*divided, *map(switch_counters, _switchable(node).values()))


def _switchable(node: NodeGpus) -> Mapping[str, VfioGpu]:
    return by_address(node.newest.vfio, [condition.gpu for condition in _by_minor(node.conditions)])


def _by_minor(conditions: GpuConditions) -> list[GpuCondition]:
    """By minor. A lost GPU gives way to one that came with its minor, as after a swap."""
    lost_first = sorted(conditions.values(), key=lambda condition: condition.lost_since is None)
    by_minor = {condition.gpu.minor: condition for condition in lost_first}
    return [by_minor[minor] for minor in sorted(by_minor)]


# Reading, and the newest state.


log = structlog.get_logger(__name__)

OBSERVE_SECONDS = 10.0
XID_WAIT_SECONDS = 1.0
NO_KERNEL_LOG = KernelLogReading(trouble="it is not read")
Clock = Callable[[], float]


@dataclass(eq=False)
class GpuReader:
    """Everything that is read from the machine, in calls that block."""

    source: GpuSource
    machine: Callable[[], Machine]
    vfio: Callable[[], tuple[VfioGpu, ...]] = tuple
    kernel_log: Callable[[], KernelLogReading] = lambda: NO_KERNEL_LOG
    """Does not block."""

    def read(self) -> GpuObservation:
        """Raises `Retry` or `Refused` if nothing can be read.

        Without a driver there are no GPUs but those that are passed through, which need none here.
        """
        vfio = self.vfio()
        try:
            inventory = self.source.read()
        except Refused as refused:
            return GpuObservation(vfio=vfio, missing=None if vfio else str(refused))
        return GpuObservation(inventory=inventory, locations=gpu_locations(self.machine()), vfio=vfio)


def _as_claimed(found: GpuObservation, claims: Collection[CheckpointEntry]) -> GpuObservation:
    """Without the MIG devices that claims made, and with the GPUs that claims have bound as switchable."""
    gpus = tuple(
        msgspec.structs.replace(gpu, migs=made_by_others(gpu.uuid, gpu.migs, claims))
        for gpu in found.inventory.gpus
    )
    changed, claimed = msgspec.structs.replace(found.inventory, gpus=gpus), passed_through(claims)
    vfio = tuple(switchable(gpu, claimed) for gpu in found.vfio)
    return msgspec.structs.replace(found, inventory=changed, vfio=vfio)


class GpuMonitor:
    """The newest state of the GPUs, kept up to date by `observe` and `listen`."""

    def __init__(self, reader: GpuReader, ignored: frozenset[int], wall: Clock, clock: Clock) -> None:
        """`wall` gives the times to publish. `clock` gives ages: nothing sets it, as CLOCK_MONOTONIC."""
        self._reader = reader
        self._newest_rules = XidRules(now=0.0, ignored=ignored, log_trouble=NO_KERNEL_LOG.trouble)
        self._wall, self._clock = wall, clock
        self._on_change: Callable[[], None] = lambda: None
        self._node = NodeGpus()
        self._pool = DevicePool(name="", devices=())
        self._claims: Callable[[], Collection[CheckpointEntry]] = tuple
        self._observed_at: float | None = None
        self._trouble = "the GPUs were not looked at yet"
        self.missing: str | None = None
        """The part that this node needs before it has GPUs, or None."""

    def resume(self, claims: Callable[[], Collection[CheckpointEntry]]) -> None:
        """`claims` returns the checkpoint's entries, which show the MIG devices that were made for claims."""
        self._claims = claims

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the published devices change."""
        self._on_change = callback

    async def pool(self, name: str) -> DevicePool:
        """The devices to publish. Raises `Retry` until the GPUs were once read."""
        await self.need()
        return msgspec.structs.replace(self._pool, name=name)

    async def need(self) -> None:
        """Make sure that the GPUs were read once. Raises `Retry` if that cannot be done now."""
        if self._observed_at is None:
            await self.observe()
        if self._observed_at is None:
            raise Retry(self._trouble, after=1.0)

    async def observe(self) -> None:
        """Read again. The previous state stays when nothing can be read."""
        # A MIG device may be made or destroyed while the GPUs are read: its claim is in one of the two.
        before, began = tuple(self._claims()), self._clock()
        try:
            found = await asyncio.to_thread(self._reader.read)
        except (Retry, Refused) as trouble:
            self._trouble = trouble.reason
            log.warning("gpu.unknown", reason=trouble.reason)
            return
        if found.missing != self.missing:
            log.warning("gpu.driver", missing=found.missing)
        found = _as_claimed(found, (*before, *self._claims()))
        away = frozenset(vfio.pci_address for vfio in found.vfio if vfio.switchable and vfio.bound)
        unmonitored = self._reader.source.unmonitored()
        self._trouble, self._observed_at, self.missing = "", self._wall(), found.missing
        # An XID 154 since the reading began is newer than the reading.
        snapshot = InventorySnapshot(inventory=found.inventory, away=away, unmonitored=unmonitored, at=began)
        conditions = update_conditions(self._node.conditions, snapshot, self._rules())
        if not self._node.conditions and conditions:
            # Before the first publication: a restart of this plugin must not end the taint of an error.
            conditions = record_errors(conditions, (), self._read_log(), self._clock())
        self._replace(NodeGpus(conditions=conditions, newest=found))

    async def listen(self) -> None:
        """Wait `XID_WAIT_SECONDS` for errors, read the kernel log, and record both. Raises `Retry`."""
        events: tuple[XidError, ...] = ()
        deaf: Retry | None = None
        try:
            events = await asyncio.to_thread(self._reader.source.wait, XID_WAIT_SECONDS)
        except Retry as retry:
            deaf = retry
        for event in events:
            log.warning("gpu.xid", gpu=event.uuid, xid=event.number)
        # After the events, so that their lines are mostly there.
        lines = self._read_log() if self._node.conditions else ()
        conditions = record_errors(self._node.conditions, events, lines, self._clock())
        self._replace(msgspec.structs.replace(self._node, conditions=conditions))
        if deaf is not None:
            raise deaf

    def device(self, name: str) -> PublishedGpu | None:
        """The device behind a published name, or None if the name is not published."""
        return devices_by_name(self._node).get(name)

    def gpu_at(self, address: str) -> NodeGpu | None:
        """The GPU at a PCI address that answered at the newest observation."""
        gpus = self._node.newest.inventory.gpus
        return next((gpu for gpu in gpus if gpu.pci_address == address), None)

    def answers(self, uuid: str) -> bool:
        """Whether a GPU answered at the newest observation."""
        return any(gpu.uuid == uuid for gpu in self._node.newest.inventory.gpus)

    def health(self, pool: str) -> tuple[DeviceHealth, ...]:
        """Health of every published device."""
        names = devices_by_name(self._node)
        return tuple(self._health(pool, name, device) for name, device in names.items())

    def _read_log(self) -> tuple[KernelXid, ...]:
        reading = self._reader.kernel_log()
        rules = self._rules()
        if reading.trouble != rules.log_trouble and reading.trouble is not None:
            log.warning("gpu.kernel-log", reason=reading.trouble)
        lost_at = rules.now if reading.is_lossy else rules.log_lost_at
        changes = {"log_trouble": reading.trouble, "log_lost_at": lost_at}
        self._newest_rules = msgspec.structs.replace(rules, **changes)
        judged = {(xid.pci_address, xid.number, xid.finding.link) for xid in reading.xids if xid.finding}
        for pci, number, link in sorted(judged, key=str):
            log.warning("gpu.xid-line", pci=pci, xid=number, link=link)
        return reading.xids

    def _replace(self, node: NodeGpus) -> None:
        self._node = node
        counters, rules = counter_sets(node), self._rules()
        devices = published_devices(node, rules)
        whole = published_devices(node, rules, partitioned=False) if counters else ()
        pool = DevicePool(name="", devices=devices, counters=counters, without_counters=whole)
        if pool != self._pool:
            self._pool = pool
            self._on_change()

    def _rules(self) -> XidRules:
        return msgspec.structs.replace(self._newest_rules, now=self._clock())

    def _health(self, pool: str, name: str, device: PublishedGpu) -> DeviceHealth:
        health, message = Health.UNKNOWN, self._trouble
        if not message and device.condition is not None:
            health, message = gpu_health(device.condition, self._rules())
        elif not message:
            message = "the driver of a GPU that is passed through is in its virtual machine"
        return DeviceHealth(
            pool=pool, device=name, health=health, observed_at=self._observed_at or 0.0, message=message
        )
