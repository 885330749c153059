"""Who is in a clique object, and under which IMEX index: pure steps from one value to the next.

An index is a daemon's place in the static `nodes_config` of all its peers, so it must not move while the
node stays a member: it is kept by node name, through restarts of the pod and changes of its address. Two
writers that join at once are told apart by the object's resourceVersion, not here.
"""

from collections.abc import Collection, Mapping

import msgspec

from rackloom.claim.domain.objects import Clique, DaemonInfo, Readiness, Ref
from rackloom.errors import Refused


def join(clique: Clique, *, node: str, ip_address: str, pod: Ref, max_nodes: int) -> Clique:
    """Enter or refresh a node's daemon, at the index it has or the smallest free one; new means not ready.

    Raises Refused when all of [0, max_nodes) is taken.
    """
    others = tuple(daemon for daemon in clique.daemons if daemon.node_name != node)
    entry = DaemonInfo(
        node_name=node,
        ip_address=ip_address,
        clique_id=clique.clique_id,
        index=_index(clique, node, others, max_nodes),
        status=_status(clique.on(node), ip_address),
    )
    owners = clique.owners if pod.uid in _uids(clique.owners) else (*clique.owners, pod)
    return msgspec.structs.replace(clique, daemons=_by_index((*others, entry)), owners=owners)


def leave(clique: Clique, *, node: str, pod: Ref) -> Clique:
    """Take a node's daemon and its pod out, on an orderly end; the index is free for another node."""
    return msgspec.structs.replace(
        clique,
        daemons=tuple(daemon for daemon in clique.daemons if daemon.node_name != node),
        owners=tuple(owner for owner in clique.owners if owner.uid != pod.uid),
    )


def with_status(clique: Clique, *, node: str, ip_address: str, status: Readiness) -> Clique:
    """Record whether a node's daemon is ready; nothing where the node has no daemon at this address."""
    return msgspec.structs.replace(
        clique,
        daemons=tuple(
            msgspec.structs.replace(daemon, status=status)
            if (daemon.node_name, daemon.ip_address) == (node, ip_address)
            else daemon
            for daemon in clique.daemons
        ),
    )


def without_stale(clique: Clique, living: Mapping[str, Collection[Ref]]) -> Clique:
    """Only what a living daemon pod stands behind: `living` are this ComputeDomain's daemon pods by node.

    Another ComputeDomain's daemon on the node is no proof of life for this one.
    """
    pods = {pod.uid for on_node in living.values() for pod in on_node}
    return msgspec.structs.replace(
        clique,
        daemons=tuple(daemon for daemon in clique.daemons if living.get(daemon.node_name)),
        owners=tuple(owner for owner in clique.owners if owner.uid in pods),
    )


def smallest_free_index(taken: Collection[int], max_nodes: int) -> int:
    """The smallest index of [0, max_nodes) that is not taken. Raises Refused when there is none."""
    for index in range(max_nodes):
        if index not in taken:
            return index
    raise Refused(
        f"all {max_nodes} places of this clique's IMEX domain are taken",
        nearest_fix="raise the controller's --max-nodes-per-imex-domain, or use fewer nodes of the clique",
    )


def _index(clique: Clique, node: str, others: tuple[DaemonInfo, ...], max_nodes: int) -> int:
    taken = {daemon.index for daemon in others}
    present = clique.on(node)
    if present is not None and 0 <= present.index < max_nodes and present.index not in taken:
        return present.index
    return smallest_free_index(taken, max_nodes)


def _status(present: DaemonInfo | None, ip_address: str) -> Readiness:
    """Readiness was observed of the daemon at one address; at another it is another daemon."""
    if present is None or present.ip_address != ip_address:
        return Readiness.NOT_READY
    return present.status


def _uids(owners: tuple[Ref, ...]) -> set[str]:
    return {owner.uid for owner in owners}


def _by_index(daemons: tuple[DaemonInfo, ...]) -> tuple[DaemonInfo, ...]:
    return tuple(sorted(daemons, key=lambda daemon: (daemon.index, daemon.node_name)))
