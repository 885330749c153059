"""eBPF programs on an interface are seen, and taken off if a claim requests it."""

import os

import pytest
from tests.claim.node.nic.nic_kit import held, needs_root
from tests.claim.node.nic.programs import loaded, put_tc, put_tcx

from rackloom.claim.node.nic.datapath import read_ebpf_programs
from rackloom.claim.node.nic.links import attach_link, read_links
from rackloom.claim.node.nic.netlink import Rtnetlink

pytestmark = needs_root


def program(name):
    try:
        return loaded(name)
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
    host.ip(lambda ipr: put_tc(ipr, "nic0", handle, "watch"))
    os.close(handle)
    assert seen(host, "nic0").tc == ("watch",)
    pod = host.pod()
    identity, _, wanted = held(host, "nic0", interface={"name": "net1", "disableEbpfPrograms": True})
    attach_link(identity, wanted, pod.path)
    assert not seen(pod, "net1")


def test_tcx_programs_are_seen_and_taken_off(host):
    host.veth("nic0", "tor0")
    handle = program(b"count")
    try:
        host.ip(lambda ipr: put_tcx(ipr, "nic0", handle))
    except OSError as error:
        pytest.skip(f"KERNEL LACKS TCX: {error}")
    os.close(handle)
    assert seen(host, "nic0").tcx == ("count",)
    pod = host.pod()
    identity, _, wanted = held(host, "nic0", interface={"name": "net1", "disableEbpfPrograms": True})
    attach_link(identity, wanted, pod.path)
    assert not seen(pod, "net1")
