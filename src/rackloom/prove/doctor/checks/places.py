"""GPUs of instances that are listed in other places than the instances were given them in: moved trays.

A machine is a place. Whoever works on the tray that was moved works on another machine now, with the GPUs and
the partition of that one, and what stands in the old place never was theirs.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from shlex import quote

import msgspec

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, at_gpu, at_machine, at_node
from rackloom.prove.doctor.findings import Finding, fails
from rackloom.prove.doctor.words import some, unique
from rackloom.prove.picture.values import FabricGpu, MachineSeen, MovedGpu
from rackloom.topology.identity import SlotKey

TOLD = 4
"""GPUs whose two sides are told one by one: a tray has as many."""


class _Lost(msgspec.Struct, frozen=True):
    """A GPU of an instance, and where it is now."""

    module_id: int
    seen: FabricGpu
    since: float | None


def check_places(view: View) -> Iterator[Finding]:
    """One finding for each machine with an instance whose GPUs are listed elsewhere, and not there."""
    listed, left = _listed(view), _left(view)
    machines = {(one.chassis_serial, one.slot): one.id for one in view.picture.machines}
    for machine in view.picture.machines:
        if machine.instance is not None and view.is_fresh(machine.domain):
            lost = list(_lost(machine, left[machine.id], listed))
            if lost:
                yield _moved(machine, lost, machines, view)


def _listed(view: View) -> Mapping[int, list[FabricGpu]]:
    """What controllers that can be read list, by GUID."""
    found: defaultdict[int, list[FabricGpu]] = defaultdict(list)
    for gpu in view.picture.fabric_gpus:
        if view.is_fresh(gpu.domain):
            found[gpu.guid].append(gpu)
    return found


def _left(view: View) -> Mapping[str, list[MovedGpu]]:
    found: defaultdict[str, list[MovedGpu]] = defaultdict(list)
    for one in view.picture.moved_gpus:
        found[one.machine].append(one)
    return found


def _lost(
    machine: MachineSeen, left: list[MovedGpu], listed: Mapping[int, list[FabricGpu]]
) -> Iterator[_Lost]:
    """What the machine is recorded with, or was until a controller listed it where another machine is."""
    had = {
        key.fabric_guid.value: (key.place.value.module_id, machine.missing_since)
        for key in machine.gpus
        if key.fabric_guid is not None and key.place is not None
    }
    had |= {one.guid: (one.module_id, one.since) for one in left}
    for guid, (module_id, since) in sorted(had.items(), key=lambda one: one[1][0]):
        places = {gpu.place: gpu for gpu in listed.get(guid, ())}
        if places and SlotKey(machine.chassis_serial, machine.slot, module_id) not in places:
            yield _Lost(module_id, next(iter(places.values())), since)


def _moved(
    machine: MachineSeen, lost: list[_Lost], machines: Mapping[tuple[str, int], str], view: View
) -> Finding:
    modules = ", ".join(str(one.module_id) for one in lost)
    now = unique(*(f"slot {one.seen.place.slot} of {one.seen.place.chassis_serial}" for one in lost))
    there = [machines.get((one.seen.place.chassis_serial, one.seen.place.slot)) for one in lost]
    concerned = unique(machine.id, *(one for one in there if one is not None))
    nodes = (view.node_of_machine[one] for one in concerned if one in view.node_of_machine)
    cordon = f"rackloom admin tray cordon {quote(machine.id)} --reason moved"
    return fails(
        names.TRAY_PLACE,
        f"machine {machine.id}",
        f"GPU {modules} of instance {machine.instance}: now in {some(now)}, so its tray was moved",
        f"{cordon}  # then put the tray back, or have the instance released",
        evidence=tuple(line for one in lost[:TOLD] for line in _sides(machine, one)),
        where=(
            *map(at_machine, concerned),
            *map(at_node, nodes),
            *(at_gpu(one.seen.domain, one.seen.guid) for one in lost),
        ),
        since=min((one.since for one in lost if one.since is not None), default=None),
    )


def _sides(machine: MachineSeen, one: _Lost) -> Iterator[str]:
    place = f"slot {machine.slot} of {machine.chassis_serial}"
    yield f"records: instance {machine.instance} had 0x{one.seen.guid:016x} as GPU {one.module_id} in {place}"
    seen = one.seen.place
    yield (
        f"switch controller of domain {one.seen.domain}: 0x{one.seen.guid:016x} is GPU {seen.module_id}"
        f" in slot {seen.slot} of {seen.chassis_serial}"
    )
