"""The nodes of a ComputeDomain, from their labels, the clique objects and the daemon pods.

A node belongs to a ComputeDomain while it carries its label. The node plugin writes the label before it
prepares a channel and removes it with the last one. The label brings the daemon, and the daemon enters
its node in the clique object.

A lost node can do none of that. It is abandoned when it is gone, or has not been ready for `lost_after`
seconds, and no pod holds a channel on it. Then, in this order:

1. it no longer counts, and the controller removes its label, in a write that fails if the node has
   changed: the node may have come back and be preparing another channel,
2. the DaemonSet controller deletes its pod, and no kubelet confirms it,
3. the entry of a pod that is being deleted on such a node is removed from the clique object. The peers
   follow that object and stop waiting. A daemon that still runs, cut off or with a dead kubelet, sees
   that its pod is being deleted and does not enter again.

When the node is back, its kubelet ends the containers that still run there. Until then the plugin's
checkpoint holds the channel, so no other ComputeDomain gets it. Before it removes anything, the controller
reads the objects again: a member that is removed by mistake would come back at another index.
"""

from rackloom.core.cluster.domain_objects import (
    ComputeDomainClique,
    ComputeDomainNode,
    DaemonInfo,
    DaemonPod,
    ObjectRef,
    Readiness,
    clique_members_json,
)
from rackloom.core.cluster.objects import ObjectWrite, PatchObject, epoch_seconds
from rackloom.core.domains import clique
from rackloom.core.domains.manifests import warm_clique
from rackloom.core.domains.snapshot import DomainSnapshot, delete_object, patch_object, release_node


def joined_nodes(snapshot: DomainSnapshot) -> frozenset[str]:
    """The nodes that are to have a daemon: those with the label, except abandoned ones."""
    return frozenset(node.name for node in snapshot.nodes) - abandoned_nodes(snapshot)


def abandoned_nodes(snapshot: DomainSnapshot) -> frozenset[str]:
    """Nodes that are lost, and on which no pod holds a channel.

    None in channel mode, in which the controller cannot see on which nodes a job runs.
    """
    now, after = epoch_seconds(snapshot.now) or 0.0, snapshot.settings.lost_after
    lost = (name for name, since in snapshot.unready.items() if now - since >= after)
    is_labelled = _is_labelled_domain(snapshot)
    return frozenset(lost) - snapshot.channel_nodes if is_labelled else frozenset()


def seconds_to_next_loss(snapshot: DomainSnapshot) -> float | None:
    """Seconds until another node is lost if nothing changes. None if all that are not ready are lost."""
    now, after = epoch_seconds(snapshot.now) or 0.0, snapshot.settings.lost_after
    ahead = [since + after - now for since in snapshot.unready.values() if since + after > now]
    return min(ahead, default=None)


def node_entries(snapshot: DomainSnapshot) -> tuple[ComputeDomainNode, ...]:
    """One entry per node, by name: fabric nodes from the cliques, the others from their pods."""
    pods = {pod.node: pod for pod in snapshot.pods if pod.alive}
    if _is_labelled_domain(snapshot):
        pods = {node: pods[node] for node in joined_nodes(snapshot) & pods.keys()}
    entries = {node: _plain_node(pod) for node, pod in pods.items() if pod.clique_id == ""}
    for record in snapshot.cliques:
        for daemon in record.clique.daemons:
            pod = pods.get(daemon.node_name)
            if pod is not None and _may_be_in_clique(pod, record.clique):
                entries[daemon.node_name] = _fabric_node(daemon, pod)
    return tuple(entries[node] for node in sorted(entries))


def needs_confirmation(snapshot: DomainSnapshot) -> bool:
    """Whether an entry seems stale, or a node abandoned.

    The cache may merely lack its pod, so pods, claims and nodes are read again before anything is removed: a
    member that is removed by mistake would come back at another index.
    """
    return bool(remove_stale_entries(snapshot) or remove_abandoned_labels(snapshot))


def remove_abandoned_labels(snapshot: DomainSnapshot) -> tuple[PatchObject, ...]:
    """Remove the label from abandoned nodes."""
    gone = abandoned_nodes(snapshot)
    return tuple(release_node(node) for node in snapshot.nodes if node.name in gone)


def remove_stale_entries(snapshot: DomainSnapshot) -> tuple[ObjectWrite, ...]:
    """Remove entries from the clique objects that no living daemon pod of this ComputeDomain backs."""
    actions: list[ObjectWrite] = []
    for record in snapshot.cliques:
        living = _living_daemons(record.clique, snapshot)
        left = clique.without_stale_daemons(record.clique, living)
        if not left.daemons and not left.owners:
            # The garbage collector never deletes an object without owners. A daemon may be joining it, so the
            # deletion fails if it has changed.
            actions += [] if record.owned.deleting else [delete_object(record.owned, unchanged=True)]
        elif left != record.clique:
            # The resourceVersion makes the write fail if a daemon has joined since the read.
            version = {"resourceVersion": record.owned.resource_version}
            actions.append(patch_object(record.owned, clique_members_json(left, version)))
    return tuple(actions)


def _is_labelled_domain(snapshot: DomainSnapshot) -> bool:
    """Whether the UID label marks its nodes: the daemons of a warm clique follow another label."""
    return snapshot.domain is not None and warm_clique(snapshot.domain, snapshot.settings) is None


def _living_daemons(
    clique: ComputeDomainClique, snapshot: DomainSnapshot
) -> dict[str, tuple[ObjectRef, ...]]:
    """The daemon pods by node that may back an entry of a clique."""
    gone = abandoned_nodes(snapshot)
    alive: dict[str, tuple[ObjectRef, ...]] = {}
    for pod in snapshot.pods:
        leaves = not pod.alive or (pod.deleting and pod.node in gone)
        if not leaves and _may_be_in_clique(pod, clique):
            alive[pod.node] = (*alive.get(pod.node, ()), pod.ref)
    return alive


def _may_be_in_clique(pod: DaemonPod, clique: ComputeDomainClique) -> bool:
    """Whether a pod may be in a clique: repartitioning a fabric leaves old entries behind."""
    return pod.clique_id in (None, clique.clique_id)


def _fabric_node(daemon: DaemonInfo, pod: DaemonPod) -> ComputeDomainNode:
    # An entry is written by the daemon itself: one that died, or is at another address, cannot correct it.
    holds = daemon.status is Readiness.READY and pod.ready and pod.ip_address == daemon.ip_address
    return ComputeDomainNode(
        name=daemon.node_name,
        ip_address=daemon.ip_address,
        clique_id=daemon.clique_id,
        index=daemon.index,
        status=Readiness.READY if holds else Readiness.NOT_READY,
    )


def _plain_node(pod: DaemonPod) -> ComputeDomainNode:
    status = Readiness.READY if pod.ready else Readiness.NOT_READY
    return ComputeDomainNode(name=pod.node, ip_address=pod.ip_address, clique_id="", status=status)
