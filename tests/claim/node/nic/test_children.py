"""A child of a NIC for the pod (IPVLAN, MACVLAN), while the NIC stays on the host as it is."""

import asyncio
import socket

import pytest
from tests.claim.node.nic.nic_kit import needs_root, require_kind
from tests.claim.node.nic.nic_node import POD, NicNode
from tests.claim.node.plugin_manager import NotPrepared

from rackloom.claim.node.nic.links import attach_child, read_links, read_settings, remove_child
from rackloom.claim.node.nic.netlink import Rtnetlink
from rackloom.core.domains.network_config import decode_network_config
from rackloom.core.nics.attachment import LinkSettings, child_identity, pod_settings

pytestmark = needs_root
KINDS = ("ipvlan", "macvlan")


@pytest.fixture(params=KINDS)
def kind(request, host):
    host.veth("nic0", "tor0")
    require_kind(host, request.param, below="nic0")
    return request.param


@pytest.fixture
def node(kit, host):
    return NicNode(kit, host)


def settings_of(netns, name):
    def look():
        with Rtnetlink() as rtnetlink:
            link = next(link for link in read_links(rtnetlink) if link.name == name)
            return read_settings(rtnetlink, link, features=True)

    return netns.call(look)


def parent_link(host):
    def look():
        with Rtnetlink() as rtnetlink:
            return next(link for link in read_links(rtnetlink) if link.name == "nic0")

    return host.call(look)


def child(host, kind, **interface):
    """The parent, its child, and the child's settings, as a prepare finds them."""

    parent = parent_link(host)
    config = decode_network_config({"interface": {"type": kind.upper(), **interface}})
    wanted = pod_settings(config, LinkSettings(name=parent.name))
    return parent.identity(), child_identity(parent, kind, "nic0"), wanted


def test_it_is_made_in_the_pod_and_deleted_and_the_nic_stays(host, kind):
    host.address("nic0", "10.9.0.2/24")
    before, pod = settings_of(host, "nic0"), host.pod()
    parent, made, wanted = child(host, kind, name="net1", addresses=["10.9.0.3/24"], mtu=1300)
    attached = attach_child(parent, made, wanted, pod.path)
    assert (attached.name, attached.addresses) == ("net1", ("10.9.0.3/24",))
    assert pod.addresses("net1") == {"10.9.0.3/24"}
    again = attach_child(parent, made, wanted, pod.path)
    assert again == attached
    assert settings_of(host, "nic0") == before
    assert host.addresses("nic0") == {"10.9.0.2/24"}
    remove_child(made, pod.path)
    assert "net1" not in pod.links()
    remove_child(made, pod.path)
    assert settings_of(host, "nic0") == before


def test_the_pod_reaches_the_network_of_the_nic(host, kind):
    parent, made, wanted = child(host, kind, name="net1", addresses=["10.9.0.3/24"])
    pod, network = host.pod(), host.pod("network")
    attach_child(parent, made, wanted, pod.path)

    def plug_in(ipr):
        with network.path.open() as handle:
            ipr.link("set", index=ipr.link_lookup(ifname="tor0")[0], net_ns_fd=handle.fileno())

    def set_up(ipr):
        (index,) = ipr.link_lookup(ifname="tor0")
        ipr.link("set", index=index, state="up")
        ipr.addr("add", index=index, address="10.9.0.1", prefixlen=24)

    host.ip(plug_in)
    network.ip(set_up)
    with network.call(datagrams) as heard, pod.call(datagrams) as sender:
        heard.bind(("10.9.0.1", 7000))
        heard.settimeout(5)
        sender.sendto(b"here", ("10.9.0.1", 7000))
        message, (source, _) = heard.recvfrom(16)
    assert (message, source) == (b"here", "10.9.0.3")


def datagrams():
    """A socket of the namespace of the thread."""
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def test_an_unnumbered_one_has_no_address(host, kind):
    host.address("nic0", "10.9.0.2/24")
    pod = host.pod()
    parent, made, wanted = child(host, kind, name="net1", addressing="Unnumbered")
    assert attach_child(parent, made, wanted, pod.path).addresses == ()
    assert pod.addresses("net1") == set()


def test_a_name_that_the_pod_has_already_is_refused_and_stays(host, kind):
    pod = host.pod()
    pod.ip(lambda ipr: ipr.link("add", ifname="net1", kind="veth", peer={"ifname": "other"}))
    parent, made, wanted = child(host, kind, name="net1", addressing="Unnumbered")
    with pytest.raises(FileExistsError):
        attach_child(parent, made, wanted, pod.path)
    remove_child(made, pod.path)
    assert {"net1", "other"} <= pod.links().keys()
    assert not [name for name in pod.links() if name.startswith("rl-")]


def test_a_child_that_a_cni_plugin_made_of_the_same_nic_stays(host, kind):
    pod = host.pod()
    parent, made, wanted = child(host, kind, name="net1", addressing="Unnumbered")
    theirs = child_identity(parent_link(host), kind, "another")
    attach_child(parent, theirs, wanted, pod.path)
    with pytest.raises(FileExistsError):
        attach_child(parent, made, wanted, pod.path)
    remove_child(made, pod.path)
    assert "net1" in pod.links()


def test_a_claim_gets_one_and_the_status_names_it(node, host, kind):
    async def story():
        async with node.all() as (_, kubelet, runtime):
            config = {
                "interface": {"type": kind.upper(), "name": "net1", "addresses": ["10.9.0.9/24"]},
                "routes": [{"destination": "10.50.0.0/16", "gateway": "10.9.0.1"}],
            }
            claim = await node.claim("c1", "nic0", config=config)
            await kubelet.prepare(claim)
            pod = host.pod()
            assert await runtime.run(POD, pod.path) == ""
            assert "nic0" in host.links()
            assert pod.addresses("net1") == {"10.9.0.9/24"}
            (reported,) = await node.status("c1")
            assert reported["networkData"]["interfaceName"] == "net1"
            assert reported["networkData"]["ips"] == ["10.9.0.9/24"]
            await runtime.stop(POD)
            assert "net1" not in pod.links()
            await kubelet.unprepare(claim)
            assert "nic0" in host.links()

    asyncio.run(story())


def test_a_larger_mtu_than_the_nics_is_refused(node, host, kind):
    async def story():
        async with node.all() as (_, kubelet, _runtime):
            interface = {"type": kind.upper(), "addressing": "Unnumbered", "mtu": 9000}
            claim = await node.claim("c1", "nic0", config={"interface": interface})
            with pytest.raises(NotPrepared, match="whose child the pod gets, has 1500"):
                await kubelet.prepare(claim)

    asyncio.run(story())
