"""Results of NVIDIA's acceptance suite for cloud partners, decided from one snapshot of a site.

Identifiers are those of the `ai-cloud-validation` test plan, for the tests about NVLink, IMEX and
ComputeDomains. A test fails by the findings of the checks that it rests on. It passes only if the layer was
read, no finding contradicts it, and there was something to observe. Otherwise it is unknown. A test that
needs something to be created, stopped or measured is not decided by a snapshot and is reported as not run. So
is a test that passes on simulated layers: a simulation proves nothing about the machines that a buyer gets.

The result also lists for each node whether it has NVLink and which NVLink domain it is in.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import StrEnum

import msgspec

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import unfolded
from rackloom.core.diagnosis.findings import CheckState, Finding
from rackloom.core.diagnosis.index import SnapshotIndex, at_node
from rackloom.core.diagnosis.snapshot import Layer, SiteSnapshot, grouped


class AcceptanceOutcome(StrEnum):
    """The outcome of one test."""

    PASS = "pass"  # noqa: S105 (a word, no password)
    FAIL = "fail"
    UNKNOWN = "unknown"
    """Its subject could not be read, or does not exist."""
    NOT_RUN = "not run"
    """A snapshot does not decide it."""


class AcceptanceResult(msgspec.Struct, frozen=True):
    """The result of one test."""

    id: str
    name: str
    outcome: AcceptanceOutcome
    evidence: tuple[str, ...]


class NodeNvlink(msgspec.Struct, frozen=True):
    """The facts that the suite requires from a provider for each node."""

    node: str
    nvlink_supported: bool
    nvlink_domain_id: str | None


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """The whole export."""

    suite: str = "ncp"
    at: float
    """Seconds since the epoch."""
    simulated: bool
    """Whether any layer is simulated. If so, no test passes."""
    results: tuple[AcceptanceResult, ...]
    nodes: tuple[NodeNvlink, ...]


_NODE_SERVES = (Check.MESH, Check.ACTIVE, Check.NODE_READY)
"""Mesh and conditions are the last reports of daemons and stay in the cluster when a node loses power."""
Findings = Mapping[str, list[Finding]]
Decision = tuple[AcceptanceOutcome, tuple[str, ...]]
"""An outcome with its evidence."""
AcceptanceTest = Callable[[SnapshotIndex, Findings], Decision]


def acceptance(snapshot: SiteSnapshot) -> Acceptance:
    """Every test of the suite that is about NVLink, IMEX or ComputeDomains, and each node's domain."""
    index = SnapshotIndex(snapshot)
    findings = grouped((finding.check, finding) for finding in unfolded(index))
    results = []
    for id_, name, decide in _TESTS:
        outcome, evidence = decide(index, findings)
        # A pass in a simulation proves nothing about the machines that a buyer gets.
        if outcome is AcceptanceOutcome.PASS and snapshot.simulated:
            outcome = AcceptanceOutcome.NOT_RUN
            evidence = (f"simulated: {', '.join(snapshot.simulated)}", *evidence)
        results.append(AcceptanceResult(id_, name, outcome, evidence))
    nodes = []
    for node in snapshot.nodes:
        # A node with GPUs in several domains is cabled or recorded wrongly, so no domain is named.
        domains = {chain.fabric.domain for chain in index.by_node.get(node.name, ()) if chain.fabric}
        domain = domains.pop() if len(domains) == 1 else None
        nodes.append(NodeNvlink(node.name, domain is not None or node.clique is not None, domain))
    return Acceptance(
        at=snapshot.at, simulated=bool(snapshot.simulated), results=tuple(results), nodes=tuple(nodes)
    )


def _nvlink_partitioning(index: SnapshotIndex, findings: Findings) -> Decision:
    ours = [partition for partition in index.snapshot.partitions if partition.owner == "site"]
    checks = (Check.ISOLATION, Check.ONE_PARTITION, Check.PARTITION_THERE, Check.INTERFACE)
    proof = f"{len(ours)} partitions hold what tenants asked for, and each GPU is in at most one"
    return _decide_by_checks(index, Layer.FABRIC, bool(ours), findings, checks, proof)


def _partition_listing(index: SnapshotIndex, findings: Findings) -> Decision:
    listed, logicals = index.snapshot.partitions, index.snapshot.logicals
    proof = f"{len(listed)} partitions and {len(logicals)} logical ones listed"
    return _decide_by_checks(index, Layer.FABRIC, bool(listed), findings, (Check.PARTITION_THERE,), proof)


def _shared_partition_id(index: SnapshotIndex, findings: Findings) -> Decision:
    """Two instances that request one logical partition in one domain are in one physical partition."""
    members = grouped(
        ((chain.fabric.domain, chain.wanted.logical), (chain.wanted.instance, chain.partition.id))
        for chain in index.chains
        if chain.wanted is not None and chain.wanted.logical and chain.fabric and chain.partition
    )
    shared = {key: found for key, found in members.items() if len({instance for instance, _ in found}) > 1}
    if not shared:
        return AcceptanceOutcome.UNKNOWN, ("no two instances share a logical partition within a domain",)
    ids = {key: sorted({id_ for _, id_ in found}) for key, found in shared.items()}
    apart = tuple(f"domain {key[0]}: partitions {found}" for key, found in ids.items() if len(found) > 1)
    if apart:
        return AcceptanceOutcome.FAIL, apart
    proof = f"{len(shared)} logical partitions with several instances have one partition id each"
    return _decide_by_checks(index, Layer.FABRIC, True, findings, (), proof)


def _instances_ready(index: SnapshotIndex, findings: Findings) -> Decision:
    requested = [gpu for gpu in index.snapshot.instance_gpus if gpu.logical is not None]
    proof = f"{len(requested)} GPUs of instances are in the partitions they were asked into"
    return _decide_by_checks(index, Layer.FABRIC, bool(requested), findings, (Check.INTERFACE,), proof)


def _imex_matrix(index: SnapshotIndex, findings: Findings) -> Decision:
    meshes = index.snapshot.meshes
    proof = f"{len(meshes)} IMEX daemons reach all their peers"
    relevant = _limited_to_nodes(findings, {mesh.node for mesh in meshes})
    return _decide_by_checks(index, Layer.CLUSTER, bool(meshes), relevant, _NODE_SERVES, proof)


def _limited_to_nodes(findings: Findings, nodes: Collection[str]) -> Findings:
    """The findings without those about the readiness of other nodes."""
    places = {at_node(node) for node in nodes}
    relevant = [finding for finding in findings.get(Check.NODE_READY, ()) if places & {*finding.where}]
    return {**findings, Check.NODE_READY: relevant}


def _daemon_per_node(index: SnapshotIndex, findings: Findings) -> Decision:
    """On each node with a pod of a ComputeDomain runs a daemon of that ComputeDomain."""
    meshed = {(mesh.domain, mesh.node) for mesh in index.snapshot.meshes}
    domains = {claim.key: claim.domain for claim in index.snapshot.claims}
    needed = {
        (uid, pod.node)
        for pod in index.snapshot.pods
        for claim in pod.claims.values()
        if pod.node and (uid := domains.get(f"{pod.namespace}/{claim}"))
    }
    lacking = sorted(node for uid, node in needed if (uid, node) not in meshed)
    if lacking and meshed:
        return AcceptanceOutcome.FAIL, tuple(f"no daemon on node {node}" for node in lacking)
    proof = f"a daemon on each of {len(needed)} nodes"
    relevant = _limited_to_nodes(findings, {node for _, node in needed})
    return _decide_by_checks(index, Layer.CLUSTER, bool(needed), relevant, _NODE_SERVES, proof)


def _bandwidth(index: SnapshotIndex, findings: Findings) -> Decision:
    transfers = index.snapshot.transfers
    if not transfers:
        return AcceptanceOutcome.NOT_RUN, ("no transfer was recorded: rackloom transfer run --save FILE",)
    if any(transfer.emulated for transfer in transfers):
        return AcceptanceOutcome.NOT_RUN, ("the newest transfers ran over emulated links",)
    proof = f"{len(transfers)} transfers kept what the topology promises"
    return _decide_by_checks(index, Layer.TRANSFER, True, findings, (Check.TRANSFER,), proof)


def _clean_after_workload(index: SnapshotIndex, findings: Findings) -> Decision:
    checks = (Check.PARTITION_OWNED, Check.SLICE_OF_NODE, Check.DEVICE_THERE)
    proof = "no partition, slice or claim is left of something that is gone"
    by_cluster = _decide_by_checks(index, Layer.CLUSTER, bool(index.snapshot.nodes), findings, checks, proof)
    if by_cluster[0] is not AcceptanceOutcome.PASS:
        return by_cluster
    return _decide_by_checks(index, Layer.FABRIC, bool(index.snapshot.domains), findings, checks, proof)


def _same_nvlink(index: SnapshotIndex, findings: Findings) -> Decision:
    """The GPUs that DRA gave to the pods of one ComputeDomain are in one partition of the fabric."""
    used = grouped(
        (chain.compute_domain.key, (chain.fabric.domain, chain.fabric.partition))
        for chain in index.chains
        if chain.compute_domain is not None and chain.fabric is not None
    )
    apart = []
    for key, places in sorted(used.items()):
        # A GPU in no partition is as bad as one in two: it reaches none of the others.
        if len(set(places)) > 1 or any(partition is None for _, partition in places):
            names = {
                f"{'no partition' if partition is None else f'partition {partition}'} of domain {domain}"
                for domain, partition in places
            }
            apart.append(f"ComputeDomain {key}: {', '.join(sorted(names))}")
    if apart:
        return AcceptanceOutcome.FAIL, tuple(apart)
    proof = f"the GPUs of each of {len(used)} ComputeDomains are in one partition"
    return _decide_by_checks(index, Layer.FABRIC, bool(used), findings, (), proof)


def _decide_by_checks(
    index: SnapshotIndex,
    layer: Layer,
    observable: bool,
    findings: Findings,
    checks: Iterable[str],
    proof: str,
) -> Decision:
    """Fail by the findings of `checks`. Pass only if the layer was read and had something to observe."""
    against = [finding for check in checks for finding in findings.get(check, ())]
    failed = tuple(_finding_text(finding) for finding in against if finding.state is CheckState.FAILS)
    if failed:
        return AcceptanceOutcome.FAIL, failed
    # If a domain's controllers do not answer, every statement about the fabric is in doubt.
    unread = findings.get(Check.CONTROLLER, ()) if layer is Layer.FABRIC else ()
    if doubts := tuple(map(_finding_text, (*against, *unread))):
        return AcceptanceOutcome.UNKNOWN, doubts
    if not index.can_see(layer):
        return AcceptanceOutcome.UNKNOWN, (f"the {layer} was not read",)
    if not observable:
        return AcceptanceOutcome.UNKNOWN, ("there is nothing to judge it by",)
    return AcceptanceOutcome.PASS, (proof,)


def _finding_text(finding: Finding) -> str:
    return f"{finding.subject}: {finding.message}"


def _not_run(how: str) -> AcceptanceTest:
    return lambda _index, _findings: (AcceptanceOutcome.NOT_RUN, (how,))


_TESTS: tuple[tuple[str, str, AcceptanceTest], ...] = (
    ("CNP03-01", "NVLink partitioning", _nvlink_partitioning),
    ("SDN12", "create an NVLink partition", _not_run("it creates one: rackloom demo does, on the twin")),
    ("SDN13", "list and get NVLink partitions", _partition_listing),
    ("SDN14", "delete an empty partition", _not_run("it deletes one: rackloom demo does, on the twin")),
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
