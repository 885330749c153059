"""Two layers that name different GPUs in one place: a tray was swapped, and one of them does not know."""

from collections import defaultdict
from collections.abc import Iterator
from shlex import quote

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, at_machine, at_node
from rackloom.prove.doctor.findings import Finding, fails
from rackloom.prove.picture.values import GpuChain

Tray = tuple[str, int]
"""Chassis serial and slot."""


def check_identity(view: View) -> Iterator[Finding]:
    """One finding per tray; a swap changes all of its GPUs at once."""
    trays: defaultdict[Tray, list[GpuChain]] = defaultdict(list)
    for chain in view.chains:
        if chain.conflicts and chain.key.place is not None and _is_fresh(chain, view):
            place = chain.key.place.value
            trays[place.chassis_serial, place.slot].append(chain)
    nodes = _nodes(view)
    for (serial, slot), gpus in sorted(trays.items()):
        yield _finding(serial, slot, gpus, sorted(nodes[serial, slot]))


def _is_fresh(chain: GpuChain, view: View) -> bool:
    """What the records say of a GPU is from the newest reading of its domain, and as old."""
    told = [one.domain for one in (chain.fabric, chain.machine) if one is not None]
    return all(view.is_fresh(domain) for domain in told)


def _nodes(view: View) -> defaultdict[Tray, set[str]]:
    """The nodes that say of their GPUs that they sit in a tray."""
    found: defaultdict[Tray, set[str]] = defaultdict(set)
    for device in view.picture.devices:
        if device.kind == "gpu" and device.key.place is not None:
            place = device.key.place.value
            found[place.chassis_serial, place.slot].add(device.node)
    return found


def _finding(serial: str, slot: int, gpus: list[GpuChain], nodes: list[str]) -> Finding:
    machines = sorted({chain.machine.id for chain in gpus if chain.machine is not None})
    modules = ", ".join(str(chain.key.place.value.module_id) for chain in gpus if chain.key.place is not None)
    return fails(
        names.IDENTITY,
        f"GPU {modules} in slot {slot} of {serial}",
        "layers name different GPUs in one place: the tray was swapped, and not all have heard of it",
        _fix(machines, nodes),
        evidence=tuple(line for chain in gpus for line in chain.conflicts),
        where=(*map(at_machine, machines), *map(at_node, nodes)),
    )


def _fix(machines: list[str], nodes: list[str]) -> str:
    if nodes:
        plugins = "-l 'app.kubernetes.io/component in (node-gpu, node-imex)'"
        ours = f"kubectl -n rackloom-system delete pod {plugins} --field-selector spec.nodeName={nodes[0]}"
        return f"{ours}  # its plugins then read the GPUs anew"
    machine = machines[0] if machines else "MACHINE"
    return f"rackloom admin machine nvlink-info populate {quote(machine)} --update-db"
