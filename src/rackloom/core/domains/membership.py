"""The nodes of a ComputeDomain, from their labels, the clique objects and the daemon pods.

A node belongs to a ComputeDomain while it carries its label. The node plugin writes the label before it
prepares a channel and removes it with the last one. The label brings the daemon, and the daemon enters
its node in the clique object.

A lost node can do none of that. It is abandoned when it is gone, or has not been ready for `lost_after`
seconds, and no pod holds a channel on it. Then, in this order:

1. it no longer counts, and the controller removes its label, in a write that fails if the node has
   changed: the node may have come back and be preparing another channel;
2. the DaemonSet controller deletes its pod, which nobody on the node confirms;
3. the entry of a pod that is being deleted on such a node is removed from the clique object. The peers
   follow that object and stop waiting. A daemon that still runs, cut off or with a dead kubelet, sees
   that its pod is being deleted and does not enter again.

When the node is back, its kubelet ends what still runs there. Until then the plugin's checkpoint holds
the channel, so no other ComputeDomain gets it. Before anything is removed, the controller reads the
objects anew: a member that is removed by mistake would come back at another index.
"""

import msgspec

from rackloom.core.domains import clique
from rackloom.core.domains.clique import ComputeDomainClique, DaemonInfo, ObjectRef, Readiness, clique_json
from rackloom.core.domains.compute_domain import ComputeDomainNode
from rackloom.core.domains.manifests import warm_clique
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import (
    CliqueRecord,
    DaemonPod,
    DomainSnapshot,
    delete_object,
    release_node,
)
from rackloom.core.kubernetes.objects import ObjectWrite, PatchObject, epoch_seconds


def joined_nodes(snapshot: DomainSnapshot, settings: ControllerSettings) -> frozenset[str]:
    """The nodes that are to have a daemon: those with the label, but for abandoned ones."""
    return frozenset(node.name for node in snapshot.nodes) - abandoned_nodes(snapshot, settings)


def abandoned_nodes(snapshot: DomainSnapshot, settings: ControllerSettings) -> frozenset[str]:
    """Nodes that are lost, and on which no pod holds a channel.

    None in channel mode: there nobody here sees on which nodes a job runs.
    """
    now, after = epoch_seconds(snapshot.now) or 0.0, settings.gangs.lost_after
    lost = (name for name, since in snapshot.unready.items() if now - since >= after)
    return (
        frozenset(lost) - snapshot.channel_nodes if _is_labelled_domain(snapshot, settings) else frozenset()
    )


def seconds_to_next_loss(snapshot: DomainSnapshot, settings: ControllerSettings) -> float | None:
    """Seconds until another node is lost, if nothing changes; None where all that are not ready are lost."""
    now, after = epoch_seconds(snapshot.now) or 0.0, settings.gangs.lost_after
    ahead = [since + after - now for since in snapshot.unready.values() if since + after > now]
    return min(ahead, default=None)


def node_entries(snapshot: DomainSnapshot, settings: ControllerSettings) -> tuple[ComputeDomainNode, ...]:
    """One entry per node, by name: fabric nodes from the cliques, the others from their pods."""
    pods = {pod.node: pod for pod in snapshot.pods if pod.alive}
    if _is_labelled_domain(snapshot, settings):
        pods = {node: pods[node] for node in joined_nodes(snapshot, settings) & pods.keys()}
    entries = {node: _plain_node(pod) for node, pod in pods.items() if pod.clique_id == ""}
    for one in snapshot.cliques:
        for daemon in one.clique.daemons:
            pod = pods.get(daemon.node_name)
            if pod is not None and _may_be_in_clique(pod, one.clique):
                entries[daemon.node_name] = _fabric_node(daemon, pod)
    return tuple(entries[node] for node in sorted(entries))


def needs_confirmation(snapshot: DomainSnapshot, settings: ControllerSettings) -> bool:
    """Whether an entry seems stale, or a node abandoned.

    Its pod may only not be in the cache yet, so what it rests on is read anew before anything is taken back:
    a member that is removed by mistake would come back at another index.
    """
    return bool(remove_stale_entries(snapshot, settings) or remove_abandoned_labels(snapshot, settings))


def remove_abandoned_labels(
    snapshot: DomainSnapshot, settings: ControllerSettings
) -> tuple[PatchObject, ...]:
    """Take the label off the nodes that are abandoned."""
    gone = abandoned_nodes(snapshot, settings)
    return tuple(release_node(node) for node in snapshot.nodes if node.name in gone)


def remove_stale_entries(snapshot: DomainSnapshot, settings: ControllerSettings) -> tuple[ObjectWrite, ...]:
    """Take out of the clique objects what no living daemon pod of this ComputeDomain stands behind."""
    actions: list[ObjectWrite] = []
    for one in snapshot.cliques:
        left = clique.without_stale_daemons(one.clique, _living_daemons(one.clique, snapshot, settings))
        if not left.daemons and not left.owners:
            # Without an owner the garbage collector would never take it. A daemon may be joining.
            actions += [] if one.thing.deleting else [delete_object(one.thing, unchanged=True)]
        elif left != one.clique:
            actions.append(_written(one, msgspec.structs.replace(one, clique=left)))
    return tuple(actions)


def _is_labelled_domain(snapshot: DomainSnapshot, settings: ControllerSettings) -> bool:
    """Whether labels say which its nodes are: the daemons of a warm clique follow a label of another name."""
    return snapshot.domain is not None and warm_clique(snapshot.domain, settings) is None


def _living_daemons(
    clique: ComputeDomainClique, snapshot: DomainSnapshot, settings: ControllerSettings
) -> dict[str, tuple[ObjectRef, ...]]:
    """The daemon pods by node that may stand behind an entry of a clique."""
    gone = abandoned_nodes(snapshot, settings)
    alive: dict[str, tuple[ObjectRef, ...]] = {}
    for pod in snapshot.pods:
        leaves = not pod.alive or (pod.deleting and pod.node in gone)
        if not leaves and _may_be_in_clique(pod, clique):
            alive[pod.node] = (*alive.get(pod.node, ()), pod.ref)
    return alive


def _may_be_in_clique(pod: DaemonPod, clique: ComputeDomainClique) -> bool:
    """Whether a pod may be in a clique: a fabric that is partitioned anew leaves old entries."""
    return pod.clique_id in (None, clique.clique_id)


def _written(old: CliqueRecord, new: CliqueRecord) -> PatchObject:
    thing = old.thing
    obj = clique_json(new.clique, thing.namespace or "")
    # With the resourceVersion a daemon that joins meanwhile is not overwritten.
    meta = {
        "resourceVersion": thing.resource_version,
        "ownerReferences": obj["metadata"]["ownerReferences"],
    }
    patch = {"metadata": meta, "daemons": obj["daemons"]}
    return PatchObject(kind=thing.kind, namespace=thing.namespace, name=thing.name, patch=patch)


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
