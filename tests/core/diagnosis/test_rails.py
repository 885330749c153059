"""The NICs of a GPU: those that its plugin names come first, then every NIC with a plugin that names it."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.core.diagnosis.healthy import GPUS, healthy, pci

from rackloom.core.diagnosis.join import Rails

DEVICES = healthy(racks=1, trays=1).devices
GPU = next(device for device in DEVICES if device.kind == "gpu")
NIC = next(device for device in DEVICES if device.kind == "nic")
SECOND = msgspec.structs.replace(NIC, name="pci-0019-03-00-0", key=type(NIC.key)())


def test_of_two_nics_of_one_gpu_that_which_the_gpu_itself_names_comes_first():
    for devices in ((*DEVICES, SECOND), (SECOND, *DEVICES)):
        assert Rails(devices).of(GPU) == (NIC, SECOND)


def test_a_nic_that_names_no_gpu_serves_the_gpu_that_names_it():
    mute = msgspec.structs.replace(NIC, partner=None)
    rails = Rails(mute if device is NIC else device for device in DEVICES)
    assert rails.of(GPU) == (mute,)
    assert (mute in rails.nics, rails.served_by(mute)) == (True, pci(1))


def test_a_nic_that_nobody_names_serves_none():
    spare = msgspec.structs.replace(SECOND, partner=None)
    assert spare not in Rails((*DEVICES, spare)).nics


@given(
    partners=st.lists(st.sampled_from([None, *(pci(module) for module in range(1, GPUS + 2))]), max_size=6)
)
def test_what_serves_a_gpu_is_a_rail_and_every_rail_says_whom_it_serves(partners):
    more = [
        msgspec.structs.replace(SECOND, name=f"more-{n}", partner=partner)
        for n, partner in enumerate(partners)
    ]
    devices = (*DEVICES, *more)
    rails = Rails(devices)
    serving = {nic for gpu in devices if gpu.kind == "gpu" for nic in rails.of(gpu)}
    assert serving <= set(rails.nics)
    assert {nic.name for nic in more} & {nic.name for nic in rails.nics} == {
        nic.name for nic in more if nic.partner is not None
    }
    assert all(rails.served_by(nic) for nic in rails.nics)
