"""What switch controllers say of GPUs, partitions and trays, before anybody's wishes."""

from collections import defaultdict
from collections.abc import Iterator
from shlex import quote

import msgspec

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.gpus import check_gpus
from rackloom.prove.doctor.checks.view import View, at_domain, at_machine, at_node, at_partition
from rackloom.prove.doctor.findings import Finding, Severity, fails, unknown
from rackloom.prove.picture.values import Layer, LayerSeen, MachineSeen

_SHOW = "rackloom admin domain show"


def check_layers(view: View) -> Iterator[Finding]:
    """Layers that should have been read, and could not; those that one cause keeps from us, together."""
    domains = tuple(at_domain(one.uuid) for one in view.picture.domains)
    lost: defaultdict[str, list[LayerSeen]] = defaultdict(list)
    for one in view.picture.layers:
        if one.unknown_since is not None:
            lost[one.problem].append(one)
    held = sum(one.instance is not None for one in view.picture.machines)
    for problem, layers in lost.items():
        fabric = any(one.layer is Layer.FABRIC for one in layers)
        found = unknown(
            names.LAYER,
            f"layer {' and '.join(one.layer for one in layers)}",
            problem,
            layers[0].fix,
            where=domains if fabric else (),
            since=layers[0].unknown_since,
        )
        yield msgspec.structs.replace(found, instances=held if fabric else 0)


def check_fabric(view: View) -> Iterator[Finding]:
    """All findings about GPUs, partitions and trays as their switch controllers show them."""
    yield from check_gpus(view)
    yield from _partitions(view)
    for machine in view.picture.machines:
        yield from _machine(machine, view)


def _partitions(view: View) -> Iterator[Finding]:
    for one in view.picture.partitions:
        if one.healthy is False and view.is_fresh(one.domain):
            yield fails(
                names.PARTITION_HEALTH,
                f"partition {one.name}",
                f"the switch controller says {one.problem or 'it is not healthy'}",
                f"{_SHOW} {quote(one.domain)}",
                evidence=(f"switch controller: partition {one.id} of domain {one.domain} is {one.problem}",),
                where=(at_partition(one.domain, one.name),),
            )


def _machine(machine: MachineSeen, view: View) -> Iterator[Finding]:
    subject, where = f"machine {machine.id}", _of_machine(machine, view)
    if not machine.domain:
        fix = (
            f"rackloom admin endpoint create --chassis-serial {quote(machine.chassis_serial)} "
            "--endpoint https://SWITCH-CONTROLLER:9370"
        )
        said = "no switch controller has reported this tray yet"
        yield unknown(names.MACHINE_PRESENT, subject, said, fix, where=where)
    elif machine.missing_since is not None and view.is_fresh(machine.domain):
        cordon = f"rackloom admin tray cordon {quote(machine.id)} --reason missing"
        yield fails(
            names.MACHINE_PRESENT,
            subject,
            "its switch controller lists none of its GPUs",
            f"{cordon}  # then see to its power and seating",
            severity=Severity.ERROR if machine.instance else Severity.WARNING,
            evidence=(
                f"records: slot {machine.slot} of {machine.chassis_serial}",
                *_node_says(machine, view),
            ),
            where=where,
            since=machine.missing_since,
        )
    elif any(key.fabric_guid is None for key in machine.gpus) and view.is_fresh(machine.domain):
        yield _unmapped(machine, where)


def _of_machine(machine: MachineSeen, view: View) -> tuple[str, ...]:
    node = view.node_of_machine.get(machine.id)
    return (at_machine(machine.id), *([] if node is None else [at_node(node)]))


def _node_says(machine: MachineSeen, view: View) -> Iterator[str]:
    node = view.nodes.get(view.node_of_machine.get(machine.id, ""))
    if node is not None:
        yield f"node {node.name}: {'ready' if node.ready else 'not ready'}"


def _unmapped(machine: MachineSeen, where: tuple[str, ...]) -> Finding:
    modules = [str(index + 1) for index, key in enumerate(machine.gpus) if key.fabric_guid is None]
    return fails(
        names.MAPPING,
        f"machine {machine.id}",
        f"no fabric GUID is recorded of GPU {', '.join(modules)}: they can join no partition",
        f"rackloom admin machine nvlink-info populate {quote(machine.id)} --update-db",
        evidence=(f"records: GPUs {', '.join(modules)} have no GUID",),
        where=where,
    )
