"""The work of `rackloom claim`: inputs from files and profiles, answers as tables."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from rackloom.claim.allocate.allocator import Mode
from rackloom.claim.allocate.cost import Standing
from rackloom.claim.allocate.explain import Explanation, explain
from rackloom.claim.allocate.objects import DeviceAttribute, DeviceResult, Node, ObjectMeta, ResourceSlice
from rackloom.claim.allocate.pods import Placed, Unplaced, allocate_each
from rackloom.claim.allocate.slices import device_classes, slices_of
from rackloom.claim.allocate.tell import told
from rackloom.claim.allocate.use import in_use_by
from rackloom.claim.manifests.read import Manifests, read
from rackloom.cli.claim_template import machine_of
from rackloom.cli.output import columns
from rackloom.errors import Refused

DeviceKey = tuple[str, str, str]
_BOUND_S = 10.0
"""As long as kube-scheduler searches on one node (filterTimeout)."""
_TELLING = ("rdmaDevice", "ifName", "pciBusID", "numaNode")
"""Attributes by which people know a device."""


def answers(found: Manifests, mode: Mode) -> tuple[Placed | Unplaced, ...]:
    """Each claim on the first node that can serve it."""
    return allocate_each(
        found.nodes, found.classes, found.slices, found.claims, mode=mode, proceed=_bounded()
    )


def accounts(found: Manifests) -> list[Explanation]:
    """The accounts of each claim without an allocation, on every node."""
    state = in_use_by(found.claims)
    return [
        explain(node, found.classes, found.slices, [claim], state=state, proceed=_bounded())
        for claim in found.claims
        if claim.status.allocation is None
        for node in found.nodes
    ]


def exit_code(found: Sequence[Placed | Unplaced | Explanation]) -> int:
    """1 where a claim was refused, or cannot be met on some node that was asked."""
    refused = [
        bool(one.fault or one.conflict) if isinstance(one, Explanation) else isinstance(one, Unplaced)
        for one in found
    ]
    return int(any(refused))


def told_all(found: Sequence[Explanation]) -> str:
    """The accounts in words."""
    return "\n\n".join(map(told, found))


def _bounded() -> Callable[[], bool]:
    """Lets searches go on for a while from now."""
    until = monotonic() + _BOUND_S
    return lambda: monotonic() < until


def manifests(files: Sequence[Path], profile: str | None, nodes: int) -> Manifests:
    """What the files hold, and the slices and classes of `nodes` machines of the profile."""
    found = read(files)
    if not found.claims:
        raise Refused("there is no claim in the files", nearest_fix="add a ResourceClaimTemplate")
    planned = _planned(profile, nodes) if profile is not None else ()
    slices = (*found.slices, *planned)
    if not slices:
        raise Refused("there is no device to allocate", nearest_fix="name a --profile or a file of --slices")
    named = {one.metadata.name for one in found.classes}
    built_in = [one for one in device_classes() if one.metadata.name not in named]
    return Manifests(
        claims=found.claims,
        classes=(*found.classes, *built_in),
        slices=slices,
        nodes=found.nodes or _nodes(slices),
        skipped=found.skipped,
    )


def _planned(profile: str, nodes: int) -> tuple[ResourceSlice, ...]:
    machine = machine_of(profile)
    return tuple(one for number in range(nodes) for one in slices_of(machine, f"node-{number}"))


def _nodes(slices: Sequence[ResourceSlice]) -> tuple[Node, ...]:
    """The nodes that the slices name: enough unless slices select nodes by label."""
    names = dict.fromkeys(name for one in slices for name in _node_names(one))
    labels = "kubernetes.io/hostname"
    return tuple(Node(metadata=ObjectMeta(name=name, labels={labels: name})) for name in names)


def _node_names(one: ResourceSlice) -> list[str]:
    names = [one.spec.node_name, *(device.node_name for device in one.spec.devices)]
    return [name for name in names if name]


def page(found: Sequence[Placed | Unplaced], slices: Sequence[ResourceSlice]) -> str:
    """What was placed as a table, then what was refused with the reasons."""
    placed = [answer for answer in found if isinstance(answer, Placed)]
    refused = [answer for answer in found if isinstance(answer, Unplaced)]
    parts = [_table(placed, slices)] if placed else []
    parts += [f"{one.claim}: {_standing(one.standing)}" for one in placed if one.standing is not None]
    return "\n\n".join([*parts, *(_refusal(answer) for answer in refused)])


def _table(placed: Sequence[Placed], slices: Sequence[ResourceSlice]) -> str:
    known = {
        (one.spec.driver, one.spec.pool.name, device.name): device.attributes
        for one in slices
        for device in one.spec.devices
    }
    rows = [
        (answer.claim, answer.node, result.request, result.driver, result.device, _known_as(result, known))
        for answer in placed
        for result in answer.allocation.devices.results
    ]
    return columns(("CLAIM", "NODE", "REQUEST", "DRIVER", "DEVICE", "KNOWN AS"), rows)


def _standing(standing: Standing) -> str:
    """`broken 1, apart 2 (proved best)`; what costs nothing is not named."""
    fields = msgspec.structs.asdict(standing.cost).items()
    costs = ", ".join(f"{name} {value}" for name, value in fields if value) or "no cost"
    return f"{costs} ({'proved best' if standing.proved else 'the best so far: the search was cut short'})"


def _known_as(result: DeviceResult, known: Mapping[DeviceKey, Mapping[str, DeviceAttribute]]) -> str:
    attributes = known.get((result.driver, result.pool, result.device), {})
    short = {name.rpartition("/")[2]: value for name, value in attributes.items()}
    return " ".join(f"{name}={_value(short[name])}" for name in _TELLING if name in short)


def _value(attribute: DeviceAttribute) -> object:
    values = (attribute.string, attribute.int_, attribute.version, attribute.bool_)
    return next((value for value in values if value is not None), "?")


def _refusal(answer: Unplaced) -> str:
    """Nodes of which the same is true are told once."""
    told_of: dict[str, list[Explanation]] = {}
    for account in answer.nodes:
        told_of.setdefault(told(account).partition("\n")[2], []).append(account)
    lines = [f"{answer.claim} is refused: {answer.reason}"]
    for text, accounts in told_of.items():
        lines += [f"on {', '.join(account.node for account in accounts)}:", text]
    fix = answer.nearest_fix or "none: no single change to the claim or to what is in use helps"
    return "\n".join([*lines, f"nearest fix: {fix}"])
