"""Checks of trays that are not where the records say: moved trays and swapped trays.

`check_moved_trays` follows GPUs by fabric GUID. A machine is a place in a rack, so the GPUs of an
instance that a controller now lists in another slot mean that the tray was moved. One finding names the
machine, the GPUs and where they are now. What is in the old slot now never belonged to the instance.

`check_swapped_trays` reports conflicts of the join: two layers that name different GPUs in one place. A
swap changes all GPUs of a tray at once, so there is one finding per tray. It suggests restarting the
node's plugins, which then read the GPUs again, or, where no node reports the tray, populating the
machine's record from the fabric.

Both judge only domains whose reading is fresh.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from shlex import quote

import msgspec

from rackloom.core.diagnosis import catalogue
from rackloom.core.diagnosis.findings import Finding, fails, first_few, unique
from rackloom.core.diagnosis.index import SnapshotIndex, at_gpu, at_machine, at_node
from rackloom.core.diagnosis.snapshot import FabricGpuRecord, GpuChain, MachineRecord, MovedGpu
from rackloom.topology.join_key import SlotKey

# Moved trays: GPUs of instances that are listed in another slot.


MOST_GPUS_NAMED = 4
"""GPUs whose two sides are told one by one: a tray has as many."""


class _MovedAway(msgspec.Struct, frozen=True):
    """A GPU of an instance, and where it is now."""

    module_id: int
    seen: FabricGpuRecord
    since: float | None


def check_moved_trays(view: SnapshotIndex) -> Iterator[Finding]:
    """One finding for each machine with an instance whose GPUs are listed elsewhere, and not there."""
    listed, left = _fabric_gpus_by_guid(view), _moved_by_machine(view)
    machines = {(one.chassis_serial, one.slot): one.id for one in view.picture.machines}
    for machine in view.picture.machines:
        if machine.instance is not None and view.is_fresh(machine.domain):
            lost = list(_moved_away(machine, left[machine.id], listed))
            if lost:
                yield _moved_tray(machine, lost, machines, view)


def _fabric_gpus_by_guid(view: SnapshotIndex) -> Mapping[int, list[FabricGpuRecord]]:
    """What controllers that can be read list, by GUID."""
    found: defaultdict[int, list[FabricGpuRecord]] = defaultdict(list)
    for gpu in view.picture.fabric_gpus:
        if view.is_fresh(gpu.domain):
            found[gpu.guid].append(gpu)
    return found


def _moved_by_machine(view: SnapshotIndex) -> Mapping[str, list[MovedGpu]]:
    found: defaultdict[str, list[MovedGpu]] = defaultdict(list)
    for one in view.picture.moved_gpus:
        found[one.machine].append(one)
    return found


def _moved_away(
    machine: MachineRecord, left: list[MovedGpu], listed: Mapping[int, list[FabricGpuRecord]]
) -> Iterator[_MovedAway]:
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
            yield _MovedAway(module_id, next(iter(places.values())), since)


def _moved_tray(
    machine: MachineRecord,
    lost: list[_MovedAway],
    machines: Mapping[tuple[str, int], str],
    view: SnapshotIndex,
) -> Finding:
    modules = ", ".join(str(one.module_id) for one in lost)
    now = unique(*(f"slot {one.seen.place.slot} of {one.seen.place.chassis_serial}" for one in lost))
    there = [machines.get((one.seen.place.chassis_serial, one.seen.place.slot)) for one in lost]
    concerned = unique(machine.id, *(one for one in there if one is not None))
    nodes = (view.node_of_machine[one] for one in concerned if one in view.node_of_machine)
    cordon = f"rackloom admin tray cordon {quote(machine.id)} --reason moved"
    return fails(
        catalogue.TRAY_PLACE,
        f"machine {machine.id}",
        f"GPU {modules} of instance {machine.instance}: now in {first_few(now)}, so its tray was moved",
        f"{cordon}  # then put the tray back, or have the instance released",
        evidence=tuple(line for one in lost[:MOST_GPUS_NAMED] for line in _both_places(machine, one)),
        where=(
            *map(at_machine, concerned),
            *map(at_node, nodes),
            *(at_gpu(one.seen.domain, one.seen.guid) for one in lost),
        ),
        since=min((one.since for one in lost if one.since is not None), default=None),
    )


def _both_places(machine: MachineRecord, moved_away: _MovedAway) -> Iterator[str]:
    place = f"slot {machine.slot} of {machine.chassis_serial}"
    yield f"records: instance {machine.instance} had 0x{moved_away.seen.guid:016x} as GPU {moved_away.module_id} in {place}"
    seen = moved_away.seen.place
    yield (
        f"switch controller of domain {moved_away.seen.domain}: 0x{moved_away.seen.guid:016x} is GPU {seen.module_id}"
        f" in slot {seen.slot} of {seen.chassis_serial}"
    )


# Swapped trays: layers that name different GPUs in one slot.


TrayKey = tuple[str, int]
"""Chassis serial and slot."""


def check_swapped_trays(view: SnapshotIndex) -> Iterator[Finding]:
    """One finding per tray; a swap changes all of its GPUs at once."""
    trays: defaultdict[TrayKey, list[GpuChain]] = defaultdict(list)
    for chain in view.chains:
        if chain.conflicts and chain.key.place is not None and _is_fresh(chain, view):
            place = chain.key.place.value
            trays[place.chassis_serial, place.slot].append(chain)
    nodes = _nodes_by_tray(view)
    for (serial, slot), gpus in sorted(trays.items()):
        yield _swapped_tray(serial, slot, gpus, sorted(nodes[serial, slot]))


def _is_fresh(chain: GpuChain, view: SnapshotIndex) -> bool:
    """What the records say of a GPU is from the newest reading of its domain, and as old."""
    told = [one.domain for one in (chain.fabric, chain.machine) if one is not None]
    return all(view.is_fresh(domain) for domain in told)


def _nodes_by_tray(view: SnapshotIndex) -> defaultdict[TrayKey, set[str]]:
    """The nodes that say of their GPUs that they sit in a tray."""
    found: defaultdict[TrayKey, set[str]] = defaultdict(set)
    for device in view.picture.devices:
        if device.kind == "gpu" and device.key.place is not None:
            place = device.key.place.value
            found[place.chassis_serial, place.slot].add(device.node)
    return found


def _swapped_tray(serial: str, slot: int, gpus: list[GpuChain], nodes: list[str]) -> Finding:
    machines = sorted({chain.machine.id for chain in gpus if chain.machine is not None})
    modules = ", ".join(str(chain.key.place.value.module_id) for chain in gpus if chain.key.place is not None)
    return fails(
        catalogue.IDENTITY,
        f"GPU {modules} in slot {slot} of {serial}",
        "layers name different GPUs in one place: the tray was swapped, and not all have heard of it",
        _swap_fix(machines, nodes),
        evidence=tuple(line for chain in gpus for line in chain.conflicts),
        where=(*map(at_machine, machines), *map(at_node, nodes)),
    )


def _swap_fix(machines: list[str], nodes: list[str]) -> str:
    if nodes:
        plugins = "-l 'app.kubernetes.io/component in (node-gpu, node-imex)'"
        ours = f"kubectl -n rackloom-system delete pod {plugins} --field-selector spec.nodeName={nodes[0]}"
        return f"{ours}  # its plugins then read the GPUs anew"
    machine = machines[0] if machines else "MACHINE"
    return f"rackloom admin machine nvlink-info populate {quote(machine)} --update-db"
