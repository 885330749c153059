"""The admission policies of deploy/kubernetes: whether they count yet."""

import json

from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import tried

from rackloom.claim.domain import names
from rackloom.claim.domain.objects import Clique, clique_json
from rackloom.claim.kube.api import Object

DRIVER = "rackloom-system"
"""The namespace of the programs that deploy/kubernetes installs."""
DAEMONS = "rackloom-imex"
"""The namespace of IMEX daemons."""
DAEMON_ACCOUNT = "compute-domain-daemon-service-account"
CLIQUE = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"


def slice_of(node: str, name: str) -> Object:
    """A ResourceSlice of the IMEX plugin on a node, without devices."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": name},
        "spec": {"driver": names.IMEX_DRIVER, "nodeName": node, "pool": pool, "devices": []},
    }


def policies_count(cluster: ControlPlane) -> bool:
    """A policy counts a moment after it was made. RBAC allows these writes, one policy each does not."""
    plugin = f"--as=system:serviceaccount:{DRIVER}:rackloom-node-imex"
    controller = f"--as=system:serviceaccount:{DRIVER}:rackloom-controller"
    daemon = f"--as=system:serviceaccount:{DAEMONS}:{DAEMON_ACCOUNT}"
    label = ("label", "--overwrite", "--dry-run=server")
    create = ("create", "--dry-run=server", "-f", "-")
    clique_object = clique_json(Clique(compute_domain="probe", clique_id=CLIQUE), DAEMONS)
    meta = {"name": "probe", "namespace": DAEMONS}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta}
    domain = {"apiVersion": names.API_VERSION, "kind": "ComputeDomain", "metadata": meta}
    domain["spec"] = {"channel": {"resourceClaimTemplate": {"name": "probe"}}}
    containers = [{"name": "main", "image": "none"}]
    labels = {"labels": {"a": "b"}}
    pods = {"selector": {"matchLabels": labels["labels"]}}
    pods["template"] = {"metadata": labels, "spec": {"containers": containers}}
    daemons = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta, "spec": pods}
    published = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **slice_of("none", "probe")}
    probes = (
        ((plugin, *label, "nodes", "--all", "probe=1"), None),
        ((controller, *label, "nodes", "--all", "probe=1"), None),
        ((plugin, *create), json.dumps(published)),
        ((daemon, *create), json.dumps(clique_object)),
        *(((controller, *create), json.dumps(made)) for made in (published, secret, domain, daemons)),
        ((plugin, *label, "pods", "--all", "-n", DRIVER, "probe=1"), None),
    )
    return all(
        "ValidatingAdmissionPolicy" in tried(cluster, *words, given=body).stderr for words, body in probes
    )
