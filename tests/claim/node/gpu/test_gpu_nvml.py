"""GPUs read through NVML: the library is faked below its own Python bindings."""

from pathlib import Path

import pynvml
import pytest

from rackloom.claim.node.gpu.inventory import MigDevice, RecoveryAction, XidError
from rackloom.claim.node.gpu.nvml import NvmlGpus, read_gpus
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.nvidia_driver import CONTAINER_DRIVER_ROOT, VALIDATIONS

NOWHERE = Path("/nowhere")


class Library:
    """Two GPUs, the second in MIG mode. Handles are numbers, but that of a MIG device is text."""

    def __init__(self, monkeypatch):
        self.lost = set()
        self.deaf = set()
        self.events = []
        self.listening = 0
        self.sessions = 0
        answers = {
            "nvmlInitWithFlags": lambda flags: self.count(1),
            "nvmlShutdown": lambda: self.count(-1),
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": self.handle,
            "nvmlSystemGetDriverVersion": lambda: "580.95.05",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}" if isinstance(handle, int) else "MIG-1",
            "nvmlDeviceGetPciInfo": self.pci,
            "nvmlDeviceGetMinorNumber": lambda handle: handle,
            "nvmlDeviceGetName": self.name,
            "nvmlDeviceGetMemoryInfo": self.memory,
            "nvmlDeviceGetBrand": lambda handle: pynvml.NVML_BRAND_NVIDIA,
            "nvmlDeviceGetArchitecture": lambda handle: pynvml.NVML_DEVICE_ARCH_HOPPER,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: [9, 0],
            "nvmlDeviceGetGpuFabricInfoV": self.unsupported,
            "nvmlDeviceGetPlatformInfo": self.unsupported,
            "nvmlDeviceGetFieldValues": self.fields,
            "_nvmlGetFunctionPointer": self.pointer,
            "nvmlDeviceGetMigMode": lambda handle: [handle, handle],
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 2,
            "nvmlDeviceGetMigDeviceHandleByIndex": self.mig,
            "nvmlDeviceGetGpuInstanceId": lambda handle: 7,
            "nvmlDeviceGetComputeInstanceId": lambda handle: 0,
            "nvmlDeviceGetGpuInstanceById": lambda handle, number: number,
            "nvmlGpuInstanceGetInfo": self.instance,
            "nvmlDeviceGetAttributes_v2": self.attributes,
            "nvmlEventSetCreate": lambda: "set",
            "nvmlEventSetFree": lambda events: None,
            "nvmlDeviceRegisterEvents": self.register,
            "nvmlEventSetWait_v2": self.wait,
        }
        for name, function in answers.items():
            monkeypatch.setattr(pynvml, name, function)

    def count(self, change):
        self.sessions += change

    def handle(self, index):
        if index in self.lost:
            raise pynvml.NVMLError_GpuIsLost
        return index

    def pci(self, handle):
        info = pynvml.nvmlPciInfo_t()
        info.busId = f"00000000:{handle + 0xA0:02X}:00.0".encode()
        return info

    def name(self, handle):
        board = "NVIDIA H100 80GB HBM3"
        return board if isinstance(handle, int) else f"{board} MIG 1g.10gb"

    def memory(self, handle):
        info = pynvml.c_nvmlMemory_t()
        info.total = 85520809984
        return info

    def unsupported(self, *_):
        raise pynvml.NVMLError_NotSupported

    def fields(self, handle, ids):
        assert ids == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        (value,) = values = (pynvml.c_nvmlFieldValue_t * 1)()
        value.nvmlReturn = pynvml.NVML_SUCCESS
        value.value.uiVal = pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET if handle else 0
        return values

    def pointer(self, name):
        assert name == "nvmlDeviceGetAddressingMode"

        def function(_handle, mode):
            assert mode._obj.version == pynvml.nvmlDeviceAddressingMode_v1
            mode._obj.value = pynvml.NVML_DEVICE_ADDRESSING_MODE_HMM
            return pynvml.NVML_SUCCESS

        return function

    def mig(self, handle, index):
        if index:
            raise pynvml.NVMLError_NotFound
        return "mig"

    def instance(self, number):
        info = pynvml.c_nvmlGpuInstanceInfo_t()
        info.id, info.profileId = number, 19
        info.placement.start, info.placement.size = 6, 1
        return info

    def attributes(self, handle):
        found = pynvml.c_nvmlDeviceAttributes()
        found.multiprocessorCount, found.sharedCopyEngineCount, found.memorySizeMB = 16, 1, 9984
        return found

    def register(self, handle, kinds, events):
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        if handle in self.deaf:
            raise pynvml.NVMLError_NotSupported
        self.listening += 1

    def wait(self, events, milliseconds):
        if not self.events:
            raise pynvml.NVMLError_Timeout
        found = self.events.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class Event:
    def __init__(self, device, number):
        self.device, self.eventData = device, number


@pytest.fixture
def library(monkeypatch):
    return Library(monkeypatch)


def test_a_gpu_is_read(library):
    inventory = read_gpus(NOWHERE)
    gpu = inventory.gpus[0]
    assert (inventory.driver_version, inventory.cuda_version) == ("580.95.05", "12.8")
    assert (gpu.minor, gpu.uuid, gpu.pci_address) == (0, "GPU-0", "0000:a0:00.0")
    assert (gpu.brand, gpu.architecture, gpu.compute_capability) == ("Nvidia", "Hopper", "9.0")
    assert (gpu.addressing_mode, gpu.memory_bytes) == ("HMM", 85520809984)
    assert (gpu.recovery, gpu.mig_mode, gpu.migs, gpu.clique) == (RecoveryAction.NONE, False, (), "")
    assert library.sessions == 0


def test_mig_devices_are_read(library):
    gpu = read_gpus(NOWHERE).gpus[1]
    assert (gpu.mig_mode, gpu.recovery) == (True, RecoveryAction.DRAIN_AND_RESET)
    assert gpu.migs == (
        MigDevice(
            uuid="MIG-1",
            profile="1g.10gb",
            gpu_instance=7,
            compute_instance=0,
            profile_id=19,
            placement_start=6,
            placement_size=1,
            memory_bytes=9984 << 20,
            multiprocessors=16,
            copy_engines=1,
        ),
    )


def test_a_lost_gpu_does_not_hide_the_others(library):
    library.lost.add(0)
    assert [gpu.uuid for gpu in read_gpus(NOWHERE).gpus] == ["GPU-1"]


def test_a_machine_without_a_driver_is_refused(library, monkeypatch):
    def missing(_flags):
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", missing)
    with pytest.raises(Refused, match="NVIDIA's driver"):
        read_gpus(NOWHERE)
    with pytest.raises(Retry, match="not loaded"):
        NvmlGpus(NOWHERE).wait(0.01)


def test_a_driver_in_trouble_is_asked_again_later(library, monkeypatch):
    def broken():
        raise pynvml.NVMLError_Unknown

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", broken)
    with pytest.raises(Retry, match="NVML does not answer"):
        read_gpus(NOWHERE)
    assert library.sessions == 0


def test_errors_are_heard_and_silence_is_silence(library):
    gpus = NvmlGpus(NOWHERE)
    library.events = [Event(1, 79)]
    assert gpus.wait(0.01) == (XidError(uuid="GPU-1", number=79),)
    assert gpus.wait(0.01) == ()
    assert (library.listening, library.sessions) == (2, 1)
    gpus.close()
    assert library.sessions == 0


def test_a_gpu_that_cannot_be_listened_to_is_named(library):
    library.deaf.add(1)
    gpus = NvmlGpus(NOWHERE)
    assert gpus.wait(0.01) == ()
    assert gpus.unmonitored() == {"GPU-1"}
    gpus.close()


def test_after_trouble_it_listens_anew(library):
    gpus = NvmlGpus(NOWHERE)
    library.events = [pynvml.NVMLError_GpuIsLost(), Event(0, 48)]
    with pytest.raises(Retry, match="no events"):
        gpus.wait(0.01)
    assert library.sessions == 0
    library.lost.add(1)
    assert gpus.wait(0.01) == (XidError(uuid="GPU-0", number=48),)
    assert library.listening == 3
    gpus.close()


@pytest.fixture
def no_library(monkeypatch):
    """The files of a driver here are empty: nothing is loaded from them."""
    monkeypatch.setattr(
        "rackloom.topology.discovery.nvidia_driver._select_library", lambda nvml, driver, *_: None
    )


def test_it_lets_go_of_a_driver_container_that_ends_and_listens_to_the_next(library, no_library, tmp_path):
    """An event set keeps the GPUs open, and with them the kernel module that is to be unloaded."""
    ready, libraries = (
        tmp_path / VALIDATIONS / ".driver-ctr-ready",
        tmp_path / CONTAINER_DRIVER_ROOT / "lib64",
    )
    libraries.mkdir(parents=True)
    (libraries / "libnvidia-ml.so.570.172.08").touch()
    ready.parent.mkdir(parents=True)
    ready.touch()
    gpus = NvmlGpus(tmp_path)
    assert gpus.wait(0.01) == ()
    assert (library.listening, library.sessions) == (2, 1)
    ready.unlink()
    with pytest.raises(Retry, match="not loaded, or is being replaced"):
        gpus.wait(0.01)
    assert library.sessions == 0
    ready.touch()
    assert gpus.wait(0.01) == ()
    assert (library.listening, library.sessions) == (4, 1)
    gpus.close()


def test_a_library_that_is_replaced_is_listened_to_anew(library, no_library, tmp_path):
    (tmp_path / "usr/lib64").mkdir(parents=True)
    (tmp_path / "usr/lib64/libnvidia-ml.so.570.172.08").touch()
    gpus = NvmlGpus(tmp_path)
    gpus.wait(0.01)
    gpus.wait(0.01)
    assert library.listening == 2
    (tmp_path / "usr/lib64/libnvidia-ml.so.580.95.05").touch()
    gpus.wait(0.01)
    assert (library.listening, library.sessions) == (4, 1)
    gpus.close()
