"""Checks of the clique label of nodes against the partitions of the switch fabric, tray by tray.

`nvidia.com/gpu.clique` has the form `<clusterUUID>.<cliqueId>`. The clique id is the id of the partition
(32766 for the factory's). The cluster UUID names the NVLink domain in a different name space, so its
meaning is learnt: it stands for the domain of most GPUs of the nodes that carry it. A tray whose GPUs are
in two partitions has no label at all (GPU Feature Discovery, internal/lm/imex.go) and is reported as
split.

Only nodes are judged whose GPUs both layers know, and whose domain has a fresh reading. The fix sets the
label that the fabric implies and says who wrote the wrong one; where the right value is not known, it
shows the node's plugin pods. A label with several field managers is a warning: they undo one another's
writes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from shlex import quote

from rackloom.core.diagnosis import catalogue
from rackloom.core.diagnosis.findings import Finding, Severity, fails
from rackloom.core.diagnosis.index import SnapshotIndex, at_node, places_around
from rackloom.core.diagnosis.snapshot import GpuChain, NodeRecord
from rackloom.core.domains.names import GPU_CLIQUE_LABEL


def check_cliques(view: SnapshotIndex) -> Iterator[Finding]:
    """All findings about cliques of nodes whose GPUs both layers know, and about who writes the label."""
    clusters = _domain_by_cluster_uuid(view)
    for name, gpus in sorted(view.by_node.items()):
        node = view.nodes.get(name)
        if node is not None and all(chain.fabric and view.is_fresh(chain.fabric.domain) for chain in gpus):
            yield from _check_node(node, gpus, clusters)
    for node in view.picture.nodes:
        yield from _several_writers(node)


def _check_node(
    node: NodeRecord, gpus: tuple[GpuChain, ...], clusters: Mapping[str, str]
) -> Iterator[Finding]:
    held = {_partition_of(chain) for chain in gpus}
    if len(held) > 1:
        yield _split_tray(node, gpus)
        return
    said = _label_mismatch(node, held.pop(), gpus, clusters)
    if said:
        yield fails(
            catalogue.CLIQUE_LABEL,
            f"node {node.name}",
            said,
            _label_fix(node, clusters, gpus),
            evidence=(f"cluster: {_label_evidence(node)}", *_fabric_evidence(gpus), *_slice_evidence(gpus)),
            where=places_around(gpus),
            since=node.clique_since if _written_by_hand(node) else None,
        )


def _label_fix(node: NodeRecord, clusters: Mapping[str, str], gpus: tuple[GpuChain, ...]) -> str:
    """Write what is right, and stop who wrote the other: or else see to whoever should have written."""
    right = _implied_clique(gpus, clusters)
    if node.clique is None or right in (None, node.clique):
        look = f"kubectl get pods -A -o wide --field-selector spec.nodeName={node.name}"
        return f"{look}  # are its plugins well: GPU Feature Discovery, or Rackloom's for GPUs and IMEX?"
    value = f"{GPU_CLIQUE_LABEL}={right} --overwrite" if right else f"{GPU_CLIQUE_LABEL}-"
    return f"kubectl label node {node.name} {value}  # {_writer_advice(node)}"


def _writer_advice(node: NodeRecord) -> str:
    writer = node.clique_writer or "GFD, or the IMEX plugin"
    if _written_by_hand(node):
        leave = f"kubectl label node {node.name} {GPU_CLIQUE_LABEL}-"
        return f"{writer} wrote it by hand: {leave} leaves it to its plugin again"
    return f"and restart what writes it, or it is written again: {writer}"


def _written_by_hand(node: NodeRecord) -> bool:
    """By a person, and not by a plugin, which also writes other things of its own now and then."""
    return node.clique is not None and node.clique_writer.startswith("kubectl")


def _implied_clique(gpus: tuple[GpuChain, ...], clusters: Mapping[str, str]) -> str | None:
    """The clique of a tray that is whole; empty where it is in no partition; None where it cannot be told."""
    domain, partition = _partition_of(gpus[0])
    if partition is None:
        return ""
    named = sorted(cluster for cluster, meant in clusters.items() if meant == domain)
    return f"{named[0]}.{partition}" if len(named) == 1 else None


def _label_mismatch(
    node: NodeRecord, held: tuple[str, int | None], gpus: tuple[GpuChain, ...], clusters: Mapping[str, str]
) -> str:
    """What is wrong with the label of a tray that is whole in one partition, or in none; empty: nothing."""
    domain, partition = held
    if partition is None:
        return "it is labelled with a clique, and its GPUs are in no partition" if node.clique else ""
    if node.clique is None:
        return f"its GPUs are in partition {partition}, and it has no label {GPU_CLIQUE_LABEL}"
    cluster, _, clique = node.clique.rpartition(".")
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


def _domain_by_cluster_uuid(view: SnapshotIndex) -> Mapping[str, str]:
    """The domain that most GPUs under each cluster UUID are in."""
    votes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, gpus in view.by_node.items():
        node = view.nodes.get(name)
        if node is not None and node.clique is not None:
            votes[node.clique.rpartition(".")[0]].update(_partition_of(chain)[0] for chain in gpus)
    return {cluster: min(found, key=lambda one: (-found[one], one)) for cluster, found in votes.items()}


def _split_tray(node: NodeRecord, gpus: tuple[GpuChain, ...]) -> Finding:
    machine = next((chain.machine for chain in gpus if chain.machine is not None), None)
    domain = next(chain.fabric.domain for chain in gpus if chain.fabric is not None)
    show = f"rackloom admin domain show {quote(domain)}"
    if machine is not None:
        show = f"rackloom admin machine nvlink-info show {quote(machine.id)}"
    told = "" if node.clique is None else f", and its label {node.clique} is stale"
    return fails(
        catalogue.SPLIT,
        f"node {node.name}",
        f"its GPUs are in different partitions, so no clique can be said of it, and it is lost to jobs{told}",
        f"{show}  # give the tray's GPUs one logical partition, or keep the node out of the cluster",
        evidence=(f"cluster: {_label_evidence(node)}", *_fabric_evidence(gpus)),
        where=places_around(gpus),
    )


def _label_evidence(node: NodeRecord) -> str:
    if node.clique is None:
        return f"node {node.name} has no label {GPU_CLIQUE_LABEL}"
    by = f", written by {node.clique_writer}" if node.clique_writer else ""
    return f"node {node.name} has {GPU_CLIQUE_LABEL}={node.clique}{by}"


def _fabric_evidence(gpus: tuple[GpuChain, ...]) -> Iterator[str]:
    for (domain, partition), modules in _by_partition(gpus).items():
        where = "no partition" if partition is None else f"partition {partition}"
        yield f"switch controller of domain {domain}: GPU {', '.join(modules)} in {where}"


def _by_partition(gpus: tuple[GpuChain, ...]) -> Mapping[tuple[str, int | None], list[str]]:
    found: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for chain in gpus:
        if chain.fabric is not None:
            found[_partition_of(chain)].append(str(chain.fabric.place.module_id))
    return found


def _slice_evidence(gpus: tuple[GpuChain, ...]) -> Iterator[str]:
    published = sorted({chain.device.clique for chain in gpus if chain.device and chain.device.clique})
    if published:
        yield f"slice: devices say clique {', '.join(published)}"


def _several_writers(node: NodeRecord) -> Iterator[Finding]:
    if node.other_writers:
        writers = (node.clique_writer, *node.other_writers)
        yield fails(
            catalogue.CLIQUE_WRITER,
            f"node {node.name}",
            f"{len(writers)} write its label {GPU_CLIQUE_LABEL}, and undo one another",
            f"kubectl get node {node.name} -o yaml --show-managed-fields"
            "  # then keep one writer: GFD, or rackloom node imex --clique-label",
            severity=Severity.WARNING,
            evidence=tuple(f"cluster: field manager {writer}" for writer in writers),
            where=(at_node(node.name),),
        )
