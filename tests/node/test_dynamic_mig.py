"""MIG devices that are made for pods, on real nodes.

NVML is a stand-in that keeps MIG mode and MIG devices as the driver does (driver/nvml.c). kubelet, scheduler,
API server and runtime are real. The capabilities among the device files of a container show which devices it
has.
"""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
from tests.node.installation import plugins
from tests.node.nodes import NodeCluster
from tests.node.workloads import Object, inside, phase, pod, until_gone, until_running
from tests.waiting import until_seen

SYSTEM = ("-n", "rackloom-system")
CHOSEN = "app.kubernetes.io/component in (node-gpu, node-all)"
CAPS = "ls /dev/nvidia-caps"
TIME_SLICES = {
    "requests": ["mig"],
    "opaque": {
        "driver": "gpu.nvidia.com",
        "parameters": {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "MigDeviceConfig",
            "sharing": {"strategy": "TimeSlicing"},
        },
    },
}
"""A config of the request `mig`."""
_INSTANCE = struct.Struct("6I")
_GPU_BYTES = 4 * 2 + 8 * _INSTANCE.size


@pytest.fixture(scope="module")
def dynamic(installed: NodeCluster) -> Iterator[NodeCluster]:
    """The GPU plugins make MIG devices."""
    (daemon_set,) = [name for name in plugins() if name.endswith(("gpu", "all"))]
    workload = f"daemonset/{daemon_set}"
    installed.kubectl("set", "env", *SYSTEM, workload, "DYNAMIC_MIG=true")
    installed.kubectl("rollout", "status", *SYSTEM, workload, "--timeout=120s")
    try:
        until_seen(
            lambda: published(installed, "mig") or refusal(installed),
            "MIG devices are published, or why they are not",
            30,
        )
        if not published(installed, "mig"):
            # The gate is off in Kubernetes 1.34 and 1.35: parts without counters would overlap.
            assert len(published(installed, "gpu")) == 8
            pytest.skip("THIS API SERVER KEEPS NO COUNTERS: whole GPUs alone are published")
        yield installed
    finally:
        installed.kubectl("set", "env", *SYSTEM, workload, "DYNAMIC_MIG-")
        installed.kubectl("rollout", "status", *SYSTEM, workload, "--timeout=120s")
        until_seen(lambda: not published(installed, "mig"), "whole GPUs are published", 30)


def refusal(cluster: NodeCluster) -> bool:
    """Whether a plugin has found that the API server keeps no counters."""
    log = cluster.kubectl("logs", *SYSTEM, "-l", CHOSEN, "--tail=-1")
    return "node.no-counters" in log


def published(cluster: NodeCluster, kind: str) -> dict[str, Object]:
    """Devices of one type on the first node, by name."""
    node = cluster.nodes[0].name
    slices = [
        part["spec"]
        for part in cluster.get("resourceslices")["items"]
        if part["spec"]["driver"] == "gpu.nvidia.com" and part["spec"].get("nodeName") == node
    ]
    devices = [device for spec in slices for device in spec.get("devices", ())]
    return {
        device["name"]: device for device in devices if device["attributes"]["type"].get("string") == kind
    }


def mig_state(cluster: NodeCluster) -> list[tuple[int, list[tuple[int, int]]]]:
    """MIG mode, and profile and place of each MIG device, for the GPUs of the first node."""
    path = cluster.nodes[0].root / "dev/shm/libnvidia-ml.mig"
    data = path.read_bytes() if path.exists() else b""
    gpus = (
        data[start : start + _GPU_BYTES]
        for start in range(0, len(data) // _GPU_BYTES * _GPU_BYTES, _GPU_BYTES)
    )
    state = []
    for gpu in gpus:
        found = _INSTANCE.iter_unpack(gpu[8:])
        state.append((struct.unpack_from("I", gpu)[0], [(at[1], at[2]) for at in found if at[0]]))
    return state


def is_untouched(cluster: NodeCluster) -> bool:
    return all(not mode and not devices for mode, devices in mig_state(cluster))


def template(name: str, *requests: tuple[str, str], **fields: Any) -> Object:
    """A claim template: names of requests and the selectors of their MIG devices."""
    asked = [
        {
            "name": request,
            "exactly": {
                "deviceClassName": "mig.nvidia.com",
                "selectors": [{"cel": {"expression": expression}}],
            },
        }
        for request, expression in requests
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": {"devices": {"requests": asked, **fields}}},
    }


def mig_pod(cluster: NodeCluster, name: str, claim: str, *requests: str) -> Object:
    """A pod with a container for each request of the claim, or one container with all if none are named."""
    value = pod(name, node=cluster.nodes[0].name)
    (main,) = value["spec"]["containers"]
    value["spec"]["resourceClaims"] = [{"name": "mig", "resourceClaimTemplateName": claim}]
    uses = [{"name": "mig", "request": request} for request in requests] or [{"name": "mig"}]
    value["spec"]["containers"] = [
        {**main, "name": f"ctr{number}", "resources": {"claims": [use]}} for number, use in enumerate(uses)
    ]
    return value


def multiprocessors(test: str) -> str:
    return f"device.capacity['gpu.nvidia.com'].multiprocessors.{test}"


def test_attributes_of_both_kinds_are_published(dynamic: NodeCluster) -> None:
    whole, parts = published(dynamic, "gpu"), published(dynamic, "mig")
    assert len(whole) == 8
    assert len(parts) == 8 * 25
    common = {
        *(
            "architecture",
            "brand",
            "cudaComputeCapability",
            "cudaDriverVersion",
            "driverVersion",
            "productName",
        ),
        *("type", "addressingMode", "resource.kubernetes.io/pciBusID"),
    }
    assert common | {"uuid"} <= whole["gpu-0"]["attributes"].keys()
    # Of the PCIe tree this machine shows the NUMA node, but no root.
    numa = "resource.kubernetes.io/numaNode"
    part = parts["gpu-0-mig-1g10gb-19-0"]["attributes"]
    assert common | {"parentUUID", "profile", numa} == part.keys() | {numa}


@pytest.mark.parametrize("more", [{}, {"config": [TIME_SLICES]}], ids=["plain", "time-slices"])
def test_a_device_is_made_for_a_pod_and_mig_mode_is_off_after_it(
    dynamic: NodeCluster, more: dict[str, Any]
) -> None:
    """The claim needs a minimum of a GPU, or has a config that changes nothing on a MIG device."""
    assert is_untouched(dynamic)
    enough = multiprocessors("isGreaterThan(quantity('10'))")
    if not more:
        enough += " && device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('10Gi'))"
    dynamic.apply(template("rct-mig1g", ("mig", enough), **more))
    dynamic.apply(mig_pod(dynamic, "pod-mig1g", "rct-mig1g"))
    until_running(dynamic, "pod-mig1g")
    assert len(inside(dynamic, "pod-mig1g", "sh", "-c", CAPS, container="ctr0").split()) == 2
    (used,) = [gpu for gpu in mig_state(dynamic) if gpu[1]]
    assert used[0] == 1
    assert len(used[1]) == 1
    dynamic.kubectl("delete", "pod", "pod-mig1g", "--wait=false")
    until_gone(dynamic, "pod-mig1g")
    dynamic.kubectl("delete", "resourceclaimtemplate", "rct-mig1g")
    until_seen(lambda: is_untouched(dynamic), "MIG mode is off", 30)


def test_two_containers_have_a_device_each_of_one_claim(dynamic: NodeCluster) -> None:
    small = ("mig1", multiprocessors("isLessThan(quantity('30'))"))
    large = ("mig2", multiprocessors("isGreaterThan(quantity('50'))"))
    dynamic.apply(template("rct-migdevs", small, large))
    dynamic.apply(mig_pod(dynamic, "pod-2mig", "rct-migdevs", "mig1", "mig2"))
    until_running(dynamic, "pod-2mig")
    first, second = (
        set(inside(dynamic, "pod-2mig", "sh", "-c", CAPS, container=f"ctr{n}").split()) for n in (0, 1)
    )
    assert len(first) == len(second) == 2
    assert not first & second
    dynamic.kubectl("delete", "pod", "pod-2mig", "--wait=false")
    until_gone(dynamic, "pod-2mig")
    until_seen(lambda: is_untouched(dynamic), "MIG mode is off", 30)


def test_a_device_with_time_slices_and_seven_that_fill_a_gpu(dynamic: NodeCluster) -> None:
    """TimeSlicing changes nothing on a MIG device. A GPU has seven of the smallest devices."""
    one_gpu = "device.attributes['resource.kubernetes.io'].pciBusID == '{}'".format(
        published(dynamic, "gpu")["gpu-0"]["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
    )
    smallest = multiprocessors("isLessThan(quantity('20'))") + f" && {one_gpu}"
    dynamic.apply(template("rct-ts", ("mig", smallest), config=[TIME_SLICES]))
    names = [f"seventh-{number}" for number in range(8)]
    dynamic.apply(*(mig_pod(dynamic, name, "rct-ts") for name in names))

    def seven_run() -> bool:
        return sorted(phase(dynamic, name) for name in names) == ["Pending", *["Running"] * 7]

    until_seen(seven_run, "seven run", 90)
    first, *_ = mig_state(dynamic)
    assert [place for _, place in sorted(first[1], key=lambda at: at[1])] == list(range(7))
    dynamic.kubectl("delete", "pod", *names, "--wait=false")
    until_gone(dynamic, *names)
    until_seen(lambda: is_untouched(dynamic), "MIG mode is off", 30)


def test_a_device_outlives_the_plugin(dynamic: NodeCluster) -> None:
    dynamic.apply(template("rct-stays", ("mig", multiprocessors("isGreaterThan(quantity('50'))"))))
    dynamic.apply(mig_pod(dynamic, "stays", "rct-stays"))
    until_running(dynamic, "stays")
    before = mig_state(dynamic)
    names = set(published(dynamic, "mig"))
    dynamic.kubectl("delete", "pod", *SYSTEM, "-l", CHOSEN, "--wait=true")
    (daemon_set,) = [name for name in plugins() if name.endswith(("gpu", "all"))]
    dynamic.kubectl("rollout", "status", *SYSTEM, f"daemonset/{daemon_set}", "--timeout=120s")
    assert mig_state(dynamic) == before
    assert set(published(dynamic, "mig")) == names
    dynamic.kubectl("delete", "pod", "stays", "--wait=false")
    until_gone(dynamic, "stays")
    until_seen(lambda: is_untouched(dynamic), "MIG mode is off", 30)
