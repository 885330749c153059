"""The join key as attributes: known parts, under names that the API takes, and nothing made up."""

import re

from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.allocate.attributes import (
    clique_attributes,
    device_attributes,
    gpu_attributes,
    tray_attributes,
)
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


def fact(value):
    return Fact(value, Source.NVML)


def key(module, *, slot=3):
    return GpuKey(
        place=fact(SlotKey("1820325190001", slot, module)),
        fabric_guid=fact(0x7C0A000000000000 + module),
        gpu_uuid=fact(f"GPU-{module}"),
    )


def plain(values):
    return {
        name: attribute.string if attribute.int_ is None else attribute.int_
        for name, attribute in device_attributes(values).items()
    }


def test_one_gpu():
    assert plain(gpu_attributes(key(2))) == {
        "chassisSerial": "1820325190001",
        "slot": 3,
        "moduleID": 2,
        "fabricGUID": "0x7c0a000000000002",
        "uuid": "GPU-2",
    }
    assert device_attributes(gpu_attributes(GpuKey())) == {}


def test_a_tray():
    assert plain(tray_attributes([key(1), key(2)])) == {
        "chassisSerial": "1820325190001",
        "slot": 3,
        "module1UUID": "GPU-1",
        "module1FabricGUID": "0x7c0a000000000001",
        "module2UUID": "GPU-2",
        "module2FabricGUID": "0x7c0a000000000002",
    }


def test_gpus_that_disagree_about_the_tray_name_none():
    assert "slot" not in tray_attributes([key(1), key(2, slot=4)])
    assert tray_attributes([GpuKey(gpu_uuid=fact("GPU-1"))]) == {}


def test_a_clique_and_none():
    assert plain(clique_attributes("7b968a6d.32766")) == {
        "clique": "7b968a6d.32766",
        "clusterUUID": "7b968a6d",
        "cliqueID": 32766,
    }
    assert clique_attributes("") == {}


@given(st.integers(1, 8))
def test_names_and_number_of_attributes_fit_into_a_device(gpus):
    attributes = tray_attributes([key(module) for module in range(1, gpus + 1)]) | clique_attributes("u.1")
    assert all(IDENTIFIER.fullmatch(name) for name in attributes)
    # type, id and tray come on top. A device takes 32.
    assert len(attributes) + 3 <= 32
