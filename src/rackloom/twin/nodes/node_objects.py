"""Node objects as kubelets write them: who they are, what they hold, and that they are alive."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rackloom.claim.kube.api import Object
from rackloom.claim.kube.timestamps import micro_time, whole_time

LEASE_NAMESPACE = "kube-node-lease"
LEASE_SECONDS = 40
"""How long one heartbeat counts: the kubelet's nodeLeaseDurationSeconds."""
HEARTBEAT_SECONDS = 10.0
"""How often kubelets renew: a quarter of the lease."""
_KUBELET = "v1.36.4"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node to play."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "96", "memory": "1000Gi", "pods": "110"}
    )
    address: str = "127.0.0.1"
    boot_id: str = "1"
    """Another one after each reboot."""


def node_object(spec: NodeSpec) -> Object:
    """The Node to register."""
    standard = {
        "kubernetes.io/hostname": spec.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": spec.name, "labels": {**standard, **spec.labels}},
    }


def node_status(spec: NodeSpec, now: float) -> Object:
    """The status of a node that is ready since `now` (seconds since the epoch)."""
    since = whole_time(now)
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "simulated node",
        "lastHeartbeatTime": since,
        "lastTransitionTime": since,
    }
    return {
        "capacity": dict(spec.capacity),
        "allocatable": dict(spec.capacity),
        "conditions": [ready],
        "addresses": [
            {"type": "InternalIP", "address": spec.address},
            {"type": "Hostname", "address": spec.name},
        ],
        "nodeInfo": _node_info(spec),
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
    }


def lease_object(node: Object, now: float) -> Object:
    """The heartbeat of a node at `now`, gone with the node."""
    name = node["metadata"]["name"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"]}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": LEASE_NAMESPACE, "ownerReferences": [owner]},
        "spec": lease_spec(name, now),
    }


def lease_spec(name: str, now: float) -> Object:
    """What a heartbeat at `now` says."""
    return {
        "holderIdentity": name,
        "leaseDurationSeconds": LEASE_SECONDS,
        "renewTime": micro_time(now),
    }


def _node_info(spec: NodeSpec) -> Object:
    return {
        "machineID": spec.name,
        "systemUUID": spec.name,
        "bootID": spec.boot_id,
        "kernelVersion": "6.8.0",
        "osImage": "simulated",
        "containerRuntimeVersion": "containerd://2.0.0",
        "kubeletVersion": _KUBELET,
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": "amd64",
    }
