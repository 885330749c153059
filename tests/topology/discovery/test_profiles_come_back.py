"""Discovery of every published machine, laid out as files, gives its description back."""

import pytest

from rackloom.lab.nodes.host_files import HostFiles, host_files, write_sysroot
from rackloom.topology.affinity import classes
from rackloom.topology.discovery.discover import build_machine, read_nccl_topology, unmatched_declarations
from rackloom.topology.discovery.sysfs import Sysroot, read_host
from rackloom.topology.machine import Machine, Nic
from rackloom.topology.profiles import load_machine, machine_names

pytestmark = pytest.mark.slow


def discovered(files: HostFiles, root) -> Machine:
    write_sysroot(files, root)
    vendor = None
    if files.nccl_topology is not None:
        vendor = read_nccl_topology(files.nccl_topology.encode(), "nccl.xml")
    machine = build_machine(read_host(Sysroot(root)), vendor=vendor, declared=files.declared)
    assert unmatched_declarations(files.declared, machine) == ()
    return machine


def by_name(machine: Machine, made_up: Machine) -> dict[tuple[str, str], tuple[str, str | None]]:
    """The matrix keyed by addresses. A profile without them has those that the twin made up, in order."""
    gpus = [gpu.pci_address for gpu in made_up.gpus]
    nics = [nic.pci_address for nic in made_up.nics]
    return {
        (gpus[cell.gpu] or "", nics[cell.nic] or ""): (cell.path_class, cell.source)
        for row in classes(machine)
        for cell in row
    }


@pytest.mark.parametrize("name", machine_names())
def test_matrix_with_sources_comes_back(name, tmp_path):
    published = load_machine(name)
    found = discovered(host_files(published), tmp_path)
    assert (len(found.gpus), len(found.nics)) == (len(published.gpus), len(published.nics))
    if all(device.pci_address for device in (*published.gpus, *published.nics)):
        assert by_name(found, found) == by_name(published, published)
    else:
        # Made-up addresses are in the order of the profile, so the order of the rows is the same.
        assert [[c.path_class for c in row] for row in classes(found)] == [
            [c.path_class for c in row] for row in classes(published)
        ]


@pytest.mark.parametrize("name", machine_names())
def test_the_same_nics_are_left_out_for_the_same_reasons(name, tmp_path):
    published = load_machine(name)
    found = discovered(host_files(published), tmp_path)
    expected = [nic.excluded or without_rdma(published, nic) for nic in published.nics]
    assert sorted(str(nic.excluded) for nic in found.nics) == sorted(map(str, expected))


def without_rdma(machine: Machine, nic: Nic) -> str | None:
    """The reason for which discovery leaves out a NIC that the profile does not exclude, or None."""
    some = any(nic.rdma_device for nic in machine.nics)
    return "Ethernet without RDMA" if some and nic.if_name and not nic.rdma_device else None


@pytest.mark.parametrize("name", machine_names())
def test_without_files_nothing_is_claimed_that_the_kernel_does_not_show(name, tmp_path):
    published = load_machine(name)
    write_sysroot(host_files(published), tmp_path)
    found = build_machine(read_host(Sysroot(tmp_path)))
    sources = {cell.source for row in classes(found) for cell in row}
    assert sources <= {"sysfs", None}
