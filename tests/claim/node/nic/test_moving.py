"""Links moved into a pod's namespace and back, in the real kernel."""

import os
import socket
import threading

import pytest
from tests.claim.node.nic.nic_kit import held, needs_ipv6, needs_root, now

from rackloom.claim.node.nic.datapath import read_features, set_features
from rackloom.claim.node.nic.links import attach_link, detach_link

pytestmark = needs_root


@needs_ipv6
def test_a_link_moves_into_a_pod_and_back_as_it_was(host):
    host.veth("nic0", "tor0", mtu=1400)
    host.address("nic0", "10.9.0.2/24")
    host.address("nic0", "fd00:9::2/64")
    host.ip(lambda ipr: ipr.route("add", dst="10.77.0.0/16", gateway="10.9.0.1", table=777))
    host.ip(lambda ipr: ipr.rule("add", table=777, priority=500, src="10.9.0.2/32"))
    pod = host.pod()
    identity, before, wanted = held(
        host,
        "nic0",
        interface={"name": "net1", "mtu": 1300, "hardwareAddr": "02:00:00:00:00:17", "arpIgnore": 1},
        neighbors=[{"destination": "10.9.0.1", "hardwareAddr": "02:00:00:00:00:01"}],
        ethtool={"features": {"gro": False}},
    )
    assert before.addresses == ("10.9.0.2/24", "fd00:9::2/64")
    assert (before.routes[0].table, before.rules[0].priority) == (777, 500)
    attached = attach_link(identity, wanted, pod.path)
    assert (attached.name, attached.mac) == ("net1", "02:00:00:00:00:17")
    assert set(attached.addresses) == {"10.9.0.2/24", "fd00:9::2/64"}
    assert "nic0" not in host.links()
    inside = now(pod, identity)
    assert (inside.name, inside.mtu, inside.mac) == ("net1", 1300, "02:00:00:00:00:17")
    assert inside.routes == before.routes
    assert inside.rules == before.rules
    assert inside.neighbors[0].destination == "10.9.0.1"
    assert inside.features["rx-gro"] is False
    assert inside.sysctls["ipv4/arp_ignore"] == 1
    assert pod.links()["net1"]["flags"] & 1

    assert detach_link(identity, before, pod.path) is True
    assert now(pod, identity) is None
    assert now(host, identity) == before


def test_the_address_of_a_link_with_a_peer_is_its_own(host):
    host.veth("nic0", "tor0")
    host.address("nic0", "10.9.0.1/32", peer="10.9.0.2")
    _, before, _ = held(host, "nic0", interface={"name": "net1"})
    assert before.addresses == ("10.9.0.1/32",)


def test_attaching_and_detaching_twice_changes_nothing(host):
    host.veth("nic0", "tor0")
    host.address("nic0", "10.9.0.2/24")
    pod = host.pod()
    identity, before, wanted = held(host, "nic0", interface={"name": "net1"})
    first = attach_link(identity, wanted, pod.path)
    assert attach_link(identity, wanted, pod.path) == first
    assert detach_link(identity, before, pod.path)
    assert detach_link(identity, before, pod.path)
    assert now(host, identity) == before


def test_traffic_between_two_pods_over_the_moved_ends(host):
    host.veth("nic0", "nic1")
    pods = host.pod("a"), host.pod("b")
    for number, pod in enumerate(pods):
        address = f"10.9.0.{number + 1}/24"
        identity, _, wanted = held(
            host, f"nic{number}", interface={"name": "net1", "addresses": [address], "mtu": 9000}
        )
        attach_link(identity, wanted, pod.path)
    listener = pods[0].call(lambda: socket.create_server(("10.9.0.1", 0)))
    got = []

    def serve():
        with listener.accept()[0] as peer:
            got.append(peer.recv(100))

    server = threading.Thread(target=serve)
    server.start()
    port = listener.getsockname()[1]
    with pods[1].call(lambda: socket.create_connection(("10.9.0.1", port), timeout=20)) as client:
        client.sendall(b"through the veth")
    server.join(20)
    listener.close()
    assert got == [b"through the veth"]


def test_a_macvlan_moves_too(host):
    host.veth("nic0", "tor0")

    def make(ipr):
        (parent,) = ipr.link_lookup(ifname="nic0")
        ipr.link("add", ifname="mac0", kind="macvlan", link=parent, macvlan_mode="bridge")

    host.ip(make)
    pod = host.pod()
    identity, before, wanted = held(host, "mac0", interface={"addresses": ["10.9.0.3/24"]})
    assert identity.kind == "macvlan"
    attach_link(identity, wanted, pod.path)
    assert pod.addresses("mac0") == {"10.9.0.3/24"}
    assert detach_link(identity, before, pod.path)
    assert now(host, identity) == before


def test_a_virtual_link_dies_with_its_namespace(host):
    host.veth("nic0", "tor0")
    pod = host.pod()
    identity, before, wanted = held(host, "nic0")
    attach_link(identity, wanted, pod.path)
    pod.destroy()
    with pytest.raises(OSError, match="No such file"):
        detach_link(identity, before, pod.path)
    while "tor0" in host.links():
        pass
    assert detach_link(identity, before, None) is False


def test_what_comes_back_under_another_name_is_found_and_restored(host):
    """As the kernel does with hardware when its namespace ends: it keeps its name, or gets a free one."""
    host.veth("nic0", "tor0", mtu=1400)
    host.address("nic0", "10.9.0.2/24")
    pod = host.pod()
    identity, before, wanted = held(host, "nic0", interface={"name": "net1", "mtu": 1300})
    attach_link(identity, wanted, pod.path)

    def thrown_out(ipr):
        (index,) = ipr.link_lookup(ifname="net1")
        ipr.link("set", index=index, state="down")
        ipr.link("set", index=index, ifname="dev0", net_ns_pid=os.getpid())

    pod.ip(thrown_out)
    assert "dev0" in host.links()
    pod.destroy()
    assert detach_link(identity, before, None) is True
    assert now(host, identity) == before


def test_a_name_that_the_pod_has_already_is_told_and_the_link_goes_back(host):
    host.veth("nic0", "tor0")
    host.veth("cni", "eth9")
    pod = host.pod()
    other, _, wanted = held(host, "cni", interface={"name": "eth0"})
    attach_link(other, wanted, pod.path)
    identity, before, wanted = held(host, "nic0", interface={"name": "eth0"})
    with pytest.raises(OSError, match="File exists"):
        attach_link(identity, wanted, pod.path)
    assert detach_link(identity, before, pod.path)
    assert now(host, identity) == before
    assert set(pod.links()) >= {"lo", "eth0"}


def test_a_feature_that_is_fixed_as_the_claim_wants_it_is_no_obstacle(host):
    host.veth("nic0", "tor0")
    host.call(lambda: set_features("nic0", {"large-receive-offload": False, "tso": False}))
    assert host.call(lambda: read_features("nic0"))["tx-tcp-segmentation"] is False
    with pytest.raises(OSError, match="nic0: it cannot switch large-receive-offload"):
        host.call(lambda: set_features("nic0", {"large-receive-offload": True}))


def test_features_that_a_link_lacks_are_named(host):
    host.veth("nic0", "tor0")
    pod = host.pod()
    identity, before, wanted = held(host, "nic0", ethtool={"features": {"warp-drive": True}})
    with pytest.raises(OSError, match="nic0: it cannot switch warp-drive"):
        attach_link(identity, wanted, pod.path)
    assert detach_link(identity, before, pod.path)
    assert now(host, identity) == before
