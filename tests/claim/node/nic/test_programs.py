"""eBPF programs on an interface: seen, and taken off where a claim asks for it."""

import ctypes
import os
import struct

import pytest
from tests.claim.node.nic.nic_kit import held, needs_root

from rackloom.claim.node.nic import datapath
from rackloom.claim.node.nic.datapath import read_ebpf_programs
from rackloom.claim.node.nic.links import attach_link, read_links
from rackloom.claim.node.nic.netlink import Rtnetlink

pytestmark = needs_root
SCHED_CLS, ATTACH, LOAD = 3, 8, 5


def program(name):
    """A program that passes every packet (r0 = 0; exit)."""
    code = ctypes.create_string_buffer(
        struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    )
    licence = ctypes.create_string_buffer(b"GPL")
    asked = struct.pack(
        "=IIQQIIQII16s",
        SCHED_CLS,
        2,
        ctypes.addressof(code),
        ctypes.addressof(licence),
        0,
        0,
        0,
        0,
        0,
        name,
    )
    try:
        return datapath._bpf(LOAD, asked)[0]
    except OSError as error:
        pytest.skip(f"KERNEL LACKS eBPF for us: {error}")


def seen(netns, name):
    def look():
        with Rtnetlink() as rtnetlink:
            (index,) = [link.index for link in read_links(rtnetlink) if link.name == name]
            return read_ebpf_programs(rtnetlink, index)

    return netns.call(look)


def test_an_interface_without_programs_has_none(host):
    host.veth("nic0", "tor0")
    assert not seen(host, "nic0")


def test_traffic_control_programs_are_seen_and_taken_off(host):
    host.veth("nic0", "tor0")
    handle = program(b"watch")

    def put(ipr):
        (index,) = ipr.link_lookup(ifname="nic0")
        ipr.tc("add", "clsact", index)
        ipr.tc("add-filter", "bpf", index, fd=handle, name="watch", parent="ffff:fff2", direct_action=True)

    host.ip(put)
    os.close(handle)
    assert seen(host, "nic0").tc == ("watch",)
    pod = host.pod()
    identity, _, wanted = held(host, "nic0", interface={"name": "net1", "disableEbpfPrograms": True})
    attach_link(identity, wanted, pod.path)
    assert not seen(pod, "net1")


def test_tcx_programs_are_seen_and_taken_off(host):
    host.veth("nic0", "tor0")
    handle = program(b"count")
    (index,) = host.ip(lambda ipr: ipr.link_lookup(ifname="nic0"))

    def put():
        datapath._bpf(ATTACH, struct.pack("=IIIIIIQ", index, handle, 46, 0, 0, 0, 0))

    try:
        host.call(put)
    except OSError as error:
        pytest.skip(f"KERNEL LACKS TCX: {error}")
    os.close(handle)
    assert seen(host, "nic0").tcx == ("count",)
    pod = host.pod()
    identity, _, wanted = held(host, "nic0", interface={"name": "net1", "disableEbpfPrograms": True})
    attach_link(identity, wanted, pod.path)
    assert not seen(pod, "net1")
