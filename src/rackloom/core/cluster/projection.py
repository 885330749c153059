"""The fields of objects that a snapshot reads: a service that follows a large cluster keeps only these.

Images of nodes, environments of pods and field ownership are most of the data of a cluster. `project_object`
drops them. Projecting a projection changes nothing. An object that cannot be read is kept whole, so that it
is named with the same reason as in a reading of whole objects.

`_FIELDS` declares the fields. A new field that a snapshot reads belongs there.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DEVICE_CLASS,
    DEVICE_TAINT_RULES,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    JsonMapping,
    Object,
    ResourceKind,
)
from rackloom.core.cluster.pods import refers_to_claims, runs_imex_daemon
from rackloom.core.cluster.reader import find_fault


class _Items(NamedTuple):
    """Some items of a list, and the fields of each."""

    is_read: Callable[[JsonMapping], bool]
    fields: "_Fields"


_Fields = Mapping[str, Any]
"""The fields of a map: None keeps a value, a map or `_Items` a part of it."""


def _whole(*fields: str) -> _Fields:
    return dict.fromkeys(fields)


_METADATA: _Fields = {
    **_whole("namespace", "name", "uid", "resourceVersion"),
    "labels": _whole(
        *(names.GPU_CLIQUE_LABEL, names.SIMULATED_LABEL, names.COMPUTE_DOMAIN_LABEL, names.CLIQUE_ID_LABEL),
        names.ORG_LABEL,
    ),
}
_CLIQUE_FIELD = f"f:{names.GPU_CLIQUE_LABEL}"
_CLIQUE_WRITES = _Items(
    lambda entry: _CLIQUE_FIELD in entry.get("fieldsV1", {}).get("f:metadata", {}).get("f:labels", {}),
    {**_whole("manager", "time"), "fieldsV1": {"f:metadata": {"f:labels": _whole(_CLIQUE_FIELD)}}},
)
_READY_CONDITION = _Items(
    lambda condition: condition.get("type") == "Ready",
    # Without the heartbeat, which changes all the time and is not shown.
    _whole("type", "status", "lastTransitionTime"),
)
_FIELDS: Mapping[ResourceKind, _Fields] = {
    RESOURCE_CLAIM_TEMPLATE: {"metadata": _METADATA},
    NAMESPACE: {"metadata": _METADATA},
    NODE: {
        "metadata": {**_METADATA, "managedFields": _CLIQUE_WRITES},
        "spec": _whole("taints", "unschedulable"),
        "status": {
            **_whole("allocatable", "capacity"),
            "conditions": _READY_CONDITION,
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
            "containers": _Items(
                lambda container: container.get("name") == names.DAEMON_CONTAINER, _whole("name")
            ),
        },
        "status": _whole("phase", "startTime", "resourceClaimStatuses", "extendedResourceClaimStatus"),
    },
}
SNAPSHOT_KINDS = (
    *(COMPUTE_DOMAIN, RESOURCE_CLAIM_TEMPLATE, RESOURCE_CLAIM, POD, NODE, RESOURCE_SLICE),
    *(NAMESPACE, DEVICE_CLASS, *DEVICE_TAINT_RULES),
)
"""The kinds of objects that a snapshot reads."""


def project_object(kind: ResourceKind, obj: Object) -> Object | None:
    """The part of an object of `SNAPSHOT_KINDS` that a snapshot reads, or None if it reads nothing."""
    if kind in (NODE, POD) and find_fault(kind, obj) is not None:
        return obj
    if kind == POD:
        extended = (obj.get("status") or {}).get("extendedResourceClaimStatus")
        if not (refers_to_claims(obj) or runs_imex_daemon(obj) or extended):
            return None
    if kind not in _FIELDS:
        metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
        return {**obj, "metadata": metadata}
    return _project(obj, _FIELDS[kind])


def _project(value: JsonMapping, fields: _Fields) -> Object:
    found: Object = {}
    for key, inner in fields.items():
        if value.get(key) is None:
            continue
        if inner is None:
            found[key] = value[key]
        elif isinstance(inner, _Items):
            found[key] = [_project(item, inner.fields) for item in value[key] if inner.is_read(item)]
        else:
            found[key] = _project(value[key], inner)
    return found


def content_hash(projected: Object) -> int:
    """A hash of a projection without its version, which also changes with the fields that were dropped."""
    metadata = {key: value for key, value in projected["metadata"].items() if key != "resourceVersion"}
    return hash(msgspec.json.encode({**projected, "metadata": metadata}))
