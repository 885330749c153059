"""The clique of a node, from NVML or from a declared file."""

import asyncio
import ctypes
import json
from pathlib import Path

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.node.fabric import (
    FabricMonitor,
    FabricState,
    GpuFabric,
    NodeFabric,
    check_fabric_driver,
    clique_of,
    read_declared_fabric,
    read_nvml_fabric,
)
from rackloom.claim.node.plugin import Health
from rackloom.core.cluster.names import NO_CLUSTER
from rackloom.errors import Refused, Retry

CLUSTER = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"


def gpu(state=FabricState.COMPLETED, cluster=CLUSTER, clique=1, status=0):
    return GpuFabric(name="gpu-0", state=state, cluster_uuid=cluster, clique_id=clique, status=status)


@pytest.mark.parametrize(
    ("gpus", "clique"),
    [
        ((), ""),
        ((gpu(),), f"{CLUSTER}.1"),
        ((gpu(), gpu()), f"{CLUSTER}.1"),
        ((gpu(clique=32766),), f"{CLUSTER}.32766"),
        ((gpu(FabricState.NOT_SUPPORTED),), ""),
        ((gpu(cluster=NO_CLUSTER),), ""),
        ((gpu(), gpu(FabricState.NOT_SUPPORTED)), f"{CLUSTER}.1"),
    ],
)
def test_the_clique_of_a_node(gpus, clique):
    assert clique_of(NodeFabric(gpus=gpus)) == clique


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ((gpu(FabricState.NOT_STARTED),), "gpu-0 has not joined its NVLink fabric: not started"),
        ((gpu(FabricState.IN_PROGRESS),), "gpu-0 has not joined its NVLink fabric: in progress"),
        ((gpu(status=999),), "NVML error 999"),
        ((gpu(), gpu(clique=2)), "are in 2 cliques"),
    ],
)
def test_what_is_not_settled_is_no_clique(gpus, why):
    with pytest.raises(Retry, match=why):
        clique_of(NodeFabric(gpus=gpus))


@pytest.mark.parametrize("version", ["565.57.01", "570.133.20"])
def test_a_driver_that_cannot_follow_peers_is_refused(version):
    with pytest.raises(Refused, match=r"older than 570\.158\.01"):
        check_fabric_driver(NodeFabric(driver_version=version))


@pytest.mark.parametrize("version", ["570.158.01", "580.95.05", None])
def test_a_driver_that_can_is_not(version):
    check_fabric_driver(NodeFabric(driver_version=version))


def test_a_declared_gpu_may_differ_from_the_rest(tmp_path):
    file = tmp_path / "fabric.json"
    file.write_text(
        json.dumps({"clusterUUID": CLUSTER, "gpus": [{}, {"cliqueId": 2, "state": "notStarted"}]})
    )
    first, second = read_declared_fabric(file).gpus
    assert (first.clique_id, first.state) == (0, FabricState.COMPLETED)
    assert (second.clique_id, second.state) == (2, FabricState.NOT_STARTED)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"gpus": [{"uiid": "x"}]}',
        '{"gpus": [], "state": "done"}',
        '{"gpus": [{"fabricGuid": "z"}]}',
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, content):
    file = tmp_path / "fabric.json"
    file.write_text(content)
    with pytest.raises(Refused, match="cannot use fabric file"):
        read_declared_fabric(file)


@given(st.binary(max_size=200))
def test_no_content_of_a_file_breaks_the_reader(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("f") / "fabric.json"
    file.write_bytes(content)
    with pytest.raises(Refused):
        read_declared_fabric(file)


class FakeLibrary:
    """libnvidia-ml's functions, filling the very structures that the bindings pass."""

    def __init__(self, *, newest=3, platform=True, state=FabricState.COMPLETED):
        self.newest = newest
        self.platform = platform
        self.state = state

    def install(self, monkeypatch):
        plain = {
            "nvmlInitWithFlags": lambda flags: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlSystemGetDriverVersion": lambda: "580.95.05",
            "nvmlDeviceGetUUID": lambda handle: "GPU-1",
            "nvmlDeviceGetPciInfo": self.pci,
            "nvmlDeviceGetGpuFabricInfoV": self.fabric,
            "nvmlDeviceGetPlatformInfo": self.place,
        }
        for name, function in plain.items():
            monkeypatch.setattr(pynvml, name, function)

    def pci(self, handle):
        info = pynvml.nvmlPciInfo_t()
        info.busId = b"00000008:01:00.0"
        return info

    def fabric(self, handle, reference):
        info = reference._obj
        if info.version >> 24 > self.newest:
            raise pynvml.NVMLError_ArgumentVersionMismatch
        assert info.version & 0xFFFFFF == ctypes.sizeof(info)
        cluster = bytes.fromhex(CLUSTER.replace("-", ""))
        ctypes.memmove(ctypes.addressof(info) + type(info).clusterUuid.offset, cluster, 16)
        info.state, info.cliqueId, info.status = self.state, 7, 0
        if hasattr(info, "healthSummary"):
            info.healthSummary = pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY

    def place(self, handle, reference):
        if not self.platform:
            raise pynvml.NVMLError_NotSupported
        info = reference._obj
        raw = {
            "ibGuid": bytes.fromhex("7c0a000000000004") + bytes(8),
            "chassisSerialNumber": b"1820325190001".ljust(16, b"\0"),
            "slotNumber": bytes([3]),
            "trayIndex": bytes([0]),
            "moduleId": bytes([4]),
        }
        for field, value in raw.items():
            at = getattr(type(info), field).offset
            ctypes.memmove(ctypes.addressof(info) + at, value, len(value))


@pytest.mark.parametrize(("newest", "health"), [(3, Health.UNHEALTHY), (2, Health.UNKNOWN)])
def test_nvml_is_read_as_it_lies_in_memory(monkeypatch, newest, health):
    FakeLibrary(newest=newest).install(monkeypatch)
    fabric = read_nvml_fabric(Path("/nowhere"))
    (found,) = fabric.gpus
    assert clique_of(fabric) == f"{CLUSTER}.7"
    assert fabric.driver_version == "580.95.05"
    assert found.health is health
    assert (found.tray, found.key.place.value.chassis_serial) == (0, "1820325190001")
    assert (found.key.place.value.slot, found.key.place.value.module_id) == (3, 4)
    assert found.key.fabric_guid.value == 0x7C0A000000000004
    assert found.key.pci_address.value == "0008:01:00.0"


@pytest.mark.parametrize("state", [FabricState.NOT_STARTED, FabricState.IN_PROGRESS])
def test_links_that_train_after_a_boot_are_no_ill_fabric(monkeypatch, state):
    """NVIDIA/NVSentinel #1701. The library reports limited capacity, and the plugins wait."""
    FakeLibrary(state=state).install(monkeypatch)
    (found,) = read_nvml_fabric(Path("/nowhere")).gpus
    assert (found.state, found.health) == (state, Health.UNHEALTHY)


def test_a_board_outside_a_rack_has_no_place(monkeypatch):
    FakeLibrary(platform=False).install(monkeypatch)
    (found,) = read_nvml_fabric(Path("/nowhere")).gpus
    assert (found.key.place, found.key.fabric_guid, found.tray) == (None, None, None)


def test_no_library_is_refused_and_a_broken_one_is_unknown(monkeypatch):
    def missing(flags):
        raise pynvml.NVMLError_LibraryNotFound

    def broken(flags):
        raise pynvml.NVMLError_LibRmVersionMismatch

    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", missing)
    with pytest.raises(Refused, match="NVIDIA's driver"):
        read_nvml_fabric(Path("/nowhere"))
    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", broken)
    with pytest.raises(Retry, match="NVML does not start"):
        read_nvml_fabric(Path("/nowhere"))


def test_a_library_that_cannot_be_loaded_is_unknown(tmp_path):
    library = tmp_path / "usr/lib64/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.write_text("no library")
    with pytest.raises(Retry, match="cannot be loaded"):
        read_nvml_fabric(tmp_path)


def test_what_was_known_stays_while_nothing_can_be_read():
    seen = (gpu(), gpu(FabricState.IN_PROGRESS), gpu(FabricState.NOT_SUPPORTED), gpu(clique=2))
    answers = [NodeFabric(gpus=(gpu,)) for gpu in seen]
    reported = []

    async def story():
        view = FabricMonitor(lambda: answers.pop(0), lambda: 5.0)
        view.on_change(lambda: reported.append("changed"))
        assert await view.clique() == f"{CLUSTER}.1"
        await view.observe()
        assert view.trouble == "gpu-0 has not joined its NVLink fabric: in progress"
        assert await view.clique() == f"{CLUSTER}.1"
        await view.observe()
        assert await view.clique() == f"{CLUSTER}.1"
        await view.observe()
        assert await view.clique() == f"{CLUSTER}.2"
        assert view.trouble is None

    asyncio.run(story())
    assert reported == ["changed", "changed"]
