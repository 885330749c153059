"""RDMA devices of a real kernel: software RoCE (rxe), in the virtual machine of `tests/node/run.py --kernel`.

The modes of RDMA belong to the whole machine, and exclusive mode is only taken while there is one network
namespace, so nothing here runs on a host.
"""

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from tests.claim.node.nic.nic_kit import Host, Netns
from tests.waiting import PATIENCE

from rackloom.claim.node.nic import rdma
from rackloom.claim.node.nic.attach import AttachmentManager, AttachmentStore
from rackloom.claim.node.nic.inventory import HostScanner
from rackloom.claim.node.nic.leases import LeaseStore
from rackloom.claim.node.nic.plugin import NicSettings, _published_devices
from rackloom.core.allocate.objects import Device
from rackloom.core.nics.attachment import PreparedNic
from rackloom.core.nics.devices import host_nics
from rackloom.errors import Refused
from rackloom.topology.discovery.sysfs import Sysroot
from rackloom.topology.nics import ExclusionPolicy

pytestmark = [
    pytest.mark.skipif(
        "RACKLOOM_OWN_KERNEL" not in os.environ,
        reason="NEEDS A KERNEL OF ITS OWN: make test-kernel",
    ),
    pytest.mark.skipif(shutil.which("rdma") is None, reason="NEEDS rdma: apt-get install iproute2"),
]


def tool(*words):
    subprocess.run(words, check=True, timeout=120)


def set_mode(mode):
    """Set it once the kernel has destroyed the namespaces of earlier tests, some time after their end."""
    command = ["rdma", "system", "set", "netns", mode]
    deadline = time.monotonic() + PATIENCE
    while subprocess.run(command, capture_output=True, timeout=120).returncode:
        assert time.monotonic() < deadline, f"the kernel does not become {mode}"
        time.sleep(0.1)


@pytest.fixture
def rxe(tmp_path):
    """A software RDMA device `rxe0` on one end of a pair, in the machine's first namespace."""
    host = Host(tmp_path)
    host.veth("nic0", "tor0")
    for module in ("rdma_rxe", "rdma_ucm", "ib_umad"):
        tool("modprobe", module)
    tool("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "nic0")
    yield host
    tool("rdma", "link", "delete", "rxe0")
    host.ip(lambda ipr: ipr.link("del", ifname="nic0"))
    host.close()


@pytest.fixture
def exclusive(rxe):
    """The machine in exclusive mode."""
    set_mode("exclusive")
    yield rxe
    rxe.close()
    set_mode("shared")


def devices_in(netns):
    return set(netns.call(rdma._devices))


def attach(tmp_path, pod):
    """The result of attaching the device alone, as of a NIC without an interface."""
    manager = AttachmentManager(
        AttachmentStore(tmp_path / "loans", "boot"), LeaseStore(tmp_path / "leases", "boot"), lambda _: None
    )
    exclusive = rdma.netns_mode() is rdma.NetnsMode.EXCLUSIVE
    nic = PreparedNic(device="rxe0", published=Device(name="rxe0"), rdma="rxe0", moves_rdma=exclusive)
    try:
        return manager._attach("uid", "pod", nic, pod.path)
    finally:
        assert bool(manager.attachments.all()) is not exclusive


def test_in_shared_mode_every_namespace_sees_the_device_and_nothing_moves(rxe, tmp_path):
    assert rdma.netns_mode() is rdma.NetnsMode.SHARED
    pod = rxe.pod()
    assert devices_in(rxe) == devices_in(pod) == {"rxe0"}
    assert attach(tmp_path, pod).name == ""
    assert devices_in(rxe) == {"rxe0"}


def test_a_device_without_an_interface_is_published_with_its_port(rxe):
    scanner = HostScanner(Path("/"), left_out=ExclusionPolicy(kinds=frozenset(), names=()))
    seen = scanner()
    found = _published_devices(NicSettings(node="n"), seen, host_nics(seen))["rxe0"].attributes
    assert found["rdma"].bool_ is True
    assert found["rdmaDevice"].string == "rxe0"
    assert found["rdmaState"].string == "active"
    assert found["linkLayer"].string == "Ethernet"
    assert "ifName" not in found


def test_its_character_devices_are_those_of_the_kernel(rxe):
    found = {node.path: (node.major, node.minor) for node in rdma.rdma_device_nodes(Sysroot(), "rxe0")}
    for path, numbers in found.items():
        at = Path(path).stat().st_rdev
        assert numbers == (os.major(at), os.minor(at))
    names = {Path(path).name.rstrip("0123456789") for path in found}
    assert names == {"rdma_cm", "uverbs", "umad", "issm"}


def test_in_exclusive_mode_a_pod_does_not_see_the_hosts_device(exclusive):
    assert rdma.netns_mode() is rdma.NetnsMode.EXCLUSIVE
    pod = exclusive.pod()
    assert devices_in(exclusive) == {"rxe0"}
    assert devices_in(pod) == set()


def test_a_device_moves_or_fails_the_pod_and_stays_on_the_host(exclusive, tmp_path):
    """rxe knows namespaces in new kernels only. Others refuse to move it, in different words."""
    pod = exclusive.pod()
    refusal = None
    try:
        rdma.push_rdma_device("rxe0", pod.path)
    except OSError as error:
        refusal = error
    if refusal is None:
        assert (devices_in(exclusive), devices_in(pod)) == (set(), {"rxe0"})
        rdma.pull_rdma_device("rxe0", pod.path)
    else:
        assert refusal.errno == errno.EOPNOTSUPP
        with pytest.raises(Refused, match="moving RDMA device rxe0: Operation not supported"):
            attach(tmp_path, pod)
    assert devices_in(exclusive) == {"rxe0"}


def test_a_device_that_is_nowhere_is_named(exclusive):
    pod: Netns = exclusive.pod()
    with pytest.raises(FileNotFoundError, match="RDMA device mlx5_9 is neither on the host nor in the pod"):
        rdma.push_rdma_device("mlx5_9", pod.path)
    rdma.pull_rdma_device("mlx5_9", pod.path)
