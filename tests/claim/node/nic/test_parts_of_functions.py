"""PCI functions with several interfaces, RDMA devices and ports: each port has one owner everywhere."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
from hypothesis import event, given, target
from hypothesis import strategies as st
from tests.claim.node.nic.test_published import link, plain
from tests.topology.discovery import nic_trees

from rackloom.claim.node.nic import plugin, rdma
from rackloom.claim.node.nic.inventory import _NetlinkSnapshot, nic_health
from rackloom.claim.node.plugin import Health
from rackloom.core.allocate.objects import Device, DeviceAttribute
from rackloom.core.diagnosis.checks.host_nics import HostIdentity, check_host_links
from rackloom.core.domains.network_config import NetworkConfig
from rackloom.core.nics.attachment import LinkIdentity, PreparedNic
from rackloom.core.nics.devices import HostLink, NicSnapshot, host_nics, merge_devices
from rackloom.errors import Refused
from rackloom.topology.discovery.discover import (
    Declaration,
    DeclaredDevice,
    build_machine,
    discover_machine,
    unmatched_declarations,
)
from rackloom.topology.discovery.sysfs import Sysroot, read_host
from rackloom.topology.machine import Gpu, HostReading, NetDevice, NetRoute, PciFunction, RdmaDevice, RdmaPort
from rackloom.topology.nics import ClusterNetwork, excluded_interfaces


def snapshot(host, **changes):
    """The host with its links, as the scanner would read it with netlink."""
    index = {netdev.name: number for number, netdev in enumerate(host.netdevs, start=100)}
    links = tuple(
        HostLink(
            link=link(
                part.name,
                index[part.name],
                parent=part.pci_address,
                kind=part.kind,
                master=index.get(part.master),
            )
        )
        for part in host.netdevs
    )
    network = _NetlinkSnapshot(tuple(on.link for on in links), {}, ())
    joined = network.added_to(host)
    return NicSnapshot(host=joined, machine=build_machine(joined, **changes), links=links)


def surfaces(root):
    """The NICs of `topology discover`, all NICs of the plugin by name, and the attributes in its slice."""
    seen = snapshot(read_host(Sysroot(root)))
    found = host_nics(seen)
    devices = plugin._published_devices(plugin.NicSettings(node="n"), seen, found)
    return (
        discover_machine(root),
        {nic.name: nic for nic in found},
        {name: plain(device) for name, device in devices.items()},
    )


def reasons(machine):
    return {interface.name: interface.excluded for interface in machine.interfaces}


def test_the_device_with_uverbs_is_the_nic_of_a_card_with_planes(tmp_path):
    nic_trees.planes(tmp_path)
    machine, nics, published = surfaces(tmp_path)
    (nic,) = machine.nics
    assert (nic.if_name, nic.rdma_device, nic.line_rate_gbps, nic.excluded) == ("ibs192", "mlx5_0", 800, None)
    assert set(published) == {"pci-0000-0b-00-0"}
    attributes = published["pci-0000-0b-00-0"]
    wanted = {"ifName": "ibs192", "rdma": True, "rdmaDevice": "mlx5_0", "linkSpeedGbps": 800}
    assert wanted.items() <= attributes.items()
    host_nic = nics["pci-0000-0b-00-0"]
    assert nic_health(host_nic, "n", 0.0).health is Health.HEALTHY
    alone = msgspec.structs.replace(host_nic, on=None)
    sysroot = Sysroot(tmp_path)
    prepared, _ = plugin.prepare_nic(
        alone, Device(name=alone.name), NetworkConfig(), sysroot, rdma.NetnsMode.SHARED
    )
    nodes = {Path(node.path).name for node in rdma.rdma_device_nodes(sysroot, prepared.rdma)}
    assert nodes == {"rdma_cm", "uverbs0", "umad0", "issm0"}


def test_a_plane_that_is_down_is_not_the_link_of_the_nic(tmp_path):
    nic_trees.planes(tmp_path)
    (tmp_path / "sys/class/infiniband/smi1/ports/2/state").write_text("1: DOWN\n")
    assert nic_health(surfaces(tmp_path)[1]["pci-0000-0b-00-0"], "n", 0.0).health is Health.HEALTHY
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert nic_health(surfaces(tmp_path)[1]["pci-0000-0b-00-0"], "n", 0.0).health is Health.UNHEALTHY


def test_a_partition_and_a_second_port_have_the_owner_of_their_function(tmp_path):
    nic_trees.partition_and_two_ports(tmp_path)
    machine, _, published = surfaces(tmp_path)
    found = [(nic.if_name, nic.rdma_device, nic.rdma_ports, nic.line_rate_gbps) for nic in machine.nics]
    assert found == [("ib0", "mlx5_0", (), 400), ("enp69s0", "mlx4_0", (1,), 40)]
    assert set(published) == {"pci-0000-44-00-0", "pci-0000-45-00-0"}
    assert published["pci-0000-44-00-0"]["ifName"] == "ib0"
    assert published["pci-0000-45-00-0"]["ifName"] == "enp69s0"
    assert published["pci-0000-45-00-0"]["linkSpeedGbps"] == 40
    assert reasons(machine) == {
        "enp69s0d1": "belongs to NIC 0000:45:00.0/mlx4_0, which has one owner",
        "ib0.8001": "belongs to NIC 0000:44:00.0/mlx5_0, which has one owner",
    }
    # The first port is the link of the NIC, for the plugin and for the doctor.
    (tmp_path / "sys/class/infiniband/mlx4_0/ports/1/state").write_text("1: DOWN\n")
    reported = nic_health(surfaces(tmp_path)[1]["pci-0000-45-00-0"], "n", 0.0)
    assert (reported.health, reported.message) == (Health.UNHEALTHY, "RDMA device mlx4_0 is down")
    gpu = Gpu(index=0, pci_address="0000:43:00.0")
    judged = list(
        check_host_links(
            read_host(Sysroot(tmp_path)),
            msgspec.structs.replace(machine, gpus=(gpu,)),
            HostIdentity(name="host h"),
        )
    )
    assert any("mlx4_0" in finding.subject and "down" in finding.message for finding in judged)


@pytest.mark.parametrize("use", ["default route", "bond"])
def test_a_port_that_the_host_uses_keeps_the_whole_function(tmp_path, use):
    """A tenant's RDMA device would reach the port of the host."""
    nic_trees.partition_and_two_ports(tmp_path)
    if use == "bond":
        (tmp_path / "sys/devices/virtual/net/bond0").mkdir(parents=True)
        (tmp_path / "sys/class/net/bond0").symlink_to("../../devices/virtual/net/bond0")
        port = (tmp_path / "sys/class/net/enp69s0d1").resolve()
        (port / "master").symlink_to("../" * 6 + "virtual/net/bond0")
    else:
        with (tmp_path / "proc/net/route").open("a") as routes:
            routes.write("enp69s0d1 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n")
    expected = {"bond": "belongs to interface bond0", "default route": "carries the default route"}
    assert discover_machine(tmp_path).nics[1].excluded == expected[use]
    assert "pci-0000-45-00-0" not in surfaces(tmp_path)[2]


def test_the_uplink_and_the_subfunction_are_nics_and_representors_are_not(tmp_path):
    nic_trees.switchdev(tmp_path)
    machine, _, published = surfaces(tmp_path)
    found = [(nic.pci_address, nic.if_name, nic.rdma_device, nic.rdma_ports) for nic in machine.nics]
    assert found == [
        ("0000:08:00.0", "uplink", "mlx5_0", (1,)),
        (None, "enp8s0f0s88", "mlx5_1", ()),
    ]
    assert published["pci-0000-08-00-0"]["linkSpeedGbps"] == 400
    subfunction = "pci-0000-08-00-0-sf88"
    assert published.keys() == {"pci-0000-08-00-0", subfunction}
    assert published[subfunction]["ifName"] == "enp8s0f0s88"
    assert published[subfunction]["resource.kubernetes.io/pcieRoot"] == "pci0000:40"
    assert reasons(machine)["uplink_1"] == "is the host's end of pf0vf1 in a switch of the card"
    # The ports of representors say nothing about the uplink.
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert nic_health(surfaces(tmp_path)[1]["pci-0000-08-00-0"], "n", 0.0).health is Health.UNHEALTHY


def test_an_uplink_in_a_pod_keeps_its_own_speed_and_health(tmp_path):
    """The ports of representors have no GIDs, so they show no interface."""
    tree = nic_trees.NicTree(tmp_path)
    function = tree.function("0000:08:00.0", "0x1021")
    tree.netdev(function, "uplink", phys_port_name="p0", phys_switch_id="e8")
    for number in range(2):
        tree.netdev(function, f"rep{number}", phys_port_name=f"pf0vf{number}", phys_switch_id="e8")
    ports = tree.rdma(function, "mlx5_0", "100 Gb/sec (2X HDR)", "400 Gb/sec (4X NDR)", "400 Gb/sec (4X NDR)")
    tree.write(ports / "ports/1/state", "1: DOWN")
    for is_away in (False, True):
        if is_away:
            (tmp_path / "sys/class/net/uplink").unlink()
        machine, nics, published = surfaces(tmp_path)
        assert machine.nics[0].rdma_ports == (1,)
        assert nic_health(nics["pci-0000-08-00-0"], "n", 0.0).health is Health.UNHEALTHY
        assert published["pci-0000-08-00-0"]["linkSpeedGbps"] == 100
        assert published["pci-0000-08-00-0"]["rdmaState"] == "down"


@pytest.mark.parametrize(
    ("names", "first"),
    [(("p0", "p1"), "e0"), (("p10", "p9"), "e1"), (("p0s1", "p0s0"), "e1"), (("p0", "p0"), None)],
)
def test_ports_with_one_dev_port_are_ranked_by_their_names(tmp_path, names, first):
    tree = nic_trees.NicTree(tmp_path)
    function = tree.function("0000:08:00.0", "0x4000", driver="nfp")
    for number, name in enumerate(names):
        tree.netdev(function, f"e{number}", phys_port_name=name)
    (nic,) = discover_machine(tmp_path).nics
    assert (nic.if_name, nic.excluded is None) == (first, first is not None)


@pytest.mark.parametrize("devices", [("mlx5_1",), (), ("mlx5_7",), ("mlx5_1", "mlx5_7")])
def test_a_subfunction_keeps_its_name_wherever_its_rdma_device_is(devices):
    function = PciFunction("0000:08:00.0", 0x020000, 0x15B3, 0x1021, 1, "mlx5_core", None)
    ports = (RdmaPort(1, "active", "Ethernet", 400.0),)
    rdma = (RdmaDevice(name, function.address, ports, uverbs=True, subfunction="sf88") for name in devices)
    of_two = [netdev(f"s{i}", function.address, dev_port=0, subfunction=f"sf{i}") for i in (88, 89)]
    of_two += [netdev("s89b", function.address, dev_port=0, subfunction="sf89")]
    host = HostReading("h", pci=(function,), netdevs=tuple(of_two), rdma=tuple(rdma))
    names = [nic.name for nic in host_nics(snapshot(host)) if nic.name.startswith("pci")]
    assert names == ["pci-0000-08-00-0", "pci-0000-08-00-0-sf88", "pci-0000-08-00-0-sf89"]
    declared = Declaration(nics={"0000:08:00.0/sf89": DeclaredDevice(excluded="storage")})
    assert build_machine(host, declared=declared).nics[-1].excluded == "storage"


def test_a_subfunction_without_a_number_has_the_name_of_its_auxiliary_device(tmp_path):
    nic_trees.switchdev(tmp_path)
    (tmp_path / "sys/devices" / nic_trees.ABOVE / "0000:08:00.0/mlx5_core.sf.4/sfnum").unlink()
    assert set(surfaces(tmp_path)[2]) == {"pci-0000-08-00-0", "pci-0000-08-00-0-mlx5-core-sf-4"}


def test_old_drivers_number_their_representors(tmp_path):
    tree = nic_trees.NicTree(tmp_path)
    function = tree.function("0000:08:00.0", "0x1021")
    tree.netdev(function, "a0", phys_port_name="0", phys_switch_id="e8ebd3")
    tree.netdev(function, "uplink", phys_port_name="p0", phys_switch_id="e8ebd3")
    (nic,) = discover_machine(tmp_path).nics
    assert nic.if_name == "uplink"


def test_a_vlan_has_the_port_of_its_parent_unless_the_parent_stays(tmp_path):
    tree = nic_trees.NicTree(tmp_path)
    function = tree.function("0000:08:00.0", "0x1021")
    tree.netdev(function, "eth1")
    tree.netdev(None, "eth1.7", iflink=2, uevent="DEVTYPE=vlan")
    assert reasons(discover_machine(tmp_path)) == {
        "eth1.7": "sends through eth1, which belongs to an offered NIC"
    }
    declared = tmp_path / "declared.json"
    declared.write_text('{"nics": {"eth1": {"excluded": "storage"}}}')
    machine = discover_machine(tmp_path, declared=declared)
    assert (machine.nics[0].excluded, reasons(machine)) == ("storage", {"eth1.7": None})


@pytest.mark.parametrize("kind", ["macsec", "hsr", "rmnet", "vxlan"])
def test_any_kind_above_an_offered_nic_has_its_owner(kind):
    function = PciFunction("0000:8a:00.0", 0x020000, 0x15B3, 0x1021, 1, "mlx5_core", None)
    port = netdev("eth1", function.address)
    child = dataclasses.replace(netdev("c0", None, lower=("eth1",)), kind=kind, virtual=True)
    far = dataclasses.replace(netdev("c1", None, lower=("c0",)), kind="vlan", virtual=True)
    host = HostReading("h", pci=(function,), netdevs=(port, child, far))
    machine = build_machine(host, excluded={})
    through = "sends through eth1, which belongs to an offered NIC"
    assert reasons(machine) == {"c0": through, "c1": through}


def test_a_parent_in_another_namespace_is_no_interface_of_the_host():
    """sysfs shows the parent's number there, which is that of eth1 here."""
    guessed = dataclasses.replace(netdev("macvlan0", None, lower=("eth1",)), kind="macvlan", virtual=True)
    pair = dataclasses.replace(netdev("veth0", None), kind="veth", virtual=True)
    host = HostReading("h", netdevs=(netdev("eth1", None), guessed, pair))
    found = _NetlinkSnapshot(
        (
            link("eth1", 2),
            link("macvlan0", 3, kind="macvlan", over=2),
            link("veth0", 4, kind="veth"),
        ),
        {3: [("10.1.0.1/24", True)]},
        (),
    ).added_to(host)
    below = {netdev.name: netdev.lower for netdev in found.netdevs}
    assert below == {"eth1": (), "macvlan0": ("interface 2",), "veth0": ()}
    cluster = ClusterNetwork(node_addresses=("10.1.0.1",))
    excluded = excluded_interfaces(found.netdevs, found.routes, cluster)
    assert "eth1" not in excluded


def two_devices(*names, **changes):
    function = PciFunction("0000:8a:00.0", 0x020000, 0x15B3, 0x1021, 1, "mlx5_core", None)
    ports = (RdmaPort(1, "active", "Ethernet", 400.0),)
    found = tuple(RdmaDevice(name, function.address, ports, **changes) for name in names)
    return HostReading("h", pci=(function,), rdma=found)


@pytest.mark.parametrize("uverbs", [True, None])
def test_two_devices_that_may_carry_data_are_not_offered_until_one_is_declared(uverbs):
    host = two_devices("mlx5_0", "mlx5_1", uverbs=uverbs)
    seen = snapshot(host)
    (nic,) = host_nics(seen)
    reason = "has several RDMA devices with uverbs (mlx5_0, mlx5_1), and its data part is not known"
    reported = nic_health(nic, "n", 0.0)
    assert (reported.health, reported.message) == (Health.UNKNOWN, f"not published: {reason}")
    assert plugin._published_devices(plugin.NicSettings(node="n"), seen, (nic,)) == {}
    with pytest.raises(Refused, match="data part is not known"):
        plugin.prepare_nic(nic, Device(name=nic.name), NetworkConfig(), Sysroot(), rdma.NetnsMode.SHARED)
    declared = Declaration(nics={"mlx5_1": DeclaredDevice(excluded="storage")})
    machine = build_machine(host, declared=declared)
    missing = "has RDMA device mlx5_0 without uverbs: load ib_uverbs on the node"
    assert machine.nics[0].rdma_device == "mlx5_0"
    assert machine.nics[0].excluded == (None if uverbs else missing)
    assert unmatched_declarations(declared, machine, host.rdma) == ()


@pytest.mark.parametrize("uverbs", [None, False])
@pytest.mark.parametrize("has_function", [True, False])
def test_rdma_without_uverbs_is_left_out_with_the_reason(tmp_path, uverbs, has_function):
    host = two_devices("mlx5_0", uverbs=uverbs)
    if not has_function:
        host = dataclasses.replace(host, rdma=(dataclasses.replace(host.rdma[0], pci_address=None),), pci=())
    seen = snapshot(host)
    (nic,) = host_nics(seen)
    published = plugin._published_devices(plugin.NicSettings(node="n"), seen, (nic,))
    if uverbs is False and has_function:
        # The function has no RDMA for programs. It stays a NIC by its interface.
        assert plain(published[nic.name])["rdma"] is False
        return
    assert published == {}
    reported = nic_health(nic, "n", 0.0)
    reason = "not published: has RDMA device mlx5_0 without uverbs: load ib_uverbs on the node"
    assert (reported.health, reported.message) == (Health.UNKNOWN, reason)
    # The module may go after the slice was written.
    stale = msgspec.structs.replace(nic, excluded=None)
    with pytest.raises(Refused, match="no uverbs device"):
        plugin.prepare_nic(
            stale, Device(name=nic.name), NetworkConfig(), Sysroot(tmp_path), rdma.NetnsMode.SHARED
        )


def test_software_rdma_has_the_owner_of_its_interface():
    nic_function = PciFunction("0000:8a:00.0", 0x020000, 0x15B3, 0x1021, 1, "mlx5_core", None)
    host_function = dataclasses.replace(nic_function, address="0000:03:00.0", vendor=0x8086, driver="igb")
    vlan = dataclasses.replace(netdev("eth1.7", None, lower=("eth1",)), kind="vlan", virtual=True)
    free = dataclasses.replace(netdev("free", None), kind="dummy", virtual=True)
    carrying = dataclasses.replace(netdev("tun0", None), kind="dummy", virtual=True)
    ports = [netdev("eth1", nic_function.address), netdev("eth0", host_function.address)]
    over = {"mlx5_0": "eth1", "a0": "eth1", "a1": "eth0", "a2": "eth1.7", "a3": "free", "a4": "tun0"}
    rdma = tuple(
        RdmaDevice(
            name,
            nic_function.address if name == "mlx5_0" else None,
            (RdmaPort(1, "active", "Ethernet", 100.0, netdev=on),),
            uverbs=True,
        )
        for name, on in over.items()
    )
    # ERDMA uses the interface of another PCI function, and has its own.
    own = dataclasses.replace(nic_function, address="0000:09:00.0", vendor=0x1DED, driver="erdma")
    erdma = dataclasses.replace(rdma[1], name="erdma_0", pci_address=own.address)
    host = HostReading(
        "h",
        pci=(host_function, nic_function, own),
        netdevs=(*ports, vlan, free, carrying),
        rdma=(*rdma, erdma),
        routes=(NetRoute("0.0.0.0/0", ("eth0",), 0), NetRoute("::/0", ("tun0",), 0)),
    )
    found = {nic.name: nic.excluded for nic in host_nics(snapshot(host))}
    other = "sends through {}, which belongs to another NIC"
    assert [found[f"a{number}"] for number in range(5)] == [
        other.format("eth1"),
        "carries the default route",
        other.format("eth1"),
        None,
        "carries the default route",
    ]
    assert found["pci-0000-8a-00-0"] is found["pci-0000-09-00-0"] is None
    assert found["free"] == "belongs to NIC a3/free, which has one owner"


@pytest.mark.parametrize("name", ["rxe0", "soft"])
def test_hardware_is_the_data_part_beside_software_rdma(name, tmp_path):
    """An operator's exclusion of the hardware excludes the NIC, and does not leave it to the software."""
    tree = nic_trees.NicTree(tmp_path)
    function = tree.function("0000:08:00.0", "0x1021")
    tree.rdma(function, "mlx5_0", "400 Gb/sec (4X NDR)")
    software = tree.rdma(function, name, "10 Gb/sec (4X SDR)")
    if name == "soft":
        tree.write(software / "node_desc", "rxe")
    (nic,) = discover_machine(tmp_path).nics
    assert (nic.rdma_device, nic.excluded) == ("mlx5_0", None)
    declared = Declaration(nics={"mlx5_0": DeclaredDevice(excluded="storage")})
    (nic,) = build_machine(read_host(Sysroot(tmp_path)), declared=declared).nics
    assert (nic.rdma_device, nic.excluded) == ("mlx5_0", "storage")


def test_a_second_port_does_not_take_the_place_of_one_in_a_pod():
    function = PciFunction("0000:8a:00.0", 0x020000, 0x1425, 0x5410, 1, "cxgb4", None)
    second = dataclasses.replace(netdev("eth1", function.address, dev_port=1), speed_mbps=10000)
    seen = snapshot(HostReading("h", pci=(function,), netdevs=(second,)))
    (nic,) = host_nics(seen)
    assert nic.on is not None
    away = LinkIdentity(name="eth0", parent=function.address, permanent_mac="02:00:00:00:00:01")
    lent = plugin._without_lent_ports(nic, {nic.name: away})
    assert lent.on is None
    published = plugin._published_devices(plugin.NicSettings(node="n"), seen, (lent,))
    held = Device(name=nic.name, attributes={"linkSpeedGbps": DeviceAttribute(int_=100)})
    (merged,) = merge_devices(published.values(), (held,))
    assert plain(merged)["linkSpeedGbps"] == 100
    itself = LinkIdentity(name="eth1", parent=function.address, permanent_mac="02:00:00:00:00:07")
    assert plugin._without_lent_ports(nic, {nic.name: itself}) == nic


def test_a_child_of_a_nic_in_a_pod_is_not_offered():
    on = HostLink(link=link("eth1.7", kind="vlan", over=5))
    child = dataclasses.replace(netdev("eth1.7", None), kind="vlan", virtual=True)
    host = HostReading("h", netdevs=(child,))
    (nic,) = host_nics(NicSnapshot(host=host, machine=build_machine(host), links=(on,)))
    assert plugin._without_lent_ports(nic, {}).excluded is None
    for identity in (
        LinkIdentity(name="eth1", parent="0000:8a:00.0"),
        LinkIdentity(name="ib0", parent="0000:8a:00.0", kind="ipoib"),
        LinkIdentity(name="enp8s0f0s88", permanent_mac="02:00:00:00:00:01"),
    ):
        assert "may be a NIC in a pod" in plugin._without_lent_ports(nic, {"x": identity}).excluded


@pytest.mark.parametrize("bus", ["pci", "subfunction", "virtio"])
def test_a_nic_is_not_offered_while_a_claim_holds_a_child_of_it(bus):
    function = PciFunction("0000:03:00.0", 0x020000, 0x8086, 0x1521, 1, "igb", None)
    parent = netdev("eth1", None if bus == "virtio" else function.address)
    if bus == "subfunction":
        parent = dataclasses.replace(parent, subfunction="sf4")
    vlan = dataclasses.replace(netdev("eth1.7", None, lower=("eth1",)), kind="vlan", virtual=True)
    macvlan = dataclasses.replace(netdev("m0", None, lower=("eth1.7",)), kind="macvlan", virtual=True)
    host = HostReading("h", pci=(function,), netdevs=(parent, vlan, macvlan))
    seen = {nic.on.link.name: nic for nic in host_nics(snapshot(host)) if nic.on is not None}
    child, owner = seen["m0"], seen["eth1"]
    assert set(child.below) == {owner.name, seen["eth1.7"].name}
    prepared = PreparedNic(device=child.name, published=Device(name=child.name), below=child.below)
    # The checkpoint and the attachment keep it over a restart of the plugin.
    held = [msgspec.json.decode(msgspec.json.encode(prepared), type=PreparedNic)]
    assert plugin._unless_held(owner, held).excluded == f"carries {child.name}, which a claim holds"
    assert plugin._unless_held(owner, []) == owner
    assert plugin._unless_held(child, held) == child


# The property: any function, and who owns its ports.


def netdev(name, address, **changes):
    return NetDevice(name, address, None, 1500, "up", None, virtual=False, master=None, **changes)


class Card:
    """One card as the host reads it, and the truth about it."""

    def __init__(self, draw, number):
        self.draw, self.number, self.address = draw, number, f"0000:{number:02x}:00.0"
        self.is_switch = draw(st.booleans())
        ports = [f"{self.address}#{port}" for port in range(draw(st.integers(1, 4)))]
        self.rates = {port: 100.0 + number * 10 + index for index, port in enumerate(ports)}
        self.states = {port: draw(st.sampled_from(["active", "down"])) for port in ports}
        self.carries: dict[str, str] = {}
        """The port of each interface that is one."""
        self.reaches: dict[str, set[str]] = {}
        """The ports, and the children of ports, that the holder of a part can use."""
        self.netdevs: list[NetDevice] = []
        for index in range(draw(st.integers(0, 6))):
            self.add_interface(f"n{number}i{index}")
        function = PciFunction(self.address, 0x020000, 0x15B3, 0x1021, 0, "mlx5_core", None)
        self.functions = [function]
        self.rdma = self.rdma_devices()
        for index in range(1, draw(st.integers(1, 3))):
            self.add_virtual_function(dataclasses.replace(function, virtual_function=True), index)

    def add_interface(self, name):
        draw, parents = self.draw, sorted(self.carries)
        role = draw(st.sampled_from(["port", "port", "partition", "vlan", "macsec", "representor"]))
        switch = "e8ebd3" if self.is_switch else None
        if role == "representor" and self.is_switch:
            self.reaches[name] = {f"{self.address[:-1]}1#0"}
            names = {"phys_port_name": "pf0vf0", "phys_switch_id": switch}
            self.netdevs.append(netdev(name, self.address, dev_port=0, **names))
        elif role in ("partition", "vlan", "macsec") and parents:
            self.add_child(name, draw(st.sampled_from(parents)), role)
        else:
            number = draw(st.integers(0, len(self.rates) - 1))
            self.carries[name] = f"{self.address}#{number}"
            self.reaches[name] = {self.carries[name]}
            # One in seven hides its number: what is not known must not be guessed.
            shown = number if draw(st.integers(0, 6)) else None
            names = {"phys_port_name": f"p{number}", "phys_switch_id": switch}
            self.netdevs.append(netdev(name, self.address, dev_port=shown, **names))

    def add_child(self, name, parent, role):
        """Children share a port by their tags. The interface of the port reaches all of them."""
        is_virtual = role != "partition"
        child = netdev(name, None if is_virtual else self.address, lower=(parent,))
        kind = role if is_virtual else ""
        self.netdevs.append(dataclasses.replace(child, kind=kind, virtual=is_virtual))
        self.reaches[name] = {f"{self.carries[parent]}/{name}"}
        for known, port in self.carries.items():
            if port == self.carries[parent]:
                self.reaches[known] |= self.reaches[name]

    def rdma_devices(self):
        """One to four devices: those with uverbs reach all ports, and the others manage planes.

        A representor's port is the exception of the model: it has the owner of its virtual function too. The
        keys of virtual functions are therefore not among those of the uplink's devices.
        """
        everything = {key for name in self.reaches for key in self.reaches[name] if key[:12] == self.address}
        tells, found = self.draw(st.booleans()), []
        roles = st.lists(st.sampled_from(["data", "smi", "smi"]), min_size=1, max_size=4)
        for index, role in enumerate(self.draw(roles)):
            ports = []
            for number, (port, rate) in enumerate(self.rates.items(), start=1):
                named = next((name for name, on in self.carries.items() if tells and on == port), None)
                data = RdmaPort(number, self.states[port], "Ethernet", rate, netdev=named)
                ports.append(data if role == "data" else RdmaPort(number, "active", "Ethernet", 999.0))
            name = f"n{self.number}r{index}"
            self.reaches[name] = everything | self.rates.keys() if role == "data" else set()
            found.append(RdmaDevice(name, self.address, tuple(ports), uverbs=role == "data"))
        return found

    def add_virtual_function(self, function, index):
        at = f"{self.address[:-1]}{index}"
        hca, interface = f"n{self.number}v{index}", f"n{self.number}w{index}"
        self.functions.append(dataclasses.replace(function, address=at))
        self.rdma.append(RdmaDevice(hca, at, (RdmaPort(1, "active", "Ethernet", 50.0),), uverbs=True))
        self.netdevs.append(netdev(interface, at, dev_port=0))
        self.reaches |= {hca: {f"{at}#0"}, interface: {f"{at}#0"}}
        self.rates[f"{at}#0"], self.states[f"{at}#0"] = 50.0, "active"
        self.carries[interface] = f"{at}#0"


@st.composite
def cards(draw):
    return [Card(draw, number) for number in range(1, draw(st.integers(2, 4)))]


@given(cards())
def test_no_port_has_two_owners_and_every_device_keeps_its_promises(cards):
    host = HostReading(
        "h",
        pci=tuple(function for card in cards for function in card.functions),
        rdma=tuple(device for card in cards for device in card.rdma),
        netdevs=tuple(netdev for card in cards for netdev in card.netdevs),
    )
    reaches, carries, rates, states = (
        {key: value for card in cards for key, value in getattr(card, name).items()}
        for name in ("reaches", "carries", "rates", "states")
    )
    seen = snapshot(host)
    found = {nic.name: nic for nic in host_nics(seen)}
    devices = plugin._published_devices(plugin.NicSettings(node="n"), seen, found.values())
    owners: dict[str, str] = {}
    uverbs = {device.name for device in host.rdma if device.uverbs}
    target(float(len(devices)))
    whole = 0
    for card in cards:
        is_published = f"pci-{card.address}".replace(":", "-").replace(".", "-") in devices
        data = [device for device in card.rdma if device.uverbs and device.pci_address == card.address]
        first = [name for name, port in card.carries.items() if port == f"{card.address}#0"]
        assert not (is_published and (len(data) > 1 or (data and len(first) > 1))), (
            "the data part was guessed"
        )
        whole += is_published
    event(f"{whole} of {len(cards)} cards published")
    for name, device in devices.items():
        attributes = plain(device)
        interface, hca = attributes.get("ifName"), attributes.get("rdmaDevice")
        for port in reaches.get(interface, set()) | reaches.get(hca, set()):
            assert owners.setdefault(port, name) == name, f"{port} is in two devices"
        assert interface is None or interface in {netdev.name for netdev in host.netdevs}
        assert attributes["rdma"] is (hca is not None)
        health = nic_health(found[name], "n", 0.0).health
        if hca is not None:
            assert hca in uverbs
            # Speed and health are those of the interface's port, else of ports without an interface.
            own = [carries[interface]] if interface else sorted(reaches[hca] & rates.keys())
            assert attributes["linkSpeedGbps"] in {int(rates[port]) for port in own}
            assert (health is Health.HEALTHY) <= any(states[port] == "active" for port in own)
        if interface not in (None, *carries):
            kinds = {netdev.name: netdev.kind for netdev in host.netdevs}
            assert kinds[interface] in ("vlan", "macsec"), "a partition or a representor was published"
    for nic in found.values():
        assert (nic.name in devices) is (nic.excluded is None)
