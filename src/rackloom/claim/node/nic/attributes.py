"""What a NIC is published with. Pure. Names of the first block are those of DRANET 1.4; the rest is ours."""

from collections.abc import Iterable

from rackloom.claim.allocate.objects import Device, DeviceAttribute
from rackloom.claim.node.nic.look import Seen
from rackloom.claim.node.nic.offered import Offered
from rackloom.claim.node.nic.partners import GpuPartner
from rackloom.claim.node.nic.pci_names import PciNames
from rackloom.topology.machine import numa_of

STANDARD = "resource.kubernetes.io"
LONGEST = 64
"""Bytes of a string attribute; with a longer one the API server refuses the whole slice."""

Plain = str | int | bool | None
_IS_RDMA = DeviceAttribute(bool_=True)


def device(one: Offered, seen: Seen, names: PciNames, partner: GpuPartner | None, rail: int | None) -> Device:
    """The device that stands for a NIC in the slice."""
    known: dict[str, Plain] = {
        **_of_link(one),
        **_of_function(one, seen, names),
        **_of_rdma(one),
        **_of_place(one),
        **_of_partner(partner),
        "rail": rail,
    }
    kept = {name: _attribute(value) for name, value in known.items() if value is not None}
    return Device(
        name=one.name, attributes={name: value for name, value in kept.items() if value is not None}
    )


def cut_list(values: Iterable[str]) -> str | None:
    """As many whole values as fit, sorted, with commas between; None for none."""
    found = ""
    for value in sorted(values):
        longer = f"{found},{value}" if found else value
        if len(longer.encode()) > LONGEST:
            break
        found = longer
    return found or None


def _attribute(value: str | int | bool) -> DeviceAttribute | None:
    if isinstance(value, bool):
        return DeviceAttribute(bool_=value)
    if isinstance(value, int):
        return DeviceAttribute(int_=value)
    return DeviceAttribute(string=value) if len(value.encode()) <= LONGEST else None


def _of_link(one: Offered) -> dict[str, Plain]:
    if one.on is None:
        return {}
    link = one.on.link
    v6 = [address for address in one.on.addresses if ":" in address]
    return {
        "ifName": link.name,
        "mac": link.mac,
        "mtu": link.mtu,
        "encapsulation": link.encapsulation,
        "alias": link.alias,
        "state": link.state,
        "type": link.kind or "device",
        "ipv4": cut_list(set(one.on.addresses) - set(v6)),
        "ipv6": cut_list(v6),
        "ebpf": bool(one.on.programs),
        "tcFilterNames": cut_list(one.on.programs.tc),
        "tcxProgramNames": cut_list(one.on.programs.tcx),
    }


def _of_function(one: Offered, seen: Seen, names: PciNames) -> dict[str, Plain]:
    function = one.function
    if function is None:
        return {"virtual": one.nic is None, "sriov": False}
    sriov = function.most_vfs > 0
    return {
        "virtual": False,
        "pciAddress": function.address,
        "pciVendor": names.vendors.get(function.vendor),
        "pciDevice": names.devices.get((function.vendor, function.device)),
        "pciSubsystem": seen.subsystems.get(function.address),
        "sriov": sriov,
        "sriovVfs": function.vfs if sriov else None,
        "isSriovVf": True if function.virtual_function else None,
    }


def _of_rdma(one: Offered) -> dict[str, Plain]:
    if one.rdma is None:
        return {"rdma": False, "linkSpeedGbps": None if one.nic is None else one.nic.line_rate_gbps}
    states = {port.state for port in one.rdma.ports}
    return {
        "rdma": True,
        "rdmaDevice": one.rdma.name,
        "rdmaState": "active" if "active" in states else next(iter(sorted(states)), None),
        "linkLayer": cut_list({port.link_layer for port in one.rdma.ports}),
        "linkSpeedGbps": None if one.nic is None else one.nic.line_rate_gbps,
    }


def _of_place(one: Offered) -> dict[str, Plain]:
    """A NUMA node that is not known must be absent: -1 would match other unknown ones."""
    if one.nic is None:
        return {}
    numa = numa_of(one.nic)
    return {
        "numaNode": numa,
        f"{STANDARD}/numaNode": numa,
        f"{STANDARD}/pcieRoot": None if one.nic.pcie is None else one.nic.pcie.root,
    }


def _of_partner(partner: GpuPartner | None) -> dict[str, Plain]:
    if partner is None:
        return {}
    return {
        "gpuPartner": partner.uuid,
        "gpuPartnerPCIBusID": partner.pci_address,
        "gpuPartnerClass": partner.path_class.value,
    }


def merged(live: Iterable[Device], remembered: Iterable[Device]) -> tuple[Device, ...]:
    """Devices by name; what is in use keeps the attributes that it cannot show now. The live ones win."""
    now = {one.name: one for one in live}
    held = {one.name: one for one in remembered}
    return tuple(_merge(name, now.get(name), held.get(name)) for name in sorted(now.keys() | held.keys()))


def _merge(name: str, live: Device | None, held: Device | None) -> Device:
    now = {} if live is None else dict(live.attributes)
    before = {} if held is None else dict(held.attributes)
    if before.get("rdma") == _IS_RDMA:
        # In exclusive mode the RDMA device is away too, and would be taken for none.
        now.pop("rdma", None)
    return Device(name=name, attributes={**before, **now})
