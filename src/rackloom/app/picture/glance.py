"""What of each Kubernetes object a picture is made of: whoever follows a large cluster remembers no more.

A node's list of images, a pod's environment and everybody's field ownership are most of what a cluster says.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rackloom.app.picture.cluster import ORG_LABEL
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.claim.node.imex.clique_label import owners, written
from rackloom.prove.doctor.collectors.cluster import DAEMON_CONTAINER

_META = ("namespace", "name", "uid", "resourceVersion")
_POD_META = ("creationTimestamp", "ownerReferences")
_POD_STATUS = ("phase", "startTime", "resourceClaimStatuses", "extendedResourceClaimStatus")
_LABELS = (
    names.GPU_CLIQUE_LABEL,
    names.SIMULATED_LABEL,
    names.COMPUTE_DOMAIN_LABEL,
    names.CLIQUE_ID_LABEL,
    ORG_LABEL,
)


def glance(kind: Kind, obj: Object) -> Object | None:
    """The part of an object of one of `KINDS` that makes a picture; None: the object is in none.

    A glance at a glance is the same glance.
    """
    return _GLANCES[kind](obj)


def _whole(obj: Object) -> Object:
    metadata = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
    return {**obj, "metadata": metadata}


def _named(obj: Object) -> Object:
    return {"metadata": _metadata(obj)}


def _metadata(obj: Object) -> Object:
    told = _of(obj["metadata"], *_META)
    labels = _of(obj["metadata"].get("labels") or {}, *_LABELS)
    return {**told, "labels": labels} if labels else told


def _node(obj: Object) -> Object:
    times = written(obj, names.GPU_CLIQUE_LABEL)
    writers = [_owner(one, times.get(one)) for one in owners(obj, names.GPU_CLIQUE_LABEL)]
    status = obj.get("status") or {}
    return {
        "metadata": {**_metadata(obj), "managedFields": writers},
        "spec": _of(obj.get("spec") or {}, "taints", "unschedulable"),
        "status": {
            "conditions": [_said(one) for one in status.get("conditions") or () if one["type"] == "Ready"],
            "nodeInfo": _of(status.get("nodeInfo") or {}, "containerRuntimeVersion"),
        },
    }


def _said(condition: Object) -> Object:
    # Not its heartbeat, which changes all the time and says nothing that is drawn.
    return _of(condition, "type", "status", "lastTransitionTime")


def _owner(manager: str, time: str | None) -> Object:
    owned: Object = {"f:metadata": {"f:labels": {f"f:{names.GPU_CLIQUE_LABEL}": {}}}}
    told: Object = {"manager": manager, "fieldsV1": owned}
    return told if time is None else {**told, "time": time}


def _pod(obj: Object) -> Object | None:
    """One that claims devices, or an IMEX daemon's: the others are many, and in no picture."""
    spec, status = obj["spec"], obj.get("status") or {}
    daemon = [one for one in spec.get("containers") or () if one.get("name") == DAEMON_CONTAINER]
    if not (spec.get("resourceClaims") or daemon or status.get("extendedResourceClaimStatus")):
        return None
    mesh = _of(obj["metadata"].get("annotations") or {}, names.MESH_ANNOTATION)
    return {
        "metadata": {**_metadata(obj), **_of(obj["metadata"], *_POD_META), "annotations": mesh},
        "spec": {
            **_of(spec, "nodeName", "schedulingGates", "resourceClaims"),
            "containers": [{"name": DAEMON_CONTAINER} for _ in daemon],
        },
        "status": _of(status, *_POD_STATUS),
    }


def _of(told: Mapping[str, Any], *keys: str) -> Object:
    return {key: told[key] for key in keys if key in told}


_GLANCES: Mapping[Kind, Callable[[Object], Object | None]] = {
    COMPUTE_DOMAIN: _whole,
    RESOURCE_CLAIM_TEMPLATE: _named,
    RESOURCE_CLAIM: _whole,
    POD: _pod,
    NODE: _node,
    RESOURCE_SLICE: _whole,
    NAMESPACE: _named,
}
KINDS = tuple(_GLANCES)
"""All that a picture is made of."""
