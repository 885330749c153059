"""The objects that NVIDIA's DRA driver installs on a cluster and makes of a ComputeDomain, from the facts.

The plugins are `nvidia_driver`, one process for each driver and node. The controller is `make_domain`, which
writes the objects that NVIDIA's makes of a new ComputeDomain. NVIDIA's image is not here: in its place the
IMEX daemons run Rackloom's program without certificates, with the names, labels and rights of NVIDIA's.
"""

import json
import sys
from typing import Any

from tests.cluster.processes import Child, start
from tests.node.nodes import NodeCluster, RealNode
from tests.node.nvidia_driver import NAMESPACE
from tests.waiting import until_seen

from rackloom.core.cluster.names import (
    API_VERSION,
    CHANNEL_CLASS,
    COMPUTE_DOMAIN_LABEL,
    DAEMON_CLASS,
    GPU_DRIVER,
    IMEX_DRIVER,
    TARGET_LABEL,
)
from rackloom.core.domains.crds import domain_crds

ACCOUNT = "compute-domain-daemon-service-account"
_PODS = ("NODE_NAME", "spec.nodeName"), ("POD_IP", "status.podIP"), ("POD_UID", "metadata.uid")
_NAMES = ("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace")
Object = dict[str, Any]


def install(cluster: NodeCluster) -> None:
    """Definitions, classes, and the account of the daemons."""
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT}
    cluster.apply(
        *domain_crds(),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _named(ACCOUNT)},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": _named(ACCOUNT),
            "rules": [
                {"apiGroups": ["resource.nvidia.com"], "resources": ["computedomaincliques"], "verbs": ["*"]},
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]},
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": _named(ACCOUNT),
            "roleRef": role,
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
        },
    )
    for class_ in (
        _class("gpu.nvidia.com", GPU_DRIVER, "gpu", extendedResourceName="nvidia.com/gpu"),
        _class(DAEMON_CLASS, IMEX_DRIVER, "daemon"),
        _class(CHANNEL_CLASS, IMEX_DRIVER, "channel"),
    ):
        # As Helm does: without the annotation of `kubectl apply`.
        cluster.kubectl("create", "-f", "-", given=json.dumps(class_))
    cluster.kubectl(
        "wait", "--for=condition=Established", "crd/computedomains.resource.nvidia.com", "--timeout=30s"
    )


def start_plugins(cluster: NodeCluster, node: RealNode, release: str) -> list[Child]:
    """NVIDIA's two plugins on a node, once they have published their devices."""
    children = []
    for driver in (IMEX_DRIVER, GPU_DRIVER):
        words = [driver, node.name, node.root, cluster.plane.admin, release]
        program = [sys.executable, "-m", "tests.node.nvidia_driver", *words]
        child = start(f"nvidia-{driver}-{node.name}", program, cluster.plane.logs)
        until_seen(
            lambda child=child: "registered True" in child.tail() or child.ended(), "kubelet knows it", 60
        )
        assert not child.ended(), child.tail()
        children.append(child)
    return children


def make_domain(cluster: NodeCluster, name: str, template: str) -> str:
    """Make a ComputeDomain with all the objects of NVIDIA's controller. Returns its UID."""
    spec = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": template}}}
    meta = {"name": name, "namespace": "default", "finalizers": [COMPUTE_DOMAIN_LABEL]}
    cluster.apply({"apiVersion": API_VERSION, "kind": "ComputeDomain", "metadata": meta, "spec": spec})
    uid = str(cluster.get("computedomain", name)["metadata"]["uid"])
    daemons = f"computedomain-daemon-{uid}"
    cluster.apply(
        _template(_owned(uid, template, "default", "Workload"), "channel", CHANNEL_CLASS, uid),
        _template(_owned(uid, daemons, NAMESPACE, "Daemon"), "daemon", DAEMON_CLASS, uid),
        _daemon_set(uid, daemons),
    )
    return uid


def _named(name: str) -> Object:
    return {"name": name, "namespace": NAMESPACE}


def _owned(uid: str, name: str, namespace: str, target: str = "") -> Object:
    labels = {COMPUTE_DOMAIN_LABEL: uid, **({TARGET_LABEL: target} if target else {})}
    return {"name": name, "namespace": namespace, "labels": labels, "finalizers": [COMPUTE_DOMAIN_LABEL]}


def _class(name: str, driver: str, kind: str, **more: Any) -> Object:
    expression = f"device.driver == '{driver}' && device.attributes['{driver}'].type == '{kind}'"
    if kind == "channel":
        expression += f" && device.attributes['{driver}'].id == 0"
    spec = {"selectors": [{"cel": {"expression": expression}}], **more}
    meta = {"name": name, "labels": {"app.kubernetes.io/managed-by": "Helm"}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": meta, "spec": spec}


def _template(meta: Object, request: str, class_: str, uid: str) -> Object:
    kind = f"ComputeDomain{request.capitalize()}Config"
    more = {"allocationMode": "Single"} if request == "channel" else {}
    parameters = {"apiVersion": API_VERSION, "kind": kind, "domainID": uid, **more}
    devices = {
        "requests": [{"name": request, "exactly": {"deviceClassName": class_}}],
        "config": [{"requests": [request], "opaque": {"driver": IMEX_DRIVER, "parameters": parameters}}],
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": meta,
        "spec": {"spec": {"devices": devices}},
    }


def _daemon_set(uid: str, name: str) -> Object:
    labels = {COMPUTE_DOMAIN_LABEL: uid}
    plain = {
        "MAX_NODES_PER_IMEX_DOMAIN": "18",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "IMEX_AUTHENTICATION": "false",
    }
    env: list[Object] = [{"name": key, "value": value} for key, value in plain.items()]
    env += [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in (*_PODS, *_NAMES)]
    check = {"httpGet": {"path": "/", "port": 8084}, "timeoutSeconds": 10}
    container = {
        "name": "compute-domain-daemon",
        "image": "rackloom:0.1.0",
        "command": ["rackloom", "imex", "run"],
        "securityContext": {"runAsUser": 0},
        "env": env,
        "resources": {"claims": [{"name": "daemon"}]},
        "startupProbe": {**check, "periodSeconds": 1, "failureThreshold": 1200},
        "readinessProbe": {**check, "periodSeconds": 10, "failureThreshold": 1},
    }
    pod = {
        "serviceAccountName": ACCOUNT,
        "nodeSelector": labels,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "resourceClaims": [{"name": "daemon", "resourceClaimTemplateName": name}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": _owned(uid, name, NAMESPACE),
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
