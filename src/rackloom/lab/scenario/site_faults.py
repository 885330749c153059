"""Faults of a scenario's racks and of the site service, and how they are repaired.

The steps stop, restart and confuse switch controllers, pull, swap and move trays, change the health of
GPUs, remove a switch tray, let another writer make, read, write and delete partitions, kill the service
and set its clock.

`SiteFaults` remembers what still lasts, so that `heal` can undo all of it: controllers answer with
their own domain UUID, trays are back in their places, other writers' partitions are gone, and
everything is healthy. `end` fails for a fault that was to strike a coming call and has not: the
scenario would show nothing of it.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable
from typing import ClassVar, Literal

import msgspec

from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID, GpuHealth, PartitionHealth
from rackloom.lab.scenario.model import ONLY_VIRTUAL, Action, NmxcAction, NotObserved, Speed
from rackloom.lab.scenario.stage import FabricTruth, SiteControl, SwitchControl
from rackloom.lab.scenario.tenants import ScenarioTenants
from rackloom.lab.switches.fabric import FabricGpu, FabricPartition

# What breaks around the switch controllers.


class SwitchStops(Action, frozen=True, kw_only=True, tag="switch-stops"):
    """The controller of a rack can no longer be reached; the fabric keeps working."""

    rack: int = 1


class SwitchAnswers(Action, frozen=True, kw_only=True, tag="switch-answers"):
    """It can be reached again."""

    rack: int = 1


class SwitchRestarts(Action, frozen=True, kw_only=True, tag="switch-restarts"):
    """It restarts, and may have forgotten something: names of partitions, all partitions, its domain uuid."""

    rack: int = 1
    forgets: Literal["nothing", "names", "partitions", "domain"] = "nothing"


class SwitchClaimsDomain(Action, frozen=True, kw_only=True, tag="switch-claims-domain"):
    """The controller of a rack says that it is the domain of another rack: the two contradict each other."""

    rack: int
    domain_of: int


class SwitchMistreats(NmxcAction, frozen=True, kw_only=True, tag="switch-mistreats"):
    """Coming calls of one RPC are refused, answered without a header, or carried out without an answer."""

    rpc: str
    how: Literal["refuses", "loses-reply", "omits-header"]
    rack: int = 1
    times: int = 1


class SwitchHides(NmxcAction, frozen=True, kw_only=True, tag="switch-hides"):
    """So many lists leave out the partition that holds an instance's first GPU."""

    instance: str
    lists: int = 1


class SwitchTrayOut(Action, frozen=True, kw_only=True, tag="switch-tray-out"):
    """One of the switch trays of a rack goes: every GPU and partition of it has less bandwidth."""

    rack: int = 1


class SwitchTrayBack(Action, frozen=True, kw_only=True, tag="switch-tray-back"):
    """It is put back."""

    rack: int = 1


# What happens to trays, GPUs and partitions behind the site's back.


class TrayPulled(Action, frozen=True, kw_only=True, tag="tray-pulled"):
    """The tray of an instance is taken out."""

    instance: str


class TrayReturned(Action, frozen=True, kw_only=True, tag="tray-returned"):
    """It is put back: the same one, or `swapped` for another with new fabric GUIDs in the same slot."""

    instance: str
    swapped: bool = False


class TrayMoved(Action, frozen=True, kw_only=True, tag="tray-moved"):
    """The tray of an instance is put where another one of its rack was, and that one where it was."""

    instance: str
    tray: int


class GpuHealthChanges(Action, frozen=True, kw_only=True, tag="gpu-health"):
    """A GPU gets worse or better."""

    instance: str
    gpu: int
    health: Literal["healthy", "degraded", "no-nvlink", "degraded-bandwidth"]


class PartitionByHand(Action, frozen=True, kw_only=True, tag="partition-by-hand"):
    """Somebody makes a partition on the switch, of GPUs wherever they are."""

    name: str
    instance: str
    gpus: tuple[int, ...]


class PartitionGone(Action, frozen=True, kw_only=True, tag="partition-gone"):
    """Somebody deletes, on the switch, the partition that holds the first GPU of an instance."""

    instance: str


class ListReadByHand(Action, frozen=True, kw_only=True, tag="list-read-by-hand"):
    """Somebody reads the members of the partition that holds the first GPU of an instance."""

    name: str
    instance: str


class ListWrittenByHand(Action, frozen=True, kw_only=True, tag="list-written-by-hand"):
    """They write the whole list back as they read it, as NMX-M's PUT does: what came since is dropped."""

    name: str


class HandLetsGo(Action, frozen=True, kw_only=True, tag="hand-lets-go"):
    """The partition that somebody made on the switch is deleted by them."""

    name: str


# What happens to the service and its machine.


class ServiceKilled(Action, frozen=True, kw_only=True, tag="service-killed"):
    """The site service ends (virtual: wherever it stands) and is started again on the same records."""

    down: float = 1.0


class ServiceDies(Action, frozen=True, kw_only=True, tag="service-dies"):
    """The service is killed at one of its next writes to the records or calls to a switch; 1: the next."""

    point: int
    speeds: ClassVar[frozenset[Speed]] = ONLY_VIRTUAL


class ClockSet(Action, frozen=True, kw_only=True, tag="clock-set"):
    """The clock of the service's machine is set forwards, or backwards."""

    by: float
    speeds: ClassVar[frozenset[Speed]] = ONLY_VIRTUAL


# What carries the steps out.


SWITCH_RESTART_SECONDS = 1.0
HEALTH_BY_NAME = {
    "healthy": GpuHealth.HEALTHY,
    "degraded": GpuHealth.DEGRADED,
    "no-nvlink": GpuHealth.NO_NVLINK,
    "degraded-bandwidth": GpuHealth.DEGRADED_BANDWIDTH,
}


class SiteFaults:
    """Breaks switches, trays and partitions; `heal` ends what still lasts."""

    def __init__(self, site: SiteControl, ground: FabricTruth, tenants: ScenarioTenants) -> None:
        self._site = site
        self._ground = ground
        self._tenants = tenants
        self._stopped: set[int] = set()
        self._pulled: dict[str, tuple[SwitchControl, tuple[FabricGpu, ...]]] = {}
        self._uuids = {number: switch.fabric.domain for number, switch in enumerate(ground.switches, 1)}
        self._moved: list[tuple[str, str]] = []
        self._read_lists: dict[str, tuple[SwitchControl, FabricPartition]] = {}
        self._new_guids = itertools.count(0xF000_0000_0000_0001)

    async def stop_switch(self, step: SwitchStops) -> str:
        """Nobody answers."""
        await self._ground.rack(step.rack).go_away()
        self._stopped.add(step.rack)
        return f"the controller of rack {step.rack} cannot be reached"

    async def start_switch(self, step: SwitchAnswers) -> str:
        """It answers again."""
        await self._start(step.rack)
        return f"the controller of rack {step.rack} can be reached"

    def note_answers(self, rack: int) -> None:
        """It answers again without having been started: its leader is elsewhere now."""
        self._stopped.discard(rack)

    async def restart_switch(self, step: SwitchRestarts) -> str:
        """Away, forgetful, and back."""
        switch = self._ground.rack(step.rack)
        await switch.go_away()
        with self._ground.hand():
            _FORGET_BY_NAME[step.forgets](switch)
        await asyncio.sleep(SWITCH_RESTART_SECONDS)
        await self._start(step.rack)
        return f"the controller of rack {step.rack} restarted, and forgot {step.forgets}"

    async def claim_domain(self, step: SwitchClaimsDomain) -> str:
        """Two controllers say they are one domain."""
        switch, other = self._ground.rack(step.rack), self._uuids[step.domain_of]
        await switch.go_away()
        switch.fabric.domain = other
        await self._start(step.rack)
        return f"the controller of rack {step.rack} says it is domain {other}"

    async def mistreat(self, step: SwitchMistreats) -> str:
        """Coming calls go wrong."""
        faults = self._ground.rack(step.rack).faults
        for _ in range(step.times):
            if step.how == "refuses":
                faults.refuse_next(step.rpc, "NOT_READY")
            elif step.how == "loses-reply":
                faults.drop_reply_of_next(step.rpc)
            else:
                faults.omit_header_of_next(step.rpc)
        return f"{step.times} coming calls of {step.rpc}: {step.how}"

    async def hide(self, step: SwitchHides) -> str:
        """Lists leave a partition out."""
        switch, partition = self._partition_of(step.instance)
        switch.faults.hide_partition(partition.id, step.lists)
        return f"{step.lists} lists leave out partition {partition.name!r}"

    async def pull_tray(self, step: TrayPulled) -> str:
        """GPUs are gone from every list."""
        machine = self._machine(step.instance)
        switch, gpus = self._ground.seat(machine)
        with self._ground.hand():
            switch.fabric.remove_gpus([gpu.guid for gpu in gpus])
        self._pulled[machine] = switch, gpus
        return f"{len(gpus)} GPUs of machine {machine} are gone"

    async def return_tray(self, step: TrayReturned) -> str:
        """The same GPUs, or others in the same seats."""
        machine = self._machine(step.instance)
        if machine not in self._pulled:
            raise NotObserved(f"the tray of {step.instance} was not pulled: write a tray-pulled step before")
        return self._put_back(machine, swapped=step.swapped)

    async def move_tray(self, step: TrayMoved) -> str:
        """Two trays change places, with the GPUs that are in them."""
        machine = self._machine(step.instance)
        switch, _ = self._ground.seat(machine)
        other = self._ground.machine(self._ground.switches.index(switch) + 1, step.tray)
        if other == machine:
            raise NotObserved(f"{step.instance} is in tray {step.tray} already: name another tray")
        self._exchange(machine, other)
        self._moved.append((machine, other))
        return f"the trays of machines {machine} and {other} are in one another's places"

    async def change_health(self, step: GpuHealthChanges) -> str:
        """A GPU gets worse or better."""
        switch, gpus = self._ground.seat(self._machine(step.instance))
        gpu = gpus[step.gpu - 1]
        with self._ground.hand():
            switch.fabric.set_health(gpu.guid, HEALTH_BY_NAME[step.health])
        return f"GPU {gpu.guid:x} is {step.health}"

    async def make_by_hand(self, step: PartitionByHand) -> str:
        """Another writer takes GPUs wherever they are."""
        switch, gpus = self._ground.seat(self._machine(step.instance))
        fabric = switch.fabric
        number = next(free for free in itertools.count(1) if free not in fabric.partitions)
        guids = tuple(sorted(gpus[module - 1].guid for module in step.gpus))
        made = FabricPartition(id=number, name=step.name, guids=guids)
        with self._ground.hand():
            fabric.put(made)
        self._ground.by_hand[step.name] = fabric, made
        return f"partition {number} {step.name!r} holds {len(guids)} GPUs"

    async def read_list(self, step: ListReadByHand) -> str:
        """Another writer begins a read-modify-write."""
        switch, partition = self._partition_of(step.instance)
        self._read_lists[step.name] = switch, partition
        return f"{step.name} read the {len(partition.guids)} members of {partition.name!r}"

    async def write_list(self, step: ListWrittenByHand) -> str:
        """And ends it, not knowing what happened meanwhile."""
        switch, read = self._read_lists.pop(step.name)
        now = switch.fabric.partitions.get(read.id, read)
        dropped = set(now.guids) - set(read.guids)
        if not dropped:
            raise NotObserved(f"{read.name!r} has no member that was not there when {step.name} read it")
        with self._ground.hand():
            switch.fabric.replace(read.id, read.guids)
        return f"{step.name} wrote {len(read.guids)} members, and dropped {len(dropped)}"

    async def take_switch_tray(self, step: SwitchTrayOut) -> str:
        """Less bandwidth for all: each GPU has links to every switch tray."""
        count = self._set_bandwidth(
            self._ground.rack(step.rack), GpuHealth.DEGRADED_BANDWIDTH, PartitionHealth.DEGRADED_BANDWIDTH
        )
        return f"{count} GPUs of rack {step.rack} lost a part of their links"

    async def return_switch_tray(self, step: SwitchTrayBack) -> str:
        """All links are up."""
        count = self._set_bandwidth(self._ground.rack(step.rack), GpuHealth.HEALTHY, PartitionHealth.HEALTHY)
        return f"{count} GPUs of rack {step.rack} have all their links"

    def _set_bandwidth(self, switch: SwitchControl, gpus: GpuHealth, partitions: PartitionHealth) -> int:
        with self._ground.hand():
            for guid in list(switch.fabric.gpus):
                switch.fabric.set_health(guid, gpus)
            for partition in list(switch.fabric.partitions.values()):
                switch.fabric.put(msgspec.structs.replace(partition, health=partitions))
        return len(switch.fabric.gpus)

    async def delete_partition(self, step: PartitionGone) -> str:
        """Another writer deletes what we made."""
        switch, partition = self._partition_of(step.instance)
        with self._ground.hand():
            switch.fabric.delete(partition.id)
        return f"partition {partition.id} {partition.name!r} of {len(partition.guids)} GPUs is deleted"

    async def let_go(self, step: HandLetsGo) -> str:
        """The other writer deletes what it made."""
        fabric, made = self._ground.by_hand.pop(step.name)
        with self._ground.hand():
            if made.id in fabric.partitions:
                fabric.delete(made.id)
        return f"partition {made.id} {made.name!r} is deleted"

    async def heal(self) -> str:
        """Everything answers, truthfully, and is healthy; what was pulled is back, hands are off.

        Not seen where a fault is still to come: nothing was shown with it.
        """
        await self.end()
        for number, switch in enumerate(self._ground.switches, 1):
            await self._heal_switch(number, switch)
        for machine in list(self._pulled):
            self._put_back(machine, swapped=False)
        while self._moved:
            self._exchange(*self._moved.pop())
        for name in list(self._ground.by_hand):
            await self.let_go(HandLetsGo(name=name))
        self._site.mend()
        return "everything is repaired"

    async def end(self) -> str:
        """Every fault that was to strike a coming call has struck one. Not seen otherwise."""
        switches = enumerate(self._ground.switches, 1)
        calls = [f"{one} of rack {rack}" for rack, switch in switches for one in switch.faults.untaken()]
        untaken = [*calls, *self._site.untaken()]
        if untaken:
            raise NotObserved(f"still to come: {', '.join(untaken)}; the scenario shows nothing of it")
        return "every fault has struck"

    async def _heal_switch(self, number: int, switch: SwitchControl) -> None:
        switch.faults.clear()
        if switch.fabric.domain != self._uuids[number] and number not in self._stopped:
            await switch.go_away()
            self._stopped.add(number)
        switch.fabric.domain = self._uuids[number]
        if number in self._stopped:
            await self._start(number)
        with self._ground.hand():
            for gpu in list(switch.fabric.gpus.values()):
                if gpu.health is not GpuHealth.HEALTHY:
                    switch.fabric.set_health(gpu.guid, GpuHealth.HEALTHY)
            for partition in list(switch.fabric.partitions.values()):
                if partition.health is not PartitionHealth.HEALTHY:
                    switch.fabric.put(msgspec.structs.replace(partition, health=PartitionHealth.HEALTHY))

    async def _start(self, rack: int) -> None:
        await self._ground.rack(rack).come_back()
        self._stopped.discard(rack)

    def _put_back(self, machine: str, *, swapped: bool) -> str:
        switch, gpus = self._pulled.pop(machine)
        if swapped:
            gpus = tuple(msgspec.structs.replace(gpu, guid=next(self._new_guids)) for gpu in gpus)
        with self._ground.hand():
            switch.fabric.insert_gpus(gpus)
        which = "other" if swapped else "the same"
        return f"{which} {len(gpus)} GPUs are in machine {machine}"

    def _exchange(self, machine: str, other: str) -> None:
        switch, gpus = self._ground.seat(machine)
        _, others = self._ground.seat(other)
        with self._ground.hand():
            switch.fabric.insert_gpus(
                [*map(_gpu_in_place_of, gpus, others), *map(_gpu_in_place_of, others, gpus)]
            )

    def _machine(self, instance: str) -> str:
        return self._tenants.instance(instance).machine

    def _partition_of(self, instance: str) -> tuple[SwitchControl, FabricPartition]:
        switch, gpus = self._ground.seat(self._machine(instance))
        number = switch.fabric.partition_of(gpus[0].guid)
        if number in (0, DEFAULT_PARTITION_ID):
            raise NotObserved(f"the first GPU of {instance} is in no partition that could be broken")
        return switch, switch.fabric.partitions[number]


def _gpu_in_place_of(gpu: FabricGpu, there: FabricGpu) -> FabricGpu:
    """A GPU in the place of another."""
    return msgspec.structs.replace(there, guid=gpu.guid, health=gpu.health)


def _forget_names(switch: SwitchControl) -> None:
    for partition in list(switch.fabric.partitions.values()):
        if partition.id != DEFAULT_PARTITION_ID:
            switch.fabric.put(msgspec.structs.replace(partition, name=""))


def _forget_domain(switch: SwitchControl) -> None:
    switch.fabric.rename(str(uuid.uuid5(uuid.UUID(switch.fabric.domain), "reborn")))


_FORGET_BY_NAME: dict[str, Callable[[SwitchControl], None]] = {
    "nothing": lambda _: None,
    "names": _forget_names,
    "partitions": lambda switch: switch.fabric.factory_reset(),
    "domain": _forget_domain,
}
