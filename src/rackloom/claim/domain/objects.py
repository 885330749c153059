"""ComputeDomain and ComputeDomainClique as values, from and to the JSON of the API server.

Source: `resource.nvidia.com/v1beta1` of NVIDIA's DRA driver for GPUs, version 0.5; the conditions are ours.
A reading takes what it needs and ignores the rest; a writing changes those fields of the object it was read
from and keeps the rest, so that fields of other writers survive.
"""

import ipaddress
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from rackloom.claim.domain import names
from rackloom.errors import Refused

Json = dict[str, Any]
"""One Kubernetes object, as the API server sends it."""

NO_INDEX = -1
"""What a node without an NVLink fabric has in a ComputeDomain's status instead of an IMEX index."""


class Readiness(StrEnum):
    """Of a daemon, a node or a whole ComputeDomain."""

    READY = "Ready"
    NOT_READY = "NotReady"


class AllocationMode(StrEnum):
    """How many of a node's IMEX channels a claim gets."""

    SINGLE = "Single"
    ALL = "All"


class Ref(msgspec.Struct, frozen=True):
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


class Clique(msgspec.Struct, frozen=True, kw_only=True):
    """One ComputeDomainClique: the daemons of one ComputeDomain in one clique."""

    compute_domain: str
    """UID of the ComputeDomain."""
    clique_id: str
    """`<clusterUUID>.<cliqueId>`."""
    daemons: tuple[DaemonInfo, ...] = ()
    owners: tuple[Ref, ...] = ()
    """The daemon pods: the object is collected when none of them is left."""

    @property
    def name(self) -> str:
        """The object's name in the driver's namespace."""
        return names.clique_object_name(self.compute_domain, self.clique_id)

    def on(self, node: str) -> DaemonInfo | None:
        """The daemon of a node."""
        return next((daemon for daemon in self.daemons if daemon.node_name == node), None)


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One node in a ComputeDomain's status."""

    name: str
    ip_address: str
    clique_id: str = msgspec.field(name="cliqueID")
    index: int = NO_INDEX
    status: Readiness = Readiness.NOT_READY


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A condition in the form that all of Kubernetes uses; `status` is True, False or Unknown."""

    type: str
    status: str
    reason: str
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""
    """RFC 3339; empty until it is written."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A ComputeDomain's status."""

    status: Readiness = Readiness.NOT_READY
    nodes: tuple[NodeStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()

    def condition(self, type_: str) -> Condition | None:
        """The condition of a type."""
        return next((one for one in self.conditions if one.type == type_), None)


class _Template(msgspec.Struct, frozen=True):
    name: str


class _Channel(msgspec.Struct, frozen=True, rename="camel"):
    resource_claim_template: _Template
    allocation_mode: AllocationMode = AllocationMode.SINGLE


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    channel: _Channel
    num_nodes: int = 0


class ComputeDomain(msgspec.Struct, frozen=True, kw_only=True):
    """One ComputeDomain."""

    namespace: str
    name: str
    uid: str
    generation: int = 0
    template: str
    """Name of the claim template that pods refer to, in the ComputeDomain's namespace."""
    allocation_mode: AllocationMode = AllocationMode.SINGLE
    num_nodes: int = 0
    deleted_at: str = ""
    """When its deletion was asked for, RFC 3339; empty while it is wanted."""
    finalizers: tuple[str, ...] = ()
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    status: Status = Status()

    @property
    def deleting(self) -> bool:
        """Whether its deletion was asked for."""
        return bool(self.deleted_at)

    @property
    def key(self) -> str:
        """`namespace/name`, as people write it."""
        return f"{self.namespace}/{self.name}"


def compute_domain(obj: Json) -> ComputeDomain:
    """Read a ComputeDomain. Raises Refused when its spec is not one that the CRD admits."""
    meta = obj["metadata"]
    try:
        spec = msgspec.convert(obj.get("spec", {}), _Spec)
    except msgspec.ValidationError as error:
        raise Refused(
            f"ComputeDomain {meta['namespace']}/{meta['name']}: spec: {error}",
            nearest_fix="create it anew with spec.channel.resourceClaimTemplate.name: a spec is immutable",
        ) from error
    return ComputeDomain(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        template=spec.channel.resource_claim_template.name,
        allocation_mode=spec.channel.allocation_mode,
        num_nodes=spec.num_nodes,
        deleted_at=meta.get("deletionTimestamp") or "",
        finalizers=tuple(meta.get("finalizers", ())),
        labels=meta.get("labels") or {},
        annotations=meta.get("annotations") or {},
        status=read_status(obj),
    )


def read_status(obj: Json) -> Status:
    """Read a ComputeDomain's status; an unreadable one is as good as none: it is computed anew."""
    try:
        return msgspec.convert(obj.get("status") or {}, Status)
    except msgspec.ValidationError:
        return Status()


def status_json(status: Status) -> Json:
    """A status as it is written."""
    return {
        "status": status.status.value,
        "nodes": [msgspec.to_builtins(node) for node in status.nodes],
        "conditions": [msgspec.to_builtins(condition) for condition in status.conditions],
    }


def clique(obj: Json) -> Clique:
    """Read a ComputeDomainClique; its labels say what it is, and its name where labels are missing."""
    meta = obj["metadata"]
    labels = meta.get("labels") or {}
    uid, _, clique_id = meta["name"].partition(".")
    return Clique(
        compute_domain=labels.get(names.COMPUTE_DOMAIN_LABEL, uid),
        clique_id=labels.get(names.CLIQUE_ID_LABEL, clique_id),
        daemons=msgspec.convert(obj.get("daemons") or (), tuple[DaemonInfo, ...]),
        owners=tuple(Ref(owner["name"], owner["uid"]) for owner in meta.get("ownerReferences") or ()),
    )


def clique_json(value: Clique, namespace: str, read: Json | None = None) -> Json:
    """A clique object as it is written: over what was read of it, or new in the driver's `namespace`."""
    base: Json = read or {"apiVersion": names.API_VERSION, "kind": "ComputeDomainClique"}
    meta: Json = dict(base.get("metadata") or {"name": value.name, "namespace": namespace})
    meta["labels"] = {**(meta.get("labels") or {}), **_clique_labels(value)}
    meta["ownerReferences"] = [_pod_owner(owner) for owner in value.owners]
    return {**base, "metadata": meta, "daemons": [msgspec.to_builtins(one) for one in value.daemons]}


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


def _clique_labels(value: Clique) -> dict[str, str]:
    return {names.COMPUTE_DOMAIN_LABEL: value.compute_domain, names.CLIQUE_ID_LABEL: value.clique_id}


def _pod_owner(owner: Ref) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid}
