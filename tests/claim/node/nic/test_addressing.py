"""Addresses that others give: a DHCP server of the network, and a router that advertises a prefix."""

import contextlib
import ipaddress
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.claim.node.nic.dhcp_server import DhcpServer
from tests.claim.node.nic.nic_kit import held, needs_ipv6, needs_root
from tests.fuzz import tries

from rackloom.claim.node.nic import attach, dhcp, links, rdma
from rackloom.claim.node.nic.links import read_links, sysctl_path
from rackloom.claim.node.nic.netlink import Rtnetlink
from rackloom.claim.node.nic.plugin import prepare_nic
from rackloom.core.allocate.objects import Device
from rackloom.core.domains.network_config import RouteConfig, decode_network_config
from rackloom.core.nics import lease
from rackloom.core.nics.devices import HostLink, HostNic
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.sysfs import Sysroot

ROUTES = bytes([16, 10, 8, 10, 9, 0, 1, 24, 10, 7, 1, 0, 0, 0, 0, 0, 10, 9, 0, 1])
READ = (
    RouteConfig(destination="10.8.0.0/16", gateway="10.9.0.1"),
    RouteConfig(destination="10.7.1.0/24", scope=253),
    RouteConfig(destination="0.0.0.0/0", gateway="10.9.0.1"),
)


def prepared(host, config):
    """The settings that a claim with `config` gets of nic0, without its lease."""

    def look():
        with Rtnetlink() as rtnetlink:
            return next(link for link in read_links(rtnetlink) if link.name == "nic0")

    host_nic = HostNic(name="nic0", on=HostLink(link=host.call(look)))
    wanted = decode_network_config({"interface": config})
    return prepare_nic(host_nic, Device(name="nic0"), wanted, Sysroot(), rdma.NetnsMode.SHARED)[0]


def test_routes_of_option_121_are_read():
    assert lease.classless_routes(ROUTES) == READ


@settings(max_examples=tries(100))
@given(st.binary(max_size=40))
def test_any_bytes_are_routes_or_refused(data):
    with contextlib.suppress(ValueError):
        for route in lease.classless_routes(data):
            ipaddress.ip_network(route.destination)


FOREVER = 2**32 - 1


@given(st.integers(1, FOREVER), *[st.none() | st.integers(0, FOREVER)] * 2)
def test_the_times_of_a_lease_are_in_order_whatever_the_server_says(seconds, renewal, rebinding):
    renew, rebind = lease.renewal_times(seconds, renewal, rebinding)
    assert 0 < renew < rebind < seconds
    if renewal is None and rebinding is None:
        assert (renew, rebind) == (seconds * 0.5, seconds * 0.875)
    elif renewal and rebinding and renewal < rebinding < seconds:
        assert renew == max(renewal, min(60, seconds * 0.5))
        assert rebind in (rebinding, seconds * 0.875)


@pytest.mark.parametrize(
    ("seconds", "renewal", "rebinding", "read"),
    [
        (3600, 1, 3000, (60, 3000)),
        (3600, 1, 2, (60, 3150)),
        (3600, 1200, 1300, (1200, 1300)),
        (3600, 1300, 1200, (1800, 3150)),
        (8, 1, 3, (4, 7)),
    ],
)
def test_no_server_has_a_lease_prolonged_all_the_time(seconds, renewal, rebinding, read):
    assert lease.renewal_times(seconds, renewal, rebinding) == read


@given(st.floats(1, 1e6), st.floats(-10, 2.0**33))
def test_the_kernel_keeps_an_address_for_as_long_as_its_lease_has_left(now, left):
    seconds = attach.seconds_left(now + left, now)
    assert (seconds > 0) == (now + left > now)
    if 0 < left < attach.MOST_ADDRESS_SECONDS - 1:
        assert seconds - 1 <= now + left - now <= seconds
    assert seconds < FOREVER


@needs_root
def test_frames_that_nobody_can_read_keep_no_answer_away(host):
    host.veth("nic0", "tor0")
    server = DhcpServer(host, "tor0", before=[bytes([53, 1, 2, 61, 0]), bytes([53, 1, 99]), b"\x35", b""])
    try:
        assert host.call(lambda: dhcp.request_lease("nic0")).lease.grant.address == "10.9.0.77/24"
    finally:
        server.close()


@needs_root
@pytest.mark.parametrize("wanted", [{"dhcp": True}, {"addressing": "DHCP"}])
def test_a_server_gives_the_address_and_routes_and_the_pod_has_them(host, wanted):
    host.veth("nic0", "tor0")
    host.address("nic0", "10.66.0.1/24")
    server = DhcpServer(host, "tor0", option121=ROUTES[:15], option3=bytes([10, 9, 0, 254]))
    try:
        nic = prepared(host, wanted)
    finally:
        server.close()
    assert [kind for kind, _ in server.asked][-1] == 3
    assert server.asked[-1][1][50] == ipaddress.ip_address("10.9.0.77").packed
    assert (nic.pod.addresses, nic.pod.routes) == (("10.9.0.77/24",), READ[:2])
    assert host.addresses("nic0") == {"10.66.0.1/24"}, "nothing is touched while it is prepared"
    pod = host.pod()
    assert links.attach_link(nic.identity, nic.pod, pod.path).addresses == ("10.9.0.77/24",)
    assert pod.addresses("nic0") == {"10.9.0.77/24"}
    assert links.detach_link(nic.identity, nic.host, pod.path)
    assert host.addresses("nic0") == {"10.66.0.1/24"}


@needs_root
def test_no_server_is_told_and_a_senseless_answer_is_refused(host):
    host.veth("nic0", "tor0")
    with pytest.raises(Retry, match=r"no DHCP server answered on nic0 within 0\.2 s"):
        host.call(lambda: dhcp.request_lease("nic0", 0.2))
    server = DhcpServer(host, "tor0", option1=b"")
    try:
        with pytest.raises(Refused, match=r"makes no sense.*; give interface\.addresses"):
            prepared(host, {"dhcp": True})
    finally:
        server.close()


@needs_root
def test_a_lease_that_is_too_short_to_be_kept_up_is_refused(host):
    host.veth("nic0", "tor0")
    server = DhcpServer(host, "tor0", option51=bytes([0, 0, 0, 1]))
    try:
        with pytest.raises(
            Refused, match=r"10\.9\.0\.77/24 on nic0 for 1 s only.*; have it lease for 5 s or more"
        ):
            prepared(host, {"dhcp": True})
    finally:
        server.close()


@needs_root
def test_an_interface_that_is_down_asks_nobody(host):
    host.veth("nic0", "tor0")

    def down(ipr):
        ipr.link("set", index=ipr.link_lookup(ifname="nic0")[0], state="down")

    host.ip(down)
    with pytest.raises(Retry, match="nic0 is down"):
        prepared(host, {"dhcp": True})


class Router:
    """Advertises a prefix on an interface again and again."""

    def __init__(self, netns, link, prefix="fd00:77::"):
        self._stopped = threading.Event()
        netns.call(lambda: self._open(link))
        option = struct.pack(
            ">BBBBIII16s", 3, 4, 64, 0xC0, 3600, 3600, 0, ipaddress.ip_address(prefix).packed
        )
        self._message = struct.pack(">BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + option
        self._thread = threading.Thread(target=self._advertise, daemon=True)
        self._thread.start()

    def _open(self, link):
        sysctl_path("ipv6/dad_transmits", link).write_text("0")
        self._socket = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        self._to = ("ff02::1", 0, 0, socket.if_nametoindex(link))

    def close(self):
        self._stopped.set()
        self._thread.join()
        self._socket.close()

    def _advertise(self):
        while not self._stopped.wait(0.1):
            # The link is away for the moment of the move.
            with contextlib.suppress(OSError):
                self._socket.sendto(self._message, self._to)


@pytest.mark.slow
@needs_root
@needs_ipv6
def test_a_pod_autoconfigures_itself_before_it_counts_as_attached(host, monkeypatch):
    monkeypatch.setattr(links, "ADVERTISEMENT_SECONDS", 60.0)
    host.veth("nic0", "tor0")
    host.address("nic0", "10.9.0.2/24")
    identity, before, wanted = held(host, "nic0", interface={"addressing": "SLAAC"})
    assert wanted.sysctls["ipv6/dad_transmits"] == 0
    pod, router = host.pod(), Router(host, "tor0")
    try:
        attached = links.attach_link(identity, wanted, pod.path)
    finally:
        router.close()
    (learnt,) = [address for address in attached.addresses if address.startswith("fd00:77:")]
    assert set(attached.addresses) == {"10.9.0.2/24", learnt}
    assert learnt in pod.addresses("nic0")
    assert links.detach_link(identity, before, pod.path)
    assert host.addresses("nic0") >= {"10.9.0.2/24"}


@needs_root
@needs_ipv6
def test_a_silent_router_is_told(host, monkeypatch):
    monkeypatch.setattr(links, "ADVERTISEMENT_SECONDS", 0.2)
    host.veth("nic0", "tor0")
    identity, before, wanted = held(host, "nic0", interface={"addressing": "SLAAC"})
    pod = host.pod()
    with pytest.raises(TimeoutError, match=r"no router has advertised a prefix on nic0 within 0\.2 s"):
        links.attach_link(identity, wanted, pod.path)
    assert links.detach_link(identity, before, pod.path)


@needs_root
@needs_ipv6
def test_ipv6_settings_are_the_pods_and_the_hosts_come_back(host):
    host.veth("nic0", "tor0")
    interface = {
        "acceptRA": 0,
        "dadTransmits": 3,
        "routerSolicitationDelay": 2,
        "routerSolicitationInterval": 7,
        "addrGenMode": 1,
    }
    identity, before, wanted = held(host, "nic0", interface=interface)
    pod = host.pod()

    def now(netns):
        return netns.call(
            lambda: {name: int(sysctl_path(name, "nic0").read_text()) for name in wanted.sysctls}
        )

    earlier = now(host)
    links.attach_link(identity, wanted, pod.path)
    assert (
        now(pod)
        == wanted.sysctls
        == {
            "ipv6/accept_ra": 0,
            "ipv6/dad_transmits": 3,
            "ipv6/router_solicitation_delay": 2,
            "ipv6/router_solicitation_interval": 7,
            "ipv6/addr_gen_mode": 1,
        }
    )
    assert links.detach_link(identity, before, pod.path)
    assert now(host) == earlier


@needs_root
@needs_ipv6
def test_a_small_interface_has_no_ipv6_to_set(host):
    host.veth("nic0", "tor0", mtu=1000)
    with pytest.raises(Refused, match=r"whose MTU is 1000: IPv6 needs 1280; ask for interface\.mtu 1280"):
        prepared(host, {"acceptRA": 2})
