"""The nodes of a ComputeDomain, from clique objects and from the pods that stand behind their entries."""

import msgspec

from rackloom.claim.cluster.actions import Action, Patch, delete
from rackloom.claim.cluster.snapshot import CliqueObject, Snapshot
from rackloom.claim.cluster.things import DaemonPod
from rackloom.claim.domain import membership
from rackloom.claim.domain.objects import DaemonInfo, NodeStatus, Readiness, clique_json


def node_entries(snapshot: Snapshot) -> tuple[NodeStatus, ...]:
    """One entry per node, by name: fabric nodes from the cliques, the others from their pods."""
    pods = {pod.node: pod for pod in snapshot.pods if pod.alive}
    entries = {node: _plain(pod) for node, pod in pods.items() if pod.clique_id == ""}
    for one in snapshot.cliques:
        for daemon in one.clique.daemons:
            if daemon.node_name in pods:
                entries[daemon.node_name] = _member(daemon, pods[daemon.node_name])
    return tuple(entries[node] for node in sorted(entries))


def is_doubtful(snapshot: Snapshot) -> bool:
    """Whether an entry seems stale.

    Its pod may only not be in the cache yet, so the pods are read anew before such an entry is removed: a
    member that is removed by mistake would come back at another index.
    """
    return bool(cleaning(snapshot))


def cleaning(snapshot: Snapshot) -> tuple[Action, ...]:
    """Take out of the clique objects what no living daemon pod of this ComputeDomain stands behind."""
    living = snapshot.living()
    actions: list[Action] = []
    for one in snapshot.cliques:
        left = membership.without_stale(one.clique, living)
        if not left.daemons and not left.owners:
            # Without an owner the garbage collector would never take it.
            actions += [] if one.thing.deleting else [delete(one.thing)]
        elif left != one.clique:
            actions.append(_written(one, msgspec.structs.replace(one, clique=left)))
    return tuple(actions)


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
