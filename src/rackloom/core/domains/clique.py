"""ComputeDomainClique: its object, and the membership of IMEX daemons with their node indices.

A clique object lists the daemons of one ComputeDomain in one NVLink clique. Writing changes only these
fields of the object that was read and keeps the rest, so that fields of other writers survive.

Membership changes are pure functions from one value to the next:

- `join_clique` adds or refreshes the daemon of a node. It keeps the index that the node has, else takes
  the smallest free one of [0, max_nodes), and raises Refused when none is free.
- `leave_clique` removes the daemon and its pod on an orderly end; the index becomes free.
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
from enum import StrEnum
from typing import Any

import msgspec

from rackloom.core.domains import names
from rackloom.errors import Refused

# The object as a value, from and to the JSON of the API server.


JsonObject = dict[str, Any]
"""One Kubernetes object, as the API server sends it."""


class Readiness(StrEnum):
    """Of a daemon, a node or a whole ComputeDomain."""

    READY = "Ready"
    NOT_READY = "NotReady"


class ObjectRef(msgspec.Struct, frozen=True):
    """An object by its name, as an owner or in a message."""

    name: str
    uid: str
    namespace: str = ""


class DaemonInfo(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One IMEX daemon in a clique object: who it is and which IMEX node index it has."""

    node_name: str
    ip_address: str
    clique_id: str = msgspec.field(name="cliqueID")
    index: int = 0
    status: Readiness = Readiness.NOT_READY


class ComputeDomainClique(msgspec.Struct, frozen=True, kw_only=True):
    """One ComputeDomainClique: the daemons of one ComputeDomain in one clique."""

    compute_domain: str
    """UID of the ComputeDomain."""
    clique_id: str
    """`<clusterUUID>.<cliqueId>`."""
    daemons: tuple[DaemonInfo, ...] = ()
    owners: tuple[ObjectRef, ...] = ()
    """The daemon pods: the object is collected when none of them is left."""

    @property
    def name(self) -> str:
        """The object's name in the driver's namespace."""
        return names.clique_object_name(self.compute_domain, self.clique_id)

    def on(self, node: str) -> DaemonInfo | None:
        """The daemon of a node."""
        return next((daemon for daemon in self.daemons if daemon.node_name == node), None)


def read_clique(obj: JsonObject) -> ComputeDomainClique:
    """Read a ComputeDomainClique; its labels say what it is, and its name where labels are missing."""
    meta = obj["metadata"]
    labels = meta.get("labels") or {}
    uid, _, clique_id = meta["name"].partition(".")
    return ComputeDomainClique(
        compute_domain=labels.get(names.COMPUTE_DOMAIN_LABEL, uid),
        clique_id=labels.get(names.CLIQUE_ID_LABEL, clique_id),
        daemons=msgspec.convert(obj.get("daemons") or (), tuple[DaemonInfo, ...]),
        owners=tuple(ObjectRef(owner["name"], owner["uid"]) for owner in meta.get("ownerReferences") or ()),
    )


def clique_json(value: ComputeDomainClique, namespace: str, read: JsonObject | None = None) -> JsonObject:
    """A clique object as it is written: over what was read of it, or new in the driver's `namespace`."""
    base: JsonObject = read or {"apiVersion": names.API_VERSION, "kind": "ComputeDomainClique"}
    meta: JsonObject = dict(base.get("metadata") or {"name": value.name, "namespace": namespace})
    meta["labels"] = {**(meta.get("labels") or {}), **_clique_labels(value)}
    meta["ownerReferences"] = [_pod_owner(owner) for owner in value.owners]
    return {**base, "metadata": meta, "daemons": [msgspec.to_builtins(daemon) for daemon in value.daemons]}


def is_ip_address(text: str) -> bool:
    """Whether a text is one IP address and nothing else: what `isIP` of Kubernetes' CEL accepts.

    An address becomes a line of its peers' hosts files. The zone of an IPv6 address (`fe80::1%eth0`) is
    refused, because Python accepts any characters in it, a line break too.
    """
    if "%" in text:
        return False
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.version == 4 or address.ipv4_mapped is None


def clean_line(text: str, most: int) -> str:
    """A text of others as one line that can be shown: without control characters, `most` characters long."""
    shown = "".join(one if one.isprintable() else " " for one in text[: 4 * most])
    line = " ".join(shown.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _clique_labels(value: ComputeDomainClique) -> dict[str, str]:
    return {names.COMPUTE_DOMAIN_LABEL: value.compute_domain, names.CLIQUE_ID_LABEL: value.clique_id}


def _pod_owner(owner: ObjectRef) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid}


# Membership: pure steps from one clique to the next.


def join_clique(
    clique: ComputeDomainClique, *, node: str, ip_address: str, pod: ObjectRef, max_nodes: int
) -> ComputeDomainClique:
    """Enter or refresh a node's daemon, at the index it has or the smallest free one; new means not ready.

    Raises Refused when all of [0, max_nodes) is taken.
    """
    others = tuple(daemon for daemon in clique.daemons if daemon.node_name != node)
    entry = DaemonInfo(
        node_name=node,
        ip_address=ip_address,
        clique_id=clique.clique_id,
        index=_index_of_node(clique, node, others, max_nodes),
        status=_readiness_at(clique.on(node), ip_address),
    )
    owners = clique.owners if pod.uid in _owner_uids(clique.owners) else (*clique.owners, pod)
    return msgspec.structs.replace(clique, daemons=_sorted_by_index((*others, entry)), owners=owners)


def leave_clique(clique: ComputeDomainClique, *, node: str, pod: ObjectRef) -> ComputeDomainClique:
    """Take a node's daemon and its pod out, on an orderly end; the index is free for another node."""
    return msgspec.structs.replace(
        clique,
        daemons=tuple(daemon for daemon in clique.daemons if daemon.node_name != node),
        owners=tuple(owner for owner in clique.owners if owner.uid != pod.uid),
    )


def with_daemon_status(
    clique: ComputeDomainClique, *, node: str, ip_address: str, status: Readiness
) -> ComputeDomainClique:
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


def without_stale_daemons(
    clique: ComputeDomainClique, living: Mapping[str, Collection[ObjectRef]]
) -> ComputeDomainClique:
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


def _index_of_node(
    clique: ComputeDomainClique, node: str, others: tuple[DaemonInfo, ...], max_nodes: int
) -> int:
    taken = {daemon.index for daemon in others}
    present = clique.on(node)
    if present is not None and 0 <= present.index < max_nodes and present.index not in taken:
        return present.index
    return smallest_free_index(taken, max_nodes)


def _readiness_at(present: DaemonInfo | None, ip_address: str) -> Readiness:
    """Readiness was observed of the daemon at one address; at another it is another daemon."""
    if present is None or present.ip_address != ip_address:
        return Readiness.NOT_READY
    return present.status


def _owner_uids(owners: tuple[ObjectRef, ...]) -> set[str]:
    return {owner.uid for owner in owners}


def _sorted_by_index(daemons: tuple[DaemonInfo, ...]) -> tuple[DaemonInfo, ...]:
    return tuple(sorted(daemons, key=lambda daemon: (daemon.index, daemon.node_name)))
