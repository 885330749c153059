"""What the GPU and NIC drivers would publish for a machine: planning without a cluster.

Attribute names and device names are those of gpu.nvidia.com and of DRANET (dra.net). Only what a driver would
read on the machine itself is published, and only where the machine profile knows it: a PCIe path that a
vendor file restores stays out, because no driver sees it, and so does the NUMA node of GPUs, which the GPU
drivers in use do not publish yet.
"""

import re
from collections.abc import Iterable

from rackloom.claim.allocate.names import NIC_NUMA_NODE, NUMA_NODE, PCIE_ROOT
from rackloom.claim.allocate.objects import (
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
from rackloom.topology.facts import Source
from rackloom.topology.machine import Gpu, Machine, Nic, PciePath, numa_of

GPU_DRIVER = "gpu.nvidia.com"
NIC_DRIVER = "dra.net"
_PCI_BUS_ID = "resource.kubernetes.io/pciBusID"

Attributes = dict[str, DeviceAttribute]
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MAX_STRING = 64
"""Longest string attribute that the API takes; a driver cuts."""


def slices_of(machine: Machine, node: str) -> tuple[ResourceSlice, ...]:
    """The ResourceSlices of both drivers for `machine` as the node `node`; a driver without devices has none.

    NICs that must not carry tenant data are published like any other: DRANET cannot know. (It leaves out the
    NIC of the default route, which a machine profile does not tell apart.)
    """
    drivers = (
        (GPU_DRIVER, [_gpu(gpu) for gpu in machine.gpus]),
        (NIC_DRIVER, [_nic(nic) for nic in machine.nics]),
    )
    return tuple(_slice(driver, node, devices) for driver, devices in drivers if devices)


def device_classes() -> tuple[DeviceClass, ...]:
    """The classes that claims for these drivers name: gpu.nvidia.com and dranet.net."""
    return (
        _class(GPU_DRIVER, f"device.driver == '{GPU_DRIVER}'"),
        _class("dranet.net", f"device.driver == '{NIC_DRIVER}'"),
    )


def _class(name: str, expression: str) -> DeviceClass:
    selector = DeviceSelector(cel=CelSelector(expression=expression))
    return DeviceClass(metadata=ObjectMeta(name=name), spec=DeviceClassSpec(selectors=(selector,)))


def _slice(driver: str, node: str, devices: list[Device]) -> ResourceSlice:
    return ResourceSlice(
        metadata=ObjectMeta(name=f"{node}-{driver}"),
        spec=ResourceSliceSpec(
            driver=driver,
            pool=ResourcePool(name=node, generation=1, resource_slice_count=1),
            node_name=node,
            devices=tuple(devices),
        ),
    )


def _gpu(gpu: Gpu) -> Device:
    attributes = _texts(
        {
            "type": "gpu",
            "uuid": gpu.uuid,
            "productName": gpu.product,
            _PCI_BUS_ID: gpu.pci_address,
            PCIE_ROOT: _root(gpu.pcie),
        }
    )
    if gpu.driver_version is not None:
        attributes["driverVersion"] = DeviceAttribute(version=_semver(gpu.driver_version))
    memory = {} if gpu.memory_mib is None else {"memory": DeviceCapacity(value=f"{gpu.memory_mib}Mi")}
    return Device(name=f"gpu-{gpu.index}", attributes=attributes, capacity=memory)


def _nic(nic: Nic) -> Device:
    attributes = _texts(
        {
            "dra.net/ifName": nic.if_name,
            "dra.net/rdmaDevice": nic.rdma_device,
            "dra.net/pciAddress": nic.pci_address,
            "dra.net/pciDevice": nic.model,
            PCIE_ROOT: _root(nic.pcie),
        }
    )
    if nic.rdma_device is not None or nic.excluded is not None:
        attributes["dra.net/rdma"] = DeviceAttribute(bool_=nic.rdma_device is not None)
    numa = numa_of(nic)
    if numa is not None:
        attributes |= {name: DeviceAttribute(int_=numa) for name in (NIC_NUMA_NODE, NUMA_NODE)}
    return Device(name=_nic_name(nic), attributes=attributes)


def _nic_name(nic: Nic) -> str:
    """DRANET's: the PCI address, else the interface, as a DNS label."""
    if nic.pci_address is not None:
        return f"pci-{re.sub('[:.]', '-', nic.pci_address)}"
    names: Iterable[str | None] = (nic.if_name, nic.rdma_device)
    usable = (name for name in names if name is not None and _DNS_LABEL.fullmatch(name))
    return next(usable, f"nic-{nic.index}")


def _texts(values: dict[str, str | None]) -> Attributes:
    known = {name: value for name, value in values.items() if value is not None}
    return {name: DeviceAttribute(string=value[:_MAX_STRING]) for name, value in known.items()}


def _root(path: PciePath | None) -> str | None:
    """The root complex where the machine itself shows it; Hyper-V functions, for one, have none."""
    return None if path is None or path.source is not Source.SYSFS else path.root


def _semver(version: str) -> str:
    """Driver versions are three numbers, with leading zeros that semantic versions forbid."""
    return ".".join(str(int(part)) if part.isdigit() else part for part in version.split("."))
