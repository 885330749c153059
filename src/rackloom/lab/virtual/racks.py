"""Simulated racks: the true fabric of each NVLink domain, its controllers, and what clients did to it.

`SimRack` joins a fabric, its leading controller, its network and its faults. A standby controller may
take over at another address; the former leader may come back with the state that it remembers, or learn
that it no longer leads. For every mutation the rack records an `ExecutedChange`: the fabric before and
after, whether the client still waited for the answer, whether anything else had changed since the
client's last complete reading, and when that reading began. The invariants are computed from these
records.

`SimSite` builds the racks of a site from a rack profile and a seed. It remembers for which logical
partition the service created each partition, since a partition on a switch carries only a name.

`ConflictingController` is a second controller that contradicts a rack's own: it shows the same domain
without one tray, or the same hardware as another domain. It has its own fabric, so that nothing asked
of it changes the truth. No mutation may be sent to it, nor to the true controller once the
contradiction was read (S6).
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    CreatePartition,
    DefaultPartitionPolicy,
    PartitionOperation,
)
from rackloom.core.partitions.partition_layout import is_tray_partition
from rackloom.lab.switches.fabric import (
    FabricGpu,
    FabricPartition,
    FabricSnapshot,
    SeededNames,
    SimulatedFabric,
    fabrics_of,
    former_leader_fabric,
    machine_id_of,
    standby_fabric,
)
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.lab.switches.nmxc import NmxcService
from rackloom.lab.virtual.network import MUTATIONS, SimController, SimNetwork
from rackloom.topology.rack import NvlinkDomain, RackProfile, RackSite, build_site

SMALL_DOMAIN_RATE = 0.2
"""How often a domain holds no more than one to three partitions."""


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


class FormerLeader(msgspec.Struct, frozen=True):
    """A controller that led, how it is reached, and the fabric as it knew it."""

    url: str
    switch: SimController
    network: SimNetwork
    memory: SimulatedFabric


def _ignore_executed(_rpc: str, _request: Any, _reply: Any, _expected: bool) -> None:
    """Calls to a former leader are not recorded."""


class SimRack:
    """One domain: its fabric, its controller, and what happened to it."""

    def __init__(self, domain: NvlinkDomain, fabric: SimulatedFabric, rng: random.Random) -> None:
        self.home = domain
        self.url = f"http://switch-{domain.racks[0]}"
        self.serials = frozenset(tray.chassis_serial for tray in domain.trays)
        self.fabric = fabric
        self.faults = NmxcFaults()
        self.network = SimNetwork(rng)
        self.switch = SimController(NmxcService(fabric, self.faults), self.network, self._executed)
        self.others: dict[str, SimController] = {}
        """Controllers of the domain that do not lead, by URL."""
        self._standby: SimNetwork | None = None
        self._old: FormerLeader | None = None
        self._moves = 0
        self.made: dict[int, str] = {}
        """Partitions that clients created: id to name."""
        self.mutations = 0
        self.watchers: list[Callable[[SimRack, ExecutedChange], None]] = []
        self._disturbed_since_read = True
        self._disturbed_now = 0
        self._reading_from = 0.0
        self._read_at = 0.0
        self._before = self._now = fabric.snapshot()
        fabric.on_change(self._changed)

    @property
    def name(self) -> str:
        """Short name for traces."""
        return self.home.racks[0]

    def foreign(self) -> Iterator[FabricPartition]:
        """Partitions that another writer created."""
        for partition in self.fabric.snapshot().partitions:
            if partition.id != DEFAULT_PARTITION_ID and self.made.get(partition.id) != partition.name:
                yield partition

    def machine_of(self, guid: int) -> str | None:
        """The machine that a GPU is on; None for one that is not there."""
        gpu = self.fabric.gpus.get(guid)
        return None if gpu is None else machine_id_of(gpu.chassis_serial, gpu.slot)

    async def stand_by(self) -> str:
        """Have another controller ready to lead; returns its URL. It lists no GPU."""
        url = f"http://switch-{self.name}-{self._moves + 2}"
        if self._standby is None:
            self._standby = SimNetwork(self.network.rng)
            service = NmxcService(standby_fabric(self.fabric), NmxcFaults())
            self.others[url] = SimController(service, self._standby, self._executed)
        return url

    async def move(self) -> None:
        """Let the standby lead. Nothing answers at the previous URL; queued call fates move along."""
        url, old = await self.stand_by(), self.url
        assert self._standby is not None  # noqa: S101 (it was made ready)
        self.network.down = True
        self.switch.break_streams()
        self._old = FormerLeader(old, self.switch, self.network, former_leader_fabric(self.fabric))
        self.others[old], self.switch = self.switch, self.others.pop(url)
        self.switch.serve(NmxcService(self.fabric, self.faults))
        self._standby.next_mutations, self.network.next_mutations = self.network.next_mutations, deque()
        self.network, self._standby = self._standby, None
        self.url = url
        self._moves += 1

    async def old_leader_returns(self) -> str:
        """Let the former leader answer again at its URL, as leader, with the state it remembers."""
        if self._old is None:
            raise RuntimeError("the leader never moved")
        # Its changes apply to its own memory, not to the fabric.
        self._old.switch.serve(NmxcService(self._old.memory, NmxcFaults()), _ignore_executed)
        self._old.network.heal()
        return self._old.url

    async def old_leader_yields(self) -> None:
        """The former leader has learned that another one leads, and lists no GPU any more."""
        if self._old is not None:
            self._old.switch.serve(NmxcService(standby_fabric(self.fabric), NmxcFaults()), self._executed)

    async def go_away(self) -> None:
        """Calls are refused from now on, and subscriptions end."""
        self.network.down = True
        self.switch.break_streams()

    async def come_back(self) -> None:
        """Calls arrive again."""
        self.network.down = False

    def switch_at(self, url: str) -> SimController:
        """The controller at one of its URLs."""
        return self.switch if url == self.url else self.others[url]

    def limit(self, room: int | None) -> None:
        """Let the domain hold no more than `room` partitions; None: as many as a real one."""
        if room is not None:
            self.fabric.limits = msgspec.structs.replace(self.fabric.limits, max_partitions=room)

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
            # Without a header the client cannot tell whether it was carried out: its readings no longer hold.
            self._note_change(rpc, request, reply)
            self.disturb()
            return
        succeeded = reply.server_header.return_code == pb.NMX_ST_SUCCESS
        if rpc == "CreatePartition" and succeeded and not reply.partition_id.partition_id:
            # Without an id neither: the client cannot tell what was made.
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
        # A complete reading is the GPU list followed by a full partition list. What changes between the two
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
        self.mutations += 1
        if rpc == "CreatePartition":
            # By name, because the answer may lack the id.
            made = (number for number, of in self.fabric.partitions.items() if of.name == request.name)
            self.made.update((number, request.name) for number in made)
        elif rpc == "DeletePartition":
            self.made.pop(reply.partition_id.partition_id, None)


class SimSite:
    """All racks of a site, and which partition serves which logical partition."""

    def __init__(
        self,
        profile: RackProfile,
        racks: int,
        rng: random.Random,
        *,
        unmanaged_tray: bool,
        room: int | None = None,
    ) -> None:
        """With `unmanaged_tray`, the last tray of the first rack is on no machine that the site knows.

        `room` is how many partitions each domain holds.
        """
        names = SeededNames(f"sim-{rng.getrandbits(64):x}")
        self.profile = profile
        self.site: RackSite = build_site(profile, racks, names)
        self.racks = tuple(
            SimRack(domain, fabric, random.Random(rng.getrandbits(64)))  # noqa: S311
            for domain, fabric in zip(self.site.domains, fabrics_of(self.site, names.seed), strict=True)
        )
        for rack in self.racks:
            few = rng.randint(1, 3) if rng.random() < SMALL_DOMAIN_RATE else None
            rack.limit(room or few)
        if unmanaged_tray:
            self.site = _without_last_tray(self.site)
        self.machines = frozenset(
            machine_id_of(tray.chassis_serial, tray.slot)
            for domain in self.site.domains
            for tray in domain.trays
        )
        self.lp_of_name: dict[str, str] = {}
        """Partition name to the logical partition (a tray, for free GPUs) that the plane made it for."""
        self.free_gpus = DefaultPartitionPolicy.NONE
        """What the site does with unassigned GPUs."""

    @property
    def endpoints(self) -> Mapping[str, str]:
        """Domain uuid, as it was ordered, to controller URL."""
        return {rack.home.uuid: rack.url for rack in self.racks}

    def rack_at(self, url: str) -> SimRack:
        """The rack behind a controller URL."""
        return next(rack for rack in self.racks if url == rack.url or url in rack.others)

    def rack_of(self, machine: str) -> SimRack:
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


def _without_last_tray(site: RackSite) -> RackSite:
    first, *others = site.domains
    known = msgspec.structs.replace(first, trays=first.trays[:-1])
    return msgspec.structs.replace(site, domains=(known, *others))


# A second controller that contradicts the one of a rack.


class ConflictingController:
    """A controller that lists GPUs of `rack` as `domain`; `asked`: the changes requested of it."""

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
