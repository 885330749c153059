"""Custom resources with a status subresource, and kubectl as a second reader."""

import json

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import serve, withdraw
from tests.cluster.kubectl import kubectl

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import ResourceKind

pytestmark = pytest.mark.anyio
WIDGET = ResourceKind("test.example.com", "v1", "Widget", "widgets", namespaced=True)


async def test_status_is_a_subresource_and_kubectl_reads_it(
    cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    await serve(api, WIDGET)
    widget = {
        "apiVersion": WIDGET.api_version,
        "kind": WIDGET.kind,
        "metadata": {"name": "one", "namespace": namespace},
        "spec": {"size": 1},
        "status": {"ignored": True},
    }

    made = await api.create(WIDGET, widget)
    assert "status" not in made
    written = await api.patch(
        WIDGET, "one", namespace, {"spec": {"size": 2}, "status": {"phase": "Ready"}}, subresource="status"
    )
    assert (written["spec"], written["status"]) == ({"size": 1}, {"phase": "Ready"})
    assert written["metadata"]["generation"] == made["metadata"]["generation"]
    seen = kubectl(cluster, "get", "widgets", "--namespace", namespace, "--output", "json")
    assert [item["status"] for item in json.loads(seen)["items"]] == [{"phase": "Ready"}]
    await withdraw(api, WIDGET)


def test_kubectl_sees_this_kubernetes(cluster: ControlPlane) -> None:
    version = json.loads(kubectl(cluster, "version", "--output", "json"))["serverVersion"]
    assert version["gitVersion"].startswith("v1.36.")
    served = kubectl(cluster, "api-resources", "--api-group=resource.k8s.io", "--no-headers")
    assert {line.split()[0] for line in served.splitlines()} == {
        "deviceclasses",
        "resourceclaims",
        "resourceclaimtemplates",
        "resourceslices",
    }
