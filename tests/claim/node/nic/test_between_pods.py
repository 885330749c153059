"""The settings of DRANET's end-to-end tests for interfaces, on real links: traffic, neighbours, routes."""

import socket
import threading

import pytest
from tests.claim.node.nic.nic_kit import held, needs_ipv6, needs_root, require_kind

from rackloom.claim.node.nic.links import attach_link
from rackloom.core.domains.network_config import (
    NeighborConfig,
    RouteConfig,
    RuleConfig,
    decode_network_config,
)
from rackloom.core.nics.attachment import LinkSettings, pod_settings

pytestmark = needs_root
TIMEOUT = 60.0


def give(host, pod, name, **config):
    """The host's link `name` into a pod, with a claim's config."""
    identity, _, wanted = held(host, name, **config)
    attach_link(identity, wanted, pod.path)


def bound(address, port, device):
    """A socket that is bound to an interface too, as `ping -I` does."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    made.settimeout(TIMEOUT)
    made.bind((address, port))
    return made


def is_heard(client, server, source, destination, device):
    """Whether the pod `server` gets the message of `client`, and from the address `source`."""

    def listen():
        listener = bound(destination, 0, device)
        listener.listen()
        return listener

    def connect(port):
        with bound(source, 0, device) as made:
            made.connect((destination, port))
            made.sendall(b"over a router")

    listener = server.call(listen)
    sender = threading.Thread(target=client.call, args=(lambda: connect(listener.getsockname()[1]),))
    sender.start()
    with listener:
        connection, (peer, _) = listener.accept()
        with connection:
            connection.settimeout(TIMEOUT)
            heard = connection.recv(100)
    sender.join()
    return heard == b"over a router" and peer == source


def three_pods(host):
    """Two pods, each with a pair to a third between them. The ends are `one`, `two`, `left` and `right`."""
    host.veth("one", "left")
    host.veth("two", "right")
    return host.pod("p1"), host.pod("p2"), host.pod("router")


def test_policy_routes_lead_through_a_pod_that_forwards(host):
    first, second, router = three_pods(host)

    def settings(own, other):
        return {
            "interface": {"name": "eth1", "addresses": [f"192.168.{own}.10/24"]},
            "rules": [
                {"source": f"192.168.{own}.0/24", "table": 100, "priority": 32000},
                {"destination": f"192.168.{other}.0/24", "table": 100, "priority": 32000},
            ],
            "routes": [{"destination": "0.0.0.0/0", "table": 100, "gateway": f"192.168.{own}.2"}],
        }

    give(host, first, "one", **settings(100, 200))
    give(host, second, "two", **settings(200, 100))
    for name, end, own in (("left", "eth1", 100), ("right", "eth2", 200)):
        addresses = [f"192.168.{own}.2/24"]
        give(host, router, name, interface={"name": end, "addresses": addresses, "forwarding": True})
    assert is_heard(first, second, "192.168.100.10", "192.168.200.10", "eth1")


def test_traffic_in_vrfs_goes_through_the_vrf_of_a_third_pod(host):
    require_kind(host, "vrf", vrf_table=9)
    first, second, router = three_pods(host)
    vrf = {"name": "test-vrf"}
    for pod, name, own in ((first, "one", 10), (second, "two", 20)):
        give(
            host,
            pod,
            name,
            interface={"name": "eth1", "addresses": [f"10.10.{own}.1/24"], "vrf": vrf},
            routes=[{"destination": "0.0.0.0/0", "gateway": f"10.10.{own}.2"}],
        )
    for name, end, own in (("left", "eth1", 10), ("right", "eth2", 20)):
        interface = {"name": end, "addresses": [f"10.10.{own}.2/24"], "forwarding": True, "vrf": vrf}
        give(host, router, name, interface=interface)
    assert is_heard(first, second, "10.10.10.1", "10.10.20.1", "eth1")


@needs_ipv6
def test_permanent_neighbours_of_the_host_come_along_also_to_other_addresses(host):
    host.veth("nic0", "tor0")
    host.address("nic0", "169.254.169.15/32")
    known = {"192.168.1.1": "00:11:22:33:44:55", "2001:db8::1": "00:aa:bb:cc:dd:ee"}

    def add(ipr):
        (index,) = ipr.link_lookup(ifname="nic0")
        for address, mac in known.items():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            ipr.neigh("add", family=family, dst=address, lladdr=mac, ifindex=index, state=0x80)

    host.ip(add)
    pod = host.pod()
    give(host, pod, "nic0", interface={"name": "eth99", "addresses": ["169.254.169.13/24"]})

    def permanent(ipr):
        (index,) = ipr.link_lookup(ifname="eth99")
        found = [
            entry
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in ipr.get_neighbours(family=family, ifindex=index)
        ]
        return {n.get_attr("NDA_DST"): n.get_attr("NDA_LLADDR") for n in found if n["state"] & 0x80}

    assert pod.ip(permanent) == known


@needs_ipv6
def test_the_route_to_an_ipv6_subnet_is_the_kernels_alone(host):
    host.veth("nic0", "tor0")
    host.address("nic0", "fd36::3:0:e:0:0/96")
    pod = host.pod()
    give(host, pod, "nic0")

    def routes(ipr):
        (index,) = ipr.link_lookup(ifname="nic0")
        found = ipr.get_routes(family=socket.AF_INET6, oif=index, table=254)
        return [
            (route.get_attr("RTA_PRIORITY"), route["proto"])
            for route in found
            if (route.get_attr("RTA_DST"), route["dst_len"]) == ("fd36::3:0:e:0:0", 96)
        ]

    assert pod.ip(routes) == [(256, 2)]


@pytest.mark.parametrize(
    ("interface", "kept"),
    [
        ({}, {"10.0.0.1", "fd00::1"}),
        ({"addresses": ["10.9.0.3/24"]}, {"10.0.0.1", "fd00::1"}),
        ({"disableIPv6": True}, {"10.0.0.1"}),
        ({"mtu": 1200}, {"10.0.0.1"}),
    ],
)
def test_neighbours_are_kept_but_for_ipv6_ones_without_ipv6(interface, kept):
    mac = "02:00:00:00:00:01"
    neighbors = tuple(NeighborConfig(destination=at, hardware_addr=mac) for at in ("10.0.0.1", "fd00::1"))
    host_settings = LinkSettings(name="nic0", neighbors=neighbors)
    wanted = pod_settings(decode_network_config({"interface": interface}), host_settings)
    assert {neighbor.destination for neighbor in wanted.neighbors} == kept


@pytest.mark.parametrize(
    ("addresses", "kept"),
    [
        ([], True),
        (["10.9.0.2/24", "fd00:9:0::2/64"], True),
        (["10.9.0.2/24", "fd00:9::2/64", "10.9.1.2/24"], True),
        (["10.9.0.2/24"], False),
        (["10.9.0.3/24", "fd00:9::2/64"], False),
        (["10.9.0.2/32", "fd00:9::2/64"], False),
    ],
)
def test_routes_and_rules_of_the_host_go_where_all_of_its_addresses_go(addresses, kept):
    route = RouteConfig(destination="10.77.0.0/16", gateway="10.9.0.1", table=777)
    rule = RuleConfig(source="10.9.0.2/32", table=777, priority=500)
    host_settings = LinkSettings(
        name="nic0", addresses=("10.9.0.2/24", "fd00:9::2/64"), routes=(route,), rules=(rule,)
    )
    wanted = pod_settings(decode_network_config({"interface": {"addresses": addresses}}), host_settings)
    assert (wanted.routes, wanted.rules) == (((route,), (rule,)) if kept else ((), ()))


def test_routes_of_an_interface_without_addresses_stay_behind_an_address_of_the_claim():
    route = RouteConfig(destination="10.77.0.0/16", scope=253)
    wanted = pod_settings(
        decode_network_config({"interface": {"addresses": ["10.9.0.3/24"]}}),
        LinkSettings(name="nic0", routes=(route,)),
    )
    assert wanted.routes == ()
