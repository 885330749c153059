"""Results of NVIDIA's acceptance suite for cloud partners, decided from one snapshot of a site.

Identifiers are those of the `ai-cloud-validation` test plan, for the tests about NVLink, IMEX and
ComputeDomains. A test fails by the findings of the checks that it rests on. It passes only where the
layer was read, nothing speaks against it, and there was something to observe; otherwise it is unknown. A
test that needs something to be created, stopped or measured is not decided by a snapshot and is reported
as not run. So is a test that passes on simulated layers: a simulation proves nothing about the machines
that a buyer gets.

The result also lists for each node whether it has NVLink and which NVLink domain it is in.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec

from rackloom.core.diagnosis import catalogue
from rackloom.core.diagnosis.examination import unfolded
from rackloom.core.diagnosis.findings import CheckState, Finding
from rackloom.core.diagnosis.index import SnapshotIndex, at_node
from rackloom.core.diagnosis.snapshot import Layer, SiteSnapshot


class AcceptanceOutcome(StrEnum):
    """Of one test."""

    PASS = "pass"  # noqa: S105 (a word, no password)
    FAIL = "fail"
    UNKNOWN = "unknown"
    """What it is about could not be read, or is not there."""
    NOT_RUN = "not run"
    """Looking does not decide it."""


class AcceptanceResult(msgspec.Struct, frozen=True):
    """One test."""

    id: str
    name: str
    outcome: AcceptanceOutcome
    evidence: tuple[str, ...]


class NodeNvlink(msgspec.Struct, frozen=True):
    """What a provider is asked per node."""

    node: str
    nvlink_supported: bool
    nvlink_domain_id: str | None


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """The whole export."""

    suite: str = "ncp"
    at: float
    """Seconds since the epoch."""
    simulated: bool
    """Some of it, or all: then it passes nothing."""
    results: tuple[AcceptanceResult, ...]
    nodes: tuple[NodeNvlink, ...]


_NODE_SERVES = (catalogue.MESH, catalogue.ACTIVE, catalogue.NODE_READY)
"""A daemon's last word is left in the cluster, also of a node that is without power since."""
AcceptanceTest = Callable[
    [SnapshotIndex, Mapping[str, list[Finding]]], tuple[AcceptanceOutcome, tuple[str, ...]]
]


def acceptance(picture: SiteSnapshot) -> Acceptance:
    """Every test of the suite that is about NVLink, IMEX or ComputeDomains, and each node's domain."""
    view = SnapshotIndex(picture)
    found: defaultdict[str, list[Finding]] = defaultdict(list)
    for one in unfolded(view):
        found[one.check].append(one)
    results = tuple(
        AcceptanceResult(id_, name, *_without_simulated_pass(view, judge(view, found)))
        for id_, name, judge in _TESTS
    )
    nodes = tuple(_node_nvlink(view))
    return Acceptance(at=picture.at, simulated=bool(picture.simulated), results=results, nodes=nodes)


def _without_simulated_pass(
    view: SnapshotIndex, result: tuple[AcceptanceOutcome, tuple[str, ...]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    """What holds in a simulation is said of nothing that a buyer gets."""
    outcome, evidence = result
    simulated = view.picture.simulated
    if outcome is not AcceptanceOutcome.PASS or not simulated:
        return result
    return AcceptanceOutcome.NOT_RUN, (f"simulated: {', '.join(simulated)}", *evidence)


def _node_nvlink(view: SnapshotIndex) -> Iterator[NodeNvlink]:
    for node in view.picture.nodes:
        domains = {chain.fabric.domain for chain in view.by_node.get(node.name, ()) if chain.fabric}
        domain = domains.pop() if len(domains) == 1 else None
        yield NodeNvlink(node.name, domain is not None or node.clique is not None, domain)


def _nvlink_partitioning(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    ours = [partition for partition in view.picture.partitions if partition.owner == "site"]
    checks = (catalogue.ISOLATION, catalogue.ONE_PARTITION, catalogue.PARTITION_THERE, catalogue.INTERFACE)
    told = f"{len(ours)} partitions hold what tenants asked for, and each GPU is in at most one"
    return _decide_by_checks(view, Layer.FABRIC, bool(ours), found, checks, told)


def _partition_listing(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    told = f"{len(view.picture.partitions)} partitions and {len(view.picture.logicals)} logical ones listed"
    return _decide_by_checks(
        view, Layer.FABRIC, bool(view.picture.partitions), found, (catalogue.PARTITION_THERE,), told
    )


def _shared_partition_id(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    """Two instances that ask for one logical partition in one domain are in one physical partition."""
    instances: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    ids: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for chain in view.chains:
        if chain.wanted is not None and chain.wanted.logical and chain.fabric and chain.partition:
            at = (chain.fabric.domain, chain.wanted.logical)
            instances[at].add(chain.wanted.instance)
            ids[at].add(chain.partition.id)
    pairs = [at for at, several in instances.items() if len(several) > 1]
    if not pairs:
        return AcceptanceOutcome.UNKNOWN, ("no two instances share a logical partition within a domain",)
    apart = [f"domain {at[0]}: partitions {sorted(ids[at])}" for at in pairs if len(ids[at]) > 1]
    if apart:
        return AcceptanceOutcome.FAIL, tuple(apart)
    told = f"{len(pairs)} logical partitions with several instances have one partition id each"
    return _decide_by_checks(view, Layer.FABRIC, True, found, (), told)


def _instances_ready(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    asked = [one for one in view.picture.instance_gpus if one.logical is not None]
    told = f"{len(asked)} GPUs of instances are in the partitions they were asked into"
    return _decide_by_checks(view, Layer.FABRIC, bool(asked), found, (catalogue.INTERFACE,), told)


def _imex_matrix(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    told = f"{len(view.picture.meshes)} IMEX daemons reach all their peers"
    about = _limited_to_nodes(found, {mesh.node for mesh in view.picture.meshes})
    return _decide_by_checks(view, Layer.CLUSTER, bool(view.picture.meshes), about, _NODE_SERVES, told)


def _limited_to_nodes(
    found: Mapping[str, list[Finding]], nodes: Collection[str]
) -> Mapping[str, list[Finding]]:
    """Of the findings about nodes themselves those about these; all others."""
    places = {at_node(node) for node in nodes}
    theirs = [one for one in found.get(catalogue.NODE_READY, ()) if not places.isdisjoint(one.where)]
    return {**found, catalogue.NODE_READY: theirs}


def _daemon_per_node(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    """On each node with a pod of a ComputeDomain runs a daemon of it."""
    meshed = {(mesh.domain, mesh.node) for mesh in view.picture.meshes}
    domains = {f"{claim.namespace}/{claim.name}": claim.domain for claim in view.picture.claims}
    needed = {
        (uid, pod.node)
        for pod in view.picture.pods
        for claim in pod.claims.values()
        if pod.node and (uid := domains.get(f"{pod.namespace}/{claim}"))
    }
    lacking = sorted(node for uid, node in needed if (uid, node) not in meshed)
    if lacking and meshed:
        return AcceptanceOutcome.FAIL, tuple(f"no daemon on node {node}" for node in lacking)
    told = f"a daemon on each of {len(needed)} nodes"
    about = _limited_to_nodes(found, {node for _, node in needed})
    return _decide_by_checks(view, Layer.CLUSTER, bool(needed), about, _NODE_SERVES, told)


def _bandwidth(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    if not view.picture.transfers:
        return AcceptanceOutcome.NOT_RUN, ("no transfer was recorded: rackloom transfer run --save FILE",)
    if any(transfer.emulated for transfer in view.picture.transfers):
        return AcceptanceOutcome.NOT_RUN, ("the newest transfers ran over emulated links",)
    told = f"{len(view.picture.transfers)} transfers kept what the topology promises"
    return _decide_by_checks(view, Layer.TRANSFER, True, found, (catalogue.TRANSFER,), told)


def _clean_after_workload(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    checks = (catalogue.PARTITION_OWNED, catalogue.SLICE_OF_NODE, catalogue.DEVICE_THERE)
    told = "no partition, slice or claim is left of something that is gone"
    by_cluster = _decide_by_checks(view, Layer.CLUSTER, bool(view.picture.nodes), found, checks, told)
    if by_cluster[0] is not AcceptanceOutcome.PASS:
        return by_cluster
    return _decide_by_checks(view, Layer.FABRIC, bool(view.picture.domains), found, checks, told)


def _same_nvlink(
    view: SnapshotIndex, found: Mapping[str, list[Finding]]
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    """The GPUs that DRA gave to the pods of one ComputeDomain are in one partition of the fabric."""
    held: defaultdict[str, set[tuple[str, int | None]]] = defaultdict(set)
    for chain in view.chains:
        if chain.compute_domain is not None and chain.fabric is not None:
            held[chain.compute_domain.key].add((chain.fabric.domain, chain.fabric.partition))
    apart = tuple(
        f"ComputeDomain {key}: {', '.join(sorted(map(_partition_text, places)))}"
        for key, places in sorted(held.items())
        if len(places) > 1 or any(partition is None for _, partition in places)
    )
    if apart:
        return AcceptanceOutcome.FAIL, apart
    told = f"the GPUs of each of {len(held)} ComputeDomains are in one partition"
    return _decide_by_checks(view, Layer.FABRIC, bool(held), found, (), told)


def _partition_text(at: tuple[str, int | None]) -> str:
    domain, partition = at
    return f"{'no partition' if partition is None else f'partition {partition}'} of domain {domain}"


def _decide_by_checks(
    view: SnapshotIndex,
    layer: Layer,
    there: bool,
    found: Mapping[str, list[Finding]],
    checks: Iterable[str],
    told: str,
) -> tuple[AcceptanceOutcome, tuple[str, ...]]:
    """Fail by the findings of `checks`; pass only where the layer was read and there was something to see."""
    against = [one for check in checks for one in found.get(check, ())]
    failed = tuple(f"{one.subject}: {one.message}" for one in against if one.state is CheckState.FAILS)
    if failed:
        return AcceptanceOutcome.FAIL, failed
    doubts = tuple(f"{one.subject}: {one.message}" for one in against)
    if layer is Layer.FABRIC:
        doubts += tuple(f"{one.subject}: {one.message}" for one in found.get(catalogue.CONTROLLER, ()))
    if doubts:
        return AcceptanceOutcome.UNKNOWN, doubts
    if not view.can_see(layer):
        return AcceptanceOutcome.UNKNOWN, (f"the {layer} was not read",)
    return (
        (AcceptanceOutcome.PASS, (told,))
        if there
        else (AcceptanceOutcome.UNKNOWN, ("there is nothing to judge it by",))
    )


def _not_run(how: str) -> AcceptanceTest:
    return lambda _view, _found: (AcceptanceOutcome.NOT_RUN, (how,))


_TESTS: tuple[tuple[str, str, AcceptanceTest], ...] = (
    ("CNP03-01", "NVLink partitioning", _nvlink_partitioning),
    (
        "SDN12",
        "create an NVLink partition",
        _not_run("it creates one: rackloom demo does, on the twin"),
    ),
    ("SDN13", "list and get NVLink partitions", _partition_listing),
    (
        "SDN14",
        "delete an empty partition",
        _not_run("it deletes one: rackloom demo does, on the twin"),
    ),
    ("SDN15", "an instance in a partition becomes ready", _instances_ready),
    ("SDN16", "two instances share one partition id", _shared_partition_id),
    ("SDN17", "IMEX package", _not_run("the package is on the nodes")),
    ("SDN18", "IMEX start", _not_run("it starts the service on a node")),
    ("SDN19", "IMEX stop", _not_run("it stops the service on a node")),
    ("SDN20", "IMEX at boot", _not_run("it restarts a node")),
    ("SDN21", "IMEX domain is up with a full matrix", _imex_matrix),
    ("SDN22", "IMEX authentication", _not_run("it changes the mode of IMEX")),
    ("SDN23", "IMEX encryption", _not_run("it changes the mode of IMEX")),
    ("SDN24", "IMEX authentication and encryption", _not_run("it changes the mode of IMEX")),
    ("SDN25", "ComputeDomain pods on each allocated node", _daemon_per_node),
    ("SDN26", "bandwidth inside the domain", _bandwidth),
    ("SDN27", "clean after the workload", _clean_after_workload),
    ("K8S24", "DRA gives GPUs on the same NVLink", _same_nvlink),
)
