"""Pods of the tests, as values, and queries of them."""

import re
from typing import Any

from tests.node.nodes import NodeCluster, seconds_until

IMAGE = "busybox:1"
RUNNING_WITHIN = 60.0
"""Seconds that a test waits for a pod before it fails, not a promised time."""
Object = dict[str, Any]


def compute_domain(name: str, template: str, mode: str = "Single") -> Object:
    channel = {"resourceClaimTemplate": {"name": template}, "allocationMode": mode}
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"numNodes": 0, "channel": channel},
    }


def pod(name: str, command: str = "sleep 100000", *, node: str = "", labels: Object | None = None) -> Object:
    """A pod that ends at once when it is deleted, on `node` if one is named."""
    selector = {"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels or {}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": IMAGE, "command": ["sh", "-c", command]}],
            **selector,
        },
    }


def claiming(value: Object, template: str) -> Object:
    """The pod with a claim from a template, for its container."""
    value["spec"]["resourceClaims"] = [{"name": "devices", "resourceClaimTemplateName": template}]
    value["spec"]["containers"][0]["resources"] = {"claims": [{"name": "devices"}]}
    return value


def claim_template(name: str, device_class: str, count: int = 1, selector: str = "") -> Object:
    request: Object = {"deviceClassName": device_class, "count": count}
    if selector:
        request["selectors"] = [{"cel": {"expression": selector}}]
    devices = {"requests": [{"name": "device", "exactly": request}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": {"devices": devices}},
    }


def phase(cluster: NodeCluster, name: str, namespace: str = "default") -> str:
    """The pod's phase, or an empty string if there is no such pod."""
    return cluster.tried("get", "pod", name, "-n", namespace, "-o", "jsonpath={.status.phase}").stdout


def until_running(cluster: NodeCluster, *names: str, within: float = RUNNING_WITHIN) -> float:
    """Seconds until all these pods are Running."""
    return seconds_until(
        lambda: all(phase(cluster, name) == "Running" for name in names), f"{names} are Running", within
    )


def until_gone(cluster: NodeCluster, *names: str, within: float = RUNNING_WITHIN) -> float:
    """Seconds until none of these pods is left."""
    return seconds_until(lambda: not any(phase(cluster, name) for name in names), f"{names} are gone", within)


def inside(cluster: NodeCluster, name: str, *command: str, container: str = "main") -> str:
    """The output of a command in a container of a pod."""
    return cluster.kubectl("exec", name, "-c", container, "--", *command)


def channels_in(listing: str) -> list[int]:
    """The numbers of the IMEX channels in an output of `ls -l`."""
    return [int(number) for number in re.findall(r" 509, +(\d+) ", listing)]


def condition(cluster: NodeCluster, domain: str, kind: str) -> Object:
    """One condition of a ComputeDomain. Empty if it does not have it yet."""
    value = cluster.get("computedomain", domain)
    found = value.get("status", {}).get("conditions", [])
    return next((entry for entry in found if entry["type"] == kind), {})


def is_ready(cluster: NodeCluster, domain: str) -> bool:
    """Whether a ComputeDomain is Ready."""
    return condition(cluster, domain, "Ready").get("status") == "True"
