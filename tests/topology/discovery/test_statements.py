import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.errors import Refused
from rackloom.topology.discovery.discover import (
    build_machine,
    read_declaration,
    read_nccl_topology,
    unmatched_declarations,
)
from rackloom.topology.discovery.nvidia_driver import NvmlGpu
from rackloom.topology.join_key import Fact, Source
from rackloom.topology.machine import HostReading, NetDevice, NetRoute, PciFunction

NIC = PciFunction("0000:41:00.0", 0x020000, 0x15B3, 0x1021, 0, "mlx5_core", None)
GPU = PciFunction("0000:18:00.0", 0x030200, 0x10DE, 0x2330, 0, "nvidia", None)


def netdev(name: str, address: str | None = None, master: str | None = None) -> NetDevice:
    return NetDevice(name, address, None, None, "up", None, virtual=address is None, master=master)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<system>",
        b"\xff\xfe",
        b'<!DOCTYPE x [<!ENTITY a "b">]><system/>',
        '<!DOCTYPE x [<!ENTITY a "b">]><system/>'.encode("utf-16"),
        '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE x><system/>'.encode("utf-16-le"),
        b"<system>" + b" " * (5 * 1024 * 1024) + b"</system>",
    ],
)
def test_what_is_no_topology_file_is_refused_by_name(content):
    with pytest.raises(Refused, match=r"topo\.xml"):
        read_nccl_topology(content, "topo.xml")


@given(st.binary(max_size=200))
def test_no_declaration_is_a_surprise(content):
    with contextlib.suppress(Refused):
        read_declaration(content, "declared.json")


def test_a_declaration_overrides_the_kernel_and_says_so():
    declared = read_declaration(b'{"nics": {"eth1": {"numa_node": 1, "excluded": "storage"}}}', "d.json")
    machine = build_machine(
        HostReading("h", pci=(NIC,), netdevs=(netdev("eth1", NIC.address),)), declared=declared
    )
    assert machine.nics[0].numa_node == Fact(1, Source.DECLARED)
    assert machine.nics[0].excluded == "storage"
    assert unmatched_declarations(declared, machine) == ()


def test_a_declaration_of_what_is_not_there_is_told():
    declared = read_declaration(b'{"nics": {"mlx5_9": {"excluded": "x"}}}', "d.json")
    assert unmatched_declarations(
        declared, build_machine(HostReading("h", pci=(NIC,)), declared=declared)
    ) == ("mlx5_9",)


def test_a_misspelt_field_is_refused():
    with pytest.raises(Refused, match="numanode"):
        read_declaration(b'{"gpus": {"0000:18:00.0": {"numanode": 1}}}', "d.json")


def test_the_default_route_leaves_out_all_below_it():
    members = (netdev("eth1", NIC.address, master="bond0"), netdev("bond0"))
    machine = build_machine(
        HostReading("h", pci=(NIC,), netdevs=members, routes=(NetRoute("0.0.0.0/0", ("bond0",)),))
    )
    assert machine.nics[0].excluded == "carries the default route"


def test_functions_that_are_lent_are_no_devices_here():
    lent = PciFunction("0000:42:00.0", 0x020000, 0x15B3, 0x1021, 0, "vfio-pci", None)
    unbound = PciFunction("0000:43:00.0", 0x020000, 0x15B3, 0x1021, 0, None, None)
    assert build_machine(HostReading("h", pci=(lent, unbound))).nics == ()


def test_a_nic_whose_interface_is_in_a_pod_is_still_a_nic():
    assert build_machine(HostReading("h", pci=(NIC,))).nics[0].pci_address == NIC.address


def test_the_library_adds_what_the_kernel_does_not_know():
    seen = NvmlGpu(GPU.address, "NVIDIA H100 80GB HBM3", "GPU-1", 0, 81559 << 20, "580.95.05")
    gpu = build_machine(HostReading("h", pci=(GPU,)), nvml=(seen,)).gpus[0]
    assert (gpu.uuid, gpu.memory_mib, gpu.pci_id) == ("GPU-1", 81559, "10de:2330")
