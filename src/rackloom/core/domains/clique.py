"""The membership of IMEX daemons in a ComputeDomainClique, with their node indices.

A clique object lists the daemons of one ComputeDomain in one NVLink clique. Membership changes are pure
functions from one value to the next:

- `join_clique` adds or refreshes the daemon of a node. It keeps the index that the node has, else takes
  the smallest free one of [0, max_nodes), and raises Refused when none is free.
- `leave_clique` removes the daemon and its pod on an orderly end. The index becomes free.
- `with_daemon_status` records readiness, but only for the address at which it was observed.
- `without_stale_daemons` removes entries that no living daemon pod of this ComputeDomain backs.

An index is a daemon's position in the static `nodes_config` of all its peers, so it must not change while
the node is a member: it is kept by node name, through pod restarts and address changes. Readiness is kept
only while the address stays the same. Concurrent writers are separated by the object's resourceVersion,
not here.

A daemon's address becomes a line in its peers' hosts files, so `is_ip_address` accepts a bare IP address
only.
"""

import ipaddress
from collections.abc import Collection, Mapping
from functools import lru_cache

import msgspec

from rackloom.core.cluster.domain_objects import ComputeDomainClique, DaemonInfo, ObjectRef, Readiness
from rackloom.errors import Refused


@lru_cache(maxsize=4096)
def is_ip_address(text: str) -> bool:
    """Whether a text is one IP address and nothing else: what `isIP` of Kubernetes' CEL accepts.

    An address becomes a line of its peers' hosts files. The zone of an IPv6 address (`fe80::1%eth0`) is
    refused, because Python accepts any characters in it, a line break too. Answers are kept: every daemon
    checks those of its whole clique at each change of one.
    """
    if "%" in text:
        return False
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.version == 4 or address.ipv4_mapped is None


# Membership: pure steps from one clique to the next.


def join_clique(
    clique: ComputeDomainClique, *, node: str, ip_address: str, pod: ObjectRef, max_nodes: int
) -> ComputeDomainClique:
    """Add or refresh a node's daemon, at its index or the smallest free one. A new one is not ready.

    Raises Refused when all of [0, max_nodes) is taken.
    """
    others = tuple(daemon for daemon in clique.daemons if daemon.node_name != node)
    present = clique.on(node)
    # The index is a line in the static nodes_config of all peers, so a node keeps it while it is a member.
    taken = {daemon.index for daemon in others}
    if present is not None and present.index in range(max_nodes) and present.index not in taken:
        index = present.index
    elif (free := next((index for index in range(max_nodes) if index not in taken), None)) is not None:
        index = free
    else:
        fix = "raise the controller's --max-nodes-per-imex-domain, or use fewer nodes of the clique"
        raise Refused(f"all {max_nodes} places of this clique's IMEX domain are taken", nearest_fix=fix)
    entry = DaemonInfo(
        node_name=node,
        ip_address=ip_address,
        clique_id=clique.clique_id,
        index=index,
        status=_readiness_at(present, ip_address),
    )
    daemons = sorted((*others, entry), key=lambda daemon: (daemon.index, daemon.node_name))
    is_owner = any(owner.uid == pod.uid for owner in clique.owners)
    owners = clique.owners if is_owner else (*clique.owners, pod)
    return msgspec.structs.replace(clique, daemons=tuple(daemons), owners=owners)


def _readiness_at(present: DaemonInfo | None, ip_address: str) -> Readiness:
    """Readiness was observed at one address. At another address it is another daemon."""
    return present.status if present and present.ip_address == ip_address else Readiness.NOT_READY


def leave_clique(clique: ComputeDomainClique, *, node: str, pod: ObjectRef) -> ComputeDomainClique:
    """Take a node's daemon and its pod out on an orderly end. The index is free for another node."""
    return msgspec.structs.replace(
        clique,
        daemons=tuple(daemon for daemon in clique.daemons if daemon.node_name != node),
        owners=tuple(owner for owner in clique.owners if owner.uid != pod.uid),
    )


def with_daemon_status(
    clique: ComputeDomainClique, *, node: str, ip_address: str, status: Readiness
) -> ComputeDomainClique:
    """Record whether a node's daemon is ready, if the node has a daemon at this address."""
    return msgspec.structs.replace(
        clique,
        daemons=tuple(
            msgspec.structs.replace(daemon, status=status)
            if (daemon.node_name, daemon.ip_address) == (node, ip_address)
            else daemon
            for daemon in clique.daemons
        ),
    )


def without_stale_daemons(
    clique: ComputeDomainClique, living: Mapping[str, Collection[ObjectRef]]
) -> ComputeDomainClique:
    """Only the daemons that a living pod backs: `living` are this ComputeDomain's daemon pods by node.

    A daemon of another ComputeDomain on the node does not count.
    """
    pods = {pod.uid for on_node in living.values() for pod in on_node}
    return msgspec.structs.replace(
        clique,
        daemons=tuple(daemon for daemon in clique.daemons if living.get(daemon.node_name)),
        owners=tuple(owner for owner in clique.owners if owner.uid in pods),
    )
