"""The nodes of a ComputeDomain, from their labels, the clique objects and the daemons' pods.

A node is of a ComputeDomain while it carries its label: the node plugin writes it before a channel is
prepared and takes it off with the last one. The label brings the daemon, and the daemon enters its node.

A node that is lost can do none of that. It is abandoned when it is gone, or has not been ready for as long as
a gang waits for a tray, and no pod holds a channel on it any more. Then, in this order:

1. it counts no more, and the controller takes its label off, in a write that fails if the node has changed:
   the node may have come back meanwhile, and prepare another channel;
2. the DaemonSet, which the label had brought there, deletes its pod, which nobody there confirms;
3. the entry of a pod that is being deleted on such a node goes. The peers follow the clique object, and wait
   for that daemon no more. One that still runs, cut off from all or with a dead kubelet, sees that its pod
   is being deleted, and does not enter again.

When the node is back, its kubelet ends what still runs there. Until then the plugin's checkpoint has the
channel, so that no other ComputeDomain gets it.
"""

import msgspec

from rackloom.claim.cluster.actions import Action, Patch, delete, let_node_go
from rackloom.claim.cluster.manifests import warm_clique
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.cluster.snapshot import CliqueObject, Snapshot
from rackloom.claim.cluster.things import DaemonPod
from rackloom.claim.domain import membership
from rackloom.claim.domain.objects import Clique, DaemonInfo, NodeStatus, Readiness, Ref, clique_json
from rackloom.claim.kube.timestamps import seconds_of


def joined(snapshot: Snapshot, settings: Settings) -> frozenset[str]:
    """The nodes that are to have a daemon: those with the label, but for abandoned ones."""
    return frozenset(node.name for node in snapshot.nodes) - abandoned(snapshot, settings)


def abandoned(snapshot: Snapshot, settings: Settings) -> frozenset[str]:
    """Nodes that are lost, and on which no pod holds a channel.

    None in channel mode: there nobody here sees on which nodes a job runs.
    """
    now, after = seconds_of(snapshot.now) or 0.0, settings.gangs.lost_after
    lost = (name for name, since in snapshot.unready.items() if now - since >= after)
    return frozenset(lost) - snapshot.channel_nodes if _has_labels(snapshot, settings) else frozenset()


def next_loss(snapshot: Snapshot, settings: Settings) -> float | None:
    """Seconds until another node is lost, if nothing changes; None where all that are not ready are lost."""
    now, after = seconds_of(snapshot.now) or 0.0, settings.gangs.lost_after
    ahead = [since + after - now for since in snapshot.unready.values() if since + after > now]
    return min(ahead, default=None)


def node_entries(snapshot: Snapshot, settings: Settings) -> tuple[NodeStatus, ...]:
    """One entry per node, by name: fabric nodes from the cliques, the others from their pods."""
    pods = {pod.node: pod for pod in snapshot.pods if pod.alive}
    if _has_labels(snapshot, settings):
        pods = {node: pods[node] for node in joined(snapshot, settings) & pods.keys()}
    entries = {node: _plain(pod) for node, pod in pods.items() if pod.clique_id == ""}
    for one in snapshot.cliques:
        for daemon in one.clique.daemons:
            pod = pods.get(daemon.node_name)
            if pod is not None and _is_of(pod, one.clique):
                entries[daemon.node_name] = _member(daemon, pod)
    return tuple(entries[node] for node in sorted(entries))


def is_doubtful(snapshot: Snapshot, settings: Settings) -> bool:
    """Whether an entry seems stale, or a node abandoned.

    Its pod may only not be in the cache yet, so what it rests on is read anew before anything is taken back:
    a member that is removed by mistake would come back at another index.
    """
    return bool(cleaning(snapshot, settings) or departures(snapshot, settings))


def departures(snapshot: Snapshot, settings: Settings) -> tuple[Patch, ...]:
    """Take the label off the nodes that are abandoned."""
    gone = abandoned(snapshot, settings)
    return tuple(let_node_go(node) for node in snapshot.nodes if node.name in gone)


def cleaning(snapshot: Snapshot, settings: Settings) -> tuple[Action, ...]:
    """Take out of the clique objects what no living daemon pod of this ComputeDomain stands behind."""
    actions: list[Action] = []
    for one in snapshot.cliques:
        left = membership.without_stale(one.clique, _living(one.clique, snapshot, settings))
        if not left.daemons and not left.owners:
            # Without an owner the garbage collector would never take it. A daemon may be joining.
            actions += [] if one.thing.deleting else [delete(one.thing, unchanged=True)]
        elif left != one.clique:
            actions.append(_written(one, msgspec.structs.replace(one, clique=left)))
    return tuple(actions)


def _has_labels(snapshot: Snapshot, settings: Settings) -> bool:
    """Whether labels say which its nodes are: the daemons of a warm clique follow a label of another name."""
    return snapshot.domain is not None and warm_clique(snapshot.domain, settings) is None


def _living(clique: Clique, snapshot: Snapshot, settings: Settings) -> dict[str, tuple[Ref, ...]]:
    """The daemon pods by node that may stand behind an entry of a clique."""
    gone = abandoned(snapshot, settings)
    alive: dict[str, tuple[Ref, ...]] = {}
    for pod in snapshot.pods:
        leaves = not pod.alive or (pod.deleting and pod.node in gone)
        if not leaves and _is_of(pod, clique):
            alive[pod.node] = (*alive.get(pod.node, ()), pod.ref)
    return alive


def _is_of(pod: DaemonPod, clique: Clique) -> bool:
    """Whether a pod may be in a clique: a fabric that is partitioned anew leaves old entries."""
    return pod.clique_id in (None, clique.clique_id)


def _written(old: CliqueObject, new: CliqueObject) -> Patch:
    thing = old.thing
    obj = clique_json(new.clique, thing.namespace or "")
    # With the resourceVersion a daemon that joins meanwhile is not overwritten.
    meta = {
        "resourceVersion": thing.resource_version,
        "ownerReferences": obj["metadata"]["ownerReferences"],
    }
    patch = {"metadata": meta, "daemons": obj["daemons"]}
    return Patch(kind=thing.kind, namespace=thing.namespace, name=thing.name, patch=patch)


def _member(daemon: DaemonInfo, pod: DaemonPod) -> NodeStatus:
    # An entry is written by the daemon itself: one that died, or is at another address, cannot correct it.
    holds = daemon.status is Readiness.READY and pod.ready and pod.ip_address == daemon.ip_address
    return NodeStatus(
        name=daemon.node_name,
        ip_address=daemon.ip_address,
        clique_id=daemon.clique_id,
        index=daemon.index,
        status=Readiness.READY if holds else Readiness.NOT_READY,
    )


def _plain(pod: DaemonPod) -> NodeStatus:
    status = Readiness.READY if pod.ready else Readiness.NOT_READY
    return NodeStatus(name=pod.node, ip_address=pod.ip_address, clique_id="", status=status)
