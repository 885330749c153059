"""The work of `rackloom claim allocate` and `explain`: inputs from files, answers as tables.

Claims, classes, slices and nodes come from the files. A profile adds the slices and classes that its drivers
would publish, and a cluster adds its own. Without Node objects, the nodes are those that the slices name. A
search ends after 10 s, kube-scheduler's limit for one node. The exit code is 1 if a claim was refused or
cannot be met on some node.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from rackloom.claim.manifests.read import Manifests, read_manifests
from rackloom.cli.claim_options import HardwareParameters
from rackloom.cli.common import columns, with_progress
from rackloom.cli.hardware import profile_slices, with_built_in_classes
from rackloom.core.allocate.allocator import SearchMode
from rackloom.core.allocate.explanation import Explanation, render_explanation
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import in_use_by
from rackloom.core.allocate.objects import DeviceAttribute, DeviceResult, Node, ObjectMeta, ResourceSlice
from rackloom.core.allocate.outcome import Cost, Optimality
from rackloom.core.allocate.planning import PlacedClaim, RefusedClaim, allocate_each
from rackloom.errors import Misuse, Refused

DeviceKey = tuple[str, str, str]
_SEARCH_SECONDS = 10.0
"""kube-scheduler's limit for one node (filterTimeout)."""
_IDENTIFYING_ATTRIBUTES = ("rdmaDevice", "ifName", "pciBusID", "numaNode")
"""Attributes by which people identify a device."""


def allocate_all(found: Manifests, mode: SearchMode) -> tuple[PlacedClaim | RefusedClaim, ...]:
    """Allocate each claim on the first node that can serve it."""
    return allocate_each(
        found.nodes,
        found.classes,
        found.slices,
        found.claims,
        mode=mode,
        proceed=_deadline(),
        each=with_progress,
    )


def explain_all(found: Manifests) -> list[Explanation]:
    """Explain each claim without an allocation on every node."""
    fleet = Fleet(found.nodes, found.classes, found.slices)
    fleet.occupy([claim.status.allocation for claim in found.claims if claim.status.allocation is not None])
    holders = in_use_by(found.claims).holders
    accounts = [
        (node.metadata.name, claim)
        for claim in found.claims
        if claim.status.allocation is None
        for node in found.nodes
    ]
    return [
        fleet.explain_on(node, [claim], holders=holders, proceed=_deadline())
        for node, claim in with_progress(accounts, "nodes explained")
    ]


def exit_code(found: Sequence[PlacedClaim | RefusedClaim | Explanation]) -> int:
    """1 if a claim was refused or cannot be met on some node, else 0."""
    refused = [
        bool(claim.fault or claim.conflict)
        if isinstance(claim, Explanation)
        else isinstance(claim, RefusedClaim)
        for claim in found
    ]
    return int(any(refused))


def _deadline() -> Callable[[], bool]:
    """A function that returns True until the search time, counted from now, is over."""
    until = monotonic() + _SEARCH_SECONDS
    return lambda: monotonic() < until


def read_inputs(files: Sequence[Path], hardware: HardwareParameters, nodes: int) -> Manifests:
    """The claims of the files, and the hardware of the files, the cluster and `nodes` machines.

    Claims of the cluster count only if they hold devices. Its pending claims are left to its scheduler.
    """
    if hardware.is_live and hardware.profile is not None:
        raise Misuse(
            f"claims are planned on the machines of a profile ({hardware.profile}) or on a cluster, not both",
            nearest_fix="leave --profile out, or --cluster, --kubeconfig and --context",
        )
    found = read_manifests([*files, *(hardware.slices or ())])
    if not found.claims:
        raise Refused("there is no claim in the files", nearest_fix="add a ResourceClaimTemplate")
    if hardware.is_live:
        from rackloom.claim.manifests.cluster import read_cluster

        found = _with_cluster(found, read_cluster(hardware.kubeconfig, hardware.context, with_claims=True))
    names = [f"node-{number}" for number in range(nodes)]
    planned = profile_slices(hardware.profile, names) if hardware.profile is not None else ()
    slices = (*found.slices, *planned)
    if not slices:
        fix = "name a --profile or a file of --slices, or ask with --cluster"
        raise Refused("there is no device to allocate", nearest_fix=fix)
    return msgspec.structs.replace(
        found,
        classes=with_built_in_classes(found.classes),
        slices=slices,
        nodes=found.nodes or _nodes_of_slices(slices),
    )


def _with_cluster(found: Manifests, cluster: Manifests) -> Manifests:
    """Add the cluster's objects. A class or claim of the files replaces the cluster's object of that name."""
    classes = {klass.metadata.name for klass in found.classes}
    claims = {(claim.metadata.namespace, claim.metadata.name) for claim in found.claims}
    holders = (
        claim
        for claim in cluster.claims
        if claim.status.allocation is not None
        and (claim.metadata.namespace, claim.metadata.name) not in claims
    )
    return msgspec.structs.replace(
        found,
        classes=(*found.classes, *(klass for klass in cluster.classes if klass.metadata.name not in classes)),
        slices=(*found.slices, *cluster.slices),
        claims=(*found.claims, *holders),
        nodes=found.nodes or cluster.nodes,
    )


def _nodes_of_slices(slices: Sequence[ResourceSlice]) -> tuple[Node, ...]:
    """The nodes that the slices name: enough unless slices select nodes by label."""
    names = dict.fromkeys(name for slice_ in slices for name in _node_names(slice_))
    labels = "kubernetes.io/hostname"
    return tuple(Node(metadata=ObjectMeta(name=name, labels={labels: name})) for name in names)


def _node_names(resource_slice: ResourceSlice) -> list[str]:
    names = [resource_slice.spec.node_name, *(device.node_name for device in resource_slice.spec.devices)]
    return [name for name in names if name]


def allocation_page(found: Sequence[PlacedClaim | RefusedClaim], slices: Sequence[ResourceSlice]) -> str:
    """A table of the placed claims, then the refused claims with the reasons."""
    placed = [answer for answer in found if isinstance(answer, PlacedClaim)]
    refused = [answer for answer in found if isinstance(answer, RefusedClaim)]
    parts = [_table(placed, slices)] if placed else []
    parts += [
        f"{claim.claim}: {_cost_text(claim.optimality)}" for claim in placed if claim.optimality is not None
    ]
    return "\n\n".join([*parts, *(_refusal(answer) for answer in refused)])


def _table(placed: Sequence[PlacedClaim], slices: Sequence[ResourceSlice]) -> str:
    known = {
        (slice_.spec.driver, slice_.spec.pool.name, device.name): device.attributes
        for slice_ in slices
        for device in slice_.spec.devices
    }
    rows = [
        (
            answer.claim,
            answer.node,
            result.request,
            result.driver,
            result.device,
            _device_names(result, known),
        )
        for answer in placed
        for result in answer.allocation.devices.results
    ]
    return columns(("CLAIM", "NODE", "REQUEST", "DRIVER", "DEVICE", "KNOWN AS"), rows)


def _cost_text(optimality: Optimality) -> str:
    """A cost as text: `broken 1, apart 2 (proved best)`."""
    if optimality.proved:
        how_good = "proved best"
    elif optimality.at_least is None:
        how_good = "the best so far: the search was cut short"
    else:
        least = _fields_text(optimality.at_least)
        how_good = f"the best so far: the search was cut short, and no other costs less than {least}"
    return f"{_fields_text(optimality.cost)} ({how_good})"


def _fields_text(cost: Cost) -> str:
    """The non-zero fields of a cost as text."""
    fields = msgspec.structs.asdict(cost).items()
    return ", ".join(f"{name} {value}" for name, value in fields if value) or "no cost"


def _device_names(result: DeviceResult, known: Mapping[DeviceKey, Mapping[str, DeviceAttribute]]) -> str:
    attributes = known.get((result.driver, result.pool, result.device), {})
    short = {name.rpartition("/")[2]: value for name, value in attributes.items()}
    return " ".join(f"{name}={_value(short[name])}" for name in _IDENTIFYING_ATTRIBUTES if name in short)


def _value(attribute: DeviceAttribute) -> object:
    values = (attribute.string, attribute.int_, attribute.version, attribute.bool_)
    return next((value for value in values if value is not None), "?")


def _refusal(answer: RefusedClaim) -> str:
    """A refusal as text. Nodes with the same explanation are listed together."""
    nodes_of: dict[str, list[Explanation]] = {}
    for account in answer.nodes:
        nodes_of.setdefault(render_explanation(account).partition("\n")[2], []).append(account)
    lines = [f"{answer.claim} is refused: {answer.reason}"]
    for text, accounts in nodes_of.items():
        lines += [f"on {', '.join(account.node for account in accounts)}:", text]
    fix = answer.nearest_fix or "none: no single change to the claim or to what is in use helps"
    return "\n".join([*lines, f"nearest fix: {fix}"])
