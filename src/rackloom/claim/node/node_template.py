"""The slices that our plugins would publish on a machine that is known by its profile only.

The devices are made by the functions with which the plugins make them (`gpu.inventory.gpu_device`,
`core.nics.devices.nic_device`, `imex.devices.imex_pool`), so names and attributes are the same. Values
that the profile lacks are absent, and so are those of a node's state (link state, addresses, MTU).
Each GPU has the UUID `template-<n>`, and on a rack all have the clique `template.0`, so that constraints
among the GPUs of a node hold.
"""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from rackloom.claim.node.fabric import NodeFabric
from rackloom.claim.node.gpu.inventory import (
    UNKNOWN_LOCATION,
    GpuInventory,
    NodeGpu,
    gpu_device,
    gpu_locations,
)
from rackloom.claim.node.imex.devices import ImexSettings, imex_pool
from rackloom.core.allocate.driver_slices import GPU_DRIVER, NIC_DRIVER, local_slice
from rackloom.core.allocate.node_template import PLACEHOLDER
from rackloom.core.allocate.objects import Device, ResourceSlice
from rackloom.core.cluster.names import IMEX_DRIVER
from rackloom.core.nics.attachment import NetworkLink, SegmentationSizes
from rackloom.core.nics.devices import (
    HostLink,
    NicSnapshot,
    PciNames,
    fit_attributes,
    gpu_partners,
    host_nics,
    nic_device,
    rail_numbers,
)
from rackloom.topology.affinity import guest_view
from rackloom.topology.machine import HostReading, Machine, Nic, PciFunction, RdmaDevice

CLIQUE = "template.0"
_NETWORK_CLASS = 0x020000
_STATE = frozenset(
    {"mtu", "state", "encapsulation", "alias", "type", "ebpf", "sriov", "sriovVfs", "rdmaState", "linkLayer"}
)
"""Attributes of a NIC that no profile knows."""


def profile_template(machine: Machine, group: str, *, has_fabric: bool) -> tuple[ResourceSlice, ...]:
    """The slices of a new node `group` of this machine. With `has_fabric` it is a tray of a rack.

    A driver without devices has none. The machine counts as its own kernel shows it: a driver sees no more.
    """
    named = tuple(replace(gpu, uuid=PLACEHOLDER.format(number=gpu.index)) for gpu in machine.gpus)
    seen = guest_view(replace(machine, gpus=named))
    clique = CLIQUE if has_fabric else ""
    drivers = {GPU_DRIVER: _gpu_devices(seen, clique), NIC_DRIVER: _nic_devices(seen)}
    if has_fabric:
        settings = ImexSettings(node=group, namespaces=(), domains=Path())
        drivers[IMEX_DRIVER] = imex_pool(settings, clique, NodeFabric()).devices
    return tuple(local_slice(driver, group, devices) for driver, devices in drivers.items() if devices)


def _gpu_devices(machine: Machine, clique: str) -> tuple[Device, ...]:
    locations = gpu_locations(machine)
    versions = [gpu.driver_version for gpu in machine.gpus if gpu.driver_version is not None]
    inventory = GpuInventory(driver_version=versions[0] if versions else None)
    devices = []
    for gpu in machine.gpus:
        node_gpu = NodeGpu(
            minor=gpu.index,
            uuid=gpu.uuid or "",
            pci_address=gpu.pci_address or "",
            product=gpu.product or "",
            memory_bytes=(gpu.memory_mib or 0) << 20,
            clique=clique,
        )
        device = gpu_device(node_gpu, inventory, locations.get(node_gpu.pci_address, UNKNOWN_LOCATION))
        devices.append(device if gpu.memory_mib else replace(device, capacity={}))
    return tuple(devices)


def _nic_devices(machine: Machine) -> tuple[Device, ...]:
    """The NICs that carry tenant data, as the NIC plugin publishes them."""
    host = HostReading(name=machine.name, pci=tuple(_functions(machine)), rdma=tuple(_rdma_devices(machine)))
    links = tuple(_link(nic) for nic in machine.nics if nic.if_name is not None)
    snapshot = NicSnapshot(host=host, machine=machine, links=links)
    partners, rails = gpu_partners(machine), rail_numbers(machine)
    found = []
    for host_nic in host_nics(snapshot):
        if host_nic.excluded is None and host_nic.nic is not None:
            index = host_nic.nic.index
            device = nic_device(host_nic, snapshot, PciNames(), partners.get(index), rails.get(index))
            known = {name: value for name, value in device.attributes.items() if name not in _STATE}
            found.append(fit_attributes(replace(device, attributes=known)))
    return tuple(found)


def _functions(machine: Machine) -> Iterator[PciFunction]:
    for nic in machine.nics:
        if nic.pci_address is not None:
            # No name is known of vendor 0.
            vendor, _, device = (nic.pci_id or "0:0").partition(":")
            yield PciFunction(
                address=nic.pci_address,
                class_code=_NETWORK_CLASS,
                vendor=int(vendor, 16),
                device=int(device, 16),
                numa_node=None,
                driver=None,
                path=nic.pcie,
            )


def _rdma_devices(machine: Machine) -> Iterator[RdmaDevice]:
    for nic in machine.nics:
        if nic.rdma_device is not None:
            yield RdmaDevice(name=nic.rdma_device, pci_address=nic.pci_address, ports=(), uverbs=True)


def _link(nic: Nic) -> HostLink:
    """Only its name is kept."""
    link = NetworkLink(
        index=nic.index,
        name=nic.if_name or "",
        kind="",
        mac=None,
        permanent_mac=None,
        mtu=0,
        up=False,
        state="",
        encapsulation="",
        alias=None,
        master=None,
        parent=nic.pci_address,
        loopback=False,
        sizes=SegmentationSizes(),
    )
    return HostLink(link=link)
