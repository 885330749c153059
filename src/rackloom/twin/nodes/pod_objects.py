"""What kubelets read in a Pod and write into its status; pure."""

import ipaddress

from rackloom.claim.kube.api import Object
from rackloom.claim.kube.pods import has_ended
from rackloom.claim.kube.timestamps import whole_time

_FIRST = ipaddress.IPv4Address("10.0.0.0")


def is_leaving(pod: Object) -> bool:
    """Whether somebody asked for its deletion."""
    return "deletionTimestamp" in pod["metadata"]


def has_work(pod: Object) -> bool:
    """Whether there is anything to do for a bound pod."""
    return not has_ended(pod) or is_leaving(pod)


def differs_in_meaning(known: Object, seen: Object) -> bool:
    """Whether a kubelet that knows a pod would sync it for this: its status does not count."""
    return known["spec"] != seen["spec"] or any(
        (known["metadata"].get(part) or {}) != (seen["metadata"].get(part) or {})
        for part in ("labels", "annotations")
    )


def is_reserved_for(claim: Object, pod: Object) -> bool:
    """Whether an allocated claim names this very pod among its users."""
    users = claim.get("status", {}).get("reservedFor", ())
    return any(user["resource"] == "pods" and user["uid"] == pod["metadata"]["uid"] for user in users)


def running_status(pod: Object, now: float, address: str, *, ready: bool) -> Object:
    """The status of a pod all of whose containers run."""
    since = whole_time(now)
    states = {"running": {"startedAt": since}}
    return {
        "phase": "Running",
        "startTime": since,
        "hostIP": "127.0.0.1",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": _conditions(pod, since, ready=ready),
        "containerStatuses": [_container(one, states, ready=ready) for one in pod["spec"]["containers"]],
    }


def ended_status(pod: Object, now: float, exit_code: int) -> Object:
    """The status of a pod whose containers ended with `exit_code`."""
    since = whole_time(now)
    reason = "Completed" if exit_code == 0 else "Error"
    states = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": since}}
    return {
        "phase": "Succeeded" if exit_code == 0 else "Failed",
        "conditions": _conditions(pod, since, ready=False),
        "containerStatuses": [_container(one, states, ready=False) for one in pod["spec"]["containers"]],
    }


def warning(pod: Object, now: float, reason: str, message: str) -> Object:
    """A warning about a pod by the kubelet of its node."""
    meta = pod["metadata"]
    since = whole_time(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": "Warning",
        "reason": reason,
        "message": message,
        "source": {"component": "kubelet", "host": pod["spec"]["nodeName"]},
        "reportingComponent": "kubelet",
        "reportingInstance": pod["spec"]["nodeName"],
        "firstTimestamp": since,
        "lastTimestamp": since,
        "count": 1,
    }


def pod_address(number: int) -> str:
    """The address of the n-th pod (from 1), in 10.0.0.0/8; nothing listens there."""
    return str(_FIRST + number)


def address_number(pod: Object) -> int:
    """Which pod's address it has; 0 while it has none."""
    address = pod.get("status", {}).get("podIP")
    return int(ipaddress.IPv4Address(address)) - int(_FIRST) if address else 0


def _conditions(pod: Object, since: str, *, ready: bool) -> list[Object]:
    """Of a kubelet's conditions, with those of others (PodScheduled, readiness gates) left as they are."""
    ours = {"Initialized": True, "ContainersReady": ready, "Ready": ready, "PodReadyToStartContainers": True}
    kept = [one for one in pod.get("status", {}).get("conditions", ()) if one["type"] not in ours]
    written = [
        {"type": name, "status": str(holds), "lastTransitionTime": since} for name, holds in ours.items()
    ]
    return [*kept, *written]


def _container(container: Object, state: Object, *, ready: bool) -> Object:
    return {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": state,
    }
