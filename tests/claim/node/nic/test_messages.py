"""The requests that go to the kernel, byte by byte where it matters.

Features that this kernel may lack (VRF, large segments for IPv4, InfiniBand addresses) are tested only here.
"""

import errno
import struct
import subprocess
import sys

from pyroute2.netlink.rtnl.fibmsg import fibmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.rtmsg import rtmsg  # type: ignore[import-untyped]

from rackloom.claim.node.nic import netlink
from rackloom.claim.node.nic.netlink import LinkMessage
from rackloom.core.domains import network_config
from rackloom.core.domains.network_config import NeighborConfig, RouteConfig, RuleConfig, VrfConfig
from rackloom.core.nics.attachment import LinkSettings, SegmentationSizes


def attributes(data, at):
    """The attributes after a header of `at` bytes, by number, undecoded."""
    found = {}
    while at < len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        found[kind & 0x3FFF] = data[at + 4 : at + length]
        at += (length + 3) & ~3
    return found


def of_link(message):
    return attributes(message.encode(), 32)


def test_a_vrf_is_made_with_its_table_and_the_link_put_below_it():
    data = netlink.make_vrf(VrfConfig(name="red", table=1500)).encode(9)
    length, kind, flags, sequence, _ = struct.unpack_from("=LHHLL", data)
    assert (length, kind, flags, sequence) == (len(data), 16, 0x1 | 0x200 | 0x400, 9)
    (info,) = [attributes(of_link(netlink.make_vrf(VrfConfig(name="red", table=1500)))[18], 0)]
    assert info[1].rstrip(b"\0") == b"vrf"
    assert attributes(info[2], 0) == {1: struct.pack("=I", 1500)}
    assert of_link(netlink.set_master(7, 9)) == {10: struct.pack("=I", 9)}


def test_a_vrf_without_a_table_has_one_of_its_name():
    data = of_link(netlink.make_vrf(VrfConfig(name="red")))
    (table,) = struct.unpack("=I", attributes(attributes(data[18], 0)[2], 0)[1])
    assert 1000 <= table < 2000


def test_segmentation_sizes_have_the_numbers_of_the_kernel():
    sizes = SegmentationSizes(gso_max_size=1, gro_max_size=2, gso_ipv4_max_size=3, gro_ipv4_max_size=4)
    sent = [
        of_link(request) for request in netlink.link_setting_requests(7, LinkSettings(name="x", sizes=sizes))
    ]
    assert sent == [
        {41: struct.pack("=I", 1)},
        {58: struct.pack("=I", 2)},
        {63: struct.pack("=I", 3)},
        {64: struct.pack("=I", 4)},
    ]


def test_an_infiniband_address_has_twenty_bytes():
    mac = ":".join(f"{number:02x}" for number in range(20))
    (sent,) = [
        of_link(request) for request in netlink.link_setting_requests(7, LinkSettings(name="ib0", mac=mac))
    ]
    assert sent == {1: bytes(range(20))}
    sent = netlink.neighbor_request(7, NeighborConfig(destination="10.0.0.1", hardware_addr=mac)).encode()
    assert attributes(sent, 28)[2] == bytes(range(20))


def test_a_move_names_the_handle_and_the_name_for_a_collision():
    sent = of_link(netlink.move_link(7, 33, "net1"))
    assert sent == {28: struct.pack("=I", 33), 3: b"net1\0"}


def decoded(shape, message):
    found = shape(message.encode())
    found.decode()
    return found


def test_routes_come_after_those_that_make_their_gateways_reachable():
    wanted = (
        RouteConfig(destination="10.1.0.0/16", gateway="10.0.0.1"),
        RouteConfig(destination="10.0.0.1/32", scope=253),
        RouteConfig(destination="::/0", gateway="fd00::1", table=70000),
    )
    first, second, third = (decoded(rtmsg, request) for request in netlink.route_requests(7, wanted))
    assert first.get_attr("RTA_DST") == "10.0.0.1"
    assert first["scope"] == 253
    assert (second.get_attr("RTA_GATEWAY"), second.get_attr("RTA_TABLE")) == ("10.0.0.1", 254)
    assert (third["family"], third["table"], third.get_attr("RTA_TABLE")) == (10, 0, 70000)
    assert third.get_attr("RTA_DST") is None


def test_routes_of_a_vrf_go_to_its_table_unless_they_name_one():
    wanted = (
        RouteConfig(destination="10.1.0.0/16", scope=253),
        RouteConfig(destination="10.2.0.0/16", scope=253, table=9),
    )
    found = [
        decoded(rtmsg, request).get_attr("RTA_TABLE") for request in netlink.route_requests(7, wanted, 1500)
    ]
    assert found == [1500, 9]


def test_what_the_library_used_before_changes_no_message():
    """Its tables of attributes are compiled once, and inherited."""
    program = (
        "from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg; ifinfmsg()\n"
        "from rackloom.claim.node.nic import netlink\n"
        "from rackloom.core.nics.attachment import LinkSettings\n"
        "wanted = LinkSettings(name='ib0', mac=':'.join(['0a'] * 20))\n"
        "print(*(one.encode().hex() for one in netlink.link_setting_requests(7, wanted)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "0a" * 20 in done.stdout, done.stderr


def test_a_rule_without_table_and_priority_is_of_the_main_table_where_the_kernel_puts_it():
    message = netlink.rule_request(RuleConfig(source="10.0.0.0/8"))
    assert message.fields["table"] == network_config.MAIN_TABLE
    assert dict(message.attrs) == {"FRA_TABLE": network_config.MAIN_TABLE, "FRA_SRC": "10.0.0.0"}


def test_a_rule_that_is_there_already_is_enough():
    message = netlink.rule_request(RuleConfig(table=300, priority=10, destination="fd00::/8"))
    found = decoded(fibmsg, message)
    assert (found["family"], found["dst_len"], found.get_attr("FRA_DST")) == (10, 8, "fd00::")
    assert errno.EEXIST in message.already


def test_neighbours_and_addresses():
    data = netlink.neighbor_request(
        7, NeighborConfig(destination="10.0.0.1", hardware_addr="02-00-00-00-00-0A")
    ).encode()
    assert attributes(data, 28) == {1: bytes([10, 0, 0, 1]), 2: bytes([2, 0, 0, 0, 0, 10])}
    data = netlink.address_request(7, "fd00::2/64").encode()
    assert data[16:20] == bytes([10, 64, 0x82, 0])
    assert attributes(data, 24)[8] == struct.pack("=I", 0x82)
    data = netlink.address_request(7, "10.0.0.2/24", seconds=2**32 - 2).encode()
    found = attributes(data, 24)
    assert (data[18], found[8]) == (0, bytes(4)), "it is not permanent"
    assert found[6][:8] == struct.pack("=II", 2**32 - 2, 2**32 - 2)


def test_programs_are_taken_off():
    assert of_link(netlink.detach_xdp(7))[43]
    data = netlink.remove_clsact(7).encode()
    assert attributes(data, 36)[1].rstrip(b"\0") == b"clsact"


def test_the_librarys_own_numbers_are_kept():
    numbers = {name: number for number, (name, _) in enumerate(LinkMessage.nla_map)}
    assert (numbers["IFLA_IFNAME"], numbers["IFLA_ALLMULTI"], numbers["IFLA_GRO_IPV4_MAX_SIZE"]) == (
        3,
        61,
        64,
    )


class BusyKernel:
    """Answers dumps as the kernel does: EBUSY while another on the socket has not been read to its end."""

    def __init__(self, *interruptions):
        self.interruptions, self.parts = list(interruptions), []

    def send(self, data):
        sequence = netlink.HEADER.unpack_from(data)[3]
        if self.parts:
            self.parts.insert(0, self.message(netlink.ERROR, 0, sequence, struct.pack("=i", -errno.EBUSY)))
            return
        flags = 0x10 if self.interruptions and self.interruptions.pop(0) else 0
        links = [self.message(16, flags, sequence, bytes(16))] * 2
        self.parts = [*links, self.message(netlink.DONE, flags, sequence, bytes(4))]

    def recv(self, _size):
        return self.parts.pop(0)

    def message(self, kind, flags, sequence, body):
        return netlink.HEADER.pack(netlink.HEADER.size + len(body), kind, flags, sequence, 0) + body


def test_a_dump_that_was_interrupted_is_read_to_its_end_before_the_next():
    rtnetlink = object.__new__(netlink.Rtnetlink)
    rtnetlink._socket, rtnetlink._sequence = BusyKernel(True, True, False), 0
    assert len(rtnetlink.dump(netlink.NetlinkRequest("reading links", "link", netlink.GETLINK))) == 2
