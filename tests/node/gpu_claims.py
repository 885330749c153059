"""Claims for whole GPUs and the pods that use them, as the tests of NVIDIA's DRA driver have them.

Kinds, counts, fields and configs are those of tests/docs/upstream_tests.toml, but names are ours. All of it
is in one namespace.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.node.nodes import NodeCluster
from tests.node.workloads import IMAGE, RUNNING_WITHIN, Object

GPU_CLASS = "gpu.nvidia.com"
NAMESPACE = "asked"
HERE = ("-n", NAMESPACE)
GPUS = "ls /dev | grep -E '^nvidia[0-9]+$'"
"""The command that lists the GPUs of a container, as device files."""
STAYS = "trap 'exit 0' TERM; sleep 100000 & wait"
"""It ends at kubelet's signal. A pod that is deleted by force is gone before kubelet has given its claim
back, and a claim of the same name is then refused on its node for a minute."""
TOLERATED = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
ATTRIBUTES = f'device.attributes["{GPU_CLASS}"]'


def claim(
    name: str, kind: str = "ResourceClaimTemplate", config: Object | None = None, **fields: Any
) -> Object:
    """A claim for whole GPUs, or a template of one. `fields` belong to its only request."""
    devices: Object = {"requests": [{"name": "gpu", "exactly": {"deviceClassName": GPU_CLASS, **fields}}]}
    if config is not None:
        opaque = {"driver": GPU_CLASS, "parameters": config}
        devices["config"] = [{"requests": ["gpu"], "opaque": opaque}]
    spec = {"devices": devices}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"spec": spec} if kind == "ResourceClaimTemplate" else spec,
    }


def selecting(name: str, expression: str, **fields: Any) -> Object:
    """A template of a claim for GPUs that an expression chooses."""
    return claim(name, selectors=[{"cel": {"expression": expression}}], **fields)


def sharing(strategy: str, **settings: Object) -> Object:
    """A config of whole GPUs that sets how their users share them."""
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": strategy, **settings},
    }


def user(
    name: str, *templates: str, command: str = STAYS, containers: int = 1, shared: str = "", **fields: Any
) -> Object:
    """A pod whose containers have a claim of each template, or the claim `shared`. `fields` of its spec."""
    claims: list[Object] = [
        {"name": f"gpu-{number}", "resourceClaimTemplateName": template}
        for number, template in enumerate(templates)
    ]
    if shared:
        claims.append({"name": "shared", "resourceClaimName": shared})
    container = {
        "image": IMAGE,
        "command": ["sh", "-c", command],
        "resources": {"claims": [{"name": each["name"]} for each in claims]},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name.rstrip("0123456789-")}},
        "spec": {
            "containers": [{"name": f"ctr{number}", **container} for number in range(containers)],
            "resourceClaims": claims,
            **fields,
        },
    }


def once(name: str, *templates: str, **fields: Any) -> Object:
    """A pod that is not started again, and goes to nodes that are kept for GPUs."""
    return user(name, *templates, restartPolicy="Never", tolerations=TOLERATED, **fields)


def host_counter(name: str, node: str) -> Object:
    """A privileged pod that counts the GPUs of its host."""
    counter = user(name, command="ls /host-dev/nvidia[0-9]* | wc -l", restartPolicy="Never")
    (container,) = counter["spec"]["containers"]
    container["securityContext"] = {"privileged": True}
    container["volumeMounts"] = [{"name": "dev", "mountPath": "/host-dev", "readOnly": True}]
    counter["spec"]["volumes"] = [{"name": "dev", "hostPath": {"path": "/dev"}}]
    counter["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return counter


def deployment(name: str, shared: str, replicas: int) -> Object:
    """A Deployment whose pods all use one claim."""
    spec = user(name, shared=shared, tolerations=TOLERATED)["spec"]
    spec["containers"][0]["resources"]["claims"][0]["request"] = "gpu"
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def published(cluster: NodeCluster) -> list[Object]:
    """Every whole GPU of all slices."""
    return [
        device
        for part in cluster.get("resourceslices")["items"]
        if part["spec"]["driver"] == GPU_CLASS
        for device in part["spec"].get("devices", ())
        if device["attributes"]["type"] == {"string": "gpu"}
    ]


def claims_of(cluster: NodeCluster, pod: str = "") -> list[Object]:
    """All claims, or those that were made for a pod."""
    found: list[Object] = cluster.get("resourceclaims", *HERE)["items"]
    owners = [[owner["name"] for owner in each["metadata"].get("ownerReferences", ())] for each in found]
    return [each for each, names in zip(found, owners, strict=True) if not pod or pod in names]


def devices_of(claim: Object) -> list[tuple[str, str]]:
    """Node and name of each device that a claim has. Empty if the claim is not allocated."""
    allocation = claim.get("status", {}).get("allocation", {})
    return [(each["pool"], each["device"]) for each in allocation.get("devices", {}).get("results", ())]


def gpus_in(cluster: NodeCluster, pod: str, container: str = "ctr0") -> list[str]:
    """The GPUs that a container sees."""
    return cluster.kubectl("exec", *HERE, pod, "-c", container, "--", "sh", "-c", GPUS).split()


def until_ready(cluster: NodeCluster, *pods: str) -> None:
    named = [f"pod/{pod}" for pod in pods]
    cluster.kubectl("wait", *HERE, "--for=condition=Ready", *named, f"--timeout={RUNNING_WITHIN:.0f}s")


def until_succeeded(cluster: NodeCluster, *pods: str) -> None:
    phase = "--for=jsonpath={.status.phase}=Succeeded"
    named = [f"pod/{pod}" for pod in pods]
    cluster.kubectl("wait", *HERE, phase, *named, f"--timeout={RUNNING_WITHIN:.0f}s")


def delete(cluster: NodeCluster, *objects: Object) -> None:
    """Delete objects and wait until they are gone."""
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    cluster.kubectl("delete", "--timeout=60s", "-f", "-", given=document)


def pods_with(cluster: NodeCluster, label: str) -> list[Object]:
    found: list[Object] = cluster.get("pods", *HERE, "-l", label)["items"]
    return found


@contextmanager
def namespace_for_claims(cluster: NodeCluster) -> Iterator[NodeCluster]:
    """The cluster, with the namespace of all that is here."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    yield cluster
    cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s")
