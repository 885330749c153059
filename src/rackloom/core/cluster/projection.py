"""The fields of objects that a snapshot reads: a service that follows a large cluster keeps only these.

Images of nodes, environments of pods and field ownership are most of the data of a cluster. `project_object`
drops them. Projecting a projection changes nothing. An object that cannot be read is kept whole, so that it
is named with the same reason as in a reading of whole objects.

`_FIELDS` declares the fields. A new field that a snapshot reads belongs there.
"""

from collections.abc import Mapping
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
