"""A pod gets its node: what a binding makes of it (Kubernetes 1.36, pods/binding)."""

from rackloom.claim.kube.api import Object
from rackloom.twin.kube import answers

SUBRESOURCE = "binding"
_SCHEDULED = "PodScheduled"


def bound(pod: Object, node: str, time: str) -> Object:
    """The pod on `node`, bound at `time` (RFC 3339). Raises `Conflict` where it cannot be."""
    metadata, spec = pod["metadata"], pod["spec"]
    if "deletionTimestamp" in metadata:
        why = f"pod {metadata['name']} is being deleted, cannot be assigned to a host"
        raise answers.unbound(metadata["name"], why)
    if spec.get("nodeName"):
        why = f'pod {metadata["name"]} is already assigned to node "{spec["nodeName"]}"'
        raise answers.unbound(metadata["name"], why)
    if spec.get("schedulingGates"):
        raise answers.unbound(metadata["name"], f"pod {metadata['name']} has non-empty .spec.schedulingGates")
    status = pod.get("status") or {}
    others = [one for one in status.get("conditions") or () if one["type"] != _SCHEDULED]
    scheduled = {"type": _SCHEDULED, "status": "True", "lastTransitionTime": time}
    return {
        **pod,
        "spec": {**spec, "nodeName": node},
        "status": {**status, "conditions": [*others, scheduled]},
    }
