"""Checks whether the admission policies of deploy/kubernetes are in effect."""

import json
from typing import Self

from tests.cluster.control_plane import ControlPlane

from rackloom.claim.kube.api import KubeError
from rackloom.claim.kube.client import KubeClient, RateLimiter
from rackloom.claim.kube.connection import http_client
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomainClique, clique_json
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    RESOURCE_SLICE,
    SECRET,
    Object,
    ResourceKind,
)

DRIVER = "rackloom-system"
"""The namespace of the programs that deploy/kubernetes installs."""
DAEMONS = "rackloom-imex"
"""The namespace of IMEX daemons."""
DAEMON_ACCOUNT = "compute-domain-daemon-service-account"
CLIQUE = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"

_POLICY = "ValidatingAdmissionPolicy"


def slice_of(node: str, name: str) -> Object:
    """A ResourceSlice of the IMEX plugin on a node, without devices."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": name},
        "spec": {"driver": names.IMEX_DRIVER, "nodeName": node, "pool": pool, "devices": []},
    }


async def policies_count(cluster: ControlPlane) -> bool:
    """New policies take effect after a moment. RBAC allows these writes, and one policy denies each."""
    meta = {"name": "probe", "namespace": DAEMONS}
    labels = {"labels": {"a": "b"}}
    pods = {"selector": {"matchLabels": labels["labels"]}}
    pods["template"] = {"metadata": labels, "spec": {"containers": [{"name": "main", "image": "none"}]}}
    channel = {"channel": {"resourceClaimTemplate": {"name": "probe"}}}
    clique = clique_json(ComputeDomainClique(compute_domain="probe", clique_id=CLIQUE), DAEMONS)
    published = (RESOURCE_SLICE, slice_of("none", "probe"))
    async with (
        _Account(cluster, DRIVER, "rackloom-node-imex") as plugin,
        _Account(cluster, DRIVER, "rackloom-controller") as controller,
        _Account(cluster, DAEMONS, DAEMON_ACCOUNT) as daemon,
    ):
        return (
            await plugin.may_not_label("nodes")
            and await controller.may_not_label("nodes")
            and await plugin.may_not_create(*published)
            and await daemon.may_not_create(COMPUTE_DOMAIN_CLIQUE, clique)
            and await controller.may_not_create(*published)
            and await controller.may_not_create(SECRET, {"metadata": meta})
            and await controller.may_not_create(COMPUTE_DOMAIN, {"metadata": meta, "spec": channel})
            and await controller.may_not_create(DAEMON_SET, {"metadata": meta, "spec": pods})
            and await plugin.may_not_label(f"namespaces/{DRIVER}/pods")
        )


class _Account:
    """The calls that the policies deny to a service account, found by impersonating it as administrator."""

    def __init__(self, cluster: ControlPlane, namespace: str, name: str) -> None:
        self._client = http_client(cluster.admin, None)
        self._client.headers["Impersonate-User"] = f"system:serviceaccount:{namespace}:{name}"
        self._admin = http_client(cluster.admin, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()
        await self._admin.aclose()

    async def may_not_create(self, kind: ResourceKind, obj: Object) -> bool:
        try:
            await KubeClient(self._client, RateLimiter(1000.0, 1000)).create(kind, obj, dry_run=True)
        except KubeError as error:
            return _POLICY in error.message
        return False

    async def may_not_label(self, kind: str) -> bool:
        """Tries the first object of a kind in v1. False if there is none."""
        path = f"api/v1/{kind}"
        found = (await self._admin.get(path)).json()["items"]
        if not found:
            return False
        answer = await self._client.patch(
            f"{path}/{found[0]['metadata']['name']}",
            params={"dryRun": "All"},
            content=json.dumps({"metadata": {"labels": {"probe": "1"}}}),
            headers={"Content-Type": "application/merge-patch+json"},
        )
        return _POLICY in answer.text
