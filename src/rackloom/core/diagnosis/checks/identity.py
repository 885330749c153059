"""Checks of trays that are not in their recorded place: moved trays and swapped trays.

`check_moved_trays` follows GPUs by fabric GUID. A machine is a place in a rack, so the GPUs of an instance
that a controller now lists in another slot mean that the tray was moved. One finding names the machine, the
GPUs and their present place. The tray that is now in the old slot never belonged to the instance.

`check_swapped_trays` reports conflicts of the join: two layers that name different GPUs in one place. A swap
changes all GPUs of a tray at once, so there is one finding per tray. It suggests restarting the node's
plugins, which then read the GPUs again. If no node reports the tray, it suggests populating the machine's
record from the fabric.

Both judge only domains with a fresh reading.
"""

from collections.abc import Iterator, Mapping
from shlex import quote

import msgspec

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding, fails, first_few, unique
from rackloom.core.diagnosis.index import SnapshotIndex, at_gpu, at_machine, at_node, slot_part, tray_part
from rackloom.core.diagnosis.snapshot import FabricGpuRecord, GpuChain, MachineRecord, grouped
from rackloom.topology.join_key import SlotKey
from rackloom.topology.part_names import PartName, place_numbers

# Moved trays: GPUs of instances that are listed in another slot.


TrayKey = tuple[str, int]
"""Chassis serial and slot."""
MOST_GPUS_NAMED = 4
"""GPUs with evidence from both sides: a tray has as many."""


class _MovedAway(msgspec.Struct, frozen=True):
    """A GPU of an instance, and the record of its new slot."""

    module_id: int
    now: FabricGpuRecord
    since: float | None


def check_moved_trays(index: SnapshotIndex) -> Iterator[Finding]:
    """One finding for each machine with an instance, if its GPUs are listed elsewhere and not there."""
    fresh = [gpu for gpu in index.snapshot.fabric_gpus if index.is_fresh(gpu.domain)]
    left = grouped((gpu.machine, gpu) for gpu in index.snapshot.moved_gpus)
    # Nearly all GPUs are listed in their slot: the lookups below are for the machines of the others.
    places = {gpu.guid: gpu.place for gpu in fresh}
    suspects = [
        machine
        for machine in index.snapshot.machines
        if machine.instance is not None
        and index.is_fresh(machine.domain)
        and (machine.id in left or not _is_in_place(machine, places))
    ]
    listed = grouped((gpu.guid, gpu) for gpu in (fresh if suspects else ()))
    machines = {(machine.chassis_serial, machine.slot): machine.id for machine in index.snapshot.machines}
    for machine in suspects:
        # The GPUs that the machine is recorded with, or was until they appeared in another machine's slot.
        recorded = {
            key.fabric_guid.value: (key.place.value.module_id, machine.missing_since)
            for key in machine.gpus
            if key.fabric_guid is not None and key.place is not None
        }
        recorded |= {gpu.guid: (gpu.module_id, gpu.since) for gpu in left[machine.id]}
        moved: list[_MovedAway] = []
        for guid, (module_id, since) in sorted(recorded.items(), key=lambda entry: entry[1][0]):
            slots = {gpu.place: gpu for gpu in listed.get(guid, ())}
            # A GPU that is listed here as well is listed twice, which is no move.
            if slots and SlotKey(machine.chassis_serial, machine.slot, module_id) not in slots:
                moved.append(_MovedAway(module_id, next(iter(slots.values())), since))
        if moved:
            yield _moved_tray(machine, moved, machines, index)


def _is_in_place(machine: MachineRecord, places: Mapping[int, SlotKey]) -> bool:
    """Whether each recorded GPU is listed in its slot of the machine."""
    return all(
        places.get(key.fabric_guid.value)
        == SlotKey(machine.chassis_serial, machine.slot, key.place.value.module_id)
        for key in machine.gpus
        if key.fabric_guid is not None and key.place is not None
    )


def _moved_tray(
    machine: MachineRecord,
    moved: list[_MovedAway],
    machines: Mapping[TrayKey, str],
    index: SnapshotIndex,
) -> Finding:
    slots = [gpu.now.place for gpu in moved]
    left = first_few([str(_recorded_part(machine, gpu)) for gpu in moved], 1)
    now = unique(*(str(slot_part(slot, index.racks).tray) for slot in slots))
    found = (machines.get((slot.chassis_serial, slot.slot)) for slot in slots)
    concerned = unique(machine.id, *(id_ for id_ in found if id_ is not None))
    nodes = (index.node_of_machine[id_] for id_ in concerned if id_ in index.node_of_machine)
    # Both sides of each GPU: its place in the records, and the place that its controller lists now.
    evidence: list[str] = []
    for gpu in moved[:MOST_GPUS_NAMED]:
        place, guid = gpu.now.place, f"0x{gpu.now.guid:016x}"
        part = f"{slot_part(place, index.racks)} ({place_numbers(place)})"
        evidence += (
            f"records: instance {machine.instance} had {guid} as {_recorded_part(machine, gpu)}",
            f"switch controller of domain {gpu.now.domain}: {guid} is {part}",
        )
    cordon = f"rackloom admin tray cordon {quote(machine.id)} --reason moved"
    return fails(
        Check.TRAY_PLACE,
        f"machine {machine.id}",
        f"{left} of instance {machine.instance}: now in {first_few(now)}, so its tray was moved",
        f"{cordon}  # then put the tray back, or have the instance released",
        evidence=tuple(evidence),
        where=(
            *map(at_machine, concerned),
            *map(at_node, nodes),
            *(at_gpu(gpu.now.domain, gpu.now.guid) for gpu in moved),
        ),
        since=min((gpu.since for gpu in moved if gpu.since is not None), default=None),
    )


def _recorded_part(machine: MachineRecord, moved: _MovedAway) -> PartName:
    return msgspec.structs.replace(tray_part(machine), gpu=moved.module_id - 1)


# Swapped trays: layers that name different GPUs in one slot.


def check_swapped_trays(index: SnapshotIndex) -> Iterator[Finding]:
    """One finding per tray: a swap changes all of its GPUs at once."""
    trays: dict[TrayKey, list[GpuChain]] = {}
    for chain in index.chains:
        if not chain.conflicts or chain.key.place is None:
            continue
        # The readings of all domains that list the GPU have to be fresh: records are as old as these.
        sources = [record for record in (chain.fabric, chain.machine) if record is not None]
        if all(index.is_fresh(record.domain) for record in sources):
            trays.setdefault(_tray_of(chain.key.place.value), []).append(chain)
    nodes = grouped(
        (_tray_of(device.key.place.value), device.node)
        for device in index.snapshot.devices
        if device.kind == "gpu" and device.key.place is not None
    )
    for tray, gpus in sorted(trays.items()):
        yield _swapped_tray(gpus, sorted(set(nodes[tray])), index)


def _tray_of(place: SlotKey) -> TrayKey:
    return place.chassis_serial, place.slot


def _swapped_tray(gpus: list[GpuChain], nodes: list[str], index: SnapshotIndex) -> Finding:
    machines = sorted({chain.machine.id for chain in gpus if chain.machine is not None})
    # A node's plugins report the GPUs that they read at their start. If no node reports the tray, the site's
    # record is the old side.
    if nodes:
        plugins = "-l 'app.kubernetes.io/component in (node-gpu, node-imex)'"
        ours = f"kubectl -n rackloom-system delete pod {plugins} --field-selector spec.nodeName={nodes[0]}"
        fix = f"{ours}  # its plugins then read the GPUs anew"
    else:
        machine = machines[0] if machines else "MACHINE"
        fix = f"rackloom admin machine nvlink-info populate {quote(machine)} --update-db"
    return fails(
        Check.IDENTITY,
        ", ".join(str(index.gpu_part(chain)) for chain in gpus),
        "layers name different GPUs in one place: the tray was swapped, and not all have heard of it",
        fix,
        evidence=tuple(line for chain in gpus for line in chain.conflicts),
        where=(
            *map(at_machine, machines),
            *map(at_node, nodes),
            *(at_gpu(chain.fabric.domain, chain.fabric.guid) for chain in gpus if chain.fabric is not None),
        ),
    )
