"""The published names of NVIDIA's driver and of Rackloom: selectors must keep their meaning.

Read of kubernetes-sigs/dra-driver-nvidia-gpu at 95932046 (August 7, 2026): GetDevice of each kind of device
in cmd/gpu-kubelet-plugin/deviceinfo.go, PartGetDevice for DynamicMIG, and the device classes of its chart.
"""

from pathlib import Path

import msgspec
import pytest
import yaml

from rackloom.claim.node.gpu.inventory import (
    GpuInventory,
    GpuLocation,
    MigDevice,
    MigPartition,
    NicPartner,
    NodeGpu,
    ShareSettings,
    gpu_device,
    mig_device,
)
from rackloom.claim.node.gpu.partitions import partitionable_devices
from rackloom.claim.node.gpu.passthrough import VfioGpu, vfio_device
from rackloom.core.allocate.objects import Device
from rackloom.topology.join_key import declared_key

CLASSES = Path(__file__).parents[4] / "deploy" / "kubernetes" / "base" / "device-classes.yaml"
STANDARD = "resource.kubernetes.io/"
OF_A_GPU = {
    "productName", "brand", "architecture", "cudaComputeCapability", "driverVersion", "cudaDriverVersion",
    "addressingMode", f"{STANDARD}pciBusID", f"{STANDARD}pcieRoot",
}  # fmt: skip
THEIRS = {
    "gpu": {"type", "uuid", "gpuModuleID", *OF_A_GPU},
    "mig": {"type", "uuid", "parentUUID", "profile", *OF_A_GPU},
    "partition": {"type", "parentUUID", "profile", *OF_A_GPU},
    "whole": {"type", "uuid", "gpuModuleID", *OF_A_GPU},
    "vfio": {
        "type", "uuid", "deviceID", "vendorID", "productName", "iommuFDEnabled",
        f"{STANDARD}pciBusID", f"{STANDARD}pcieRoot",
    },
}  # fmt: skip
ENGINES = {"multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"}
THEIR_CAPACITIES = {
    "gpu": {"memory", "shares"},
    "mig": {"memory", "shares", *ENGINES, "memorySlice0", "memorySlice1"},
    "partition": {"memory", *ENGINES},
    "whole": {"memory", *ENGINES},
    "vfio": {"addressableMemory"},
}  # fmt: skip
THEIR_COUNTERS = {
    "memory", "multiprocessors", "copy-engines", "decoders", "encoders", "jpeg-engines", "ofa-engines",
    "memory-slice-0",
}  # fmt: skip
THEIR_CLASSES = {
    "gpu.nvidia.com", "mig.nvidia.com", "vfio.gpu.nvidia.com",
    "compute-domain-daemon.nvidia.com", "compute-domain-default-channel.nvidia.com",
}  # fmt: skip


def device(kind: str) -> Device:
    """A device whose GPU is fully known, and that several claims may have."""
    mig = MigDevice(
        uuid="MIG-1",
        profile="1g.10gb",
        gpu_instance=1,
        compute_instance=0,
        profile_id=19,
        placement_start=0,
        placement_size=2,
        memory_bytes=10 << 30,
        multiprocessors=16,
    )
    gpu = NodeGpu(
        minor=0,
        uuid="GPU-1",
        pci_address="0000:41:00.0",
        product="NVIDIA H100",
        memory_bytes=80 << 30,
        brand="Nvidia",
        architecture="Hopper",
        compute_capability="9.0",
        addressing_mode="HMM",
        migs=(mig,),
        key=declared_key(
            uuid="GPU-1",
            pci_address="0000:41:00.0",
            chassis_serial="C",
            slot=1,
            module_id=1,
            fabric_guid=None,
        ),
    )
    inventory = GpuInventory(driver_version="580.95.05", cuda_version="13.0")
    nic = NicPartner(rdma="mlx5_0", pci_address="0000:42:00.0", path_class="PIX")
    location = GpuLocation(pcie_root="pci0000:40", numa_node=0, nic=nic)
    vfio = VfioGpu(
        index=0,
        pci_address="0000:41:00.0",
        vendor_id="0x10de",
        device_id="0x2330",
        product="GH100 [H100 SXM5 80GB]",
        group=17,
        addressable_memory=1 << 37,
        pcie_root="pci0000:40",
    )
    partition = MigPartition(
        gpu="GPU-1",
        profile="1g.10gb",
        profile_id=19,
        placement_start=0,
        placement_size=1,
        compute_slices=1,
        memory_bytes=10 << 30,
        multiprocessors=16,
    )
    divided = msgspec.structs.replace(gpu, migs=(), partitions=(partition,), mig_switchable=True)
    if kind in ("whole", "partition"):
        by_kind = dict(
            zip(("whole", "partition"), partitionable_devices(divided, inventory, location), strict=True)
        )
        return by_kind[kind]
    found = {
        "gpu": gpu_device(gpu, inventory, location),
        "mig": mig_device(gpu, mig, inventory, location),
        "vfio": vfio_device(vfio),
    }[kind]
    return ShareSettings("shares", 7).of(found)


@pytest.mark.parametrize("kind", THEIRS)
def test_every_attribute_of_theirs_is_published_under_its_name(kind: str) -> None:
    published = {name.removeprefix("gpu.nvidia.com/") for name in device(kind).attributes}
    assert THEIRS[kind] <= published


@pytest.mark.parametrize("kind", THEIRS)
def test_every_capacity_of_theirs_is_published_under_its_name(kind: str) -> None:
    assert THEIR_CAPACITIES[kind] <= device(kind).capacity.keys()


@pytest.mark.parametrize("kind", ["whole", "partition"])
def test_counters_are_theirs(kind: str) -> None:
    (draw,) = device(kind).consumes_counters
    assert draw.counter_set == "gpu-0-counter-set"
    assert draw.counters.keys() == THEIR_COUNTERS


def test_what_is_added_takes_no_bare_name_of_theirs() -> None:
    """An added name in their domain could get another meaning with their next release. Each is listed."""
    added = {
        name.removeprefix("gpu.nvidia.com/")
        for kind in THEIRS
        for name in device(kind).attributes
        if name.removeprefix("gpu.nvidia.com/") not in THEIRS[kind] and "/" not in name
    }
    assert added == {
        *("nicPartner", "nicPartnerPCIBusID", "nicPartnerClass"),
        *("chassisSerial", "slot", "moduleID"),
    }


def test_their_classes_are_there() -> None:
    classes = {document["metadata"]["name"] for document in yaml.safe_load_all(CLASSES.read_text())}
    of_nics = {"dra.net", "dranet.net"}
    assert classes - THEIR_CLASSES - of_nics == {"compute-domain-isolated-channel.rackloom.dev"}
    assert classes >= THEIR_CLASSES
