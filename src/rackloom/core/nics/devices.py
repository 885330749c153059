"""Which NICs of a host are published, under which name, and with which attributes.

`host_nics` joins the snapshot of a host: each NIC of the machine's topology with its PCI function, its
RDMA device and its interface, and then interfaces without hardware. A NIC that must stay on the host
carries the reason (`excluded`) and is not published. Names are `pci-0000-8a-00-0`, for a subfunction
`pci-0000-8a-00-0-sf88`, or the interface's name if that is a DNS label, else in base32. The name of a NIC
stays when its interface or its RDMA device is in a pod.

`nic_device` builds the device. Attribute names of the first block are those of DRANET 1.4, the rest is
Rackloom's: the GPU that the NIC is nearest to (`gpu_partners`) and its rail. The rail is the NIC's
position among those that carry data, by PCI address: on machines of one model the same position is cabled
to the same leaf switch.

A NUMA node that is not known is absent: -1 would match other unknown ones. `merge_devices` keeps the
published attributes of a NIC while it is in a pod and cannot show them.

To add an attribute, add it to the function of its part (link, PCI function, RDMA device, place). A value from
sysfs needs no change of `Machine`: the snapshot keeps the PCI function as it was read.
"""

import base64
import re
from collections.abc import Iterable, Mapping

import msgspec

from rackloom.core.allocate.attributes import (
    LONGEST_TEXT,
    STANDARD_DOMAIN,
    AttributeValues,
    device_attributes,
)
from rackloom.core.allocate.objects import Device, DeviceAttribute
from rackloom.core.nics.attachment import NetworkLink
from rackloom.topology.affinity import own_gpus
from rackloom.topology.machine import (
    HostReading,
    Machine,
    NetDevice,
    Nic,
    PathClass,
    PciFunction,
    RdmaDevice,
    numa_of,
)
from rackloom.topology.nics import data_rdma, lower_interfaces, reachable

# The snapshot of a host.


class EbpfPrograms(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the programs on one link."""

    tc: tuple[str, ...] = ()
    tcx: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.tc or self.tcx)


class HostLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link of the host, with the properties that only netlink knows."""

    link: NetworkLink
    addresses: tuple[str, ...] = ()
    programs: EbpfPrograms = EbpfPrograms()


class NicSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The host at one moment."""

    host: HostReading
    machine: Machine
    links: tuple[HostLink, ...] = ()
    subsystems: Mapping[str, str] = {}
    """Subsystem IDs in hex, by PCI address."""


# Names of PCI vendors and devices.


_KNOWN_VENDORS: Mapping[int, str] = {
    0x14E4: "Broadcom Inc. and subsidiaries",
    0x15B3: "Mellanox Technologies",
    0x1AF4: "Red Hat, Inc.",
    0x1AE0: "Google, Inc.",
    0x1D0F: "Amazon.com, Inc.",
    0x1DED: "Alibaba (China) Co., Ltd.",
    0x8086: "Intel Corporation",
}
_PCI_IDS_LINE = re.compile(r"(\t?)([0-9a-f]{4})  (.+)")


class PciNames(msgspec.Struct, frozen=True):
    """Names by vendor, and by vendor and device."""

    vendors: Mapping[int, str] = msgspec.field(default_factory=lambda: _KNOWN_VENDORS)
    devices: Mapping[tuple[int, int], str] = {}


def parse_pci_ids(text: str) -> PciNames:
    """Lines `vvvv  name` for vendors, and below each, after a tab, `dddd  name` for its devices."""
    vendors: dict[int, str] = {}
    devices: dict[tuple[int, int], str] = {}
    vendor = None
    for line in text.splitlines():
        if line.startswith("C "):
            # Classes of devices follow the vendors.
            break
        if (match := _PCI_IDS_LINE.fullmatch(line)) is None:
            continue
        tab, number, name = match[1], int(match[2], 16), match[3]
        if tab and vendor is not None:
            devices[vendor, number] = name
        elif not tab:
            vendor = number
            vendors[number] = name
    return PciNames({**_KNOWN_VENDORS, **vendors}, devices)


# The NICs of a host.


_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_IPOIB = "infiniband"


class HostNic(msgspec.Struct, frozen=True, kw_only=True):
    """One NIC: a PCI function, an interface without one, or both. An RDMA device may be on it."""

    name: str
    nic: Nic | None = None
    """As the machine's topology knows it."""
    function: PciFunction | None = None
    rdma: RdmaDevice | None = None
    """With the ports that carry its data."""
    on: HostLink | None = None
    """Its interface, while that is on the host."""
    excluded: str | None = None
    below: tuple[str, ...] = ()
    """Names of the NICs and interfaces that it sends through."""


def host_nics(snapshot: NicSnapshot, *, moves_ipoib: bool = True) -> tuple[HostNic, ...]:
    """All NICs by name, the `excluded` ones with their reason."""
    movable = [link for link in snapshot.links if moves_ipoib or link.link.encapsulation != _IPOIB]
    links = {link.link.name: link for link in movable}
    excluded = {interface.name: interface.excluded for interface in snapshot.machine.interfaces}
    of_nics = [_host_nic(snapshot, nic, links) for nic in snapshot.machine.nics]
    taken = {nic.on.link.name for nic in of_nics if nic.on is not None}
    edges = lower_interfaces(snapshot.host.netdevs)
    devices = {netdev.name: _name_of_netdev(netdev) for netdev in snapshot.host.netdevs}
    others = (
        HostNic(
            name=device_name(pci_address=None, interface=name),
            on=on,
            excluded=excluded.get(name),
            below=tuple(
                sorted({devices[low] for low in reachable({name}, edges) - {name} if low in devices})
            ),
        )
        for name, on in links.items()
        if name not in taken
    )
    return tuple(sorted((*of_nics, *others), key=lambda nic: nic.name))


def device_name(*, pci_address: str | None, interface: str) -> str:
    """`pci-0000-8a-00-0`, or the interface's name if Kubernetes accepts it, else in base32."""
    if pci_address is not None:
        return f"pci-{re.sub('[^a-z0-9]+', '-', pci_address.lower())}"
    if _DNS_LABEL.fullmatch(interface):
        return interface
    return f"net-{base64.b32encode(interface.encode()).decode().rstrip('=').lower()}"


def _name_of_netdev(netdev: NetDevice) -> str:
    """Of its NIC, which owns all interfaces of the function or subfunction."""
    parts = filter(None, (netdev.pci_address, netdev.subfunction))
    return device_name(pci_address="/".join(parts) or None, interface=netdev.name)


def _host_nic(snapshot: NicSnapshot, nic: Nic, links: dict[str, HostLink]) -> HostNic:
    host = snapshot.host
    function = next((function for function in host.pci if function.address == nic.pci_address), None)
    own = nic.rdma_device or nic.if_name or "unnamed"
    return HostNic(
        name=device_name(pci_address=nic.pci_address or nic.subfunction, interface=own),
        nic=nic,
        function=function,
        rdma=data_rdma(host, nic),
        on=links.get(nic.if_name or ""),
        excluded=nic.excluded,
    )


# Nearest GPUs and rails.


class GpuPartner(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU that a NIC serves best."""

    uuid: str | None
    pci_address: str | None
    path_class: PathClass


def gpu_partners(machine: Machine) -> dict[int, GpuPartner]:
    """By NIC index. NICs that are near to no GPU have none."""
    found = {}
    for nic, cell in own_gpus(machine).items():
        gpu = machine.gpus[cell.gpu]
        found[nic] = GpuPartner(uuid=gpu.uuid, pci_address=gpu.pci_address, path_class=cell.path_class)
    return found


def rail_numbers(machine: Machine) -> dict[int, int]:
    """By NIC index: the NICs that carry data, counted in the order of their PCI addresses.

    On machines of one model the same position is cabled to the same leaf switch. A machine without RDMA has
    no rails. On one with RDMA, a NIC counts also while its RDMA device is away in a pod.
    """
    if all(nic.rdma_device is None for nic in machine.nics):
        return {}
    carrying = [nic.index for nic in machine.nics if nic.excluded is None and nic.pci_address is not None]
    return {index: rail for rail, index in enumerate(carrying)}


# Devices and their attributes.


_IS_RDMA = DeviceAttribute(bool_=True)


def nic_device(
    host_nic: HostNic, snapshot: NicSnapshot, names: PciNames, partner: GpuPartner | None, rail: int | None
) -> Device:
    """The device that stands for a NIC in the slice."""
    attributes = device_attributes(
        {
            **_of_link(host_nic),
            **_of_function(host_nic, snapshot, names),
            **_of_rdma(host_nic),
            **_of_place(host_nic),
            **_of_partner(partner),
            "rail": rail,
        }
    )
    return Device(name=host_nic.name, attributes=attributes)


MOST_ATTRIBUTES = 32
"""Of one device. The API server refuses the whole slice for one more."""
_GIVEN_UP_FIRST = (
    *("gpuPartnerClass", "pciSubsystem", "tcxProgramNames", "tcFilterNames", "alias", "rdmaState"),
    *("linkLayer", "gpuPartnerPCIBusID", "sriovVfs", "encapsulation"),
)
"""Attributes that selectors need least. A NIC with all attributes in a cloud has too many."""


def fit_attributes(device: Device) -> Device:
    """The device with as many attributes as it may have: without some of `_GIVEN_UP_FIRST`, then the last."""
    attributes = dict(device.attributes)
    for name in _GIVEN_UP_FIRST:
        if len(attributes) <= MOST_ATTRIBUTES:
            break
        attributes.pop(name, None)
    kept = dict(tuple(attributes.items())[:MOST_ATTRIBUTES])
    return msgspec.structs.replace(device, attributes=kept)


def join_within_limit(values: Iterable[str]) -> str | None:
    """As many whole values as fit, sorted, with commas between. None if none fits."""
    found = ""
    for value in sorted(values):
        longer = f"{found},{value}" if found else value
        if len(longer.encode()) > LONGEST_TEXT:
            break
        found = longer
    return found or None


def _of_link(host_nic: HostNic) -> AttributeValues:
    if host_nic.on is None:
        return {}
    link = host_nic.on.link
    v6 = [address for address in host_nic.on.addresses if ":" in address]
    return {
        "ifName": link.name,
        "mac": link.mac,
        "mtu": link.mtu,
        "encapsulation": link.encapsulation,
        "alias": link.alias,
        "state": link.state,
        "type": link.kind or "device",
        "ipv4": join_within_limit(set(host_nic.on.addresses) - set(v6)),
        "ipv6": join_within_limit(v6),
        "ebpf": bool(host_nic.on.programs),
        "tcFilterNames": join_within_limit(host_nic.on.programs.tc),
        "tcxProgramNames": join_within_limit(host_nic.on.programs.tcx),
    }


def _of_function(host_nic: HostNic, snapshot: NicSnapshot, names: PciNames) -> AttributeValues:
    function = host_nic.function
    if function is None:
        return {"virtual": host_nic.nic is None, "sriov": False}
    sriov = function.most_vfs > 0
    return {
        "virtual": False,
        "pciAddress": function.address,
        "pciVendor": names.vendors.get(function.vendor),
        "pciDevice": names.devices.get((function.vendor, function.device)),
        "pciSubsystem": snapshot.subsystems.get(function.address),
        "sriov": sriov,
        "sriovVfs": function.vfs if sriov else None,
        "isSriovVf": True if function.virtual_function else None,
    }


def _of_rdma(host_nic: HostNic) -> AttributeValues:
    if host_nic.rdma is None:
        return {"rdma": False, "linkSpeedGbps": None if host_nic.nic is None else host_nic.nic.line_rate_gbps}
    states = {port.state for port in host_nic.rdma.ports}
    return {
        "rdma": True,
        "rdmaDevice": host_nic.rdma.name,
        "rdmaState": "active" if "active" in states else next(iter(sorted(states)), None),
        "linkLayer": join_within_limit({port.link_layer for port in host_nic.rdma.ports}),
        "linkSpeedGbps": None if host_nic.nic is None else host_nic.nic.line_rate_gbps,
    }


def _of_place(host_nic: HostNic) -> AttributeValues:
    """A NUMA node that is not known must be absent: -1 would match other unknown ones."""
    if host_nic.nic is None:
        return {}
    numa = numa_of(host_nic.nic)
    return {
        "numaNode": numa,
        f"{STANDARD_DOMAIN}/numaNode": numa,
        f"{STANDARD_DOMAIN}/pcieRoot": None if host_nic.nic.pcie is None else host_nic.nic.pcie.root,
    }


def _of_partner(partner: GpuPartner | None) -> AttributeValues:
    if partner is None:
        return {}
    return {
        "gpuPartner": partner.uuid,
        "gpuPartnerPCIBusID": partner.pci_address,
        "gpuPartnerClass": partner.path_class.value,
    }


def merge_devices(live: Iterable[Device], remembered: Iterable[Device]) -> tuple[Device, ...]:
    """Devices by name. Those in use keep the attributes that they cannot show now. The live ones win."""
    now = {device.name: dict(device.attributes) for device in live}
    held = {device.name: dict(device.attributes) for device in remembered}
    for name in now.keys() & held.keys():
        if held[name].get("rdma") == _IS_RDMA:
            # In exclusive mode the RDMA device is in the pod, so that the NIC looks as if it had none.
            now[name].pop("rdma", None)
    return tuple(
        fit_attributes(Device(name=name, attributes={**held.get(name, {}), **now.get(name, {})}))
        for name in sorted(now.keys() | held.keys())
    )
