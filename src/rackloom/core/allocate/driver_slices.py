"""ResourceSlices without a cluster: those that drivers would publish for a machine, and typical devices.

For planning and linting only. `claim.node.gpu` and `core.nics` decide which devices our plugins publish.

Attribute and device names are those of gpu.nvidia.com and of DRANET (dra.net), and the standard ones of
resource.kubernetes.io (pcieRoot since Kubernetes 1.34, numaNode since 1.37).

`slices_of` makes the ResourceSlices of a machine profile, so that claims can be planned without a
cluster. It publishes only facts that a driver would read on the machine itself, and only if the profile
has them. A PCIe path that a vendor file restores is left out, because no driver sees it. So is the NUMA
node of GPUs, which current GPU drivers do not publish. NICs that must not carry tenant data are
published like any other.

`typical_slices` makes one node with a device of every kind, to check claims if no slices are available.
Some of these kinds have attributes that only Rackloom's plugins publish. Attributes are absent as in the
drivers: a virtual interface has no PCI address, a virtual function on Hyper-V has no PCIe root, and an
RDMA-only function has no interface. Values are made up and nothing is compared with them.
"""

import re
from collections.abc import Iterable
from functools import cache

from rackloom.core.allocate.attributes import CHASSIS_SERIAL, CLIQUE, FABRIC_GUID, MODULE_ID, SLOT, TRAY
from rackloom.core.allocate.objects import (
    CelSelector,
    Device,
    DeviceAttribute,
    DeviceCapacity,
    DeviceClass,
    DeviceClassSpec,
    DeviceSelector,
    ObjectMeta,
    ResourcePool,
    ResourceSlice,
    ResourceSliceSpec,
)
from rackloom.topology.join_key import Source
from rackloom.topology.machine import Gpu, Machine, Nic, PciePath, numa_of

# Standard and vendor names of locality attributes.


PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NUMA_NODE = "resource.kubernetes.io/numaNode"
NIC_NUMA_NODE = "dra.net/numaNode"
"""DRANET's name, which is older than the standard one."""


# ResourceSlices of a machine profile.


GPU_DRIVER = "gpu.nvidia.com"
NIC_DRIVER = "dra.net"
PCI_BUS_ID = "resource.kubernetes.io/pciBusID"

Attributes = dict[str, DeviceAttribute]
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MAX_STRING = 64
"""The longest string attribute that the API accepts. Drivers truncate longer values."""


def slices_of(machine: Machine, node: str) -> tuple[ResourceSlice, ...]:
    """The ResourceSlices of both drivers for `machine` as the node `node`. Drivers without devices have none.

    NICs that must not carry tenant data are published like any other, because DRANET cannot know them. (It
    leaves out the NIC of the default route, but a machine profile does not mark that NIC.)
    """
    drivers = (
        (GPU_DRIVER, [_gpu_device(gpu) for gpu in machine.gpus]),
        (NIC_DRIVER, [_nic_device(nic) for nic in machine.nics]),
    )
    return tuple(local_slice(driver, node, devices) for driver, devices in drivers if devices)


def device_classes() -> tuple[DeviceClass, ...]:
    """The classes that claims for these drivers name: gpu.nvidia.com and dranet.net."""
    return (
        _device_class(GPU_DRIVER, f"device.driver == '{GPU_DRIVER}'"),
        _device_class("dranet.net", f"device.driver == '{NIC_DRIVER}'"),
    )


def _device_class(name: str, expression: str) -> DeviceClass:
    selector = DeviceSelector(cel=CelSelector(expression=expression))
    return DeviceClass(metadata=ObjectMeta(name=name), spec=DeviceClassSpec(selectors=(selector,)))


def local_slice(driver: str, node: str, devices: Iterable[Device]) -> ResourceSlice:
    """The one slice of a pool that is named after its node."""
    return ResourceSlice(
        metadata=ObjectMeta(name=f"{node}-{driver}"),
        spec=ResourceSliceSpec(
            driver=driver,
            pool=ResourcePool(name=node, generation=1, resource_slice_count=1),
            node_name=node,
            devices=tuple(devices),
        ),
    )


def _gpu_device(gpu: Gpu) -> Device:
    attributes = _string_attributes(
        {
            "type": "gpu",
            "uuid": gpu.uuid,
            "productName": gpu.product,
            PCI_BUS_ID: gpu.pci_address,
            PCIE_ROOT: _pcie_root(gpu.pcie),
        }
    )
    if gpu.driver_version is not None:
        # Driver versions are three numbers, with leading zeros that semantic versions forbid.
        parts = (str(int(part)) if part.isdigit() else part for part in gpu.driver_version.split("."))
        attributes["driverVersion"] = DeviceAttribute(version=".".join(parts))
    memory = {} if gpu.memory_mib is None else {"memory": DeviceCapacity(value=f"{gpu.memory_mib}Mi")}
    return Device(name=f"gpu-{gpu.index}", attributes=attributes, capacity=memory)


def _nic_device(nic: Nic) -> Device:
    attributes = _string_attributes(
        {
            "dra.net/ifName": nic.if_name,
            "dra.net/rdmaDevice": nic.rdma_device,
            "dra.net/pciAddress": nic.pci_address,
            "dra.net/pciDevice": nic.model,
            PCIE_ROOT: _pcie_root(nic.pcie),
        }
    )
    if nic.rdma_device is not None or nic.excluded is not None:
        attributes["dra.net/rdma"] = DeviceAttribute(bool_=nic.rdma_device is not None)
    numa = numa_of(nic)
    if numa is not None:
        attributes |= {name: DeviceAttribute(int_=numa) for name in (NIC_NUMA_NODE, NUMA_NODE)}
    return Device(name=_nic_name(nic), attributes=attributes)


def _nic_name(nic: Nic) -> str:
    """DRANET's name of a NIC: its PCI address, or else its interface, as a DNS label."""
    if nic.pci_address is not None:
        return f"pci-{re.sub('[:.]', '-', nic.pci_address)}"
    names: Iterable[str | None] = (nic.if_name, nic.rdma_device)
    usable = (name for name in names if name is not None and _DNS_LABEL.fullmatch(name))
    return next(usable, f"nic-{nic.index}")


def _string_attributes(values: dict[str, str | None]) -> Attributes:
    known = {name: value for name, value in values.items() if value is not None}
    return {name: DeviceAttribute(string=value[:_MAX_STRING]) for name, value in known.items()}


def _pcie_root(path: PciePath | None) -> str | None:
    """The root complex if the machine itself shows it. Hyper-V functions, for example, have none."""
    return None if path is None or path.source is not Source.SYSFS else path.root


# Typical devices of each driver, for checks without slices.


ScalarValue = str | int | bool
_OTHER_DRIVER = "cpu.example.com"
"""Another driver of the cluster. Its devices share no attribute with GPUs and NICs."""

_VIRTUAL: dict[str, ScalarValue] = {"ifName": "eth0", "mac": "02:00:00:00:00:01", "mtu": 1500, "state": "up"}
_LINK: dict[str, ScalarValue] = {
    **_VIRTUAL,
    "encapsulation": "ether",
    "alias": "",
    "type": "device",
    "ebpf": False,
    "ipv4": "192.0.2.1/24",
    "ipv6": "2001:db8::1/64",
}
_PCI: dict[str, ScalarValue] = {
    "pciAddress": "0000:01:00.0",
    "pciVendor": "a vendor",
    "pciDevice": "a device",
    "pciSubsystem": "0000",
    "numaNode": 0,
    NUMA_NODE: 0,
}
_ROOT: dict[str, ScalarValue] = {PCIE_ROOT: "pci0000:00", PCI_BUS_ID: "0000:01:00.0"}
_TYPICAL_NICS: dict[str, dict[str, ScalarValue]] = {
    "port": {**_LINK, **_PCI, **_ROOT, "rdma": True, "rdmaDevice": "mlx5_0", "virtual": False, "sriov": True}
    | {"sriovVfs": 0, "tcFilterNames": "", "tcxProgramNames": ""},
    "rdma-only-function": {**_PCI, "rdma": True, "rdmaDevice": "mlx5_1", "isSriovVf": True, "virtual": False},
    "ethernet": {**_LINK, **_PCI, **_ROOT, "rdma": False, "virtual": False, "sriov": False},
    "virtual-interface": {**_VIRTUAL, "type": "veth", "rdma": False, "virtual": True},
}
_TYPICAL_NICS["port-of-rackloom"] = {
    **_TYPICAL_NICS["port"],
    "rail": 0,
    "rdmaState": "active",
    "linkLayer": "InfiniBand",
    "linkSpeedGbps": 400,
    "gpuPartner": "GPU-0",
    "gpuPartnerPCIBusID": "0000:01:00.0",
    "gpuPartnerClass": "PIX",
}
"""A port with the attributes that only Rackloom's NIC plugin publishes (`core.nics.devices`)."""
_GPU_COMMON: dict[str, ScalarValue] = {
    "uuid": "GPU-0",
    "productName": "a product",
    "brand": "a brand",
    "architecture": "an architecture",
    "addressingMode": "HMM",
}
_TYPICAL_GPUS: dict[str, dict[str, ScalarValue]] = {
    "gpu": {**_GPU_COMMON, **_ROOT, "type": "gpu", NUMA_NODE: 0},
    "gpu-of-an-older-driver": {**_GPU_COMMON, **_ROOT, "type": "gpu"},
    "partition": {**_GPU_COMMON, **_ROOT, "type": "mig", "profile": "1g.10gb", "parentUUID": "GPU-0"},
}
_TYPICAL_GPUS["gpu-of-rackloom"] = {
    **_TYPICAL_GPUS["gpu"],
    CLIQUE: "cluster.1",
    "clusterUUID": "cluster",
    "cliqueID": 1,
    CHASSIS_SERIAL: "a serial",
    SLOT: 1,
    MODULE_ID: 1,
    FABRIC_GUID: "0x1",
    "gpuModuleID": 1,
    TRAY: 0,
    "nicPartner": "mlx5_0",
    "nicPartnerPCIBusID": "0000:01:00.0",
    "nicPartnerClass": "PIX",
}
"""A GPU with the attributes that only Rackloom's GPU plugin publishes (`claim.node.gpu.inventory`)."""
_VERSIONS = ("cudaComputeCapability", "driverVersion", "cudaDriverVersion")


def typical_slices() -> tuple[ResourceSlice, ...]:
    """One node with a device of every kind."""
    nics = [_typical_device(name, of) for name, of in _TYPICAL_NICS.items()]
    # Every GPU has versions and memory. The values are made up, and nothing is compared with them.
    versions = {version: DeviceAttribute(version="1.0.0") for version in _VERSIONS}
    memory = {"memory": DeviceCapacity(value="80Gi")}
    gpus = []
    for name, of in _TYPICAL_GPUS.items():
        published = {**_typical_device(name, of).attributes, **versions}
        gpus.append(Device(name=name, attributes=published, capacity=memory))
    foreign = [Device(name="cpu-0")]
    drivers = ((GPU_DRIVER, gpus), (NIC_DRIVER, nics), (_OTHER_DRIVER, foreign))
    return tuple(local_slice(driver, "typical", devices) for driver, devices in drivers)


@cache
def attributes_always_published(driver: str) -> frozenset[str]:
    """Attributes that every device of a driver has, fully qualified."""
    kinds = {GPU_DRIVER: _TYPICAL_GPUS, NIC_DRIVER: _TYPICAL_NICS}.get(driver, {})
    names = [{name if "/" in name else f"{driver}/{name}" for name in of} for of in kinds.values()]
    return frozenset(set.intersection(*names)) if names else frozenset()


def _typical_device(name: str, attributes: dict[str, ScalarValue]) -> Device:
    return Device(name=name, attributes={key: _attribute_of(value) for key, value in attributes.items()})


def _attribute_of(value: ScalarValue) -> DeviceAttribute:
    if isinstance(value, bool):
        return DeviceAttribute(bool_=value)
    return DeviceAttribute(int_=value) if isinstance(value, int) else DeviceAttribute(string=value)
