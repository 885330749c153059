"""What the cluster calls a clique against the partition that the fabric really has, tray by tray.

`nvidia.com/gpu.clique` is `<clusterUUID>.<cliqueId>`, and the clique id is the partition's id (32766 for the
factory's). The cluster UUID names the NVLink domain in a name space of its own: which domain it stands for is
learnt from the GPUs that both layers know. A node whose GPUs are in two partitions has no label at all (GPU
Feature Discovery, internal/lm/imex.go).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from shlex import quote

from rackloom.claim.domain.names import GPU_CLIQUE_LABEL
from rackloom.prove.doctor import names
from rackloom.prove.doctor.checks.view import View, around, at_node
from rackloom.prove.doctor.findings import Finding, Severity, fails
from rackloom.prove.picture.values import GpuChain, NodeSeen


def check_cliques(view: View) -> Iterator[Finding]:
    """All findings about cliques of nodes whose GPUs both layers know, and about who writes the label."""
    clusters = _clusters(view)
    for name, gpus in sorted(view.by_node.items()):
        node = view.nodes.get(name)
        if node is not None and all(chain.fabric and view.is_fresh(chain.fabric.domain) for chain in gpus):
            yield from _node(node, gpus, clusters)
    for node in view.picture.nodes:
        yield from _writers(node)


def _node(node: NodeSeen, gpus: tuple[GpuChain, ...], clusters: Mapping[str, str]) -> Iterator[Finding]:
    held = {_partition(chain) for chain in gpus}
    if len(held) > 1:
        yield _split(node, gpus)
        return
    said = _difference(node, held.pop(), gpus, clusters)
    if said:
        yield fails(
            names.CLIQUE_LABEL,
            f"node {node.name}",
            said,
            _put_right(node, clusters, gpus),
            evidence=(f"cluster: {_label(node)}", *_fabric(gpus), *_slices(gpus)),
            where=around(gpus),
            since=node.clique_since if _by_hand(node) else None,
        )


def _put_right(node: NodeSeen, clusters: Mapping[str, str], gpus: tuple[GpuChain, ...]) -> str:
    """Write what is right, and stop who wrote the other: or else see to whoever should have written."""
    right = _right(gpus, clusters)
    if node.clique is None or right in (None, node.clique):
        look = f"kubectl get pods -A -o wide --field-selector spec.nodeName={node.name}"
        return f"{look}  # are its plugins well: GPU Feature Discovery, or Rackloom's for GPUs and IMEX?"
    value = f"{GPU_CLIQUE_LABEL}={right} --overwrite" if right else f"{GPU_CLIQUE_LABEL}-"
    return f"kubectl label node {node.name} {value}  # {_stop(node)}"


def _stop(node: NodeSeen) -> str:
    writer = node.clique_writer or "GFD, or the IMEX plugin"
    if _by_hand(node):
        leave = f"kubectl label node {node.name} {GPU_CLIQUE_LABEL}-"
        return f"{writer} wrote it by hand: {leave} leaves it to its plugin again"
    return f"and restart what writes it, or it is written again: {writer}"


def _by_hand(node: NodeSeen) -> bool:
    """By a person, and not by a plugin, which also writes other things of its own now and then."""
    return node.clique is not None and node.clique_writer.startswith("kubectl")


def _right(gpus: tuple[GpuChain, ...], clusters: Mapping[str, str]) -> str | None:
    """The clique of a tray that is whole; empty where it is in no partition; None where it cannot be told."""
    domain, partition = _partition(gpus[0])
    if partition is None:
        return ""
    named = sorted(cluster for cluster, meant in clusters.items() if meant == domain)
    return f"{named[0]}.{partition}" if len(named) == 1 else None


def _difference(
    node: NodeSeen, held: tuple[str, int | None], gpus: tuple[GpuChain, ...], clusters: Mapping[str, str]
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


def _partition(chain: GpuChain) -> tuple[str, int | None]:
    return ("", None) if chain.fabric is None else (chain.fabric.domain, chain.fabric.partition)


def _clusters(view: View) -> Mapping[str, str]:
    """The domain that most GPUs under each cluster UUID are in."""
    votes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, gpus in view.by_node.items():
        node = view.nodes.get(name)
        if node is not None and node.clique is not None:
            votes[node.clique.rpartition(".")[0]].update(_partition(chain)[0] for chain in gpus)
    return {cluster: min(found, key=lambda one: (-found[one], one)) for cluster, found in votes.items()}


def _split(node: NodeSeen, gpus: tuple[GpuChain, ...]) -> Finding:
    machine = next((chain.machine for chain in gpus if chain.machine is not None), None)
    domain = next(chain.fabric.domain for chain in gpus if chain.fabric is not None)
    show = f"rackloom admin domain show {quote(domain)}"
    if machine is not None:
        show = f"rackloom admin machine nvlink-info show {quote(machine.id)}"
    told = "" if node.clique is None else f", and its label {node.clique} is stale"
    return fails(
        names.SPLIT,
        f"node {node.name}",
        f"its GPUs are in different partitions, so no clique can be said of it, and it is lost to jobs{told}",
        f"{show}  # give the tray's GPUs one logical partition, or keep the node out of the cluster",
        evidence=(f"cluster: {_label(node)}", *_fabric(gpus)),
        where=around(gpus),
    )


def _label(node: NodeSeen) -> str:
    if node.clique is None:
        return f"node {node.name} has no label {GPU_CLIQUE_LABEL}"
    by = f", written by {node.clique_writer}" if node.clique_writer else ""
    return f"node {node.name} has {GPU_CLIQUE_LABEL}={node.clique}{by}"


def _fabric(gpus: tuple[GpuChain, ...]) -> Iterator[str]:
    for (domain, partition), modules in _by_partition(gpus).items():
        where = "no partition" if partition is None else f"partition {partition}"
        yield f"switch controller of domain {domain}: GPU {', '.join(modules)} in {where}"


def _by_partition(gpus: tuple[GpuChain, ...]) -> Mapping[tuple[str, int | None], list[str]]:
    found: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for chain in gpus:
        if chain.fabric is not None:
            found[_partition(chain)].append(str(chain.fabric.place.module_id))
    return found


def _slices(gpus: tuple[GpuChain, ...]) -> Iterator[str]:
    published = sorted({chain.device.clique for chain in gpus if chain.device and chain.device.clique})
    if published:
        yield f"slice: devices say clique {', '.join(published)}"


def _writers(node: NodeSeen) -> Iterator[Finding]:
    if node.other_writers:
        writers = (node.clique_writer, *node.other_writers)
        yield fails(
            names.CLIQUE_WRITER,
            f"node {node.name}",
            f"{len(writers)} write its label {GPU_CLIQUE_LABEL}, and undo one another",
            f"kubectl get node {node.name} -o yaml --show-managed-fields"
            "  # then keep one writer: GFD, or rackloom node imex --clique-label",
            severity=Severity.WARNING,
            evidence=tuple(f"cluster: field manager {one}" for one in writers),
            where=(at_node(node.name),),
        )
