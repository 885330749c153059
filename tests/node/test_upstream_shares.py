"""Shares of a GPU on real kubelets, requested with the objects of the tests of NVIDIA's DRA driver.

tests/docs/upstream_tests.toml names the upstream test behind each of these. A container shows by its
device files which GPU it has. The plugins are started again for each way of sharing.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.node.conftest import only_all
from tests.node.gpu_claims import (
    HERE,
    claim,
    claims_of,
    delete,
    devices_of,
    gpus_in,
    namespace_for_claims,
    once,
    published,
    sharing,
    until_ready,
    user,
)
from tests.node.installation import gpu_plugin
from tests.node.nodes import NodeCluster
from tests.node.workloads import Object
from tests.waiting import until_seen

SYSTEM = ("-n", "rackloom-system")
pytestmark = only_all


@pytest.fixture(scope="module")
def gpus(installed: NodeCluster) -> Iterator[NodeCluster]:
    """The nodes, with a namespace for the claims."""
    with namespace_for_claims(installed):
        yield installed


def keeps_shares(cluster: NodeCluster) -> bool:
    """Whether the API server keeps the field that lets several claims have a device."""
    device = {"name": "any", "allowMultipleAllocations": True}
    pool = {"name": "any", "generation": 1, "resourceSliceCount": 1}
    probe = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "any"},
        "spec": {"driver": "any.example.com", "nodeName": "any", "pool": pool, "devices": [device]},
    }
    words = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    kept = json.loads(cluster.kubectl(*words, given=json.dumps(probe)))
    return "allowMultipleAllocations" in kept["spec"]["devices"][0]


ASKED: dict[str, list[Object]] = {
    "4": [{"capacity": {"requests": {"shares": 1}}}, {"capacity": {"requests": {"memory": "2Gi"}}}],
    "unlimited": [{"count": 1}],
    "memory": [{"capacity": {"requests": {"memory": "2Gi"}}}],
}
"""The requests of claims, by the number of claims that may have a GPU."""


@pytest.fixture(scope="module")
def shared_gpus(gpus: NodeCluster) -> Iterator[NodeCluster]:
    """The nodes. Afterwards each of their GPUs has one user again."""
    if not keeps_shares(gpus):
        pytest.skip("THIS API SERVER KEEPS NO SHARES: each GPU has one user")
    yield gpus
    set_shares(gpus, "CONSUMABLE_SHARES-")
    until_seen(lambda: how_shared(gpus) == {"disabled"}, "whole GPUs are published", 30)


@pytest.fixture(scope="module", params=[*ASKED])
def shares(shared_gpus: NodeCluster, request: pytest.FixtureRequest) -> str:
    """The GPU plugins publish shares. Returns how many claims may have a GPU."""
    set_shares(shared_gpus, f"CONSUMABLE_SHARES={request.param}")
    until_seen(lambda: how_shared(shared_gpus) == {request.param}, "shares are published", 30)
    return str(request.param)


def set_shares(cluster: NodeCluster, setting: str) -> None:
    workload = f"daemonset/{gpu_plugin()}"
    cluster.kubectl("set", "env", *SYSTEM, workload, setting)
    cluster.kubectl("rollout", "status", *SYSTEM, workload, "--timeout=120s")


def how_shared(cluster: NodeCluster) -> set[str]:
    """How many claims may have a GPU, by the published fields of the GPUs."""
    return {_how_shared(device) for device in published(cluster)}


def _how_shared(device: Object) -> str:
    if not device.get("allowMultipleAllocations"):
        return "disabled"
    if "shares" in device["capacity"]:
        return str(device["capacity"]["shares"]["value"])
    # If a claim without a request for memory gets none of it, any number fits.
    without = device["capacity"]["memory"]["requestPolicy"]["default"]
    return "unlimited" if without == "0" else "memory"


def share_one_gpu(cluster: NodeCluster, **fields: Any) -> None:
    """Two pods of one node have a claim each of one template, and see one GPU."""
    names = ["share-0", "share-1"]
    on_one = {"nodeSelector": {"kubernetes.io/hostname": cluster.nodes[0].name}}
    objects = [claim("share", **fields), *(once(name, "share", **on_one) for name in names)]
    cluster.apply(*objects)
    until_ready(cluster, *names)
    first, second = (gpus_in(cluster, name) for name in names)
    assert len(first) == 1
    assert first == second
    first_claim, second_claim = claims_of(cluster)
    assert len(devices_of(first_claim)) == 1
    assert devices_of(first_claim) == devices_of(second_claim)
    delete(cluster, *objects)
    until_seen(lambda: not claims_of(cluster), "the claims have gone", 30)


def test_two_claims_have_a_share_of_one_gpu(shared_gpus: NodeCluster, shares: str) -> None:
    for fields in ASKED[shares]:
        share_one_gpu(shared_gpus, **fields)


def test_a_share_takes_no_mps(shared_gpus: NodeCluster, shares: str) -> None:
    name = f"mps-{shares}"
    settings = {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}
    objects = (
        claim("with-mps", config=sharing("MPS", mpsConfig=settings)),
        user(name, "with-mps", containers=2),
    )
    shared_gpus.apply(*objects)

    def refusals() -> str:
        about = f"involvedObject.name={name},reason=FailedPrepareDynamicResources"
        return shared_gpus.kubectl(
            "get", "events", *HERE, "--field-selector", about, "-o", "jsonpath={.items[*].message}"
        )

    reported = until_seen(refusals, "the claim is refused", 60)
    assert "has a share of" in reported
    assert "asks for sharing settings" in reported
    assert shared_gpus.get("pod", *HERE, name)["status"]["phase"] == "Pending"
    delete(shared_gpus, *objects)
    until_seen(lambda: not claims_of(shared_gpus), "the claim has gone", 30)
