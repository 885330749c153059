"""The invariants of the site service, checked at every change of a fabric and at every REST answer.

`ServiceInvariants` compares three independent sources: the fabrics as they are, the ledger of answers to
tenants, and the answers of controllers to readings. It never queries the service for its state.

- After every change of a fabric: a GPU is in at most one partition (S1), and no partition that the
  service created holds GPUs of two tenants (S2).
- After every mutation by the service: it was allowed (S4: not another tenant's, S5: no running workload,
  nothing in a paused domain), it was not refused while its facts still held (S6), and it fits the domain's
  limits (S9).
- When a process begins to request a change: it has read the fabric since any other process requested a
  change there (S11). Leases are for this.
- After every REST answer: a Ready status rests on a reading that is newer than the intent and not too
  old (S3), and Unknown clears after one good reading (L5). An answer may rest on the newest reading, or
  on an older one while the newer may not have been written down.

`check_settled` runs after the faults have stopped for two intervals. Every request for which there is
room is served, every other one reports its reason, and the fabric holds nothing else (L1, S7).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tests.simulation.carving.clients import RandomTenant
from tests.simulation.carving.racks import ConflictingController, ExecutedChange, JudgedRack, JudgedSite
from tests.simulation.carving.service import WRITE_DELAY, JudgedService, ReadOutcome
from tests.simulation.invariants.ledger import (
    InvariantViolated,
    Json,
    Ledger,
    LedgerInstance,
    desired_partitions_of,
)

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    DefaultPartitionPolicy,
    DomainObservation,
    ObservedPartition,
)
from rackloom.lab.invariants.fabric import changed_foreign, mixed_tenants, shared_gpus
from rackloom.lab.switches.fabric import FabricPartition, machine_id_of

REQUEST_FLIGHT_SECONDS = 0.1
"""Seconds. A request is no longer on its way after them, if no network is slow."""


class ServiceInvariants:
    """Checks one run. Each method raises `InvariantViolated`."""

    def __init__(self, world: JudgedSite, plane: JudgedService, ledger: Ledger) -> None:
        self.world = world
        self.plane = plane
        self.ledger = ledger
        self.checks = 0

    def fabric_changed(self, rack: JudgedRack) -> None:
        """S1 and S2, after a change by any client."""
        # S1 holds for every partition. S2 holds only for ours: other writers may mix tenants.
        snapshot = rack.fabric.snapshot()
        _require_none("S1", rack, shared_gpus(snapshot))
        for partition in snapshot.partitions:
            if rack.made.get(partition.id) == partition.name:
                self._one_tenant(rack, partition)
        self.checks += 1

    def executed(self, rack: JudgedRack, event: ExecutedChange) -> None:
        """S4, S5, S6 and S9 on a change that the service requested."""
        if event.read_at > self.ledger.paused.get(rack.name, math.inf) and event.expected:
            raise InvariantViolated(f"S5 {rack.name}: {event.rpc} was asked for, though the domain is paused")
        if (
            event.expected
            and (controller := self.plane.conflict_of(rack))
            and self._heard(controller, event.read_at - REQUEST_FLIGHT_SECONDS)
        ):
            raise InvariantViolated(
                f"S6 {rack.name}: {event.rpc} was asked for, though {controller.url} contradicts"
            )
        if event.code != "SUCCESS":
            self._refusal(rack, event)
        elif event.rpc in ("DeletePartition", "RemoveGpusFromPartition"):
            self._removal(rack, event)
        self.checks += 1

    def requested(self, url: str) -> None:
        """S11 on the change that a process has just begun to request of a controller."""
        *earlier, newest = self.plane.requests[url]
        for other in reversed(earlier):
            if other.requested_at < newest.read.begun:
                break
            if other.read.life is not newest.read.life:
                raise InvariantViolated(
                    f"S11 {url}: {newest.read.life.name} requests a change, and has not read the fabric"
                    f" since {other.read.life.name} requested one"
                )
        self.checks += 1

    def answered(self, org: str, path: str, status: int, answer: Any) -> None:
        """S3 and L5 on every instance and interface in an answer, and S2 on their owners."""
        if 200 <= status < 300 and path.startswith("nvlink-interface"):
            self._own_interfaces(org, answer)
        if 200 <= status < 300 and path.startswith("instance") and not path.startswith("instance/type"):
            for obj in answer if isinstance(answer, list) else [answer]:
                if isinstance(obj, dict) and "nvLinkInterfaces" in obj:
                    self._instance(obj)
        self.checks += 1

    def _own_interfaces(self, org: str, answer: list[Json]) -> None:
        for row in answer:
            recorded = self.ledger.instances.get(row["instanceId"])
            if recorded is not None and recorded.org != org:
                raise InvariantViolated(f"S2 {org} is shown an interface of {recorded.org}")

    def check_isolation(self) -> None:
        """S2 for all racks: a machine may have a new tenant while its GPUs never left their partition."""
        for rack in self.world.racks:
            self.fabric_changed(rack)

    def _one_tenant(self, rack: JudgedRack, partition: FabricPartition) -> None:
        if self.world.is_of_tray(partition.name):
            self._one_tray(rack, partition)
        owner = self.ledger.owner_of(self.world.lp_of_name.get(partition.name, ""))
        if owner is not None:
            holders = [self._holder(rack, guid) for guid in partition.guids]
            present = {
                holder.org for holder in holders if holder and not self._may_have_passed(holder, owner)
            }
            _require_none("S2", rack, mixed_tenants(partition, {owner, *present}))

    def _may_have_passed(self, holder: LedgerInstance, owner: str) -> bool:
        """Whether a machine that is being released may belong to another tenant after a lost answer."""
        return holder.state == "leaving" and owner in self.ledger.unanswered

    def _one_tray(self, rack: JudgedRack, partition: FabricPartition) -> None:
        machines = {machine for guid in partition.guids if (machine := rack.machine_of(guid))}
        if len(machines) > 1:
            raise InvariantViolated(
                f"S2 {rack.name}: partition {partition.name} of free GPUs spans {sorted(machines)}"
            )

    def _holder(self, rack: JudgedRack, guid: int) -> LedgerInstance | None:
        return self.ledger.on_machine(rack.machine_of(guid) or "")

    def _refusal(self, rack: JudgedRack, event: ExecutedChange) -> None:
        if not (event.undisturbed and event.expected):
            return
        if event.code == "RESOURCE_EXHAUSTED":
            full = len(event.before.partitions) >= rack.fabric.limits.max_partitions
            if full:
                raise InvariantViolated(f"S9 {rack.name}: a partition too many was asked for")
            return  # multicast groups: requested optimistically, and again without them
        if event.code in ("NOT_READY", "INSUFFICIENT_RESOURCES", "GENERIC_ERROR"):
            return  # a state of the controller, not a fault of the plan
        raise InvariantViolated(
            f"S6 {rack.name}: {event.rpc} was refused with {event.code}, though nothing had changed"
        )

    def _removal(self, rack: JudgedRack, event: ExecutedChange) -> None:
        number = event.request.partition_id.partition_id
        target = next(partition for partition in event.before.partitions if partition.id == number)
        left = {
            guid for partition in event.after.partitions if partition.id == number for guid in partition.guids
        }
        _require_none("S4", rack, changed_foreign(event.before, event.after, self._is_foreign))
        for guid in set(target.guids) - left:
            self._may_leave(rack, guid, target, event)

    def _is_foreign(self, partition: FabricPartition) -> bool:
        return partition.id != DEFAULT_PARTITION_ID and partition.name not in self.world.lp_of_name

    def _may_leave(self, rack: JudgedRack, guid: int, target: FabricPartition, event: ExecutedChange) -> None:
        gpu = rack.fabric.gpus.get(guid)
        if gpu is None or not event.expected:
            return
        machine = machine_id_of(gpu.chassis_serial, gpu.slot)
        if machine not in self.world.machines:
            raise InvariantViolated(f"S4 {rack.name}: took out {guid:#x}, which is on no machine of the site")
        if event.read_at < self.ledger.drained_until.get(machine, 0.0):
            return
        holder = self.ledger.on_machine(machine)
        device = gpu.module_id - 1
        if holder is None or holder.state != "live" or holder.in_doubt:
            return
        wanted_here = holder.desired.get(device) == self.world.lp_of_name.get(target.name)
        if wanted_here and target.id != DEFAULT_PARTITION_ID and holder.desired_since(device) < event.read_at:
            raise InvariantViolated(
                f"S5 {rack.name}: took {guid:#x} out of {target.name}, where {holder.name} wants it"
            )

    def _instance(self, answer: Json) -> None:
        recorded = self.ledger.instances.get(answer["id"])
        rack = self.world.rack_of(answer["machineId"])
        outcomes = _readings_behind(self.plane.outcomes_of(rack), self.plane.now())
        if controller := self.plane.conflict_of(rack):
            self._contradicted(answer, controller)
            return
        if answer["unknownSince"] is not None and all(_is_good_reading(outcome) for outcome in outcomes):
            raise InvariantViolated(f"L5 instance {answer['name']} is Unknown after a good observation")
        for row in answer["nvLinkInterfaces"]:
            if row["status"] == "Ready":
                if answer["status"] == "Terminating":
                    raise InvariantViolated(
                        f"S3 {answer['name']} is being removed, and an interface of it is shown Ready"
                    )
                device, partition = row["deviceInstance"], row["nvLinkLogicalPartitionId"]
                self._supported(rack, answer, recorded, {device: partition}, outcomes, (device,))
        if answer["status"] == "Ready":
            desired = desired_partitions_of(answer)
            devices = range(self.world.profile.gpus_per_tray)
            self._supported(rack, answer, recorded, desired, outcomes, devices)

    def _contradicted(self, answer: Json, controller: ConflictingController) -> None:
        """While controllers contradict each other, nothing is shown Ready and no change is requested."""
        if controller.asked:
            raise InvariantViolated(
                f"S6 {controller.url}, which another controller contradicts,"
                f" was asked for {controller.asked[0]}"
            )
        heard = self._heard(controller, self.plane.now())
        well = [
            interface for interface in (answer, *answer["nvLinkInterfaces"]) if interface["status"] == "Ready"
        ]
        if heard and well:
            raise InvariantViolated(f"S3 {answer['name']} is shown Ready, while {controller.url} contradicts")

    def _heard(self, controller: ConflictingController, before: float) -> bool:
        """Whether a reading of it was in the records before that virtual time."""
        return any(
            outcome.observation is not None and outcome.was_written_down(before)
            for outcome in self.plane.outcomes[controller.url]
        )

    def _supported(
        self,
        rack: JudgedRack,
        answer: Json,
        recorded: LedgerInstance | None,
        desired: dict[int, str],
        outcomes: list[ReadOutcome],
        devices: Iterable[int],
    ) -> None:
        # One supporting reading is enough. The message lists why each candidate doesn't support the status.
        doubts = []
        for outcome in outcomes:
            doubt = self._doubt(answer, recorded, desired, outcome, devices)
            if doubt is None:
                return
            doubts.append(doubt)
        raise InvariantViolated(
            f"S3 {rack.name}: {answer['name']} is shown Ready: {'; '.join(doubts) or 'never read'}"
        )

    def _doubt(
        self,
        answer: Json,
        recorded: LedgerInstance | None,
        desired: dict[int, str],
        outcome: ReadOutcome,
        devices: Iterable[int],
    ) -> str | None:
        if outcome.observation is None:
            return "the last reading failed"
        if self.plane.now() - outcome.begun > self.plane.longest_silence:
            return f"the last reading was begun {self.plane.now() - outcome.begun:.0f} s ago"
        for device in devices:
            if recorded and _requested_after(recorded, device, outcome):
                return f"GPU {device} was asked for after the last reading had begun"
            if doubt := self._misplaced(
                answer["machineId"], device, desired.get(device), outcome.observation
            ):
                return f"GPU {device} {doubt}"
        return None

    def _misplaced(
        self, machine: str, device: int, wanted: str | None, observation: DomainObservation
    ) -> str | None:
        guid = next(
            (
                gpu.guid
                for gpu in observation.gpus
                if machine_id_of(gpu.chassis_serial, gpu.slot) == machine and gpu.module_id == device + 1
            ),
            None,
        )
        if guid in observation.uncertain:
            return "was listed in two ways"
        holders = [partition for partition in observation.partitions if guid in partition.members]
        if wanted is None:
            unexpected = [holder.name for holder in holders if not self.world.is_of_tray(holder.name)]
            return f"was seen in {unexpected[0]}" if unexpected else None
        if guid is None:
            return "was not seen"
        if [self.world.lp_of_name.get(holder.name) for holder in holders] != [wanted]:
            return f"was seen in {[holder.name for holder in holders]}"
        return self._why_shared(holders[0], observation, machine)

    def _why_shared(
        self, partition: ObservedPartition, observation: DomainObservation, machine: str
    ) -> str | None:
        mine = self.ledger.on_machine(machine)
        for gpu in observation.gpus:
            if gpu.guid in partition.members:
                other = self.ledger.on_machine(machine_id_of(gpu.chassis_serial, gpu.slot))
                if mine and other and other.org != mine.org:
                    return f"was seen with a GPU of {other.org}"
        return None


def _require_none(promise: str, rack: JudgedRack, violations: Iterable[str]) -> None:
    for text in violations:
        raise InvariantViolated(f"{promise} {rack.name}: {text}")


def _requested_after(recorded: LedgerInstance, device: int, outcome: ReadOutcome) -> bool:
    sure = recorded.state == "live" and not recorded.in_doubt
    return sure and outcome.begun < recorded.desired_since(device) - WRITE_DELAY


def _is_good_reading(outcome: ReadOutcome) -> bool:
    """The racks of a run have GPUs on record: a reading that lists none, or contradicts itself, is none."""
    seen = outcome.observation
    return seen is not None and bool(seen.gpus) and not seen.uncertain


def _readings_behind(outcomes: list[ReadOutcome], now: float) -> list[ReadOutcome]:
    """The readings that an answer given now may rest on.

    The newest one, and those before it as long as the newer ones may not have been written down: they ended
    this very moment, or their process was killed then.
    """
    # Newest first, up to and including the first that is surely in the records: it replaced all older ones.
    found: list[ReadOutcome] = []
    for outcome in reversed(outcomes):
        found.append(outcome)
        if outcome.was_written_down(now):
            break
    return found


# The settled site: what must hold two intervals after the last fault.


async def check_settled(
    world: JudgedSite, plane: JudgedService, ledger: Ledger, tenants: Sequence[RandomTenant]
) -> None:
    """Raise `InvariantViolated` unless all requests that fit are served and nothing else is left."""
    full = {rack.name for rack in world.racks if _is_full(rack, _desired_partitions(rack, ledger))}
    for rack in world.racks:
        _check_fabric(world, rack, ledger)
    for tenant in tenants:
        await _check_answers(tenant, world, full)


def _partition_capacity(rack: JudgedRack) -> int:
    """Partitions that tenants can have there. The default one stays if it holds unmanaged GPUs."""
    return rack.fabric.limits.max_partitions - (DEFAULT_PARTITION_ID in rack.fabric.partitions)


def _free_tray_partitions(
    world: JudgedSite, rack: JudgedRack, wanted: dict[str, set[int]]
) -> dict[str, set[int]]:
    """The tray partitions that the site's policy requires, by name, as far as the domain has room."""
    if world.free_gpus is not DefaultPartitionPolicy.TRAY:
        return {}
    given = set[int]().union(*wanted.values())
    free: dict[str, set[int]] = {}
    for gpu in rack.fabric.gpus.values():
        if rack.machine_of(gpu.guid) in world.machines and gpu.guid not in given:
            free.setdefault(f"tray-{gpu.chassis_serial}-{gpu.slot}", set()).add(gpu.guid)
    room = max(0, _partition_capacity(rack) - len(wanted))
    return {name: free[name] for name in sorted(free)[:room]}


def _is_full(rack: JudgedRack, wanted: dict[str, set[int]]) -> bool:
    return len(wanted) > _partition_capacity(rack)


def _desired_partitions(rack: JudgedRack, ledger: Ledger) -> dict[str, set[int]]:
    wanted: dict[str, set[int]] = {}
    for gpu in rack.fabric.gpus.values():
        holder = ledger.on_machine(rack.machine_of(gpu.guid) or "")
        if holder is not None and holder.state == "live" and gpu.module_id - 1 in holder.desired:
            wanted.setdefault(holder.desired[gpu.module_id - 1], set()).add(gpu.guid)
    return wanted


def _check_fabric(world: JudgedSite, rack: JudgedRack, ledger: Ledger) -> None:
    wanted = _desired_partitions(rack, ledger)
    found: dict[str, set[int]] = {}
    for partition in rack.fabric.partitions.values():
        present = set(partition.guids) & rack.fabric.gpus.keys()
        if partition.id == DEFAULT_PARTITION_ID:
            if known := [guid for guid in present if rack.machine_of(guid) in world.machines]:
                raise InvariantViolated(
                    f"L1 {rack.name}: {len(known)} GPUs of the site are in the default partition"
                )
            continue
        found[world.lp_of_name.get(partition.name, partition.name)] = present
    # If more is requested than fits, any choice is right as long as the domain is full.
    if _is_full(rack, wanted):
        room = _partition_capacity(rack)
        served = {name: guids for name, guids in wanted.items() if name in found}
        if len(served) < room:
            raise InvariantViolated(
                f"L1 {rack.name}: there is room for {room} partitions, and {len(served)} are served"
            )
        wanted = served
    wanted |= _free_tray_partitions(world, rack, wanted)
    if found != wanted:
        raise InvariantViolated(
            f"L1 {rack.name}: wanted are {_describe_members(wanted)},"
            f" the fabric has {_describe_members(found)}"
        )


async def _check_answers(tenant: RandomTenant, world: JudgedSite, full: set[str]) -> None:
    for obj in await tenant.must("GET", "instance?pageSize=100"):
        why = obj["statusHistory"][0]["message"]
        if obj["status"] != "Ready" and not (
            world.rack_of(obj["machineId"]).name in full and "partitions of at most" in why
        ):
            raise InvariantViolated(f"L1 {obj['name']} is {obj['status']}: {why}")
    for obj in await tenant.must("GET", "nvlink-logical-partition?pageSize=100"):
        if obj["status"] != "Ready":
            raise InvariantViolated(f"L1 logical partition {obj['name']} is still {obj['status']}")


def _describe_members(members: dict[str, set[int]]) -> str:
    return str({name: [f"{guid:x}" for guid in sorted(guids)] for name, guids in sorted(members.items())})
