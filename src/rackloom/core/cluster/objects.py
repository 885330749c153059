"""Kubernetes objects as plain JSON: their kinds, the facts that each of them has, and writes as values.

An object is a plain mapping, exactly as the API server sends it, so that fields which this code does
not know survive a read and a write. Outside `core.cluster` it is a handle: it is passed on, and functions
answer questions about it. So each question has one answer, and a later format changes one place. Decisions
about pods and nodes take the values that `pods.read_pod` and `nodes.read_node` make of them.

An object of the API server has a name, a UID and a version. An object of a file may lack each of them, and an
absent text is "". A list or a map may be absent or null, which means empty. Times follow the Kubernetes API:
metav1.Time has whole seconds, metav1.MicroTime has microseconds, both in UTC. An index function gives the
values under which a cache files an object, so that lookups need no scan.

A decision returns writes as immutable values, and an executor sends them. A delete names a UID, so it never
reaches another object that took the same name. A change carries its base: a merge patch holds a
resourceVersion if it replaces a list, and a JSON patch starts with `test` operations. It fails when another
writer was faster, and the next decision starts from the new state.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import readable

Object = dict[str, Any]
"""One Kubernetes object as JSON. A value that nests too deeply to be read is replaced (see
`claim.kube.decoding`)."""
JsonMapping = Mapping[str, Any]
"""An object that is only read, or a part of one."""


@dataclass(frozen=True, slots=True)
class ResourceKind:
    """A resource type: where it is served and how its objects name themselves."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects: `v1` for the core group, else `group/version`."""
        return f"{self.group}/{self.version}" if self.group else self.version


# The resource types that Rackloom reads or writes.


POD = ResourceKind("", "v1", "Pod", "pods", namespaced=True)
NODE = ResourceKind("", "v1", "Node", "nodes", namespaced=False)
NAMESPACE = ResourceKind("", "v1", "Namespace", "namespaces", namespaced=False)
SECRET = ResourceKind("", "v1", "Secret", "secrets", namespaced=True)
CONFIG_MAP = ResourceKind("", "v1", "ConfigMap", "configmaps", namespaced=True)
SERVICE = ResourceKind("", "v1", "Service", "services", namespaced=True)
SERVICE_ACCOUNT = ResourceKind("", "v1", "ServiceAccount", "serviceaccounts", namespaced=True)
EVENT = ResourceKind("", "v1", "Event", "events", namespaced=True)
DEPLOYMENT = ResourceKind("apps", "v1", "Deployment", "deployments", namespaced=True)
DAEMON_SET = ResourceKind("apps", "v1", "DaemonSet", "daemonsets", namespaced=True)
JOB = ResourceKind("batch", "v1", "Job", "jobs", namespaced=True)
ENDPOINT_SLICE = ResourceKind("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices", namespaced=True)
NETWORK_POLICY = ResourceKind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", namespaced=True)
LEASE = ResourceKind("coordination.k8s.io", "v1", "Lease", "leases", namespaced=True)
RESOURCE_SLICE = ResourceKind("resource.k8s.io", "v1", "ResourceSlice", "resourceslices", namespaced=False)
RESOURCE_CLAIM = ResourceKind("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims", namespaced=True)
RESOURCE_CLAIM_TEMPLATE = ResourceKind(
    "resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates", namespaced=True
)
DEVICE_CLASS = ResourceKind("resource.k8s.io", "v1", "DeviceClass", "deviceclasses", namespaced=False)
DEVICE_TAINT_RULES = tuple(
    ResourceKind("resource.k8s.io", version, "DeviceTaintRule", "devicetaintrules", namespaced=False)
    for version in ("v1", "v1beta2", "v1alpha3")
)
"""A server serves them in some of these versions, or not at all: 1.37 in the first, 1.36 in the second if
that is switched on. Each version that it serves has all of its rules."""
CRD = ResourceKind(
    "apiextensions.k8s.io",
    "v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    namespaced=False,
)
MUTATING_WEBHOOK = ResourceKind(
    "admissionregistration.k8s.io",
    "v1",
    "MutatingWebhookConfiguration",
    "mutatingwebhookconfigurations",
    namespaced=False,
)
VALIDATING_WEBHOOK = ResourceKind(
    "admissionregistration.k8s.io",
    "v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    namespaced=False,
)
COMPUTE_DOMAIN = ResourceKind(
    "resource.nvidia.com", "v1beta1", "ComputeDomain", "computedomains", namespaced=True
)
COMPUTE_DOMAIN_CLIQUE = ResourceKind(
    "resource.nvidia.com", "v1beta1", "ComputeDomainClique", "computedomaincliques", namespaced=True
)
GANG_PLAN = ResourceKind("rackloom.dev", "v1alpha1", "GangPlan", "gangplans", namespaced=True)
WORKLOAD = ResourceKind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads", namespaced=True)
ADMISSION_CHECK = ResourceKind(
    "kueue.x-k8s.io", "v1beta2", "AdmissionCheck", "admissionchecks", namespaced=False
)
RESOURCE_FLAVOR = ResourceKind(
    "kueue.x-k8s.io", "v1beta2", "ResourceFlavor", "resourceflavors", namespaced=False
)
"""Kueue's: served where it is installed."""


def list_names(names: Collection[str], most: int = 3) -> str:
    """The first few, and how many more."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


# Times as the Kubernetes API writes them.


def metav1_time(seconds: float) -> str:
    """metav1.Time of seconds since 1970: whole seconds."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def epoch_seconds(time: str) -> float | None:
    """Seconds since 1970 of an RFC 3339 time, or None for anything else."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None


def metav1_micro_time(seconds: float) -> str:
    """metav1.MicroTime of seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# The state of pods and claims.


def pod_phase(pod: JsonMapping) -> str:
    """Its phase, or Pending if no kubelet has written one."""
    return str((pod.get("status") or {}).get("phase", "Pending"))


ENDED_PHASES = ("Succeeded", "Failed")
"""Of a pod that runs no more and never will."""


def has_pod_ended(pod: JsonMapping) -> bool:
    """Whether it runs no more and never will."""
    return pod_phase(pod) in ENDED_PHASES


def is_pod_ready(pod: JsonMapping) -> bool:
    """Whether its Ready condition holds."""
    return has_condition(pod, "Ready")


def has_condition(obj: JsonMapping, *types: str) -> bool:
    """Whether the status has a condition of one of these types that is True."""
    written = _written_conditions(obj)
    return any(entry.get("type") in types and entry.get("status") == "True" for entry in written)


def pod_claim_names(pod: JsonMapping) -> Iterator[str]:
    """The ResourceClaims of a pod, in its namespace, as far as they have been made.

    A claim that is made from a template is named in the pod's status, and so is the one that the scheduler
    makes for extended resources (KEP-5004). A template without requests needs none.
    """
    yield from named_pod_claims(pod).values()
    status = pod.get("status") or {}
    extended = (status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName")
    if extended:
        yield extended


def named_pod_claims(pod: JsonMapping) -> dict[str, str]:
    """The ResourceClaims of a pod by their names in its spec, as far as they have been made."""
    created = (pod.get("status") or {}).get("resourceClaimStatuses") or ()
    written = (*((pod.get("spec") or {}).get("resourceClaims") or ()), *created)
    return {entry["name"]: name for entry in written if (name := entry.get("resourceClaimName"))}


# The state of a node.


def not_ready_since(node: JsonMapping) -> float | None:
    """Seconds since the epoch, or None while a node is ready.

    A node without the condition has not been ready since its creation.
    """
    ready = condition_of(node, "Ready") or Condition(type="Ready")
    if ready.status == "True":
        return None
    return ready.since or created_at(node) or 0.0


# Index functions for caches.


Indexer = Callable[[Object], Iterable[str]]
"""The values under which an object is found."""


def index_by_label(label: str) -> Indexer:
    """An index of the values of a label."""

    def values(obj: Object) -> Iterable[str]:
        found = (obj["metadata"].get("labels") or {}).get(label)
        return () if found is None else (found,)

    return values


def index_by_uid(obj: Object) -> Iterable[str]:
    """An index of the object's own uid."""
    return (obj["metadata"]["uid"],)


# Writes to the API server, as values. Each is safe to send twice.


PatchOperation = dict[str, Any]
"""One operation of a JSON patch (RFC 6902)."""


def add_operation(path: str, value: Any) -> PatchOperation:
    """The operation that adds a value."""
    return {"op": "add", "path": path, "value": value}


def json_pointer(path: str, key: str) -> str:
    """The pointer to an entry of a map at a path. RFC 6901 writes "~" as "~0" and "/" as "~1"."""
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def add_entries(
    path: str, present: Mapping[str, str] | None, entries: Mapping[str, str]
) -> tuple[PatchOperation, ...]:
    """The operations that add labels or annotations to those that are `present`.

    An `add` below a missing mapping fails, so the mapping is then added as a whole.
    """
    if not present:
        return (add_operation(path, dict(entries)),) if entries else ()
    return tuple(add_operation(json_pointer(path, key), value) for key, value in entries.items())


class CreateObject(msgspec.Struct, frozen=True, kw_only=True):
    """Create an object. If it exists already, the cache was old."""

    kind: ResourceKind
    obj: Object

    @property
    def what(self) -> str:
        """For logs and messages."""
        meta = self.obj["metadata"]
        return f"create {object_title(self.kind, meta.get('namespace'), meta['name'])}"


class PatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """Change an object: a mapping is a merge patch, a tuple of operations a JSON patch."""

    kind: ResourceKind
    namespace: str | None
    name: str
    patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...]
    subresource: str = ""

    @property
    def what(self) -> str:
        """For logs and messages."""
        return f"change {object_title(self.kind, self.namespace, self.name)}"


class DeleteObject(msgspec.Struct, frozen=True, kw_only=True):
    """Request the deletion of one object, not of another that took its name."""

    kind: ResourceKind
    namespace: str | None
    name: str
    uid: str
    resource_version: str | None = None
    """Delete it only in this version, or in any if None."""
    grace_seconds: int | None = None
    """0 removes a pod on a kubelet that does not answer. None uses the grace period of the object."""

    @property
    def what(self) -> str:
        """For logs and messages."""
        return f"delete {object_title(self.kind, self.namespace, self.name)}"


ObjectWrite = CreateObject | PatchObject | DeleteObject


def object_title(kind: ResourceKind, namespace: str | None, name: str) -> str:
    """`Kind namespace/name`, for logs and messages."""
    return f"{kind.kind} {namespace}/{name}" if namespace else f"{kind.kind} {name}"


class EventNotice(msgspec.Struct, frozen=True):
    """An event to record."""

    warning: bool
    reason: str
    message: str


# The facts that every object has.


class OwnerReference(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """An owner reference."""

    kind: str = ""
    api_version: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None

    def is_of(self, kind: ResourceKind) -> bool:
        """Whether the owner is of this kind and API version."""
        return (self.api_version, self.kind) == (kind.api_version, kind.kind)


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A condition in the usual form of Kubernetes. `status` is True, False or Unknown."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""
    """RFC 3339. Empty until it is written."""

    @property
    def since(self) -> float | None:
        """The time of its last change, in seconds since 1970, or None if it names none."""
        return epoch_seconds(self.last_transition_time)


def name_of(obj: JsonMapping) -> str:
    """The name of an object."""
    return str(_metadata(obj).get("name") or "")


def object_name(obj: JsonMapping) -> Any:
    """The name of an object of a file, or the generateName, with which the API server begins one."""
    return _metadata(obj).get("name") or _metadata(obj).get("generateName") or ""


def namespace_of(obj: JsonMapping) -> str | None:
    """The namespace of an object, or None for one of the whole cluster."""
    return _metadata(obj).get("namespace") or None


def full_name(obj: JsonMapping) -> str:
    """`namespace/name`, or the name alone for an object of the whole cluster."""
    namespace = namespace_of(obj)
    return f"{namespace}/{name_of(obj)}" if namespace else name_of(obj)


def title_of(kind: ResourceKind, obj: JsonMapping) -> str:
    """`Kind namespace/name`, for messages."""
    return object_title(kind, namespace_of(obj), name_of(obj))


def name_in_file(obj: JsonMapping, key: str = "name") -> Any:
    """The name of an object of a file, or its generateName by that key, in any shape."""
    metadata = obj.get("metadata")
    return metadata.get(key) if isinstance(metadata, Mapping) else None


def title_in_file(obj: JsonMapping) -> str:
    """`Kind name` of an object of a file, in any shape. It may have only a generateName."""
    names = (name_in_file(obj, key) for key in ("name", "generateName"))
    name = next((name for name in names if isinstance(name, str) and name), "(unnamed)")
    return f"{obj.get('kind')} {name}"


def uid_of(obj: JsonMapping) -> str:
    """The UID of an object. No other object ever has it, not even one of the same name."""
    return str(_metadata(obj).get("uid") or "")


def version_of(obj: JsonMapping) -> str:
    """The `resourceVersion`: another value means another state."""
    return str(_metadata(obj).get("resourceVersion") or "")


def generation_of(obj: JsonMapping) -> int:
    """The generation: the API server counts it up when the spec changes."""
    return int(_metadata(obj).get("generation") or 0)


def identity_of(obj: JsonMapping, *fields: str) -> dict[str, str]:
    """Those of these fields of the metadata that it has. A write names an object or its version by them."""
    metadata = _metadata(obj)
    return {field: metadata[field] for field in fields if field in metadata}


def labels_of(obj: JsonMapping) -> Mapping[str, str]:
    """The labels of an object."""
    return _metadata(obj).get("labels") or {}


def annotations_of(obj: JsonMapping) -> Mapping[str, str]:
    """The annotations of an object."""
    return _metadata(obj).get("annotations") or {}


def finalizers_of(obj: JsonMapping) -> Sequence[str]:
    """The finalizers of an object. It stays until all of them are gone."""
    return _metadata(obj).get("finalizers") or ()


def owners_of(obj: JsonMapping) -> tuple[OwnerReference, ...]:
    """The owners of an object."""
    written = _metadata(obj).get("ownerReferences")
    return msgspec.convert(written, tuple[OwnerReference, ...]) if written else ()


def controller_of(obj: JsonMapping) -> OwnerReference | None:
    """The owner that made an object, or None if a person made it."""
    return next((owner for owner in owners_of(obj) if owner.controller), None)


def created_at(obj: JsonMapping) -> float | None:
    """When an object was created, in seconds since 1970. An object of a file gives None."""
    return epoch_seconds(_metadata(obj).get("creationTimestamp") or "")


def is_being_deleted(obj: JsonMapping) -> bool:
    """Whether the deletion of an object was requested. It is there until its finalizers are gone."""
    return bool(_metadata(obj).get("deletionTimestamp"))


def deletion_time(obj: JsonMapping) -> float | None:
    """When an object that is being deleted should be gone, in seconds since 1970, or None if it is not."""
    return epoch_seconds(_metadata(obj).get("deletionTimestamp") or "")


def data_of(obj: JsonMapping) -> Mapping[str, str]:
    """The data of a ConfigMap or a Secret. The values of a Secret are in base64."""
    return obj.get("data") or {}


def webhook_authorities(configuration: JsonMapping) -> Iterator[tuple[str, str]]:
    """The webhooks of a configuration in order: their names, and the certificates that are trusted there."""
    for webhook in configuration.get("webhooks") or ():
        yield webhook["name"], webhook["clientConfig"].get("caBundle") or ""


def has_same_spec(first: JsonMapping, second: JsonMapping) -> bool:
    """Whether two states of an object have the same spec."""
    return bool(first.get("spec") == second.get("spec"))


def field_managers(obj: JsonMapping, label: str | None = None) -> Iterator[str]:
    """The programs that wrote fields of an object, or one label of it."""
    return (manager for manager, _ in field_writes(obj, label))


def field_writes(obj: JsonMapping, label: str | None = None) -> Iterator[tuple[str, float | None]]:
    """The same programs, and when each last changed any of its fields, in seconds since 1970."""
    for entry in _metadata(obj).get("managedFields") or ():
        fields = (entry.get("fieldsV1") or {}).get("f:metadata") or {}
        if label is None or f"f:{label}" in (fields.get("f:labels") or {}):
            yield entry.get("manager") or "", epoch_seconds(entry.get("time") or "")


def conditions_of(obj: JsonMapping) -> tuple[Condition, ...]:
    """The conditions of an object, without those that another program has shaped in its own way."""
    return tuple(readable(_written_conditions(obj), Condition))


def condition_of(obj: JsonMapping, type_: str) -> Condition | None:
    """The condition of a type."""
    written = (entry for entry in _written_conditions(obj) if entry.get("type") == type_)
    return next(readable(written, Condition), None)


def dated_condition(new: Condition, old: Condition | None, now: str, generation: int = 0) -> Condition:
    """A condition as it is to be written in place of an old one. `now` is RFC 3339.

    The time is that of the last change of its status.
    """
    since = old.last_transition_time if old is not None and old.status == new.status else ""
    return replace(new, last_transition_time=since or now, observed_generation=generation)


def changed_conditions(obj: JsonMapping, changed: Sequence[Condition], now: str) -> list[JsonMapping]:
    """All conditions of an object as JSON, with these in place of those of their types. `now` is RFC 3339."""
    types, generation = {condition.type for condition in changed}, generation_of(obj)
    kept = [entry for entry in _written_conditions(obj) if entry.get("type") not in types]
    dated = (dated_condition(new, condition_of(obj, new.type), now, generation) for new in changed)
    return [*kept, *map(msgspec.to_builtins, dated)]


def _written_conditions(obj: JsonMapping) -> Sequence[JsonMapping]:
    return (obj.get("status") or {}).get("conditions") or ()


def _metadata(obj: JsonMapping) -> JsonMapping:
    return obj.get("metadata") or {}
