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
from functools import lru_cache
from typing import Any

import msgspec

from rackloom.core.cluster import names
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
    """Read a ComputeDomainClique. Its labels name the domain and the clique; without them, its name does."""
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
    """The object to write: changes to the object that was read, or a new one in the driver's `namespace`."""
    base: JsonObject = read or {"apiVersion": names.API_VERSION, "kind": "ComputeDomainClique"}
    meta: JsonObject = dict(base.get("metadata") or {"name": value.name, "namespace": namespace})
    labels = {names.COMPUTE_DOMAIN_LABEL: value.compute_domain, names.CLIQUE_ID_LABEL: value.clique_id}
    meta["labels"] = {**(meta.get("labels") or {}), **labels}
    meta["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid} for owner in value.owners
    ]
    return {**base, "metadata": meta, "daemons": [msgspec.to_builtins(daemon) for daemon in value.daemons]}


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


def clean_line(text: str, most: int) -> str:
    """Untrusted text as one line of at most `most` characters, without control characters."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * most])
    line = " ".join(shown.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


# Membership: pure steps from one clique to the next.


def join_clique(
    clique: ComputeDomainClique, *, node: str, ip_address: str, pod: ObjectRef, max_nodes: int
) -> ComputeDomainClique:
    """Add or refresh a node's daemon, at its index or the smallest free one; a new one is not ready.

    Raises Refused when all of [0, max_nodes) is taken.
    """
    others = tuple(daemon for daemon in clique.daemons if daemon.node_name != node)
    present = clique.on(node)
    # The index is a line in the static nodes_config of all peers, so a node keeps it while it is a member.
    taken = {daemon.index for daemon in others}
    if present is not None and present.index in range(max_nodes) and present.index not in taken:
        index = present.index
    else:
        index = _smallest_free_index(taken, max_nodes)
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
    """Readiness was observed at one address; at another address it is another daemon."""
    return present.status if present and present.ip_address == ip_address else Readiness.NOT_READY


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
    """Only the daemons that a living pod backs: `living` are this ComputeDomain's daemon pods by node.

    A daemon of another ComputeDomain on the node does not count.
    """
    pods = {pod.uid for on_node in living.values() for pod in on_node}
    return msgspec.structs.replace(
        clique,
        daemons=tuple(daemon for daemon in clique.daemons if living.get(daemon.node_name)),
        owners=tuple(owner for owner in clique.owners if owner.uid in pods),
    )


def _smallest_free_index(taken: Collection[int], max_nodes: int) -> int:
    index = next((index for index in range(max_nodes) if index not in taken), None)
    if index is None:
        fix = "raise the controller's --max-nodes-per-imex-domain, or use fewer nodes of the clique"
        raise Refused(f"all {max_nodes} places of this clique's IMEX domain are taken", nearest_fix=fix)
    return index
