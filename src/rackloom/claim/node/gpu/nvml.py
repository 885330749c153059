"""The GPUs of a node as NVIDIA's driver tells of them, through NVML.

A GPU that has fallen off the bus does not stop the others from being read: it is left out. What an older
driver or a smaller GPU does not know is None.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rackloom.claim.node.gpu.inventory import Gpu, Inventory, Recovery
from rackloom.claim.node.gpu.nvml_mig import mig_devices, mig_mode
from rackloom.claim.node.imex.fabric import GpuFabric, NodeFabric, clique_of
from rackloom.claim.node.imex.nvml import gpu_fabric
from rackloom.errors import Retry
from rackloom.topology.discovery.nvml import driver_missing, nvml_session
from rackloom.topology.discovery.pci import pci_address

T = TypeVar("T")
_BRANDS = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "Grid",
    5: "GeForce",
    6: "Titan",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
}
_ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada Lovelace",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
_ADDRESSING = {0: "None", 1: "HMM", 2: "ATS"}


def read_gpus(driver_root: Path) -> Inventory:
    """Every GPU that answers. Raises `Refused` where the driver is missing, `Retry` where it has trouble."""
    with nvml_session(driver_root) as nvml:
        if nvml is None:
            raise driver_missing(driver_root)
        indices = range(nvml.nvmlDeviceGetCount())
        read = (_answering(nvml, index) for index in indices)
        return Inventory(
            gpus=tuple(gpu for gpu in read if gpu is not None),
            driver_version=nvml.nvmlSystemGetDriverVersion(),
            cuda_version=_cuda_version(nvml.nvmlSystemGetCudaDriverVersion_v2()),
        )


def asked(nvml: Any, question: Callable[[], T]) -> T | None:
    """The answer, or None where the GPU or its driver does not know."""
    unknown = (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_ArgumentVersionMismatch,
        nvml.NVMLError_NoPermission,
    )
    try:
        return question()
    except unknown:
        return None


def _answering(nvml: Any, index: int) -> Gpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return _gpu(nvml, handle, gpu_fabric(nvml, index, handle))
    except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired):
        return None


def _gpu(nvml: Any, handle: Any, fabric: GpuFabric) -> Gpu:
    bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId
    in_mig_mode = mig_mode(nvml, handle)
    return Gpu(
        minor=nvml.nvmlDeviceGetMinorNumber(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        pci_address=pci_address(bus_id) or bus_id.lower(),
        product=nvml.nvmlDeviceGetName(handle),
        memory_bytes=_memory(nvml, handle),
        brand=_BRANDS.get(nvml.nvmlDeviceGetBrand(handle)),
        architecture=_ARCHITECTURES.get(nvml.nvmlDeviceGetArchitecture(handle)),
        compute_capability="{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        addressing_mode=asked(nvml, lambda: _addressing(nvml, handle)),
        mig_mode=in_mig_mode,
        migs=mig_devices(nvml, handle) if in_mig_mode else (),
        recovery=asked(nvml, lambda: _recovery(nvml, handle)),
        key=fabric.key,
        tray=fabric.tray,
        clique=_clique(fabric),
        fabric_health=fabric.health,
        fabric_message=fabric.health_message,
    )


def _clique(fabric: GpuFabric) -> str:
    """A GPU that is still registering has none yet: absent means unknown."""
    try:
        return clique_of(NodeFabric(gpus=(fabric,)))
    except Retry:
        return ""


def _memory(nvml: Any, handle: Any) -> int:
    """Bytes. A GPU that shares the machine's memory (DGX Spark) has none of its own."""
    memory = asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    return 0 if memory is None else int(memory.total)


def _addressing(nvml: Any, handle: Any) -> str | None:
    """How the GPU reaches the host's pageable memory. The bindings leave the version out of the question."""
    from ctypes import byref

    mode = nvml.c_nvmlDeviceAddressingMode_t()
    mode.version = nvml.nvmlDeviceAddressingMode_v1
    nvml._nvmlCheckReturn(nvml._nvmlGetFunctionPointer("nvmlDeviceGetAddressingMode")(handle, byref(mode)))
    return _ADDRESSING.get(mode.value)


def _recovery(nvml: Any, handle: Any) -> Recovery | None:
    (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        return None
    wanted = int(field.value.uiVal)
    # An action that this version does not know is still one that is wanted.
    return Recovery(wanted) if wanted in list(Recovery) else Recovery.SYSTEM_REBOOT


def _cuda_version(number: int) -> str:
    """NVML has 12080 for 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"
