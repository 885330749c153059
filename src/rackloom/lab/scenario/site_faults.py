"""Faults of a scenario's racks and of the site service, and how they are repaired.

The steps stop, restart and confuse switch controllers, pull, swap and move trays, change the health of
GPUs, remove a switch tray, let another writer make, read, write and delete partitions, kill the service
and set its clock.

`Stage.damage` remembers the faults that still last, so that `heal_site` can undo all of them: controllers
answer with their own domain UUID, trays are back in their slots, other writers' partitions are gone, and
everything is healthy. `require_all_struck` fails for a fault that was to strike a coming call and has
not: the scenario would show nothing of it.
"""

import asyncio
from functools import partial
from typing import Literal

from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID, GpuHealth, PartitionHealth
from rackloom.lab import faults
from rackloom.lab.scenario.model import ONLY_VIRTUAL, NotObserved, action, require
from rackloom.lab.scenario.parameters import (
    FIRST_RACK,
    ForeignPartition,
    Instance,
    InstanceGpu,
    InstanceGpus,
    ListRead,
    NewForeignPartition,
    NewListRead,
    Number,
    Ordinal,
    OtherRack,
    Rack,
    Rpc,
    Seconds,
    Tray,
)
from rackloom.lab.scenario.stage import Stage
from rackloom.lab.switches.fabric import FabricPartition

SWITCH_RESTART_SECONDS = 1.0

# Faults around the switch controllers.


@action()
async def switch_stops(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """The controller of a rack can no longer be reached. The fabric keeps working."""
    await stage.truth.rack(rack).go_away()
    stage.damage.stopped.add(rack)
    return f"the controller of {rack} cannot be reached"


@action()
async def switch_answers(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """It can be reached again."""
    await _start(stage, rack)
    return f"the controller of {rack} can be reached"


@action()
async def switch_restarts(
    stage: Stage, *, rack: Rack = FIRST_RACK, forgets: faults.Forgotten = "nothing"
) -> str:
    """It restarts, and may have forgotten something: names of partitions, all partitions, its domain uuid."""
    switch = stage.truth.rack(rack)
    async with faults.unreachable(switch):
        faults.forget(switch, forgets)
        await asyncio.sleep(SWITCH_RESTART_SECONDS)
    stage.damage.stopped.discard(rack)
    return f"the controller of {rack} restarted, and forgot {forgets}"


@action()
async def switch_claims_domain(stage: Stage, *, rack: Rack, domain_of: OtherRack) -> str:
    """The controller of a rack claims to be the domain of another rack: the two contradict each other."""
    switch, claimed = stage.truth.rack(rack), stage.truth.domains[stage.truth.number(domain_of)]
    async with faults.unreachable(switch):
        faults.set_domain(switch, claimed)
    stage.damage.stopped.discard(rack)
    return f"the controller of {rack} says it is domain {claimed}"


@action(needs="nmx-c")
async def switch_mistreats(
    stage: Stage,
    *,
    rpc: Rpc,
    how: faults.Mistreatment,
    rack: Rack = FIRST_RACK,
    times: Ordinal = 1,
) -> str:
    """Coming calls of one RPC are refused, answered without header or id, or executed without an answer."""
    for _ in range(times):
        faults.mistreat_call(stage.truth.rack(rack).faults, rpc, how)
    return f"{times} coming calls of {rpc}: {how}"


@action(needs="nmx-c")
async def switch_hides(stage: Stage, *, instance: Instance, lists: Ordinal = 1) -> str:
    """So many lists leave out the partition that holds an instance's first GPU."""
    switch, partition = _partition_of(stage, instance)
    switch.faults.hide_partition(partition.id, lists)
    return f"{lists} lists leave out partition {partition.name!r}"


@action(needs="nmx-c", speeds=ONLY_VIRTUAL)
async def network_bad(stage: Stage, *, how: faults.NetworkFault, rack: Rack = FIRST_RACK) -> str:
    """The effect of the network on the next change requested of a rack, or on all calls from now on."""
    stage.site.spoil(stage.truth.number(rack), how)
    return f"the network before {rack}: {how}"


@action()
async def switch_tray_out(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """One of the switch trays of a rack goes: every GPU and partition of it has less bandwidth."""
    switch = stage.truth.rack(rack)
    faults.set_links(switch, GpuHealth.DEGRADED_BANDWIDTH, PartitionHealth.DEGRADED_BANDWIDTH)
    return f"{len(switch.fabric.gpus)} GPUs of {rack} lost a part of their links"


@action()
async def switch_tray_back(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """It is put back."""
    switch = stage.truth.rack(rack)
    faults.heal_fabric(switch)
    return f"{len(switch.fabric.gpus)} GPUs of {rack} have all their links"


# Changes of trays, GPUs and partitions behind the site's back.


@action()
async def tray_pulled(stage: Stage, *, instance: Instance) -> str:
    """The tray of an instance is taken out."""
    machine = stage.rest.instance(instance).machine
    switch, gpus = stage.truth.locate(machine)
    faults.pull_tray(switch, gpus)
    stage.damage.pulled[machine] = switch, gpus
    return f"{len(gpus)} GPUs of machine {machine} are gone"


@action()
async def tray_returned(stage: Stage, *, instance: Instance, swapped: bool = False) -> str:
    """It is put back: the same one, or `swapped` for another with new fabric GUIDs in the same slot."""
    machine = stage.rest.instance(instance).machine
    is_pulled = machine in stage.damage.pulled
    require(is_pulled, f"the tray of {instance} was not pulled: write a tray-pulled step before")
    return _put_back(stage, machine, swapped=swapped)


@action()
async def tray_moved(stage: Stage, *, instance: Instance, tray: Tray) -> str:
    """The tray of an instance is put where another one of its rack was, and that one where it was."""
    machine = stage.rest.instance(instance).machine
    switch, _ = stage.truth.locate(machine)
    neighbour = stage.truth.machine(tray)
    require(neighbour != machine, f"{instance} is in {tray} already: name another tray")
    require(
        stage.truth.locate(neighbour)[0] is switch,
        f"{tray} is not in the rack of {instance}: name another tray",
    )
    _exchange(stage, machine, neighbour)
    stage.damage.exchanged.append((machine, neighbour))
    return f"the trays of machines {machine} and {neighbour} are in one another's places"


@action()
async def gpu_health(
    stage: Stage,
    *,
    instance: Instance,
    gpu: InstanceGpu,
    health: Literal["healthy", "degraded", "no-nvlink", "degraded-bandwidth"],
) -> str:
    """A GPU gets worse or better."""
    machine = stage.rest.instance(instance).machine
    switch, gpus = stage.truth.locate(machine)
    found, wanted = gpus[_index_of(gpu)], GpuHealth[health.replace("-", "_").upper()]
    name = f"{stage.truth.tray_of(machine)}/{gpu} (0x{found.guid:016x})"
    require(found.health is not wanted, f"{name} is {health} already")
    faults.set_health(switch, found.guid, wanted)
    return f"{name} is {health}"


@action()
async def partition_by_hand(
    stage: Stage, *, name: NewForeignPartition, instance: Instance, gpus: InstanceGpus
) -> str:
    """Somebody makes a partition on the switch, of GPUs wherever they are."""
    switch, present = stage.truth.locate(stage.rest.instance(instance).machine)
    made = faults.put_partition(switch, [present[_index_of(gpu)].guid for gpu in gpus], name)
    stage.truth.invariants.foreign[name] = switch, made
    return f"partition {made.id} {name!r} holds {len(made.guids)} GPUs"


@action()
async def partition_gone(stage: Stage, *, instance: Instance) -> str:
    """Somebody deletes, on the switch, the partition that holds the first GPU of an instance."""
    switch, partition = _partition_of(stage, instance)
    faults.delete_partition(switch, partition)
    return f"partition {partition.id} {partition.name!r} of {len(partition.guids)} GPUs is deleted"


@action()
async def list_read_by_hand(stage: Stage, *, name: NewListRead, instance: Instance) -> str:
    """Somebody reads the members of the partition that holds the first GPU of an instance."""
    _, partition = stage.lists_read[name] = _partition_of(stage, instance)
    return f"{name} read the {len(partition.guids)} members of {partition.name!r}"


@action()
async def list_written_by_hand(stage: Stage, *, name: ListRead) -> str:
    """They write the whole list back as they read it, as NMX-M's PUT does: what came since is dropped."""
    switch, read = stage.lists_read.pop(name)
    now = switch.fabric.partitions.get(read.id, read)
    dropped = set(now.guids) - set(read.guids)
    require(dropped, f"{read.name!r} has no member that was not there when {name} read it")
    faults.replace_members(switch, read)
    return f"{name} wrote {len(read.guids)} members, and dropped {len(dropped)}"


@action()
async def hand_lets_go(stage: Stage, *, name: ForeignPartition) -> str:
    """A partition that was made by hand on the switch is deleted by hand."""
    return _delete_foreign(stage, name)


# Faults of the service and its machine.


@action()
async def service_killed(stage: Stage, *, down: Seconds = 1.0) -> str:
    """The site service ends (virtual: wherever it stands) and is started again on the same records."""
    await stage.site.kill(down)
    return f"the service ended, and was started again after {down:g} s"


@action(speeds=ONLY_VIRTUAL)
async def service_dies(stage: Stage, *, point: Ordinal) -> str:
    """The service is killed at one of its next writes to the records or calls to a switch (1: the next)."""
    stage.site.kill_at(point)
    return f"the service will end at its write or call number {point} from here"


@action(speeds=ONLY_VIRTUAL)
async def clock_set(stage: Stage, *, by: Number) -> str:
    """The clock of the service's machine is set forwards, or backwards."""
    stage.site.set_clock(by)
    return f"the machine's clock is {by:+g} s"


# Repair.


async def heal_site(stage: Stage) -> str:
    """Make everything answer truthfully and be healthy, put trays back, and undo other writers' work.

    Raises `NotObserved` if a fault is still to come: nothing was shown with it.
    """
    require_all_struck(stage)
    for rack in stage.truth.racks:
        switch = stage.truth.rack(rack)
        switch.faults.clear()
        domain, stopped = stage.truth.domains[stage.truth.number(rack)], stage.damage.stopped
        if switch.fabric.domain != domain and rack not in stopped:
            await switch.go_away()
            stopped.add(rack)
        faults.set_domain(switch, domain)
        if rack in stopped:
            await _start(stage, rack)
        faults.heal_fabric(switch)
    for machine in list(stage.damage.pulled):
        _put_back(stage, machine, swapped=False)
    while stage.damage.exchanged:
        _exchange(stage, *stage.damage.exchanged.pop())
    for name in list(stage.truth.invariants.foreign):
        _delete_foreign(stage, name)
    stage.site.mend()
    return "everything is repaired"


def require_all_struck(stage: Stage) -> None:
    """Raise `NotObserved` unless every fault that was to strike a coming call has struck one."""
    switches = zip(stage.truth.racks, stage.truth.switches, strict=True)
    calls = [f"{fault} of {rack}" for rack, switch in switches for fault in switch.faults.untaken()]
    untaken = ", ".join([*calls, *stage.site.untaken()])
    require(not untaken, f"still to come: {untaken}; the scenario shows nothing of it")


async def _start(stage: Stage, rack: str) -> None:
    await stage.truth.rack(rack).come_back()
    stage.damage.stopped.discard(rack)


def _put_back(stage: Stage, machine: str, *, swapped: bool) -> str:
    switch, gpus = stage.damage.pulled.pop(machine)
    faults.return_tray(switch, gpus, partial(next, stage.new_guids) if swapped else None)
    return f"{'other' if swapped else 'the same'} {len(gpus)} GPUs are in machine {machine}"


def _exchange(stage: Stage, machine: str, neighbour: str) -> None:
    switch, gpus = stage.truth.locate(machine)
    _, others = stage.truth.locate(neighbour)
    faults.exchange_trays(switch, gpus, others)


def _delete_foreign(stage: Stage, name: str) -> str:
    switch, made = stage.truth.invariants.foreign.pop(name)
    faults.delete_partition(switch, made)
    return f"partition {made.id} {made.name!r} is deleted"


def _index_of(gpu: str) -> int:
    return int(gpu.removeprefix("gpu-"))


def _partition_of(stage: Stage, instance: str) -> tuple[faults.SwitchControl, FabricPartition]:
    switch, gpus = stage.truth.locate(stage.rest.instance(instance).machine)
    number = switch.fabric.partition_of(gpus[0].guid)
    if number in (0, DEFAULT_PARTITION_ID):
        raise NotObserved(f"the first GPU of {instance} is in no partition that could be broken")
    return switch, switch.fabric.partitions[number]
