"""The devices that an end sees, in trees laid out like the kernel's."""

import os
from pathlib import Path

import pytest

from rackloom.core.transfer.values import AllocatedDevices, Link, VisibleDevices
from rackloom.errors import Refused
from rackloom.prove.transfer.devices import (
    missing_devices,
    read_allocation,
    read_links,
    unallocated_devices,
    visible_devices,
)

ROUTES = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


def pci(root: Path, address: str, **files: str) -> Path:
    function = root / "devices/pci0000:10" / address
    function.mkdir(parents=True)
    for name, content in files.items():
        (function / name).write_text(f"{content}\n")
    return function


def nic(root: Path, address: str, number: int, netdev: str | None) -> None:
    """An HCA mlx5_<number> with its character devices and perhaps a netdev."""
    function = pci(
        root,
        address,
        numa_node="1",
        current_link_speed="16.0 GT/s PCIe",
        current_link_width="8",
        max_link_speed="32.0 GT/s PCIe",
        max_link_width="16",
    )
    hca = function / "infiniband" / f"mlx5_{number}"
    (hca / "ports/1").mkdir(parents=True)
    (hca / "ports/1/state").write_text("4: ACTIVE\n")
    (hca / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    link(root / "class/infiniband" / hca.name, hca)
    link(hca / "device", function)
    for kind, file in (
        ("infiniband_verbs", "uverbs"),
        ("infiniband_mad", "umad"),
        ("infiniband_mad", "issm"),
    ):
        entry = root / "class" / kind / f"{file}{number}"
        entry.mkdir(parents=True)
        (entry / "ibdev").write_text(f"{hca.name}\n")
    if netdev:
        device = function / "net" / netdev
        device.mkdir(parents=True)
        for name, content in (("operstate", "up"), ("mtu", "4200"), ("speed", "400000")):
            (device / name).write_text(f"{content}\n")
        link(device / "device", function)
        link(root / "class/net" / netdev, device)


def link(name: Path, to: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    name.symlink_to(os.path.relpath(to, name.parent))


def dev(root: Path, *names: str) -> Path:
    for name in names:
        (root / "infiniband").mkdir(parents=True, exist_ok=True)
        (root / "infiniband" / name).touch()
    return root


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    root = tmp_path / "sys"
    nic(root, "0000:8a:00.0", 0, "rdma0")
    nic(root, "0000:9b:00.0", 1, None)
    return root


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    file = tmp_path / "route"
    file.write_text(f"{ROUTES}eth0\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
    return file


def test_only_character_devices_make_an_hca_visible(sys: Path, tmp_path: Path) -> None:
    """The RDMA subsystem shows every HCA of the host in /sys, whichever namespace has it."""
    seen = visible_devices(sys, dev(tmp_path / "dev", "rdma_cm", "uverbs0", "umad0", "issm0"))
    assert seen == VisibleDevices(("issm0", "rdma_cm", "umad0", "uverbs0"), ("mlx5_0",), ("rdma0",))


@pytest.mark.parametrize("name", ["mlx5_0", "rdma0", "0000:8a:00.0"])
def test_an_allocation_covers_the_hca_and_its_netdev_by_any_name(
    name: str, sys: Path, tmp_path: Path, routes: Path
) -> None:
    seen = visible_devices(sys, dev(tmp_path / "dev", "rdma_cm", "uverbs0"))
    assert unallocated_devices(seen, AllocatedDevices((name,)), sys, routes) == []
    assert missing_devices(seen, AllocatedDevices((name,)), sys) == []


def test_a_device_beyond_the_allocation_is_a_stranger(sys: Path, tmp_path: Path, routes: Path) -> None:
    seen = visible_devices(sys, dev(tmp_path / "dev", "uverbs0", "uverbs1"))
    assert unallocated_devices(seen, AllocatedDevices(("mlx5_0",)), sys, routes) == ["mlx5_1"]
    assert unallocated_devices(seen, AllocatedDevices(("mlx5_1",)), sys, routes) == ["mlx5_0", "rdma0"]


def test_a_file_that_no_hca_answers_to_is_a_stranger_itself(sys: Path, tmp_path: Path, routes: Path) -> None:
    seen = visible_devices(sys, dev(tmp_path / "dev", "uverbs0", "uverbs7"))
    assert unallocated_devices(seen, AllocatedDevices(("mlx5_0",)), sys, routes) == ["uverbs7"]


def test_the_pod_network_is_nobodys_claim(routes: Path, tmp_path: Path) -> None:
    seen = VisibleDevices(netdevs=("eth0", "eth1"))
    assert unallocated_devices(seen, AllocatedDevices(()), tmp_path, routes) == ["eth1"]
    assert unallocated_devices(seen, AllocatedDevices(()), tmp_path, tmp_path / "none") == ["eth0", "eth1"]


def test_an_allocated_device_that_is_not_there_is_told(sys: Path, tmp_path: Path) -> None:
    assert missing_devices(
        visible_devices(sys, dev(tmp_path / "dev", "uverbs0")), AllocatedDevices(("mlx5_0", "mlx5_1")), sys
    ) == ["mlx5_1"]


def test_links_carry_rate_mtu_and_pcie(sys: Path) -> None:
    (sys / "class/net/bonding_masters").write_text("")
    netdev, first, second = read_links(sys)
    assert netdev == Link(
        name="rdma0",
        kind="netdev",
        state="up",
        mtu=4200,
        gigabits=400.0,
        numa_node=1,
        pci_address="0000:8a:00.0",
        pcie="16.0 GT/s x8",
        pcie_best="32.0 GT/s x16",
    )
    assert (first.name, first.state, first.gigabits, first.pci_address) == (
        "mlx5_0:1",
        "ACTIVE",
        400.0,
        "0000:8a:00.0",
    )
    assert second.name == "mlx5_1:1"


def test_what_a_kernel_does_not_say_is_none(tmp_path: Path) -> None:
    device = tmp_path / "devices/virtual/net/veth0"
    device.mkdir(parents=True)
    (device / "speed").write_text("10000\n")
    (device / "mtu").write_text("not a number\n")
    link(tmp_path / "class/net/veth0", device)
    assert read_links(tmp_path) == (Link(name="veth0", kind="netdev"),)
    assert read_links(tmp_path / "nothing") == ()


CLAIMS = """
apiVersion: v1
kind: List
items:
- apiVersion: resource.k8s.io/v1
  kind: ResourceClaim
  status:
    allocation:
      devices:
        results:
        - {driver: gpu.nvidia.com, device: gpu-0, pool: node-1, request: gpu}
        - {driver: dra.net, device: pci-0000-8a-00-0, pool: node-1, request: nic}
        - {driver: dra.net, device: rdma1, pool: node-1, request: nic}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
spec: {}
"""


def test_the_nics_of_a_claim_are_read_from_the_api_servers_objects(tmp_path: Path) -> None:
    (tmp_path / "claims.yaml").write_text(CLAIMS)
    assert read_allocation(tmp_path / "claims.yaml") == AllocatedDevices(("0000:8a:00.0", "rdma1"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("kind: ResourceClaim\nspec: {}\n", "no ResourceClaim that is allocated"),
        ("a: [1\n", "while parsing"),
        ("kind: ResourceClaim\nstatus: 7\n", "Expected `object`"),
        ("", "no ResourceClaim that is allocated"),
    ],
)
def test_what_is_no_allocation_is_refused(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "claim.yaml").write_text(content)
    with pytest.raises(Refused, match=problem) as refused:
        read_allocation(tmp_path / "claim.yaml")
    assert refused.value.nearest_fix is not None


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file"):
        read_allocation(tmp_path / "none")
