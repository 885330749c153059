import json
from importlib.resources import files

import msgspec
import pytest

from rackloom.errors import Refused
from rackloom.topology import profiles
from rackloom.topology.join_key import Source
from rackloom.topology.machine import Machine
from rackloom.topology.rack import RackProfile


def test_sixteen_machines_and_four_racks_ship():
    assert len(profiles.machine_names()) == 16
    assert profiles.rack_names() == ("gb200-nvl36x2", "gb200-nvl72", "gb300-nvl72", "vera-rubin-nvl72")
    assert profiles.profile_names() == profiles.machine_names() + profiles.rack_names()


@pytest.mark.parametrize("name", profiles.machine_names())
def test_every_machine_is_called_like_its_file_and_says_where_it_is_from(name):
    machine = profiles.load_profile(name)
    assert isinstance(machine, Machine)
    assert machine.name == name
    assert machine.origin
    assert machine.note
    assert machine.gpus
    assert machine.nics


@pytest.mark.parametrize("name", profiles.machine_names())
def test_addresses_are_full_lower_case_and_unique(name):
    machine = profiles.load_machine(name)
    addresses = [d.pci_address for d in (*machine.gpus, *machine.nics) if d.pci_address is not None]
    assert len(set(addresses)) == len(addresses)
    for address in addresses:
        domain, bus, function = address.split(":")
        assert (len(domain), len(bus), len(function), function[2]) == (4, 2, 4, ".")
        assert address == address.lower()


@pytest.mark.parametrize("name", profiles.machine_names())
def test_a_stated_matrix_fits_the_machine(name):
    machine = profiles.load_machine(name)
    for row in machine.declared_classes:
        assert row.gpu < len(machine.gpus)
        assert len(row.classes) <= len(machine.nics)


@pytest.mark.parametrize("name", profiles.rack_names())
def test_every_rack_is_called_like_its_file_and_its_tray_has_its_gpus(name):
    rack = profiles.load_profile(name)
    assert isinstance(rack, RackProfile)
    assert rack.name == name
    assert rack.gpus_per_domain == 72
    if rack.tray_machine is not None:
        tray = profiles.load_machine(rack.tray_machine)
        assert [gpu.product for gpu in tray.gpus] == [rack.product] * rack.gpus_per_tray


def test_what_is_not_published_stays_unknown():
    assert {gpu.pci_address for gpu in profiles.load_machine("alibaba-ecs.gn8is-2x.8xlarge").gpus} == {None}
    mi300x = profiles.load_machine("azure-nd96isr-mi300x-v5")
    assert {gpu.pci_address for gpu in mi300x.gpus} == {None}
    assert [gpu.numa_node.value for gpu in mi300x.gpus if gpu.numa_node] == [0] * 4 + [1] * 4
    assert {gpu.numa_node.source for gpu in mi300x.gpus if gpu.numa_node} == {Source.DECLARED}
    assert profiles.load_rack("vera-rubin-nvl72").nvlink_links_per_gpu is None


def test_management_nics_are_kept_but_not_for_tenants():
    p6 = profiles.load_machine("aws-p6-b200.48xlarge-b200x8-efa")
    assert [nic.rdma_device for nic in p6.nics if nic.excluded] == ["ibp115s0f0", "ibp116s0f0"]
    gb200 = profiles.load_machine("oci-bm.gpu.gb200-v3.4")
    assert [nic.if_name for nic in gb200.nics if nic.excluded] == ["eth0", "eth1"]


@pytest.mark.parametrize("load", [profiles.load_profile, profiles.load_machine])
def test_an_unknown_machine_names_the_closest(load):
    with pytest.raises(Refused) as refused:
        load("azure-nd96isr-h100")
    assert refused.value.nearest_fix is not None
    assert refused.value.nearest_fix.startswith("use azure-nd96isr-h100-v5")


def test_an_unknown_name_like_nothing_lists_all():
    with pytest.raises(Refused) as refused:
        profiles.load_rack("../../etc/passwd")
    assert refused.value.nearest_fix == "use gb200-nvl36x2 or gb200-nvl72 or gb300-nvl72 or vera-rubin-nvl72"


@pytest.mark.parametrize(
    ("path", "value"), [(("gpus", 1, "index"), 5), (("nics", 0, "index"), -1), (("colour",), "green")]
)
def test_a_damaged_machine_is_not_read(path, value):
    source = files("rackloom.topology.profiles") / "machines" / "azure-nd96isr-h100-v5.json"
    document = json.loads(source.read_text())
    target = document
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(document), type=Machine)


def test_a_rack_that_splits_a_tray_is_not_read():
    with pytest.raises(ValueError, match="17 trays do not divide over 2 racks"):
        msgspec.structs.replace(profiles.load_rack("gb200-nvl36x2"), trays_per_domain=17)
