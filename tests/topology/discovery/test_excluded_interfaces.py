"""The interfaces of a host that are not for tenants: the rule, its reasons, and the kinds in sysfs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.topology.discovery.discover import build_machine
from rackloom.topology.discovery.sysfs import Sysroot, read_routes
from rackloom.topology.machine import HostReading, NetDevice, NetRoute, PciFunction, RdmaDevice
from rackloom.topology.nics import ClusterNetwork, ExclusionPolicy, excluded_interfaces

CLUSTER = ClusterNetwork(
    node_addresses=("10.0.0.5", "not an address"),
    api_servers=("10.3.0.10",),
    pod_cidrs=("10.244.1.0/24", "fd00:244:1::/64", "nonsense"),
)
NOTHING_LEFT_OUT = ExclusionPolicy(kinds=frozenset(), names=())


def netdev(name, kind="", master=None, lower=(), addresses=(), pci=None):
    return NetDevice(
        name=name,
        pci_address=pci,
        mac=None,
        mtu=1500,
        state="up",
        speed_mbps=None,
        virtual=bool(kind),
        master=master,
        kind=kind,
        lower=lower,
        addresses=addresses,
    )


def reasons(netdevs, routes=(), cluster=CLUSTER, **more):
    return {
        name: interface.reason
        for name, interface in excluded_interfaces(netdevs, routes, cluster, **more).items()
    }


def test_a_node_with_flannel():
    """As in the prototype: bridge plugin, vxlan. The NIC for tenants is eth1."""
    netdevs = [
        netdev("eth0", addresses=("10.0.0.5/24",), pci="0000:01:00.0"),
        netdev("eth1", addresses=("10.9.0.5/24",), pci="0000:02:00.0"),
        netdev("cni0", "bridge", addresses=("10.244.1.1/24",)),
        netdev("veth1234", "veth", master="cni0"),
        netdev("flannel.1", "vxlan", lower=("eth0",), addresses=("10.244.1.0/32",)),
        netdev("docker0", "bridge", addresses=("172.17.0.1/16",)),
        netdev("nodelocaldns", "dummy", addresses=("169.254.20.10/32",)),
        netdev("dummy0", "dummy"),
        netdev("mac0", "macvlan", lower=("eth0",)),
    ]
    routes = [
        NetRoute("0.0.0.0/0", ("eth0",)),
        NetRoute("10.244.1.0/24", ("cni0",)),
        NetRoute("10.244.2.0/24", ("flannel.1",)),
    ]
    assert reasons(netdevs, routes) == {
        "eth0": "carries the default route",
        "cni0": "carries the pods' network 10.244.1.0/24",
        "veth1234": "carries the pods' network 10.244.1.0/24",
        "flannel.1": "carries the pods' network 10.244.1.0/24",
        "docker0": "is a bridge, which cannot leave the host",
        "nodelocaldns": "has a name that container networks use (nodelocaldns)",
    }
    assert reasons(netdevs, routes, ClusterNetwork())["flannel.1"] == "is a tunnel (vxlan)"
    # An operator may offer the optional ones. Those that the node needs stay excluded.
    needed = reasons(netdevs, routes, left_out=NOTHING_LEFT_OUT)
    assert set(needed) == {"eth0", "cni0", "veth1234", "flannel.1"}


def test_what_carries_the_node_is_followed_down_the_stack():
    netdevs = [
        netdev("br0", "bridge"),
        netdev("vlan7", "vlan", master="br0", lower=("bond0",)),
        netdev("bond0", "bond"),
        netdev("eth0", master="bond0"),
        netdev("eth1", master="bond0"),
        netdev("eth2"),
    ]
    routes = [NetRoute("::/0", ("br0",))]
    assert reasons(netdevs, routes) == dict.fromkeys(
        ("br0", "vlan7", "bond0", "eth0", "eth1"), "carries the default route"
    )


def test_the_nodes_address_and_the_way_to_the_api_server():
    netdevs = [netdev("eth0", addresses=("10.0.0.5/24",)), netdev("eth1"), netdev("eth2"), netdev("eth3")]
    routes = [
        NetRoute("10.3.0.0/16", ("eth3",)),
        NetRoute("10.3.0.0/24", ("eth2",), 100),
        NetRoute("10.3.0.0/24", ("eth1",), 50),
    ]
    assert reasons(netdevs, routes) == {
        "eth0": "has the node's address 10.0.0.5",
        "eth1": "carries the route to the API server at 10.3.0.10",
    }


def test_every_next_hop_of_a_route_is_needed():
    netdevs = [netdev("eth0"), netdev("eth1"), netdev("eth2")]
    assert set(reasons(netdevs, [NetRoute("0.0.0.0/0", ("eth0", "eth1"))])) == {"eth0", "eth1"}


def test_a_member_of_something_would_not_come_back_as_it_was():
    netdevs = [netdev("bond1", "bond"), netdev("eth1", master="bond1"), netdev("eth2", master="away")]
    found = excluded_interfaces(netdevs, (), CLUSTER)
    assert found["eth1"].reason == "belongs to bond bond1"
    assert "ip link set eth1 nomaster" in found["eth1"].fix
    assert found["eth2"].reason == "belongs to interface away"
    assert not found["eth1"].needed


def test_hardware_is_never_left_out_for_its_name():
    assert reasons([netdev("cni-rail0", pci="0000:02:00.0")]) == {}
    assert reasons([netdev("cni-rail0", "dummy")]) == {
        "cni-rail0": "has a name that container networks use (cni*)"
    }


def test_a_nic_with_rdma_that_carries_the_default_route_is_not_offered():
    function = PciFunction("0000:8a:00.0", 0x020000, 0x15B3, 0x1021, 1, "mlx5_core", None)
    host = HostReading(
        name="h",
        pci=(function,),
        rdma=(RdmaDevice("mlx5_0", function.address, (), uverbs=True),),
        netdevs=(netdev("eth1", pci=function.address), netdev("eth2", pci=function.address)),
        routes=(NetRoute("0.0.0.0/0", ("eth1",), 1024),),
    )
    machine = build_machine(host)
    assert machine.nics[0].excluded == "carries the default route"


def test_what_belongs_to_no_nic_is_listed_with_its_reason():
    host = HostReading(
        name="h", netdevs=(netdev("br7", "bridge"), netdev("mac0", "macvlan"), netdev("bmc0", "usb"))
    )
    machine = build_machine(host)
    assert machine.nics == ()
    assert [(interface.name, interface.kind, interface.excluded) for interface in machine.interfaces] == [
        ("br7", "bridge", "is a bridge, which cannot leave the host"),
        ("mac0", "macvlan", None),
        ("bmc0", "usb", "hangs on USB, as the board's own management controller does"),
    ]


NAMES = st.sampled_from([f"i{number}" for number in range(6)])
TEXT = st.text(max_size=20) | st.sampled_from(
    ["0.0.0.0/0", "::/0", "10.0.0.0/8", "10.244.1.7/32", "10.244.1.0/24", "fd00:244:1::1/128", "10.3.0.10"]
)
NETDEVS = st.lists(
    st.builds(
        netdev,
        NAMES,
        kind=st.sampled_from(["", "bridge", "bond", "veth", "vxlan", "dummy"]),
        master=st.none() | NAMES,
        lower=st.lists(NAMES, max_size=2).map(tuple),
        addresses=st.lists(TEXT, max_size=2).map(tuple),
    ),
    max_size=6,
    unique_by=lambda netdev: netdev.name,
)
ROUTES = st.lists(
    st.builds(NetRoute, TEXT, st.lists(NAMES, max_size=2).map(tuple), st.integers(0, 9)), max_size=5
)
CLUSTERS = st.builds(
    ClusterNetwork,
    node_addresses=st.lists(TEXT, max_size=2).map(tuple),
    api_servers=st.lists(TEXT, max_size=2).map(tuple),
    pod_cidrs=st.lists(TEXT, max_size=2).map(tuple),
)


@given(NETDEVS, ROUTES, CLUSTERS)
def test_whoever_carries_something_is_excluded_with_all_below_it(netdevs, routes, cluster):
    """For any facts, even those that no kernel has, such as circular members or text that is no address."""
    found = excluded_interfaces(netdevs, routes, cluster)
    assert set(found) <= {netdev.name for netdev in netdevs}
    assert all(exclusion.reason and exclusion.fix for exclusion in found.values())
    needed = {name for name, exclusion in found.items() if exclusion.needed}
    for netdev in netdevs:
        assert netdev.master is None or netdev.name in found
        assert netdev.master not in needed or netdev.name in needed
        assert netdev.name not in needed or needed >= set(netdev.lower) & {other.name for other in netdevs}
    for route in routes:
        if route.destination in ("0.0.0.0/0", "::/0"):
            assert needed >= set(route.interfaces) & {netdev.name for netdev in netdevs}
    offered = excluded_interfaces(netdevs, routes, cluster, NOTHING_LEFT_OUT)
    assert {name for name, exclusion in offered.items() if exclusion.needed} == needed


def test_routes_of_procfs(tmp_path):
    net = tmp_path / "proc" / "net"
    net.mkdir(parents=True)
    (net / "route").write_text(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "cni0\t0001F40A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "eth1\t0000090A\t00000000\t0000\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "eth2\t0000090A\t00000000\t0001\t0\t0\t0\tFF00FF00\t0\t0\t0\n"
    )
    zeros = "0" * 32
    (net / "ipv6_route").write_text(
        f"{zeros} 00 {zeros} 00 fe800000000000000000000000000001 00000400 00000001 00000000 00450003 eth0\n"
        f"fd000244000100000000000000000000 40 {zeros} 00 {zeros} 00000100 00000001 00000000 00000001 cni0\n"
        f"{zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n"
    )
    assert read_routes(Sysroot(tmp_path)) == (
        NetRoute("0.0.0.0/0", ("eth0",), 100),
        NetRoute("10.244.1.0/24", ("cni0",), 0),
        NetRoute("::/0", ("eth0",), 1024),
        NetRoute("fd00:244:1::/64", ("cni0",), 256),
    )


LOOK = """
import json, subprocess, sys
from pathlib import Path
from rackloom.topology.discovery.sysfs import read_netdevs
from rackloom.topology.discovery.sysfs import Sysroot

lacking = {}
for kind, words in json.loads(sys.argv[2]).items():
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        lacking[kind] = done.stderr.strip()
found = read_netdevs(Sysroot(Path(sys.argv[1])))
print(json.dumps([lacking, {one.name: (one.kind, one.lower, one.virtual) for one in found}]))
"""
TUNNEL = ("remote", "192.0.2.1", "local", "192.0.2.2")
MAKING = {
    "veth": ("link", "add", "of-veth", "type", "veth", "peer", "name", "partner"),
    **{
        kind: ("link", "add", f"of-{kind}", "type", kind)
        for kind in ("bridge", "bond", "dummy", "ifb", "wireguard")
    },
    "vxlan": ("link", "add", "of-vxlan", "type", "vxlan", "id", "5", "dstport", "4789", "dev", "partner"),
    "geneve": ("link", "add", "of-geneve", "type", "geneve", "id", "5", "remote", "192.0.2.1"),
    "vlan": ("link", "add", "of-vlan", "link", "partner", "type", "vlan", "id", "7"),
    "macvlan": ("link", "add", "of-macvlan", "link", "partner", "type", "macvlan"),
    "ipip": ("link", "add", "of-ipip", "type", "ipip", *TUNNEL),
    "gre": ("link", "add", "of-gre", "type", "gre", *TUNNEL),
    "tun": ("tuntap", "add", "of-tun", "mode", "tap"),
}
UNTOLD = {"dummy", "ifb", "macvlan"}
"""Kinds that sysfs does not name."""
ABOVE = {"vxlan", "vlan", "macvlan"}


@pytest.fixture(scope="module")
def interfaces_of_every_kind(tmp_path_factory):
    """In a namespace with a separate sysfs: kinds that the kernel lacks, and the readings of the rest."""
    root = tmp_path_factory.mktemp("root")
    (root / "sys").mkdir()
    look = [sys.executable, "-c", LOOK, str(root), json.dumps(MAKING)]
    shell = f'mount -t sysfs sysfs {root}/sys && exec "$@"'
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", shell, "sh", *look],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    if done.returncode:
        pytest.skip(f"NEEDS ROOT and iproute2: {done.stderr.strip()}")
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", MAKING)
def test_sysfs_tells_the_kinds_that_are_left_out(interfaces_of_every_kind, kind):
    lacking, found = interfaces_of_every_kind
    if kind in lacking:
        pytest.skip(f"KERNEL LACKS {kind}: {lacking[kind]}")
    below = ["partner"] if kind in ABOVE else []
    assert found[f"of-{kind}"] == ["" if kind in UNTOLD else kind, below, True]
