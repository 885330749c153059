"""Results of the acceptance suite that buyers run, as far as one picture of the site can decide them.

Identifiers are those of NVIDIA's `ai-cloud-validation` test plan for cloud partners. A test that needs
something to be created, stopped or measured is not decided by looking, and says so.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec

from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, at_node
from rackloom.prove.doctor.examine import unfolded
from rackloom.prove.doctor.findings import Finding, State
from rackloom.prove.picture.values import Layer, Picture


class Outcome(StrEnum):
    """Of one test."""

    PASS = "pass"  # noqa: S105 (a word, no password)
    FAIL = "fail"
    UNKNOWN = "unknown"
    """What it is about could not be read, or is not there."""
    NOT_RUN = "not run"
    """Looking does not decide it."""


class Result(msgspec.Struct, frozen=True):
    """One test."""

    id: str
    name: str
    outcome: Outcome
    evidence: tuple[str, ...]


class NodeFabric(msgspec.Struct, frozen=True):
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
    results: tuple[Result, ...]
    nodes: tuple[NodeFabric, ...]


_SERVING = (names.MESH, names.ACTIVE, names.NODE_READY)
"""A daemon's last word is left in the cluster, also of a node that is without power since."""
Judge = Callable[[View, Mapping[str, list[Finding]]], tuple[Outcome, tuple[str, ...]]]


def acceptance(picture: Picture) -> Acceptance:
    """Every test of the suite that is about NVLink, IMEX or ComputeDomains, and each node's domain."""
    view = View(picture)
    found: defaultdict[str, list[Finding]] = defaultdict(list)
    for one in unfolded(view):
        found[one.check].append(one)
    results = tuple(Result(id_, name, *_judged(view, judge(view, found))) for id_, name, judge in _TESTS)
    nodes = tuple(_nodes(view))
    return Acceptance(at=picture.at, simulated=bool(picture.simulated), results=results, nodes=nodes)


def _judged(view: View, result: tuple[Outcome, tuple[str, ...]]) -> tuple[Outcome, tuple[str, ...]]:
    """What holds in a simulation is said of nothing that a buyer gets."""
    outcome, evidence = result
    simulated = view.picture.simulated
    if outcome is not Outcome.PASS or not simulated:
        return result
    return Outcome.NOT_RUN, (f"simulated: {', '.join(simulated)}", *evidence)


def _nodes(view: View) -> Iterator[NodeFabric]:
    for node in view.picture.nodes:
        domains = {chain.fabric.domain for chain in view.by_node.get(node.name, ()) if chain.fabric}
        domain = domains.pop() if len(domains) == 1 else None
        yield NodeFabric(node.name, domain is not None or node.clique is not None, domain)


def _partitioning(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
    ours = [one for one in view.picture.partitions if one.owner == "site"]
    checks = (names.ISOLATION, names.ONE_PARTITION, names.PARTITION_THERE, names.INTERFACE)
    told = f"{len(ours)} partitions hold what tenants asked for, and each GPU is in at most one"
    return _decided(view, Layer.FABRIC, bool(ours), found, checks, told)


def _listing(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
    told = f"{len(view.picture.partitions)} partitions and {len(view.picture.logicals)} logical ones listed"
    return _decided(view, Layer.FABRIC, bool(view.picture.partitions), found, (names.PARTITION_THERE,), told)


def _shared(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
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
        return Outcome.UNKNOWN, ("no two instances share a logical partition within a domain",)
    apart = [f"domain {at[0]}: partitions {sorted(ids[at])}" for at in pairs if len(ids[at]) > 1]
    if apart:
        return Outcome.FAIL, tuple(apart)
    told = f"{len(pairs)} logical partitions with several instances have one partition id each"
    return _decided(view, Layer.FABRIC, True, found, (), told)


def _ready(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
    asked = [one for one in view.picture.instance_gpus if one.logical is not None]
    told = f"{len(asked)} GPUs of instances are in the partitions they were asked into"
    return _decided(view, Layer.FABRIC, bool(asked), found, (names.INTERFACE,), told)


def _matrix(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
    told = f"{len(view.picture.meshes)} IMEX daemons reach all their peers"
    about = _of_nodes(found, {one.node for one in view.picture.meshes})
    return _decided(view, Layer.CLUSTER, bool(view.picture.meshes), about, _SERVING, told)


def _of_nodes(found: Mapping[str, list[Finding]], nodes: Collection[str]) -> Mapping[str, list[Finding]]:
    """Of the findings about nodes themselves those about these; all others."""
    places = {at_node(node) for node in nodes}
    theirs = [one for one in found.get(names.NODE_READY, ()) if not places.isdisjoint(one.where)]
    return {**found, names.NODE_READY: theirs}


def _daemons(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
    """On each node with a pod of a ComputeDomain runs a daemon of it."""
    meshed = {(one.domain, one.node) for one in view.picture.meshes}
    domains = {f"{one.namespace}/{one.name}": one.domain for one in view.picture.claims}
    needed = {
        (uid, pod.node)
        for pod in view.picture.pods
        for claim in pod.claims.values()
        if pod.node and (uid := domains.get(f"{pod.namespace}/{claim}"))
    }
    lacking = sorted(node for uid, node in needed if (uid, node) not in meshed)
    if lacking and meshed:
        return Outcome.FAIL, tuple(f"no daemon on node {node}" for node in lacking)
    told = f"a daemon on each of {len(needed)} nodes"
    about = _of_nodes(found, {node for _, node in needed})
    return _decided(view, Layer.CLUSTER, bool(needed), about, _SERVING, told)


def _bandwidth(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
    if not view.picture.transfers:
        return Outcome.NOT_RUN, ("no transfer was recorded: rackloom transfer run --save FILE",)
    if any(one.emulated for one in view.picture.transfers):
        return Outcome.NOT_RUN, ("the newest transfers ran over emulated links",)
    told = f"{len(view.picture.transfers)} transfers kept what the topology promises"
    return _decided(view, Layer.TRANSFER, True, found, (names.TRANSFER,), told)


def _clean(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
    checks = (names.PARTITION_OWNED, names.SLICE_OF_NODE, names.DEVICE_THERE)
    told = "no partition, slice or claim is left of something that is gone"
    by_cluster = _decided(view, Layer.CLUSTER, bool(view.picture.nodes), found, checks, told)
    if by_cluster[0] is not Outcome.PASS:
        return by_cluster
    return _decided(view, Layer.FABRIC, bool(view.picture.domains), found, checks, told)


def _same_nvlink(view: View, found: Mapping[str, list[Finding]]) -> tuple[Outcome, tuple[str, ...]]:
    """The GPUs that DRA gave to the pods of one ComputeDomain are in one partition of the fabric."""
    held: defaultdict[str, set[tuple[str, int | None]]] = defaultdict(set)
    for chain in view.chains:
        if chain.compute_domain is not None and chain.fabric is not None:
            held[chain.compute_domain.key].add((chain.fabric.domain, chain.fabric.partition))
    apart = tuple(
        f"ComputeDomain {key}: {', '.join(sorted(map(_place, places)))}"
        for key, places in sorted(held.items())
        if len(places) > 1 or any(partition is None for _, partition in places)
    )
    if apart:
        return Outcome.FAIL, apart
    told = f"the GPUs of each of {len(held)} ComputeDomains are in one partition"
    return _decided(view, Layer.FABRIC, bool(held), found, (), told)


def _place(at: tuple[str, int | None]) -> str:
    domain, partition = at
    return f"{'no partition' if partition is None else f'partition {partition}'} of domain {domain}"


def _decided(
    view: View,
    layer: Layer,
    there: bool,
    found: Mapping[str, list[Finding]],
    checks: Iterable[str],
    told: str,
) -> tuple[Outcome, tuple[str, ...]]:
    """Fail by the findings of `checks`; pass only where the layer was read and there was something to see."""
    against = [one for check in checks for one in found.get(check, ())]
    failed = tuple(f"{one.subject}: {one.message}" for one in against if one.state is State.FAILS)
    if failed:
        return Outcome.FAIL, failed
    doubts = tuple(f"{one.subject}: {one.message}" for one in against)
    if layer is Layer.FABRIC:
        doubts += tuple(f"{one.subject}: {one.message}" for one in found.get(names.CONTROLLER, ()))
    if doubts:
        return Outcome.UNKNOWN, doubts
    if not view.can_see(layer):
        return Outcome.UNKNOWN, (f"the {layer} was not read",)
    return (Outcome.PASS, (told,)) if there else (Outcome.UNKNOWN, ("there is nothing to judge it by",))


def _not_by_looking(how: str) -> Judge:
    return lambda _view, _found: (Outcome.NOT_RUN, (how,))


_TESTS: tuple[tuple[str, str, Judge], ...] = (
    ("CNP03-01", "NVLink partitioning", _partitioning),
    (
        "SDN12",
        "create an NVLink partition",
        _not_by_looking("it creates one: rackloom demo does, on the twin"),
    ),
    ("SDN13", "list and get NVLink partitions", _listing),
    (
        "SDN14",
        "delete an empty partition",
        _not_by_looking("it deletes one: rackloom demo does, on the twin"),
    ),
    ("SDN15", "an instance in a partition becomes ready", _ready),
    ("SDN16", "two instances share one partition id", _shared),
    ("SDN17", "IMEX package", _not_by_looking("the package is on the nodes")),
    ("SDN18", "IMEX start", _not_by_looking("it starts the service on a node")),
    ("SDN19", "IMEX stop", _not_by_looking("it stops the service on a node")),
    ("SDN20", "IMEX at boot", _not_by_looking("it restarts a node")),
    ("SDN21", "IMEX domain is up with a full matrix", _matrix),
    ("SDN22", "IMEX authentication", _not_by_looking("it changes the mode of IMEX")),
    ("SDN23", "IMEX encryption", _not_by_looking("it changes the mode of IMEX")),
    ("SDN24", "IMEX authentication and encryption", _not_by_looking("it changes the mode of IMEX")),
    ("SDN25", "ComputeDomain pods on each allocated node", _daemons),
    ("SDN26", "bandwidth inside the domain", _bandwidth),
    ("SDN27", "clean after the workload", _clean),
    ("K8S24", "DRA gives GPUs on the same NVLink", _same_nvlink),
)
