"""GPUs that several claims share: the published, allocated and refused shares."""

import msgspec
import pytest
from tests.claim.node.gpu.test_gpu_configs import NAMES

from rackloom.claim.node.gpu.inventory import parse_shares
from rackloom.claim.node.gpu.sharing import claimed_gpus
from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.objects import (
    Device,
    DeviceCapacity,
    DeviceClass,
    Node,
    ObjectMeta,
    ResourceClaim,
    ResourcePool,
    ResourceSlice,
    ResourceSliceSpec,
)
from rackloom.core.allocate.outcome import Allocation
from rackloom.core.cluster.claims import AllocatedClaim, AllocatedDevice, ClaimRef, OpaqueConfig
from rackloom.errors import Refused

GIBIBYTE = 1 << 30
GPU = Device(name="gpu-0", capacity={"memory": DeviceCapacity(value=str(80 * GIBIBYTE + 4096))})
CLASS = DeviceClass(metadata=ObjectMeta(name="gpu.nvidia.com"))


def claim(number, memory=None):
    asked = {"capacity": {"requests": {"memory": memory}}} if memory else {}
    exactly = {"deviceClassName": "gpu.nvidia.com", "count": 1, "allocationMode": "ExactCount", **asked}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    return msgspec.convert(
        {"metadata": {"name": f"c{number}", "namespace": "d", "uid": f"u{number}"}, "spec": spec},
        ResourceClaim,
    )


def placed(mode, *claims):
    """How many of the claims, in one pod, get a share of the one GPU."""
    pool = ResourcePool(name="n", generation=1, resource_slice_count=1)
    spec = ResourceSliceSpec(
        driver="gpu.nvidia.com", node_name="n", pool=pool, devices=(parse_shares(mode).of(GPU),)
    )
    slices = [ResourceSlice(metadata=ObjectMeta(name="s"), spec=spec)]
    found = allocate(Node(metadata=ObjectMeta(name="n")), [CLASS], slices, list(claims))
    return isinstance(found, Allocation)


@pytest.mark.parametrize(
    ("mode", "memory", "fits"),
    [("disabled", None, 1), ("3", None, 3), ("memory", None, 1), ("memory", "20Gi", 4)],
)
def test_as_many_claims_fit_as_the_mode_says(mode, memory, fits):
    assert placed(mode, *(claim(number, memory) for number in range(fits)))
    assert not placed(mode, *(claim(number, memory) for number in range(fits + 1)))


def test_without_a_limit_any_number_fits():
    assert placed("unlimited", *(claim(number) for number in range(20)))


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "10001", "9" * 5000, "٣"])
def test_what_is_no_mode_is_refused(text):
    with pytest.raises(Refused, match="--consumable-shares"):
        parse_shares(text)


def test_a_device_without_memory_has_one_user():
    bare = Device(name="gpu-vfio-0")
    assert parse_shares("5").of(bare) is bare


@pytest.mark.parametrize("strategy", ["TimeSlicing", "MPS"])
def test_a_share_takes_no_settings_of_the_whole_gpu(strategy):
    config = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": strategy},
    }
    asked = AllocatedClaim(
        ref=ClaimRef(namespace="d", name="c", uid="u"),
        results=(AllocatedDevice(driver="d", request="r", pool="n", device="gpu-0", share_id="s"),),
        configs=(OpaqueConfig(source="FromClaim", requests=(), parameters=config),),
        fingerprint="f",
    )
    with pytest.raises(
        Refused, match="has a share of gpu-0 and asks for sharing settings; leave sharing out"
    ):
        claimed_gpus(asked, NAMES.get)
