"""The fields of objects that are read: a service that follows a large cluster keeps only these.

Images of nodes, environments of pods and field ownership are most of the data of a cluster. `project_object`
keeps the fields that a snapshot shows, `project_for_control` those that the controllers decide from.
Projecting a projection changes nothing. An object that cannot be read is kept whole, so that it is named with
the same reason as in a reading of whole objects.

`_FIELDS` and `_CONTROL_FIELDS` declare the fields. A new field that is read belongs there.

Most objects of a cluster are written alike. The controllers keep one copy of equal labels, containers,
tolerations and attributes of devices.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    DEVICE_TAINT_RULES,
    GANG_PLAN,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    JsonMapping,
    Object,
    ResourceKind,
    field_writes,
    pod_claim_names,
)
from rackloom.core.cluster.pods import CHANNEL_CONDITION, refers_to_claims, runs_imex_daemon
from rackloom.core.cluster.reader import find_fault

_Fields = Mapping[str, Any]
"""The fields of a map that are kept. None keeps a value, fields keep a part of it. A predicate with fields
keeps a part of some items of a list."""


def _whole(*fields: str) -> _Fields:
    return dict.fromkeys(fields)


_CLIQUE_FIELD = f"f:{names.GPU_CLIQUE_LABEL}"
_METADATA: _Fields = {
    **_whole("namespace", "name", "uid", "resourceVersion"),
    "labels": _whole(
        *(names.GPU_CLIQUE_LABEL, names.SIMULATED_LABEL, names.COMPUTE_DOMAIN_LABEL, names.CLIQUE_ID_LABEL),
        names.ORG_LABEL,
    ),
}
_FIELDS: Mapping[ResourceKind, _Fields] = {
    RESOURCE_CLAIM_TEMPLATE: {"metadata": _METADATA},
    NAMESPACE: {"metadata": _METADATA},
    GANG_PLAN: {"metadata": _METADATA, "status": _whole("conditions")},
    NODE: {
        "metadata": {
            **_METADATA,
            "managedFields": (
                lambda write: any(
                    field_writes({"metadata": {"managedFields": [write]}}, names.GPU_CLIQUE_LABEL)
                ),
                {
                    **_whole("manager", "time"),
                    "fieldsV1": {"f:metadata": {"f:labels": _whole(_CLIQUE_FIELD)}},
                },
            ),
        },
        "spec": _whole("taints", "unschedulable"),
        "status": {
            **_whole("allocatable", "capacity"),
            # Without the heartbeat, which changes all the time and is not shown.
            "conditions": (
                lambda known: known["type"] == "Ready",
                _whole("type", "status", "lastTransitionTime"),
            ),
            "nodeInfo": _whole("containerRuntimeVersion"),
        },
    },
    POD: {
        "metadata": {
            **_METADATA,
            **_whole("creationTimestamp", "ownerReferences"),
            "annotations": _whole(names.MESH_ANNOTATION),
        },
        "spec": {
            **_whole("nodeName", "schedulingGates", "resourceClaims"),
            "containers": (lambda container: container.get("name") == names.DAEMON_CONTAINER, _whole("name")),
        },
        "status": {
            **_whole("phase", "startTime", "resourceClaimStatuses", "extendedResourceClaimStatus"),
            "conditions": (
                lambda known: known.get("type") == CHANNEL_CONDITION,
                _whole("type", "status", "reason", "message", "lastTransitionTime"),
            ),
        },
    },
}
SNAPSHOT_KINDS = (
    *(COMPUTE_DOMAIN, GANG_PLAN, RESOURCE_CLAIM_TEMPLATE, RESOURCE_CLAIM, POD, NODE, RESOURCE_SLICE),
    *(NAMESPACE, DEVICE_CLASS, *DEVICE_TAINT_RULES),
)
"""The kinds of objects that a snapshot reads."""


def project_object(kind: ResourceKind, obj: Object) -> Object | None:
    """The part of an object of `SNAPSHOT_KINDS` that a snapshot reads, or None if it reads nothing."""
    if kind in (NODE, POD) and find_fault(kind, obj) is not None:
        return obj
    if kind == POD and not (refers_to_claims(obj) or runs_imex_daemon(obj) or any(pod_claim_names(obj))):
        return None
    if kind in _FIELDS:
        return _project(obj, _FIELDS[kind])
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "metadata": metadata}


_CONTAINER_FIELDS = (lambda _: True, _whole("name", "resources", "restartPolicy", "ports"))
_CONTROL_FIELDS: Mapping[ResourceKind, _Fields] = {
    NODE: {
        **_whole("apiVersion", "kind", "metadata"),
        "spec": _whole("taints", "unschedulable", "podCIDR", "podCIDRs"),
        "status": {
            **_whole("allocatable", "capacity", "addresses"),
            "conditions": _FIELDS[NODE]["status"]["conditions"],
        },
    },
    POD: {
        **_whole("apiVersion", "kind", "metadata"),
        "spec": {
            **_whole("nodeName", "schedulingGates", "resourceClaims", "affinity", "nodeSelector", "priority"),
            **_whole("tolerations", "topologySpreadConstraints", "resources", "overhead", "hostNetwork"),
            **_whole("priorityClassName", "preemptionPolicy"),
            **dict.fromkeys(("containers", "initContainers"), _CONTAINER_FIELDS),
        },
        "status": {
            **_whole("phase", "podIP", "resourceClaimStatuses", "extendedResourceClaimStatus"),
            "conditions": (lambda _: True, _whole("type", "status", "reason", "message")),
        },
    },
}
_READ_PREFIXES = ("rackloom.dev/", "resource.kubernetes.io/", "topology.slinky.slurm.net/")
"""Of the annotations that are read."""


def project_for_control(kind: ResourceKind, obj: Object) -> Object:
    """The part of an object that the controllers read, in the form of the whole."""
    if kind in (*_CONTROL_FIELDS, RESOURCE_SLICE) and find_fault(kind, obj) is not None:
        return obj
    if kind in _CONTROL_FIELDS:
        obj = _project(obj, _CONTROL_FIELDS[kind])
        for part in filter(None, (obj.get("spec"), obj.get("status"))):
            part.update({key: _shared(value) for key, value in part.items()})
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    if kind in _CONTROL_FIELDS and "annotations" in metadata:
        written = metadata["annotations"].items()
        metadata["annotations"] = {key: value for key, value in written if key.startswith(_READ_PREFIXES)}
    metadata |= {key: _shared(value) for key, value in metadata.items()}
    if kind != RESOURCE_SLICE:
        return {**obj, "metadata": metadata}
    devices = [
        {key: _with_shared_values(value) for key, value in device.items()}
        for device in obj["spec"].get("devices") or ()
    ]
    return {**obj, "metadata": metadata, "spec": {**obj["spec"], "devices": devices}}


_MOST_SHARED = 1 << 14


def _shared(value: Any) -> Any:
    """An equal value that other objects have as well. It must not be changed."""
    return _decoded(msgspec.json.encode(value)) if isinstance(value, dict | list) else value


def _with_shared_values(value: Any) -> Any:
    return {key: _shared(part) for key, part in value.items()} if isinstance(value, dict) else _shared(value)


@lru_cache(_MOST_SHARED)
def _decoded(encoded: bytes) -> Any:
    return msgspec.json.decode(encoded)


def _project(value: JsonMapping, fields: _Fields) -> Object:
    found: Object = {}
    for key, inner in fields.items():
        part = value.get(key)
        if part is not None and isinstance(inner, Mapping):
            part = _project(part, inner)
        elif part is not None and inner is not None:
            is_read, inside = inner
            part = [_project(item, inside) for item in part if is_read(item)]
        if part is not None:
            found[key] = part
    return found


def content_hash(projected: Object) -> int:
    """A hash of a projection without its version, which also changes with the fields that were dropped."""
    metadata = {key: value for key, value in projected["metadata"].items() if key != "resourceVersion"}
    return hash(msgspec.json.encode({**projected, "metadata": metadata}))
