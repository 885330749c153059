"""GPUs and NICs on real nodes: the example of seed 003, and a NIC that NRI moves into a pod and back."""

import json
from typing import Any

from tests.node.conftest import ROOT
from tests.node.nodes import NodeCluster
from tests.node.workloads import claim_template, claiming, inside, pod, until_gone, until_running
from tests.waiting import until_seen

EXAMPLE = ROOT / "examples/nixl-kv-transfer"
TEMPLATE = "h100-4gpu-4nic-numa-aligned"
NODE_0_GPUS = {"0001:00:00.0", "0002:00:00.0", "0003:00:00.0", "0008:00:00.0"}


def test_seed_003_gets_aligned_gpus_and_nics(installed: NodeCluster) -> None:
    installed.kubectl("apply", "-f", str(EXAMPLE / "resource-claim-template-aligned.yaml"))
    names = ["kv-target", "kv-initiator"]
    ends = [
        claiming(pod(name, node=node.name), TEMPLATE)
        for name, node in zip(names, installed.nodes, strict=True)
    ]
    installed.apply(*ends)
    until_running(installed, *names)
    for name in names:
        devices = inside(installed, name, "ls", "/dev").split()
        assert {"nvidiactl", "nvidia-uvm"} <= set(devices)
        assert sum(device.removeprefix("nvidia").isdigit() for device in devices) == 4
        assert len(inside(installed, name, "ls", "/dev/infiniband").split("uverbs")) == 5
        assert _claimed(installed, name) == NODE_0_GPUS
    installed.kubectl("delete", "pod", *names, "--wait=false")
    until_gone(installed, *names)


def test_a_nic_goes_into_a_pod_and_comes_back(installed: NodeCluster) -> None:
    template = claim_template(
        "fabric-nic", "dranet.net", selector='device.attributes["dra.net"].ifName == "fab0"'
    )
    ends = [claiming(pod(f"nic-{node.name}", node=node.name), "fabric-nic") for node in installed.nodes]
    installed.apply(template, *ends)
    names = [end["metadata"]["name"] for end in ends]
    until_running(installed, *names)
    assert "10.99.0.1" in inside(installed, names[0], "ip", "address", "show", "fab0")
    inside(installed, names[0], "ping", "-c", "1", "-W", "5", "10.99.0.2")
    assert "fab0" not in _interfaces(installed, 0)
    installed.kubectl("delete", "pod", *names, "--wait=false")
    until_gone(installed, *names)
    until_seen(lambda: "fab0" in _interfaces(installed, 0), "the NIC is back on its node", 30)
    # Its addresses come a moment after it.
    node = installed.nodes[0]
    until_seen(lambda: "10.99.0.1" in node.run("ip", "address", "show", "fab0"), "it has its address", 10)


def test_links_of_the_pods_own_network_are_not_published(installed: NodeCluster) -> None:
    published = {
        device["attributes"]["ifName"]["string"]
        for slice_ in installed.get("resourceslices")["items"]
        if slice_["spec"]["driver"] == "dra.net"
        for device in slice_["spec"]["devices"]
        if "ifName" in device["attributes"]
    }
    assert published == {"fab0"}, "links that carry the node or its pods can be claimed"


def _interfaces(cluster: NodeCluster, index: int) -> set[str]:
    links: list[dict[str, Any]] = json.loads(cluster.nodes[index].run("ip", "-j", "link"))
    return {link["ifname"] for link in links}


def _claimed(cluster: NodeCluster, name: str) -> set[str]:
    """PCI addresses of the GPUs that the claim of a pod got."""
    statuses = cluster.get("pod", name)["status"]["resourceClaimStatuses"]
    claim = cluster.get("resourceclaim", statuses[0]["resourceClaimName"])
    results = claim["status"]["allocation"]["devices"]["results"]
    wanted = {
        (result["pool"], result["device"]) for result in results if result["driver"] == "gpu.nvidia.com"
    }
    return {
        device["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
        for slice_ in cluster.get("resourceslices")["items"]
        for device in slice_["spec"]["devices"]
        if (slice_["spec"]["pool"]["name"], device["name"]) in wanted
    }
