"""Every part has one written name, and every form that a vendor's tool prints is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source
from rackloom.topology.part_names import PartName, canonical_name, gpu_numbers, read_part_name

NUMBERS = st.integers(0, 200)
RACKS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
PARTS = st.one_of(
    st.builds(PartName, RACKS),
    st.builds(PartName, RACKS, slot=NUMBERS),
    st.builds(PartName, RACKS, slot=NUMBERS, gpu=NUMBERS),
    st.builds(PartName, RACKS, slot=NUMBERS, nic=NUMBERS),
    st.builds(PartName, RACKS, gpu=NUMBERS),
    st.builds(PartName, RACKS, switch=NUMBERS),
    st.builds(PartName, RACKS, switch=NUMBERS, port=NUMBERS),
)


@given(part=PARTS)
def test_what_is_written_is_read_again(part):
    assert read_part_name(str(part)) == part


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (PartName("rack-04", slot=2, gpu=2), "rack-04/slot-2/gpu-2"),
        (PartName("rack-04", slot=2, nic=1), "rack-04/slot-2/nic-1"),
        (PartName("rack-04", switch=3, port=17), "rack-04/switch-3/port-17"),
        (PartName("rack-04", slot=0, gpu=0).tray, "rack-04/slot-0"),
        (PartName("node-7", gpu=0), "node-7/gpu-0"),
    ],
)
def test_the_written_form(part, name):
    assert str(part) == name


@pytest.mark.parametrize(
    ("form", "name"),
    [
        # The name, and the names of older maps and findings.
        ("rack-04/slot-2/gpu-2", "rack-04/slot-2/gpu-2"),
        ("rack-04/SLOT-2/GPU-2", "rack-04/slot-2/gpu-2"),
        ("GPU 3 of rack-04 slot 2", "rack-04/slot-2/gpu-2"),
        ("rack-04  slot 2", "rack-04/slot-2"),
        ("GPU 3 in slot 2 of 1820325190001", "1820325190001/slot-2/gpu-2"),
        # Chassis slot and module id, as the switch controller and nvidia-smi print them.
        ("1820325190001 slot 2", "1820325190001/slot-2"),
        ("slot 2 of 1820325190001", "1820325190001/slot-2"),
        ("1820325190001 slot 2 module 3", "1820325190001/slot-2/gpu-2"),
        ("chassis 1820325190001 slot 2 module 3", "1820325190001/slot-2/gpu-2"),
        # PCI addresses: nvidia-smi, the kernel, lspci without a domain, and the device name of a NIC.
        ("00000008:01:00.0", "0008:01:00.0"),
        ("0008:01:00.0", "0008:01:00.0"),
        ("0008:0A:00.0", "0008:0a:00.0"),
        ("8:01:00.0", "0008:01:00.0"),
        ("01:00.0", "0000:01:00.0"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("pci-0008-01-00-0", "0008:01:00.0"),
        ("00000008:01:00.0 of node-7", "0008:01:00.0 of node-7"),
        # Fabric GUIDs: NVML, NMX-C's JSON, and NMX-M's decimals.
        ("0xdb488cb179784801", "0xdb488cb179784801"),
        ("DB488CB179784801", "0xdb488cb179784801"),
        ("15801033986504411137", "0xdb488cb179784801"),
        ("0x1", "0x0000000000000001"),
        # Names that stand for themselves.
        ("GPU-4d2a7f3e-0000-4000-8000-000000000001", "GPU-4d2a7f3e-0000-4000-8000-000000000001"),
        ("1820325190001", "1820325190001"),
        ("node-1a2b3c4d", "node-1a2b3c4d"),
        ("node-1a2b3c4d/gpu-2", "node-1a2b3c4d/gpu-2"),
        ("sim0123456789-2", "sim0123456789-2"),
    ],
)
def test_every_form_has_one_spelling(form, name):
    assert canonical_name(form) == name
    assert canonical_name(name) == name


def test_a_module_counts_from_1_so_there_is_no_module_0():
    assert canonical_name("GPU 0 of rack-04 slot 2") == "GPU 0 of rack-04/slot-2"


def test_the_numbers_of_a_vendor_are_those_that_are_known():
    place = Fact(SlotKey("1820325190001", 2, 3), Source.NMX)
    assert gpu_numbers(GpuKey(place=place)) == "chassis 1820325190001 slot 2 module 3"
    whole = GpuKey(
        place,
        Fact(0xDB488CB179784801, Source.NMX),
        Fact("GPU-4d", Source.NVML),
        Fact("0008:01:00.0", Source.NVML),
    )
    assert gpu_numbers(whole) == (
        "chassis 1820325190001 slot 2 module 3, fabric GUID 0xdb488cb179784801, GPU-4d, PCI 0008:01:00.0"
    )
