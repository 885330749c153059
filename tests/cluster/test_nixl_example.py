"""The KV-cache example is accepted by a real API server, and its two claims become those of two pods."""

from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import LEAVE, kubectl
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import POD, ResourceKind

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).parents[2] / "examples"
CLAIM = ResourceKind("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims", namespaced=True)
TEMPLATE = "h100-4gpu-4nic-numa-aligned"


async def claims_of(api: KubeApi, namespace: str) -> list[str]:
    """The templates that claims were made from, by the pods that own them."""
    claims = (await api.list(CLAIM, namespace)).items
    return sorted(owner["name"] for claim in claims for owner in claim["metadata"]["ownerReferences"])


async def test_the_example_applies_as_it_stands(cluster: ControlPlane, api: KubeApi, namespace: str) -> None:
    output = kubectl(cluster, "-n", namespace, "apply", "-k", str(EXAMPLES / "nixl-kv-transfer"))
    assert output.count(" created") == 7, output
    for name in ("nixl-kv-initiator", "nixl-kv-target"):
        pod = await api.get(POD, name, namespace)
        (claim,) = pod["spec"]["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == TEMPLATE

    async def both_have_claims() -> bool:
        return await claims_of(api, namespace) == ["nixl-kv-initiator", "nixl-kv-target"]

    await until(both_have_claims, "each pod has a claim made from the template")
    # The example's own first verification command works on the applied objects.
    assert "gpu-nic" in kubectl(cluster, "-n", namespace, "get", "resourceclaims", "-o", "yaml")
    kubectl(cluster, "-n", namespace, "delete", *LEAVE, "-k", str(EXAMPLES / "nixl-kv-transfer"))


def test_the_job_form_is_accepted(cluster: ControlPlane) -> None:
    output = kubectl(
        cluster, "-n", "default", "apply", "--dry-run=server", "-k", str(EXAMPLES / "nixl-kv-transfer-jobs")
    )
    assert output.count("job.batch/") == 2, output
