"""RDMA: the netlink messages of the exclusive mode, and the character devices that a pod gets.

NO RDMA HERE: the kernel of most machines has no RDMA devices. test_rdma_in_the_kernel.py has a software one,
which cannot be moved, so moves that succeed are shown by the messages alone.
"""

import struct

import pytest

from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.nic import links, rdma
from rackloom.claim.node.nic.attach import AttachmentManager, AttachmentStore
from rackloom.claim.node.nic.leases import LeaseStore
from rackloom.claim.node.plugin import ContainerEdits, PreparedClaim, PreparedDevice
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster.claims import AllocatedDevice
from rackloom.core.nics.attachment import LinkIdentity, LinkSettings, PreparedNic
from rackloom.topology.discovery.sysfs import Sysroot


def attribute(kind, value):
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def message(kind, payload):
    return struct.pack("=LHHLL", 16 + len(payload), kind, 0, 1, 0) + payload


def test_the_mode_is_asked_for_and_read():
    assert rdma.ask_mode() == struct.pack("=LHHLL", 16, 5 << 10 | 6, 1, 1, 0)
    assert rdma.mode_in(message(5 << 10 | 6, attribute(66, b"\1"))) is rdma.NetnsMode.SHARED
    assert rdma.mode_in(message(5 << 10 | 6, attribute(66, b"\0"))) is rdma.NetnsMode.EXCLUSIVE
    assert rdma.mode_in(b"") is rdma.NetnsMode.SHARED


def test_a_device_is_found_by_name_and_moved_by_number():
    first = message(5 << 10 | 1, attribute(1, struct.pack("=I", 4)) + attribute(2, b"mlx5_0\0"))
    second = message(5 << 10 | 1, attribute(1, struct.pack("=I", 5)) + attribute(2, b"mlx5_1\0"))
    assert rdma.devices_in(first + second) == {"mlx5_0": 4, "mlx5_1": 5}
    expected = attribute(1, struct.pack("=I", 5)) + attribute(68, struct.pack("=I", 33))
    assert rdma.move_device(5, 33) == struct.pack("=LHHLL", 32, 5 << 10 | 2, 1 | 4, 1, 0) + expected


def test_garbage_from_the_kernel_ends():
    for data in (b"\0" * 64, b"\xff" * 64, struct.pack("=LHHLL", 18, 1, 0, 0, 0) + b"\0\0"):
        assert rdma.devices_in(data) == {}
        assert rdma.mode_in(data) is rdma.NetnsMode.SHARED


@pytest.fixture
def machine(tmp_path):
    def put(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    put("sys/class/misc/rdma_cm/dev", "10:58\n")
    for number, device in enumerate(("mlx5_0", "mlx5_1")):
        put(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"{device}\n")
        put(f"sys/class/infiniband_verbs/uverbs{number}/dev", f"231:{192 + number}\n")
        put(f"sys/class/infiniband_mad/umad{number}/ibdev", f"{device}\n")
        put(f"sys/class/infiniband_mad/umad{number}/dev", f"231:{number}\n")
        put(f"sys/class/infiniband_mad/issm{number}/ibdev", f"{device}\n")
        put(f"sys/class/infiniband_mad/issm{number}/dev", f"231:{64 + number}\n")
    put("sys/class/infiniband_verbs/uverbs9/ibdev", "mlx5_1\n")
    put("sys/class/infiniband_verbs/uverbs9/dev", "what?\n")
    return Sysroot(tmp_path)


def test_a_pod_gets_the_character_devices_of_its_own_hca_only(machine):
    found = {node.path: (node.major, node.minor) for node in rdma.rdma_device_nodes(machine, "mlx5_1")}
    assert found == {
        "/dev/infiniband/rdma_cm": (10, 58),
        "/dev/infiniband/uverbs1": (231, 193),
        "/dev/infiniband/umad1": (231, 1),
        "/dev/infiniband/issm1": (231, 65),
    }


def test_containerd_makes_the_character_devices_of_a_pod(machine, tmp_path, read_specs):
    result = AllocatedDevice(driver="d", request="r", pool="p", device="eth1")
    edits = ContainerEdits(device_nodes=rdma.rdma_device_nodes(machine, "mlx5_1"))
    device = PreparedDevice(result=result, kind="nic", edits=edits)
    cdi = CdiDirectory(tmp_path / "cdi", "dra.net")
    cdi.write("u", PreparedClaim(devices=(device,)))
    (container,) = read_specs(tmp_path / "cdi", cdi.ids("u", device)).containers
    assert container.allowed == {(10, 58, "rw"), (231, 193, "rw"), (231, 1, "rw"), (231, 65, "rw")}
    assert {made["fileMode"] for made in container.devices} == {0o666}


def test_rdma_leaves_after_the_interface_and_returns_before_it(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(links, "attach_link", lambda *_: done.append("interface to pod"))
    monkeypatch.setattr(links, "detach_link", lambda *_: done.append("interface back") or True)
    monkeypatch.setattr(rdma, "push_rdma_device", lambda *_: done.append("rdma to pod"))
    monkeypatch.setattr(rdma, "pull_rdma_device", lambda *_: done.append("rdma back"))
    settings = LinkSettings(name="eth1")
    nic = PreparedNic(
        device="d",
        published=Device(name="d"),
        identity=LinkIdentity(name="eth1"),
        host=settings,
        pod=settings,
        rdma="mlx5_0",
        moves_rdma=True,
    )
    attachment_manager = AttachmentManager(
        AttachmentStore(tmp_path / "loans", "boot"),
        LeaseStore(tmp_path / "leases", "boot"),
        lambda _: done.append("asked"),
    )
    monkeypatch.setattr(
        attachment_manager.attachments,
        "put",
        lambda attachment: attachment_manager.attachments._known.__setitem__(attachment.key, attachment),
    )
    attachment_manager._attach("uid", "pod", nic, tmp_path)
    attachment_manager._detach(attachment_manager.attachments.all()[0])
    assert done == ["asked", "interface to pod", "rdma to pod", "rdma back", "interface back"]
