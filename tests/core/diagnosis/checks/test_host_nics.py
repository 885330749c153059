"""NICs of one host that are far from its GPUs: the advice about NICs that would be near."""

from rackloom.core.diagnosis.checks.host_nics import HostIdentity, check_host_nics
from rackloom.topology.join_key import Fact, Source
from rackloom.topology.machine import Gpu, Machine, Nic, PciePath


def path(root):
    return PciePath(root=root, bridges=(), source=Source.SYSFS)


def machine(near):
    gpu = Gpu(index=0, pci_address="0000:18:00.0", numa_node=Fact(0, Source.SYSFS), pcie=path("pci0000:10"))
    far = Nic(index=1, rdma_device="mlx5_1", numa_node=Fact(1, Source.SYSFS), pcie=path("pci0000:80"))
    own = Nic(
        index=0,
        rdma_device="mlx5_0",
        numa_node=Fact(0, Source.SYSFS),
        pcie=path("pci0000:20"),
        excluded=near,
    )
    return Machine(name="m", note="", origin=(), gpus=(gpu,), nics=(own, far))


def test_a_nearer_nic_that_is_left_out_is_told_of_with_its_reason():
    (finding,) = check_host_nics(machine("carries the default route"), HostIdentity(name="host h"))
    assert finding.evidence == (
        "host: GPU 0000:18:00.0 is at NUMA node 0, its nearest NIC mlx5_1 at NUMA node 1 (SYS)",
        "host: NIC mlx5_0 at NUMA node 0 is left out: carries the default route",
    )


def test_with_its_own_nic_nothing_is_found():
    assert list(check_host_nics(machine(None), HostIdentity(name="host h"))) == []
