"""Checks of the clique label of nodes against the partitions of the switch fabric, tray by tray.

`nvidia.com/gpu.clique` has the form `<clusterUUID>.<cliqueId>`. The clique id is the id of the partition
(32766 for the factory's). The cluster UUID names the NVLink domain in a different name space, so its meaning
is learnt: it stands for the domain of most GPUs of the nodes that carry it. A tray with GPUs in two
partitions has no label at all (GPU Feature Discovery, internal/lm/imex.go) and is reported as split.

A node is judged only if both layers know its GPUs and its domain has a fresh reading. The fix sets the label
that the fabric implies and names the writer of the wrong one. If the right value is not known, it shows the
node's plugin pods. A label with several field managers is a warning: they undo one another's writes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote

from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding, Severity, fails
from rackloom.core.diagnosis.index import SnapshotIndex, at_node, places_around
from rackloom.core.diagnosis.snapshot import GpuChain, NodeRecord, grouped

ClusterVotes = Mapping[str, Counter[str]]
"""GPUs of each NVLink domain by cluster UUID."""


def check_cliques(index: SnapshotIndex, clusters: Mapping[str, str]) -> Iterator[Finding]:
    """All findings about cliques, and writers of the label, of nodes with GPUs that both layers know.

    `clusters` are the domains of cluster UUIDs, at least of those that the nodes or domains here have.
    """
    for name, gpus in sorted(index.by_node.items()):
        node = index.nodes.get(name)
        if node is not None and all(_is_known(chain, index) for chain in gpus):
            yield from _check_node(node, gpus, clusters, index)
    for node in index.snapshot.nodes:
        yield from _several_writers(node)


def _is_known(chain: GpuChain, index: SnapshotIndex) -> bool:
    gpu = chain.fabric
    return gpu is not None and not gpu.uncertain and index.is_fresh(gpu.domain)


def _check_node(
    node: NodeRecord, gpus: tuple[GpuChain, ...], clusters: Mapping[str, str], index: SnapshotIndex
) -> Iterator[Finding]:
    partitions = {_partition_of(chain) for chain in gpus}
    if len(partitions) > 1:
        yield _split_tray(node, gpus, index)
        return
    message = _label_mismatch(node, partitions.pop(), gpus, clusters)
    if message:
        yield fails(
            Check.CLIQUE_LABEL,
            f"node {node.name}",
            message,
            _label_fix(node, clusters, gpus),
            evidence=(
                f"cluster: {_label_evidence(node)}",
                *_fabric_evidence(gpus, index),
                *_slice_evidence(gpus),
            ),
            where=places_around(gpus),
            since=node.clique_since if _written_by_hand(node) else None,
        )


def _label_fix(node: NodeRecord, clusters: Mapping[str, str], gpus: tuple[GpuChain, ...]) -> str:
    """Set the implied label and stop the wrong writer. If it has no writer, look at the node's plugins."""
    # The implied clique is empty if the tray is in no partition, and None if it is not known.
    right: str | None = ""
    domain, partition = _partition_of(gpus[0])
    if partition is not None:
        uuids = [cluster for cluster, named in clusters.items() if named == domain]
        right = f"{uuids[0]}.{partition}" if len(uuids) == 1 else None
    if node.clique is None or right in (None, node.clique):
        pods = f"kubectl get pods -A -o wide --field-selector spec.nodeName={node.name}"
        return f"{pods}  # are its plugins well: GPU Feature Discovery, or Rackloom's for GPUs and IMEX?"
    value = f"{GPU_CLIQUE_LABEL}={right} --overwrite" if right else f"{GPU_CLIQUE_LABEL}-"
    writer = node.clique_writer or "GFD, or the IMEX plugin"
    advice = f"and restart what writes it, or it is written again: {writer}"
    if _written_by_hand(node):
        leave = f"kubectl label node {node.name} {GPU_CLIQUE_LABEL}-"
        advice = f"{writer} wrote it by hand: {leave} leaves it to its plugin again"
    return f"kubectl label node {node.name} {value}  # {advice}"


def _written_by_hand(node: NodeRecord) -> bool:
    """Whether a person wrote the label with kubectl. A plugin keeps writing other fields now and then."""
    return node.clique is not None and node.clique_writer.startswith("kubectl")


def _label_mismatch(
    node: NodeRecord, place: tuple[str, int | None], gpus: tuple[GpuChain, ...], clusters: Mapping[str, str]
) -> str:
    """The problem with the label of an undivided tray. Empty if it is right."""
    domain, partition = place
    if partition is None:
        return "it is labelled with a clique, and its GPUs are in no partition" if node.clique else ""
    if node.clique is None:
        return f"its GPUs are in partition {partition}, and it has no label {GPU_CLIQUE_LABEL}"
    cluster, _, clique = node.clique.rpartition(".")
    # The clique id is the partition's id. The cluster UUID is compared by the domain that it stands for.
    if clique != str(partition):
        return f"its label says clique {clique}, and its GPUs are in partition {partition}"
    if clusters.get(cluster, domain) != domain:
        return f"its label says cluster {cluster}, which is domain {clusters[cluster]}, not {domain}"
    published = {chain.device.clique for chain in gpus if chain.device is not None and chain.device.clique}
    if published and published != {node.clique}:
        return f"its label says {node.clique}, and its devices say {', '.join(sorted(published))}"
    return ""


def _partition_of(chain: GpuChain) -> tuple[str, int | None]:
    return ("", None) if chain.fabric is None else (chain.fabric.domain, chain.fabric.partition)


def cluster_votes(index: SnapshotIndex) -> ClusterVotes:
    """How many GPUs of each domain the nodes under each cluster UUID have."""
    votes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, gpus in index.by_node.items():
        node = index.nodes.get(name)
        if node is not None and node.clique is not None:
            votes[cluster_of(node.clique)].update(_partition_of(chain)[0] for chain in gpus)
    return votes


def cluster_of(clique: str) -> str:
    """The cluster UUID of a clique label."""
    return clique.rpartition(".")[0]


def domain_of_clusters(parts: Iterable[ClusterVotes]) -> Mapping[str, str]:
    """The domain of most GPUs under each cluster UUID, from the votes of all parts of a site.

    The two names of an NVLink domain share no id space, so a vote over all nodes is the only join there is.
    """
    votes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for part in parts:
        for cluster, found in part.items():
            votes[cluster].update(found)
    return {
        cluster: min(found, key=lambda domain: (-found[domain], domain)) for cluster, found in votes.items()
    }


def _split_tray(node: NodeRecord, gpus: tuple[GpuChain, ...], index: SnapshotIndex) -> Finding:
    machine = next((chain.machine for chain in gpus if chain.machine is not None), None)
    domain = next(chain.fabric.domain for chain in gpus if chain.fabric is not None)
    show = f"rackloom admin domain show {quote(domain)}"
    if machine is not None:
        show = f"rackloom admin machine nvlink-info show {quote(machine.id)}"
    stale = "" if node.clique is None else f", and its label {node.clique} is stale"
    return fails(
        Check.SPLIT,
        f"node {node.name}",
        f"its GPUs are in different partitions, so no clique can be said of it,"
        f" and it is lost to jobs{stale}",
        f"{show}  # give the tray's GPUs one logical partition, or keep the node out of the cluster",
        evidence=(f"cluster: {_label_evidence(node)}", *_fabric_evidence(gpus, index)),
        where=places_around(gpus),
    )


def _label_evidence(node: NodeRecord) -> str:
    if node.clique is None:
        return f"node {node.name} has no label {GPU_CLIQUE_LABEL}"
    by = f", written by {node.clique_writer}" if node.clique_writer else ""
    return f"node {node.name} has {GPU_CLIQUE_LABEL}={node.clique}{by}"


def _fabric_evidence(gpus: tuple[GpuChain, ...], index: SnapshotIndex) -> Iterator[str]:
    members = grouped(
        (_partition_of(chain), str(index.gpu_part(chain))) for chain in gpus if chain.fabric is not None
    )
    for (domain, partition), names in members.items():
        where = "no partition" if partition is None else f"partition {partition}"
        yield f"switch controller of domain {domain}: {', '.join(names)} in {where}"


def _slice_evidence(gpus: tuple[GpuChain, ...]) -> Iterator[str]:
    published = sorted({chain.device.clique for chain in gpus if chain.device and chain.device.clique})
    if published:
        yield f"slice: devices say clique {', '.join(published)}"


def _several_writers(node: NodeRecord) -> Iterator[Finding]:
    if node.other_writers:
        writers = (node.clique_writer, *node.other_writers)
        yield fails(
            Check.CLIQUE_WRITER,
            f"node {node.name}",
            f"{len(writers)} write its label {GPU_CLIQUE_LABEL}, and undo one another",
            f"kubectl get node {node.name} -o yaml --show-managed-fields"
            "  # then keep one writer: GFD, or rackloom node imex --clique-label",
            severity=Severity.WARNING,
            evidence=tuple(f"cluster: field manager {writer}" for writer in writers),
            where=(at_node(node.name),),
        )
