"""The published NICs of real machines, and of one that is in use."""

import pytest
from tests.core.allocate.known_attributes import unknown_to_lint

from rackloom.claim.node.nic import plugin
from rackloom.claim.node.nic.inventory import nic_health
from rackloom.claim.node.plugin import Health
from rackloom.core.allocate.objects import Device, DeviceAttribute
from rackloom.core.nics.attachment import NetworkLink, SegmentationSizes
from rackloom.core.nics.devices import (
    LONGEST_TEXT,
    EbpfPrograms,
    HostLink,
    NicSnapshot,
    PciNames,
    device_name,
    fit_attributes,
    host_nics,
    join_within_limit,
    merge_devices,
    parse_pci_ids,
)
from rackloom.lab.nodes.host_files import host_files, write_sysroot
from rackloom.topology.affinity import partner
from rackloom.topology.discovery.discover import build_machine, read_nccl_topology
from rackloom.topology.discovery.sysfs import Sysroot, read_host
from rackloom.topology.join_key import Source
from rackloom.topology.machine import HostReading, PciePath, PciFunction, RdmaDevice, RdmaPort
from rackloom.topology.profiles import load_machine, machine_names


def link(name, index=7, **changes):
    known = {
        "kind": "",
        "mac": "02:00:00:00:00:07",
        "permanent_mac": "02:00:00:00:00:07",
        "mtu": 9000,
        "up": True,
        "state": "up",
        "encapsulation": "ether",
        "alias": None,
        "master": None,
        "parent": None,
        "loopback": False,
        "sizes": SegmentationSizes(),
    }
    return NetworkLink(name=name, index=index, **{**known, **changes})


def plain(device):
    """Attributes as values, by name."""
    return {
        name: next(v for v in (value.string, value.int_, value.bool_) if v is not None)
        for name, value in device.attributes.items()
    }


NO_NAMES = PciNames()


def devices(seen, names=NO_NAMES):
    settings = plugin.NicSettings(node="n", names=names)
    return plugin._published_devices(settings, seen, host_nics(seen))


@pytest.mark.slow
@pytest.mark.parametrize("name", machine_names())
def test_every_nic_of_a_real_machine_is_published_or_left_out_with_a_reason(name, tmp_path):
    files = host_files(load_machine(name))
    write_sysroot(files, tmp_path)
    host = read_host(Sysroot(tmp_path))
    vendor = (
        None if files.nccl_topology is None else read_nccl_topology(files.nccl_topology.encode(), "nccl.xml")
    )
    machine = build_machine(host, vendor=vendor, declared=files.declared)
    seen = NicSnapshot(host=host, machine=machine)
    found = devices(seen)
    for nic in machine.nics:
        host_nic = next(o for o in host_nics(seen) if o.nic is nic)
        if nic.excluded is not None:
            assert host_nic.name not in found
            reported = nic_health(host_nic, "n", 0.0)
            assert (reported.health, reported.message) == (Health.UNKNOWN, f"not published: {nic.excluded}")
            continue
        reported = plain(found[host_nic.name])
        assert reported.get("rdmaDevice") == nic.rdma_device
        assert reported["rdma"] is (nic.rdma_device is not None)
        assert reported.get("pciAddress") == nic.pci_address
        root = None if nic.pcie is None else nic.pcie.root
        assert reported.get("resource.kubernetes.io/pcieRoot") == root
        assert "resource.kubernetes.io/numaNode" not in reported or reported["numaNode"] >= 0
    by_address = {plain(d).get("pciAddress"): plain(d) for d in found.values()}
    partners = {d.get("gpuPartnerPCIBusID") for d in by_address.values()} - {None}
    for gpu in machine.gpus:
        nearest = [machine.nics[cell.nic] for cell in partner(machine, gpu.index)]
        reported = {by_address[n.pci_address].get("gpuPartnerPCIBusID") for n in nearest if n.pci_address}
        assert reported <= partners
        if len(nearest) == 1 and nearest[0].pci_address:
            assert reported
    for device in found.values():
        strings = [value.string or "" for value in device.attributes.values()]
        assert all(len(string.encode()) <= LONGEST_TEXT for string in strings)
        assert len(device.attributes) <= 32


def a_mellanox(**changes):
    function = PciFunction(
        address="0000:8a:00.0",
        class_code=0x020000,
        vendor=0x15B3,
        device=0x1021,
        numa_node=1,
        driver="mlx5_core",
        path=PciePath(root="pci0000:80", bridges=("0000:80:01.0",), source=Source.SYSFS),
        vfs=2,
        most_vfs=8,
    )
    rdma = RdmaDevice("mlx5_0", "0000:8a:00.0", (RdmaPort(1, "active", "Ethernet", 400.0),), uverbs=True)
    return HostReading(name="h", pci=(function,), rdma=(rdma,), **changes)


def test_all_attributes_of_an_interface():
    host = a_mellanox(netdevs=())
    names = parse_pci_ids("15b3  Mellanox Technologies\n\t1021  MT2910 Family [ConnectX-7]\nC 02  Network\n")
    on = HostLink(
        link=link("eth1", parent="0000:8a:00.0", alias="rail0"),
        addresses=("10.1.0.2/24", "fd00::2/64", "10.0.0.2/24"),
        programs=EbpfPrograms(tc=("cil_from_netdev",), tcx=("count",)),
    )
    machine = build_machine(host)
    nic = machine.nics[0].__class__(**{**_fields(machine.nics[0]), "if_name": "eth1"})
    machine = machine.__class__(**{**_fields(machine), "nics": (nic,)})
    seen = NicSnapshot(host=host, machine=machine, links=(on,), subsystems={"0000:8a:00.0": "0240"})
    reported = plain(devices(seen, names)["pci-0000-8a-00-0"])
    assert reported == {
        "ifName": "eth1",
        "mac": "02:00:00:00:00:07",
        "mtu": 9000,
        "encapsulation": "ether",
        "alias": "rail0",
        "state": "up",
        "type": "device",
        "ipv4": "10.0.0.2/24,10.1.0.2/24",
        "ipv6": "fd00::2/64",
        "ebpf": True,
        "tcFilterNames": "cil_from_netdev",
        "tcxProgramNames": "count",
        "virtual": False,
        "pciAddress": "0000:8a:00.0",
        "pciVendor": "Mellanox Technologies",
        "pciDevice": "MT2910 Family [ConnectX-7]",
        "pciSubsystem": "0240",
        "sriov": True,
        "sriovVfs": 2,
        "rdma": True,
        "rdmaDevice": "mlx5_0",
        "rdmaState": "active",
        "linkLayer": "Ethernet",
        "linkSpeedGbps": 400,
        "numaNode": 1,
        "resource.kubernetes.io/numaNode": 1,
        "resource.kubernetes.io/pcieRoot": "pci0000:80",
        "rail": 0,
    }
    assert unknown_to_lint("dra.net", reported) == set()


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_an_ipoib_interface_may_stay_on_the_host():
    host = a_mellanox(netdevs=())
    machine = build_machine(host)
    nic = machine.nics[0].__class__(**{**_fields(machine.nics[0]), "if_name": "ib0"})
    machine = machine.__class__(**{**_fields(machine), "nics": (nic,)})
    links = (
        HostLink(link=link("ib0", parent="0000:8a:00.0", encapsulation="infiniband")),
        HostLink(link=link("ib0.8001", 8, kind="ipoib", encapsulation="infiniband")),
    )
    seen = NicSnapshot(host=host, machine=machine, links=links)
    moved = host_nics(seen)
    assert [nic.name for nic in moved] == ["net-nfrdalrygaydc", "pci-0000-8a-00-0"]
    assert [nic.on for nic in moved] == [links[1], links[0]]
    (alone,) = host_nics(seen, moves_ipoib=False)
    assert (alone.name, alone.on, alone.rdma) == ("pci-0000-8a-00-0", None, host.rdma[0])


def test_names_are_what_kubernetes_takes():
    assert device_name(pci_address="0000:8a:00.0", interface="x") == "pci-0000-8a-00-0"
    assert device_name(pci_address=None, interface="eth1") == "eth1"
    assert device_name(pci_address=None, interface="eth1.100") == "net-mv2gqmjogeyda"
    assert device_name(pci_address=None, interface="Wan_0") == "net-k5qw4xzq"


def test_a_list_is_cut_between_addresses():
    addresses = [f"fd00:1234:5678:9abc::{number:x}/64" for number in range(5)]
    reported = join_within_limit(addresses)
    assert len(reported.encode()) <= LONGEST_TEXT
    assert reported.split(",") == sorted(addresses)[: len(reported.split(","))]
    assert join_within_limit([]) is None


def test_what_is_in_use_keeps_its_attributes_and_live_ones_win():
    def device(**attributes):
        return Device(name="d", attributes={k: DeviceAttribute(string=v) for k, v in attributes.items()})

    (merged,) = merge_devices([device(mac="new")], [device(mac="old", ifName="eth1")])
    assert plain(merged) == {"mac": "new", "ifName": "eth1"}
    (gone,) = merge_devices([], [device(ifName="eth1")])
    assert plain(gone) == {"ifName": "eth1"}


def test_rdma_that_is_away_in_a_pod_is_still_rdma():
    held = Device(name="d", attributes={"rdma": DeviceAttribute(bool_=True)})
    live = Device(name="d", attributes={"rdma": DeviceAttribute(bool_=False)})
    assert plain(merge_devices([live], [held])[0]) == {"rdma": True}


def test_a_device_has_no_more_attributes_than_the_api_server_takes():
    """It refuses the whole slice for one more: with a cloud's and the operator's there may be too many."""
    least = ("alias", "gpuPartnerClass", "linkLayer")
    found = {name: DeviceAttribute(bool_=True) for name in (*least, *(f"a{n}" for n in range(40)))}
    device = Device(name="d", attributes=dict(tuple(found.items())[:35]))
    assert set(fit_attributes(device).attributes) == {f"a{n}" for n in range(32)}
    fitting = Device(name="d", attributes=dict(tuple(found.items())[:32]))
    assert fit_attributes(fitting) == fitting
    assert len(fit_attributes(Device(name="d", attributes=found)).attributes) == 32
    held = Device(name="d", attributes=dict(tuple(found.items())[5:35]))
    (merged,) = merge_devices([fitting], [held])
    assert len(merged.attributes) == 32
