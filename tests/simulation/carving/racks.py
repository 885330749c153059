"""Racks that record clients' changes for the invariants, and controllers that contradict one.

For every mutation a `JudgedRack` records an `ExecutedChange`: the fabric before and after, whether the
client still waited for the answer, whether anything else had changed since the client's last complete
reading, and when that reading began. The invariants are computed from these records.

`JudgedSite` remembers for which logical partition the service created each partition, since a partition
on a switch carries only a name.

`ConflictingController` is a second controller that contradicts a rack's own: it shows the same domain without
one tray, or the same hardware as another domain. It has its own fabric, so that no request to it changes the
truth. No mutation may be sent to it, nor to the true controller once the contradiction was read (S6).
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import msgspec

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    CreatePartition,
    DefaultPartitionPolicy,
    PartitionOperation,
    is_tray_partition,
)
from rackloom.lab.switches.fabric import (
    FabricGpu,
    FabricPartition,
    FabricSnapshot,
    SimulatedFabric,
    machine_id_of,
)
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.lab.switches.nmxc import NmxcService
from rackloom.lab.virtual.network import MUTATIONS, SimController, SimNetwork
from rackloom.lab.virtual.racks import SimRack, SimSite
from rackloom.topology.rack import NvlinkDomain, RackProfile


class ExecutedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that a client requested, the controller's answer, and the fabric before and after."""

    rpc: str
    request: Any
    code: str
    before: FabricSnapshot
    after: FabricSnapshot
    expected: bool
    """The client still waits for this answer."""
    undisturbed: bool
    """Nothing but the client's own expected changes happened since the client last read the fabric."""
    read_at: float
    """Virtual time at which the client's last complete reading was begun."""


class JudgedRack(SimRack):
    """A rack, the partitions that clients created there, and their answers."""

    def __init__(self, domain: NvlinkDomain, fabric: SimulatedFabric, rng: random.Random) -> None:
        super().__init__(domain, fabric, rng)
        self.made: dict[int, str] = {}
        """Partitions that clients created: id to name."""
        self.watchers: list[Callable[[JudgedRack, ExecutedChange], None]] = []
        self._disturbed_since_read = True
        self._disturbed_now = 0
        self._reading_from = 0.0
        self._read_at = 0.0
        self._before = self._now = fabric.snapshot()
        fabric.on_change(self._changed)

    def foreign(self) -> Iterator[FabricPartition]:
        """Partitions that another writer created."""
        for partition in self.fabric.snapshot().partitions:
            if partition.id != DEFAULT_PARTITION_ID and self.made.get(partition.id) != partition.name:
                yield partition

    def machine_of(self, guid: int) -> str | None:
        """The machine that a GPU is on, or None if it is absent."""
        gpu = self.fabric.gpus.get(guid)
        return None if gpu is None else machine_id_of(gpu.chassis_serial, gpu.slot)

    def disturb(self) -> None:
        """Note a change by another writer: what a client has read no longer holds."""
        self._disturbed_since_read = True
        self._disturbed_now += 1

    def _changed(self, snapshot: FabricSnapshot) -> None:
        self._before, self._now = self._now, snapshot

    def _executed(self, rpc: str, request: Any, reply: Any, expected: bool) -> None:
        if rpc not in MUTATIONS:
            self._note_reading(rpc, reply)
            return
        if not reply.HasField("server_header"):
            # Without a header the client doesn't know the outcome: its readings no longer hold.
            self._note_change(rpc, request, reply)
            self.disturb()
            return
        succeeded = reply.server_header.return_code == pb.NMX_ST_SUCCESS
        if rpc == "CreatePartition" and succeeded and not reply.partition_id.partition_id:
            # The same without an id: the client doesn't know which partition was made.
            self._note_change(rpc, request, reply)
            self.disturb()
            return
        code = pb.StReturnCode.Name(reply.server_header.return_code).removeprefix("NMX_ST_")
        done = code == "SUCCESS"
        # A refused change left the fabric as it is, so before and after are the same.
        event = ExecutedChange(
            rpc=rpc,
            request=request,
            code=code,
            before=self._before if done else self._now,
            after=self._now,
            expected=expected,
            undisturbed=not self._disturbed_since_read,
            read_at=self._read_at,
        )
        if done:
            self._note_change(rpc, request, reply)
            if not expected:
                self.disturb()
        for watcher in self.watchers:
            watcher(self, event)

    def _note_reading(self, rpc: str, reply: Any) -> None:
        # A complete reading is the GPU list followed by a full partition list. A change between the two
        # counts as a disturbance, since the reading may show either state.
        if rpc == "GetGpuInfoList":
            self._reading_from, self._disturbed_now = asyncio.get_running_loop().time(), 0
        elif rpc == "GetPartitionInfoList":
            whole = len(reply.partition_info_list) == len(self.fabric.partitions)
            self._read_at, self._disturbed_since_read = (
                self._reading_from,
                self._disturbed_now > 0 or not whole,
            )

    def _note_change(self, rpc: str, request: Any, reply: Any) -> None:
        if rpc == "CreatePartition":
            # By name, because the answer may lack the id.
            made = (number for number, of in self.fabric.partitions.items() if of.name == request.name)
            self.made.update((number, request.name) for number in made)
        elif rpc == "DeletePartition":
            self.made.pop(reply.partition_id.partition_id, None)


class JudgedSite(SimSite):
    """The racks of a site, and which partition serves which logical partition."""

    racks: tuple[JudgedRack, ...]

    def __init__(
        self,
        profile: RackProfile,
        racks: int,
        rng: random.Random,
        *,
        unmanaged_tray: bool,
        room: int | None = None,
    ) -> None:
        """As a `SimSite`."""
        super().__init__(profile, racks, rng, unmanaged_tray=unmanaged_tray, room=room, rack_class=JudgedRack)
        self.machines = frozenset(
            machine_id_of(tray.chassis_serial, tray.slot)
            for domain in self.site.domains
            for tray in domain.trays
        )
        self.lp_of_name: dict[str, str] = {}
        """Partition name to the logical partition (a tray, for free GPUs) that the plane made it for."""
        self.free_gpus = DefaultPartitionPolicy.NONE
        """The site's policy for unassigned GPUs."""

    def rack_of(self, machine: str) -> JudgedRack:
        """The rack of a machine."""
        serial = machine.rpartition("-")[0].upper()
        return next(rack for rack in self.racks if serial in rack.serials)

    def is_of_tray(self, partition: str) -> bool:
        """Whether the plane made a partition for the free GPUs of a tray."""
        return is_tray_partition(self.lp_of_name.get(partition, ""))

    def asked(self, operation: PartitionOperation) -> None:
        """Note which logical partition a new partition is for."""
        if isinstance(operation, CreatePartition):
            self.lp_of_name[operation.name] = operation.logical_partition


# A second controller that contradicts the one of a rack.


class ConflictingController:
    """A controller that lists GPUs of `rack` as `domain`. `asked`: the changes requested of it."""

    def __init__(self, rack: SimRack, domain: str, gpus: Collection[FabricGpu], rng: random.Random) -> None:
        self.rack = rack
        self.domain = domain
        self.url = f"{rack.url}-second"
        self.serial = f"{min(rack.serials)}-second"
        self.asked: list[str] = []
        fabric = SimulatedFabric(domain, gpus, rack.fabric.limits)
        self.switch = SimController(NmxcService(fabric, NmxcFaults()), SimNetwork(rng), self._executed)

    def concerns(self, rack: SimRack) -> bool:
        """Whether its state contradicts that of `rack`."""
        return rack is self.rack or rack.fabric.domain == self.domain

    def _executed(self, rpc: str, _request: Any, _reply: Any, _expected: bool) -> None:
        if rpc in MUTATIONS:
            self.asked.append(rpc)


def controller_without_tray(rack: SimRack, rng: random.Random) -> ConflictingController:
    """A controller that claims to be the rack's domain, and lacks one of its trays."""
    gpus = list(rack.fabric.gpus.values())
    away = rng.choice(sorted({gpu.host_id for gpu in gpus}))
    return ConflictingController(rack, rack.fabric.domain, [gpu for gpu in gpus if gpu.host_id != away], rng)


def controller_of_other_domain(rack: SimRack, domain: str, rng: random.Random) -> ConflictingController:
    """A controller that claims to be another `domain`, and lists the rack's hardware."""
    return ConflictingController(rack, domain, list(rack.fabric.gpus.values()), rng)
