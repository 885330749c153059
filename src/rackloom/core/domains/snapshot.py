"""The snapshot that a decision about one ComputeDomain is based on, and writes to the objects in it.

`OwnedObject` is any object as far as ownership and deletion are concerned: labels, finalizers,
versions. Ownership is a label with the UID of the ComputeDomain plus a finalizer, not an owner
reference, because owner references cannot cross namespaces. A `DomainSnapshot` joins the objects of one
UID. It may describe the rest of a ComputeDomain that is gone.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ChannelClaim,
    ComputeDomain,
    ComputeDomainClique,
    ComputeDomainNode,
    DaemonPod,
)
from rackloom.core.cluster.objects import (
    DAEMON_SET,
    NETWORK_POLICY,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    SECRET,
    DeleteObject,
    Object,
    PatchObject,
    ResourceKind,
    finalizers_of,
    is_being_deleted,
    json_pointer,
    labels_of,
    name_of,
    namespace_of,
    object_title,
    uid_of,
    version_of,
)
from rackloom.core.domains.quota import DomainQuota
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE, ControllerSettings


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
        """UID of the ComputeDomain that it belongs to. Empty for a foreign object."""
        return self.labels.get(names.COMPUTE_DOMAIN_LABEL, "")

    @property
    def title(self) -> str:
        """`Kind namespace/name`, for messages."""
        return object_title(self.kind, self.namespace, self.name)


def owned_object(kind: ResourceKind, obj: Object) -> OwnedObject:
    """The metadata of an object as a value."""
    return OwnedObject(
        kind=kind,
        namespace=namespace_of(obj),
        name=name_of(obj),
        uid=uid_of(obj),
        resource_version=version_of(obj),
        labels=labels_of(obj),
        finalizers=tuple(finalizers_of(obj)),
        deleting=is_being_deleted(obj),
    )


# Writes to the objects of a ComputeDomain. Each fails when another writer was faster.


def patch_object(owned: OwnedObject, patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...]) -> PatchObject:
    """Patch the object that was read: a merge patch, or JSON patch operations."""
    return PatchObject(kind=owned.kind, namespace=owned.namespace, name=owned.name, patch=patch)


def delete_object(owned: OwnedObject, *, unchanged: bool = False) -> DeleteObject:
    """Delete the object that was read. With `unchanged`, only if no field has changed since."""
    version = owned.resource_version if unchanged else None
    return DeleteObject(
        kind=owned.kind, namespace=owned.namespace, name=owned.name, uid=owned.uid, resource_version=version
    )


def adopt_domain(domain: OwnedObject) -> PatchObject:
    """Add our finalizer to a ComputeDomain, and its UID as a label by which node plugins find it."""
    meta = {
        "resourceVersion": domain.resource_version,
        "finalizers": [*_other_finalizers(domain), names.FINALIZER],
        "labels": {names.COMPUTE_DOMAIN_LABEL: domain.uid},
    }
    return patch_object(domain, {"metadata": meta})


def release_finalizer(owned: OwnedObject) -> PatchObject:
    """Remove our finalizer and no other."""
    # A merge patch replaces the whole list: with the resourceVersion it cannot undo another writer's change.
    meta = {"resourceVersion": owned.resource_version, "finalizers": _other_finalizers(owned)}
    return patch_object(owned, {"metadata": meta})


def _other_finalizers(owned: OwnedObject) -> list[str]:
    return [finalizer for finalizer in owned.finalizers if finalizer != names.FINALIZER]


def remove_label(owned: OwnedObject, label: str, value: str) -> PatchObject:
    """Remove a label if it still has this value: another writer may have set it since."""
    path = json_pointer("/metadata/labels", label)
    test = {"op": "test", "path": path, "value": value}
    remove = {"op": "remove", "path": path}
    return patch_object(owned, (test, remove))


def release_node(node: OwnedObject) -> PatchObject:
    """Remove the label of its ComputeDomain from a node, unless the node has changed since."""
    meta = {"resourceVersion": node.resource_version, "labels": {names.COMPUTE_DOMAIN_LABEL: None}}
    return patch_object(node, {"metadata": meta})


# One ComputeDomain and everything that belongs to it.


class CliqueRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A clique object, with the fields that are needed to change it."""

    owned: OwnedObject
    clique: ComputeDomainClique


class WarmDomain(msgspec.Struct, frozen=True, kw_only=True):
    """The warm IMEX domain of the clique in which a shared claim was allocated."""

    clique_id: str
    nodes: tuple[ComputeDomainNode, ...]
    pods: tuple[DaemonPod, ...] = ()


class DomainSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One ComputeDomain and its objects. `domain` is None for objects that outlived it."""

    uid: str
    now: str
    """RFC 3339, for the conditions."""
    settings: ControllerSettings
    domain: ComputeDomain | None
    domain_object: OwnedObject | None
    held: tuple[OwnedObject, ...] = ()
    """Templates, DaemonSets and claims that carry this UID, in any namespace we look at. If the ComputeDomain
    is going or gone, the certificates, too."""
    home: str = DEFAULT_DAEMON_NAMESPACE
    """Namespace of its daemons."""
    named: tuple[OwnedObject, ...] = ()
    """All objects, also foreign ones, under the names that this ComputeDomain's objects need."""
    nodes: tuple[OwnedObject, ...] = ()
    """Nodes labelled with this UID: a channel of it was prepared there."""
    unready: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Nodes with its label, a daemon or an entry of it that are not ready: since when, in seconds since the
    epoch, or 0 for one that is gone."""
    clique_labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique label of each node with its label or a channel of it, if the node has one."""
    pods: tuple[DaemonPod, ...] = ()
    cliques: tuple[CliqueRecord, ...] = ()
    claims: tuple[ChannelClaim, ...] = ()
    """Claims that use it: for a warm ComputeDomain those of all jobs in its clique."""
    warm: WarmDomain | None = None
    mixed_nodes: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Cliques of this ComputeDomain whose nodes disagree about isolation, with the values found."""
    quota: DomainQuota = DomainQuota()
    invalid: str = ""
    """The reason why the spec cannot be read. Empty if it can."""
    failures: tuple[str, ...] = ()
    """Writes of the last decision that the API server rejected."""

    def held_of(self, kind: ResourceKind, target: str | None = None) -> tuple[OwnedObject, ...]:
        """Our objects of a kind, of one target where templates have two."""
        return tuple(
            owned
            for owned in self.held
            if owned.kind == kind and (target is None or owned.labels.get(names.TARGET_LABEL) == target)
        )

    @property
    def workload_templates(self) -> tuple[OwnedObject, ...]:
        """Templates for the user's pods: one, if all is well."""
        return self.held_of(RESOURCE_CLAIM_TEMPLATE, names.TARGET_WORKLOAD)

    @property
    def daemon_objects(self) -> tuple[OwnedObject, ...]:
        """The DaemonSet of the IMEX daemons and its objects, in the order of their removal.

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
        held = (claim for claim in self.claims if claim.namespace == space and claim.reserved_for)
        pools = (claim.device[0] for claim in held if claim.device is not None)
        return frozenset(pool for pool in pools if names.clique_of_pool(pool) is None)
