"""API objects as values: type schemas, and the effect of create, update, bind and delete.

A `TypeSchema` holds the facts of a type beyond its JSON: whether it has a status subresource
and a generation, whether a replace needs a resourceVersion, which lists merge by which keys
(x-kubernetes-list-type and -list-map-keys), which maps are atomic, and which field selectors it
supports. `TYPE_SCHEMAS` lists the types that are served from the start, with the facts of Kubernetes
1.36 and of our CRDs.

The other functions follow k8s.io/apiserver's generic registry. Create sets identity, UID and time.
Update keeps the fields that only the server may change, checks preconditions, writes status and spec only
through their own endpoints, counts the generation up when more than metadata and status changed, and takes
no new finalizer on an object that is being deleted. Delete marks an object with a grace period. The object
goes when it has neither finalizers nor grace left. Only a running pod on a node has a grace period.

All functions return new values and change nothing in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind, has_pod_ended
from rackloom.lab.kube import refusals

Lists = dict[str, tuple[str, ...]]

METADATA_LISTS: Lists = {"metadata.ownerReferences": ("uid",), "metadata.finalizers": ()}
_CONDITION_LISTS: Lists = {"status.conditions": ("type",)}

_POD_FIELDS = frozenset(
    {
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.podIPs",
        "status.nominatedNodeName",
    }
)
_INVOLVED_OBJECT = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_EVENT_FIELDS = frozenset(
    {
        "reason",
        "reportingComponent",
        "source",
        "type",
        *(f"involvedObject.{field}" for field in _INVOLVED_OBJECT),
    }
)


_CONTAINER_LISTS: Lists = {
    "": ("name",),
    ".env": ("name",),
    ".ports": ("containerPort", "protocol"),
    ".volumeDevices": ("devicePath",),
    ".volumeMounts": ("mountPath",),
    ".resources.claims": ("name",),
}
_POD_SPEC_LISTS: Lists = {
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumes": ("name",),
} | {
    which + path: keys
    for which in ("containers", "initContainers", "ephemeralContainers")
    for path, keys in _CONTAINER_LISTS.items()
}


def _below(at: str, lists: Lists) -> Lists:
    return {f"{at}.{path}": keys for path, keys in lists.items()}


_TEMPLATE_LISTS = _below("spec.template", METADATA_LISTS) | _below("spec.template.spec", _POD_SPEC_LISTS)
_WEBHOOK_LISTS: Lists = {"webhooks": ("name",), "webhooks.matchConditions": ("name",)}


@dataclass(frozen=True, slots=True)
class TypeSchema:
    """One type. `generation`: counted up when more than metadata and status change.

    `status`: a subresource, which a write of the object leaves as it was. `blind_writes`: a replace without
    resourceVersion is taken. `lists` and `atoms`: merging lists, and maps that are owned as a whole.
    `selectable`: what field selectors may name beside the name and the namespace.
    """

    status: bool = False
    generation: bool = False
    blind_writes: bool = False
    status_on_create: bool = False
    lists: Lists = field(default_factory=dict)
    atoms: frozenset[str] = frozenset()
    selectable: frozenset[str] = frozenset()

    def merging(self, path: str) -> tuple[str, ...] | None:
        """The keys that a list merges by, () for a set, None for an atomic list."""
        return self.lists.get(path, METADATA_LISTS.get(path))


TYPE_SCHEMAS: Mapping[ResourceKind, TypeSchema] = {
    objects.POD: TypeSchema(
        status=True,
        generation=True,
        blind_writes=True,
        lists=_below("spec", _POD_SPEC_LISTS)
        | _CONDITION_LISTS
        | {"status.resourceClaimStatuses": ("name",), "status.podIPs": ("ip",)},
        atoms=frozenset({"spec.nodeSelector"}),
        selectable=_POD_FIELDS,
    ),
    objects.NODE: TypeSchema(
        status=True,
        blind_writes=True,
        status_on_create=True,
        lists=_CONDITION_LISTS | {"status.addresses": ("type",), "spec.podCIDRs": ()},
        selectable=frozenset({"spec.unschedulable"}),
    ),
    objects.NAMESPACE: TypeSchema(
        status=True, blind_writes=True, lists=_CONDITION_LISTS, selectable=frozenset({"status.phase"})
    ),
    objects.SECRET: TypeSchema(blind_writes=True, selectable=frozenset({"type"})),
    objects.CONFIG_MAP: TypeSchema(blind_writes=True),
    objects.SERVICE: TypeSchema(
        status=True,
        blind_writes=True,
        lists=_CONDITION_LISTS | {"spec.ports": ("port", "protocol")},
        selectable=frozenset({"spec.clusterIP", "spec.type"}),
    ),
    objects.SERVICE_ACCOUNT: TypeSchema(blind_writes=True, lists={"secrets": ("name",)}),
    objects.EVENT: TypeSchema(blind_writes=True, selectable=_EVENT_FIELDS),
    **dict.fromkeys(
        (objects.DAEMON_SET, objects.DEPLOYMENT),
        TypeSchema(
            status=True,
            generation=True,
            blind_writes=True,
            lists=_TEMPLATE_LISTS | _CONDITION_LISTS,
            atoms=frozenset({"spec.selector", "spec.template.spec.nodeSelector"}),
        ),
    ),
    objects.JOB: TypeSchema(
        status=True,
        generation=True,
        blind_writes=True,
        lists=_TEMPLATE_LISTS,
        atoms=frozenset({"spec.selector", "spec.template.spec.nodeSelector"}),
        selectable=frozenset({"status.successful"}),
    ),
    objects.ENDPOINT_SLICE: TypeSchema(generation=True, blind_writes=True),
    objects.NETWORK_POLICY: TypeSchema(
        generation=True, blind_writes=True, atoms=frozenset({"spec.podSelector"})
    ),
    objects.LEASE: TypeSchema(),
    objects.RESOURCE_SLICE: TypeSchema(
        generation=True, blind_writes=True, selectable=frozenset({"spec.nodeName", "spec.driver"})
    ),
    objects.RESOURCE_CLAIM: TypeSchema(
        status=True,
        blind_writes=True,
        lists={"status.reservedFor": ("uid",), "status.devices": ("driver", "device", "pool", "shareID")},
        atoms=frozenset({"status.allocation.nodeSelector"}),
    ),
    objects.RESOURCE_CLAIM_TEMPLATE: TypeSchema(blind_writes=True, lists=_below("spec", METADATA_LISTS)),
    objects.DEVICE_CLASS: TypeSchema(generation=True, blind_writes=True),
    objects.CRD: TypeSchema(status=True, generation=True, lists=_CONDITION_LISTS),
    objects.MUTATING_WEBHOOK: TypeSchema(generation=True, blind_writes=True, lists=_WEBHOOK_LISTS),
    objects.VALIDATING_WEBHOOK: TypeSchema(generation=True, blind_writes=True, lists=_WEBHOOK_LISTS),
    objects.COMPUTE_DOMAIN: TypeSchema(
        status=True, generation=True, lists=_CONDITION_LISTS | {"status.nodes": ("name",)}
    ),
    objects.GANG_PLAN: TypeSchema(status=True, generation=True, lists=_CONDITION_LISTS),
    objects.COMPUTE_DOMAIN_CLIQUE: TypeSchema(generation=True, lists={"daemons": ("nodeName",)}),
}
"""Every type that a fake server serves from the start."""


# The types of metadata's fields (k8s.io/apimachinery, ObjectMeta).


class _OwnerReference(msgspec.Struct, rename="camel"):
    uid: str = ""
    kind: str = ""
    name: str = ""
    api_version: str = ""


class _ObjectMeta(msgspec.Struct, rename="camel"):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None
    owner_references: list[_OwnerReference] | None = None


def check_metadata(kind: ResourceKind, obj: Any) -> None:
    """Raise `Rejected`: 400 for a field of a wrong type, 422 for an incomplete owner reference."""
    if not isinstance(obj, dict):
        raise refusals.bad_request(f"{kind.kind} is not an object but: {type(obj).__name__}")
    try:
        metadata = msgspec.convert(obj.get("metadata") or {}, _ObjectMeta)
    except msgspec.ValidationError as error:
        raise refusals.bad_request(f"{kind.kind} in version {kind.version}, metadata: {error}") from error
    missing = [
        f'metadata.ownerReferences.{field}: Invalid value: "": must not be empty'
        for owner in metadata.owner_references or ()
        for field, value in msgspec.to_builtins(owner).items()
        if not value
    ]
    if missing:
        raise refusals.invalid(kind, metadata.name or "", *missing)


# Create, update and delete.


FOREGROUND_FINALIZER = "foregroundDeletion"
ORPHAN_FINALIZER = "orphan"
NAMESPACE_FINALIZER = "kubernetes"
CRD_FINALIZER = "customresourcecleanup.apiextensions.k8s.io"
"""Finalizers of the server's own controllers (on a real one, a namespace has its in spec.finalizers)."""
_PROPAGATION = {"Foreground": FOREGROUND_FINALIZER, "Orphan": ORPHAN_FINALIZER}
_IMMUTABLE_METADATA = (
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
_SERVER_METADATA = (*_IMMUTABLE_METADATA, "managedFields", "selfLink")
_SERVER_SET_ON_CREATE = (*_SERVER_METADATA, "namespace")
POD_GRACE_SECONDS = 30


def new_object(
    kind: ResourceKind,
    obj: Object,
    namespace: str | None,
    schema: TypeSchema,
    *,
    uid: str,
    time: str,
    suffix: str,
) -> Object:
    """The object as it is first stored, without resourceVersion and managedFields.

    The server adds its `uid`, the `time` (RFC 3339), and the `suffix` of a generated name.
    """
    check_metadata(kind, obj)
    given: dict[str, Any] = dict(obj.get("metadata") or {})
    if given.get("resourceVersion"):
        message = "resourceVersion should not be set on objects to be created"
        raise refusals.bad_request(message)
    name = given.get("name") or (given["generateName"] + suffix if given.get("generateName") else "")
    if not name:
        raise refusals.invalid(kind, "", "metadata.name: Required value: name or generateName is required")
    identity = {"name": name, "uid": uid, "creationTimestamp": time}
    if kind.namespaced:
        identity["namespace"] = namespace
    # A client cannot choose fields that the server sets: they are dropped, and no error is given.
    metadata = {key: value for key, value in given.items() if key not in _SERVER_SET_ON_CREATE} | identity
    if schema.generation:
        metadata["generation"] = 1
    body = {key: value for key, value in obj.items() if key != "status" or keeps_status(schema)}
    return {**body, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}


def keeps_status(schema: TypeSchema) -> bool:
    """Whether a create stores the status it is given."""
    return not schema.status or schema.status_on_create


def updated_object(
    kind: ResourceKind, old: Object, new: Object, schema: TypeSchema, subresource: str
) -> Object:
    """`new` as it may replace `old` through this subresource ("" is the object itself)."""
    check_metadata(kind, new)
    _check_identity(kind, old, new)
    new = _with_untouched_part(old, new, schema, subresource)
    metadata = dict(new["metadata"])
    for key in _IMMUTABLE_METADATA:
        metadata.pop(key, None)
        if key in old["metadata"]:
            metadata[key] = old["metadata"][key]
    metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
    new = {**new, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    _check_finalizers(kind, old, new)
    if schema.generation and _spec_part(old, schema) != _spec_part(new, schema):
        metadata["generation"] = old["metadata"].get("generation", 0) + 1
    return new


def _check_identity(kind: ResourceKind, old: Object, new: Object) -> None:
    have, given = old["metadata"], new.get("metadata") or {}
    if given.get("uid", have["uid"]) != have["uid"]:
        raise refusals.uid_conflict(kind, have["name"], given["uid"], have["uid"])
    for key in ("name", "namespace"):
        if (given.get(key) or None) != have.get(key):
            problem = f'metadata.{key}: Invalid value: "{given.get(key, "")}": field is immutable'
            raise refusals.invalid(kind, have["name"], problem)
    version = given.get("resourceVersion")
    if version and version != have["resourceVersion"]:
        raise refusals.stale_version(kind, have["name"])


def _with_untouched_part(old: Object, new: Object, schema: TypeSchema, subresource: str) -> Object:
    """A write of the object leaves its status as it is, and a write of the status leaves the rest."""
    if not schema.status:
        return new
    if subresource == "status":
        metadata = {**old["metadata"], "managedFields": new["metadata"].get("managedFields", [])}
        return _with_status({**old, "metadata": metadata}, new)
    return _with_status(new, old)


def _with_status(obj: Object, source: Object) -> Object:
    bare = {key: value for key, value in obj.items() if key != "status"}
    return bare | {"status": source["status"]} if "status" in source else bare


def _check_finalizers(kind: ResourceKind, old: Object, new: Object) -> None:
    if "deletionTimestamp" not in old["metadata"]:
        return
    added = [finalizer for finalizer in finalizers_of(new) if finalizer not in finalizers_of(old)]
    if added:
        why = "no new finalizers can be added if the object is being deleted, found new finalizers"
        names = ", ".join(f'"{finalizer}"' for finalizer in added)
        problem = f"metadata.finalizers: Forbidden: {why} []string{{{names}}}"
        raise refusals.invalid(kind, old["metadata"]["name"], problem)


def _spec_part(obj: Object, schema: TypeSchema) -> Object:
    apart = ("metadata", "apiVersion", "kind", *(("status",) if schema.status else ()))
    return {key: value for key, value in obj.items() if key not in apart}


def finalizers_of(obj: Object) -> list[str]:
    """The finalizers of an object: it is removed only when none is left."""
    return list(obj["metadata"].get("finalizers") or ())


def owner_references(obj: Object) -> list[Mapping[str, Any]]:
    """The ownerReferences of an object."""
    return list(obj["metadata"].get("ownerReferences") or ())


def may_be_removed(obj: Object) -> bool:
    """Whether an object that is being deleted may go now: no finalizer and no grace is left."""
    metadata = obj["metadata"]
    is_deleted = "deletionTimestamp" in metadata
    return is_deleted and not finalizers_of(obj) and not metadata.get("deletionGracePeriodSeconds")


def marked_for_deletion(obj: Object, ending: str, grace: int, propagation: str | None) -> Object:
    """`obj` after a delete. Its `grace` (seconds) ends at `ending` (RFC 3339)."""
    metadata = dict(obj["metadata"])
    if "deletionTimestamp" not in metadata and "generation" in metadata:
        metadata["generation"] += 1
    if grace < metadata.get("deletionGracePeriodSeconds", grace + 1):
        metadata |= {"deletionTimestamp": ending, "deletionGracePeriodSeconds": grace}
    marked = {**obj, "metadata": metadata}
    if propagation is None:
        return marked
    for finalizer in _PROPAGATION.values():
        marked = without_finalizer(marked, finalizer)
    wanted = _PROPAGATION.get(propagation)
    return with_finalizer(marked, wanted) if wanted else marked


def with_namespace_phase(namespace: Object) -> Object:
    """The namespace with its phase, Active or Terminating."""
    phase = "Terminating" if "deletionTimestamp" in namespace["metadata"] else "Active"
    return {**namespace, "status": {**(namespace.get("status") or {}), "phase": phase}}


def with_finalizer(obj: Object, finalizer: str) -> Object:
    """`obj` with a finalizer more."""
    metadata = obj["metadata"] | {"finalizers": [*finalizers_of(obj), finalizer]}
    return {**obj, "metadata": metadata}


def without_finalizer(obj: Object, finalizer: str) -> Object:
    """`obj` without a finalizer."""
    kept = [held for held in finalizers_of(obj) if held != finalizer]
    metadata = {key: value for key, value in obj["metadata"].items() if key != "finalizers"}
    return {**obj, "metadata": metadata | {"finalizers": kept} if kept else metadata}


def grace_seconds_of(kind: ResourceKind, obj: Object, asked: int | None) -> int:
    """Seconds until the object may go: only a pod that is on a node and has not ended gets any."""
    if kind != objects.POD:
        return 0
    if has_pod_ended(obj) or not obj.get("spec", {}).get("nodeName"):
        return 0
    default = obj["spec"].get("terminationGracePeriodSeconds", POD_GRACE_SECONDS)
    return int(default if asked is None else asked)


# Binding a pod to its node (pods/binding).


BINDING_SUBRESOURCE = "binding"
_POD_SCHEDULED = "PodScheduled"


def bound_pod(pod: Object, node: str, time: str) -> Object:
    """The pod on `node`, bound at `time` (RFC 3339). Raises `Conflict` where it cannot be."""
    metadata, spec = pod["metadata"], pod["spec"]
    if "deletionTimestamp" in metadata:
        why = f"pod {metadata['name']} is being deleted, cannot be assigned to a host"
        raise refusals.binding_conflict(metadata["name"], why)
    if spec.get("nodeName"):
        why = f'pod {metadata["name"]} is already assigned to node "{spec["nodeName"]}"'
        raise refusals.binding_conflict(metadata["name"], why)
    if spec.get("schedulingGates"):
        raise refusals.binding_conflict(
            metadata["name"], f"pod {metadata['name']} has non-empty .spec.schedulingGates"
        )
    status = pod.get("status") or {}
    others = [
        condition for condition in status.get("conditions") or () if condition["type"] != _POD_SCHEDULED
    ]
    scheduled = {"type": _POD_SCHEDULED, "status": "True", "lastTransitionTime": time}
    return {
        **pod,
        "spec": {**spec, "nodeName": node},
        "status": {**status, "conditions": [*others, scheduled]},
    }
