"""Devices as the drivers publish them anywhere: what a claim must expect when no slices are at hand.

Attribute names and which of them may be absent are DRANET's and the NVIDIA driver's: a virtual interface has
no PCI address, a virtual function on Hyper-V no PCI root, an RDMA-only function no interface, a GPU of a
driver before numaNode none. Values are made up; nothing is compared with them.
"""

from functools import cache

from rackloom.claim.allocate.objects import (
    Device,
    DeviceAttribute,
    DeviceCapacity,
    ObjectMeta,
    ResourcePool,
    ResourceSlice,
    ResourceSliceSpec,
)
from rackloom.claim.allocate.slices import GPU_DRIVER, NIC_DRIVER

Scalar = str | int | bool
_STANDARD = "resource.kubernetes.io"
_FOREIGN = "cpu.example.com"
"""Some other driver of the cluster, whose devices share no attribute with GPUs and NICs."""

_LINK: dict[str, Scalar] = {
    "ifName": "eth0",
    "mac": "02:00:00:00:00:01",
    "mtu": 1500,
    "encapsulation": "ether",
    "alias": "",
    "state": "up",
    "type": "device",
    "ipv4": "192.0.2.1/24",
    "ipv6": "2001:db8::1/64",
    "ebpf": False,
}
_PCI: dict[str, Scalar] = {
    "pciAddress": "0000:01:00.0",
    "pciVendor": "a vendor",
    "pciDevice": "a device",
    "pciSubsystem": "0000",
    "numaNode": 0,
    f"{_STANDARD}/numaNode": 0,
}
_ROOT: dict[str, Scalar] = {f"{_STANDARD}/pcieRoot": "pci0000:00", f"{_STANDARD}/pciBusID": "0000:01:00.0"}
_VIRTUAL = {name: value for name, value in _LINK.items() if name in ("ifName", "mac", "mtu", "state")}
_NICS: dict[str, dict[str, Scalar]] = {
    "port": {**_LINK, **_PCI, **_ROOT, "rdma": True, "rdmaDevice": "mlx5_0", "virtual": False, "sriov": True}
    | {"sriovVfs": 0, "tcFilterNames": "", "tcxProgramNames": ""},
    "rdma-only-function": {**_PCI, "rdma": True, "rdmaDevice": "mlx5_1", "isSriovVf": True, "virtual": False},
    "ethernet": {**_LINK, **_PCI, **_ROOT, "rdma": False, "virtual": False, "sriov": False},
    "virtual-interface": {**_VIRTUAL, "type": "veth", "rdma": False, "virtual": True},
}
_GPU: dict[str, Scalar] = {
    "uuid": "GPU-0",
    "productName": "a product",
    "brand": "a brand",
    "architecture": "an architecture",
    "addressingMode": "HMM",
}
_GPUS: dict[str, dict[str, Scalar]] = {
    "gpu": {**_GPU, **_ROOT, "type": "gpu", f"{_STANDARD}/numaNode": 0},
    "gpu-of-an-older-driver": {**_GPU, **_ROOT, "type": "gpu"},
    "partition": {**_GPU, **_ROOT, "type": "mig", "profile": "1g.10gb", "parentUUID": "GPU-0"},
}
_VERSIONS = ("cudaComputeCapability", "driverVersion", "cudaDriverVersion")


def typical_slices() -> tuple[ResourceSlice, ...]:
    """One node with a device of every kind."""
    nics = [_device(name, of) for name, of in _NICS.items()]
    gpus = [_gpu(name, of) for name, of in _GPUS.items()]
    foreign = [Device(name="cpu-0")]
    drivers = ((GPU_DRIVER, gpus), (NIC_DRIVER, nics), (_FOREIGN, foreign))
    return tuple(_slice(driver, devices) for driver, devices in drivers)


@cache
def always(driver: str) -> frozenset[str]:
    """Attributes that every device of a driver has, fully qualified."""
    kinds = {GPU_DRIVER: _GPUS, NIC_DRIVER: _NICS}.get(driver, {})
    names = [{name if "/" in name else f"{driver}/{name}" for name in of} for of in kinds.values()]
    return frozenset(set.intersection(*names)) if names else frozenset()


def _gpu(name: str, attributes: dict[str, Scalar]) -> Device:
    device = _device(name, attributes)
    versions = {version: DeviceAttribute(version="1.0.0") for version in _VERSIONS}
    return Device(
        name=name,
        attributes={**device.attributes, **versions},
        capacity={"memory": DeviceCapacity(value="80Gi")},
    )


def _device(name: str, attributes: dict[str, Scalar]) -> Device:
    return Device(name=name, attributes={key: _attribute(value) for key, value in attributes.items()})


def _attribute(value: Scalar) -> DeviceAttribute:
    if isinstance(value, bool):
        return DeviceAttribute(bool_=value)
    return DeviceAttribute(int_=value) if isinstance(value, int) else DeviceAttribute(string=value)


def _slice(driver: str, devices: list[Device]) -> ResourceSlice:
    return ResourceSlice(
        metadata=ObjectMeta(name=f"typical-{driver}"),
        spec=ResourceSliceSpec(
            driver=driver,
            pool=ResourcePool(name="typical", generation=1, resource_slice_count=1),
            node_name="typical",
            devices=tuple(devices),
        ),
    )
