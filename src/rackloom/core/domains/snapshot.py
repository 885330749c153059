"""The snapshot that a decision about one ComputeDomain is based on, and writes to the objects in it.

`OwnedObject` is any object as far as ownership and deletion are concerned: labels, finalizers,
versions. Ownership is a label with the UID of the ComputeDomain plus a finalizer, not an owner
reference, because owner references cannot cross namespaces. `DaemonPod` and `ChannelClaim` are what is
read of IMEX daemon pods and of claims for IMEX channels. A `DomainSnapshot` joins them for one UID; it
may describe what is left of a ComputeDomain that is gone.

What a daemon says about nvidia-imex is cut to a limit and to one line: it runs on a tenant's node.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.core.domains import names
from rackloom.core.domains.clique import ComputeDomainClique, ObjectRef, clean_line
from rackloom.core.domains.compute_domain import ComputeDomain, ComputeDomainNode
from rackloom.core.domains.device_configs import ChannelConfig, decode_imex_config_leniently
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.core.kubernetes.objects import (
    DAEMON_SET,
    NETWORK_POLICY,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    SECRET,
    DeleteObject,
    Object,
    PatchObject,
    ResourceKind,
)
from rackloom.errors import Refused

LONGEST_ERROR = 500
"""Characters of what a daemon says of nvidia-imex that go into a status: it runs on a tenant's node."""


class OwnedObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object of any kind, as far as ownership and deletion are concerned."""

    kind: ResourceKind
    namespace: str | None
    name: str
    uid: str
    resource_version: str
    labels: Mapping[str, str]
    finalizers: tuple[str, ...]
    deleting: bool

    @property
    def domain(self) -> str:
        """UID of the ComputeDomain it belongs to; empty for an object of somebody else."""
        return self.labels.get(names.COMPUTE_DOMAIN_LABEL, "")

    @property
    def called(self) -> str:
        """Kind and name, as people write them."""
        place = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind.kind} {place}"


class DaemonMesh(msgspec.Struct, frozen=True):
    """What a daemon's annotation says of its connections."""

    complete: bool
    missing: tuple[str, ...] = ()


class DaemonPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of a ComputeDomain's DaemonSet."""

    ref: ObjectRef
    domain: str
    node: str
    ip_address: str
    clique_id: str | None
    """None until the daemon has said it; empty on a node without an NVLink fabric."""
    ready: bool
    mesh: DaemonMesh | None = None
    """Whether it reaches all its peers, as it says; None until it has said."""
    imex_error: str = ""
    """Why nvidia-imex does not run in it, in one line; empty while it does, or nobody knows."""
    alive: bool
    """False once all its containers have ended for good."""
    deleting: bool = False


def owned_object(kind: ResourceKind, obj: Object) -> OwnedObject:
    """Read what all objects have."""
    meta = obj["metadata"]
    return OwnedObject(
        kind=kind,
        namespace=meta.get("namespace"),
        name=meta["name"],
        uid=meta.get("uid", ""),
        resource_version=meta.get("resourceVersion", ""),
        labels=meta.get("labels") or {},
        finalizers=tuple(meta.get("finalizers") or ()),
        deleting=meta.get("deletionTimestamp") is not None,
    )


class ChannelClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim for IMEX channels."""

    thing: OwnedObject
    domain: str
    """UID of the ComputeDomain that its config names."""
    created: str
    """RFC 3339."""
    reserved_for: tuple[str, ...]
    """Names of the pods that may use it now."""
    device: tuple[str, str] | None
    """Pool and device allocated to it."""


def read_daemon_pod(obj: Object) -> DaemonPod | None:
    """Read a daemon pod; None for one that has no node yet."""
    meta, status = obj["metadata"], obj.get("status") or {}
    labels = meta.get("labels") or {}
    node = (obj.get("spec") or {}).get("nodeName")
    if not node:
        return None
    deleting = meta.get("deletionTimestamp") is not None
    return DaemonPod(
        ref=ObjectRef(meta["name"], meta["uid"], meta.get("namespace", "")),
        domain=labels.get(names.COMPUTE_DOMAIN_LABEL, ""),
        node=node,
        ip_address=status.get("podIP", ""),
        clique_id=labels.get(names.CLIQUE_ID_LABEL),
        ready=not deleting and _has_ready_condition(status),
        mesh=_read_mesh(meta),
        imex_error=clean_line(_annotation(meta, names.IMEX_ERROR_ANNOTATION) or "", LONGEST_ERROR),
        alive=status.get("phase") not in ("Succeeded", "Failed"),
        deleting=deleting,
    )


def read_channel_claim(obj: Object) -> ChannelClaim | None:
    """Read a claim; None when it names no ComputeDomain for a channel."""
    domain = claimed_domain_uid(obj)
    if domain is None:
        return None
    status = obj.get("status") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    ours = [result for result in results if result.get("driver") == names.IMEX_DRIVER]
    return ChannelClaim(
        thing=owned_object(RESOURCE_CLAIM, obj),
        domain=domain,
        created=obj["metadata"].get("creationTimestamp", ""),
        reserved_for=tuple(one["name"] for one in status.get("reservedFor") or ()),
        device=(ours[0]["pool"], ours[0]["device"]) if ours else None,
    )


def claimed_domain_uid(obj: Object) -> str | None:
    """UID of the ComputeDomain whose channel a claim asks for; None where it asks for none."""
    for entry in ((obj.get("spec") or {}).get("devices") or {}).get("config") or ():
        config = _channel_config(entry.get("opaque") or {})
        if config is not None:
            return config.domain_id
    return None


def _channel_config(opaque: Mapping[str, Any]) -> ChannelConfig | None:
    if opaque.get("driver") != names.IMEX_DRIVER:
        return None
    try:
        config = decode_imex_config_leniently(opaque.get("parameters") or {})
    except Refused:
        return None
    return config if isinstance(config, ChannelConfig) else None


def _annotation(meta: Object, name: str) -> str | None:
    found: str | None = (meta.get("annotations") or {}).get(name)
    return found


def _read_mesh(meta: Object) -> DaemonMesh | None:
    said = _annotation(meta, names.MESH_ANNOTATION)
    try:
        mesh = None if said is None else msgspec.json.decode(said, type=DaemonMesh)
    except (ValueError, RecursionError):  # what does not decode, a lone surrogate, nesting without end
        return None
    if mesh is None:
        return None
    return DaemonMesh(mesh.complete, tuple(clean_line(one, LONGEST_ERROR) for one in mesh.missing))


def _has_ready_condition(status: Object) -> bool:
    conditions = status.get("conditions") or ()
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions
    )


# Writes to the objects of a ComputeDomain. Each fails when another writer was faster.


def delete_object(thing: OwnedObject, *, unchanged: bool = False) -> DeleteObject:
    """Ask for the deletion of what was seen; `unchanged`: only as it was seen."""
    version = thing.resource_version if unchanged else None
    return DeleteObject(
        kind=thing.kind, namespace=thing.namespace, name=thing.name, uid=thing.uid, resource_version=version
    )


def adopt_domain(domain: OwnedObject) -> PatchObject:
    """Put our finalizer on a ComputeDomain, and its own UID as a label, by which node plugins find it."""
    meta = {
        "resourceVersion": domain.resource_version,
        "finalizers": [
            *(finalizer for finalizer in domain.finalizers if finalizer != names.FINALIZER),
            names.FINALIZER,
        ],
        "labels": {names.COMPUTE_DOMAIN_LABEL: domain.uid},
    }
    return PatchObject(
        kind=domain.kind, namespace=domain.namespace, name=domain.name, patch={"metadata": meta}
    )


def release_finalizer(thing: OwnedObject) -> PatchObject:
    """Remove our finalizer, and nobody else's."""
    left = [finalizer for finalizer in thing.finalizers if finalizer != names.FINALIZER]
    # A merge patch replaces the whole list: with the resourceVersion it cannot undo another writer's change.
    meta = {"resourceVersion": thing.resource_version, "finalizers": left}
    return PatchObject(kind=thing.kind, namespace=thing.namespace, name=thing.name, patch={"metadata": meta})


def remove_label(thing: OwnedObject, label: str, value: str) -> PatchObject:
    """Take a label off an object if it still has this value: another writer may have set it since."""
    path = f"/metadata/labels/{label.replace('~', '~0').replace('/', '~1')}"
    test = {"op": "test", "path": path, "value": value}
    remove = {"op": "remove", "path": path}
    return PatchObject(kind=thing.kind, namespace=thing.namespace, name=thing.name, patch=(test, remove))


def release_node(node: OwnedObject) -> PatchObject:
    """Take the label of its ComputeDomain off a node that has not changed since it was seen."""
    meta = {"resourceVersion": node.resource_version, "labels": {names.COMPUTE_DOMAIN_LABEL: None}}
    return PatchObject(kind=node.kind, namespace=None, name=node.name, patch={"metadata": meta})


# One ComputeDomain and everything that belongs to it.


class CliqueRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A clique object with what is needed to change it."""

    thing: OwnedObject
    clique: ComputeDomainClique


class WarmDomain(msgspec.Struct, frozen=True, kw_only=True):
    """What the warm IMEX domain of the clique in which a shared claim was allocated looks like."""

    clique_id: str
    nodes: tuple[ComputeDomainNode, ...]
    pods: tuple[DaemonPod, ...] = ()


class DomainSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One ComputeDomain and what belongs to it. `domain` is None for things that outlived theirs."""

    uid: str
    now: str
    """RFC 3339, for the conditions."""
    domain: ComputeDomain | None
    domain_thing: OwnedObject | None
    held: tuple[OwnedObject, ...] = ()
    """Templates, DaemonSets and claims that carry this UID, in any namespace we look at; the certificates
    too where the ComputeDomain is going or gone."""
    home: str = DEFAULT_DAEMON_NAMESPACE
    """Namespace of its daemons."""
    named: tuple[OwnedObject, ...] = ()
    """Whatever has the names that this ComputeDomain's objects need."""
    nodes: tuple[OwnedObject, ...] = ()
    """Nodes labelled with this UID: a channel of it was prepared there."""
    unready: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Nodes with its label, a daemon or an entry of it that are not ready: since when, in seconds since the
    epoch; 0 for one that is gone."""
    clique_labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique that each node with its label or a channel of it is labelled with, where it is."""
    pods: tuple[DaemonPod, ...] = ()
    cliques: tuple[CliqueRecord, ...] = ()
    claims: tuple[ChannelClaim, ...] = ()
    """Claims that use it: for a warm ComputeDomain those of all jobs in its clique."""
    warm: WarmDomain | None = None
    mixed_nodes: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Cliques of this ComputeDomain whose nodes disagree about isolation, with what is said."""
    invalid: str = ""
    """Why the spec cannot be read; empty when it can."""
    failures: tuple[str, ...] = ()
    """What the API server did not accept of the last decision."""

    def held_of(self, kind: ResourceKind, target: str | None = None) -> tuple[OwnedObject, ...]:
        """Our objects of a kind, of one target where templates have two."""
        return tuple(
            one
            for one in self.held
            if one.kind == kind and (target is None or one.labels.get(names.TARGET_LABEL) == target)
        )

    @property
    def workload_templates(self) -> tuple[OwnedObject, ...]:
        """Templates for the user's pods; one, if all is well."""
        return self.held_of(RESOURCE_CLAIM_TEMPLATE, names.TARGET_WORKLOAD)

    @property
    def daemon_objects(self) -> tuple[OwnedObject, ...]:
        """The DaemonSet of the IMEX daemons and what they have, in the order in which it goes.

        Nothing but the DaemonSet leads to the certificates of a ComputeDomain that is gone, so it goes last.
        """
        return (
            *self.held_of(RESOURCE_CLAIM_TEMPLATE, names.TARGET_DAEMON),
            *self.held_of(SECRET),
            *self.held_of(NETWORK_POLICY),
            *self.held_of(DAEMON_SET),
        )

    @property
    def shared_claims(self) -> tuple[OwnedObject, ...]:
        """The claim of channel mode."""
        return self.held_of(RESOURCE_CLAIM)

    @property
    def channel_nodes(self) -> frozenset[str]:
        """Nodes on which a pod holds a channel of it, in domain mode: there a node's channels are its pool.

        Claims of other namespaces are never prepared.
        """
        space = None if self.domain is None else self.domain.namespace
        held = (claim for claim in self.claims if claim.thing.namespace == space and claim.reserved_for)
        pools = (claim.device[0] for claim in held if claim.device is not None)
        return frozenset(pool for pool in pools if names.clique_of_pool(pool) is None)
