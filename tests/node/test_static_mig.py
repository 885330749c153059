"""MIG devices that the operator has made, on real nodes: each takes the place of its GPU, and a pod gets one.

NVML is a stand-in (driver/nvml.c). The device is written into the stand-in's state file while no plugin
looks. The capabilities among the device files of a container show which device it has.
"""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from tests.node.conftest import only_all
from tests.node.installation import gpu_plugin
from tests.node.nodes import NodeCluster
from tests.node.test_dynamic_mig import CAPS, CHOSEN, SYSTEM, published
from tests.node.workloads import Object, claim_template, claiming, inside, pod, until_gone, until_running
from tests.waiting import until_seen

pytestmark = only_all
SMALLEST = 19
"""NVIDIA's number of the profile 1g."""
_GPU_BYTES = 4 * (2 + 8 * 6)


@pytest.fixture(scope="module")
def whole(installed: NodeCluster) -> dict[str, Any]:
    """The devices of the first node before one is divided, by name."""
    return published(installed, "gpu")


@pytest.fixture(scope="module")
def divided(installed: NodeCluster, whole: dict[str, Any]) -> Iterator[NodeCluster]:
    """The nodes. The first has one MIG device of the smallest kind on its first GPU."""
    assert len(whole) == 8
    state = installed.nodes[0].root / "dev/shm/libnvidia-ml.mig"
    # MIG mode, how many were made, and the first: it exists, profile, start, size, compute instance, serial.
    state.write_bytes(struct.pack("8I", 1, 1, 1, SMALLEST, 0, 1, 1, 1).ljust(_GPU_BYTES, b"\0"))
    _start_again(installed)
    until_seen(lambda: published(installed, "mig"), "the MIG device is published", 60)
    yield installed
    state.write_bytes(bytes(_GPU_BYTES))
    _start_again(installed)
    until_seen(lambda: len(published(installed, "gpu")) == len(whole), "all GPUs are whole", 60)


def _start_again(cluster: NodeCluster) -> None:
    """Plugins look for MIG devices when they start."""
    cluster.kubectl("delete", "pod", *SYSTEM, "-l", CHOSEN, "--wait=true")
    cluster.kubectl("rollout", "status", *SYSTEM, f"daemonset/{gpu_plugin()}", "--timeout=120s")


def _uuid(device: Object) -> str:
    return str(device["attributes"]["uuid"]["string"])


def test_a_device_takes_the_place_of_its_gpu(divided: NodeCluster, whole: dict[str, Any]) -> None:
    gpus, (part,) = published(divided, "gpu"), published(divided, "mig").values()
    assert len(gpus) + 1 == len(whole)
    assert all(_uuid(device).startswith("GPU-") for device in whole.values())
    assert _uuid(part).startswith("MIG-")
    (parent,) = {_uuid(device) for device in whole.values()} - {_uuid(device) for device in gpus.values()}
    assert part["attributes"]["parentUUID"] == {"string": parent}


def test_a_pod_gets_it(divided: NodeCluster) -> None:
    divided.apply(claim_template("any-mig", "mig.nvidia.com"), claiming(pod("any-mig"), "any-mig"))
    until_running(divided, "any-mig")
    assert len(inside(divided, "any-mig", "sh", "-c", CAPS).split()) == 2
    assert divided.get("pod", "any-mig")["spec"]["nodeName"] == divided.nodes[0].name
    divided.kubectl("delete", "pod", "any-mig", "--wait=false")
    until_gone(divided, "any-mig")
    divided.kubectl("delete", "resourceclaimtemplate", "any-mig")
