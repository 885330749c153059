"""GPUs as NVIDIA's management library knows them."""

from dataclasses import dataclass
from types import ModuleType

from rackloom.errors import Retry
from rackloom.topology.discovery.pci import pci_address

_LOOK_AGAIN = 10.0


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU. `memory_bytes` is all of it; `minor` is the N of /dev/nvidiaN."""

    pci_address: str
    product: str
    uuid: str
    minor: int
    memory_bytes: int
    driver_version: str


def read_nvml() -> tuple[NvmlGpu, ...] | None:
    """All GPUs of this machine; None where there is no driver. Raises Retry while it is in trouble."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise Retry(f"NVML does not start: {error}", after=_LOOK_AGAIN) from error
    try:
        version = str(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu(pynvml, index, version) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise Retry(f"NVML does not answer: {error}", after=_LOOK_AGAIN) from error
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: ModuleType, index: int, version: str) -> NvmlGpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    printed = str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    return NvmlGpu(
        pci_address=pci_address(printed) or printed.lower(),
        product=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        minor=int(pynvml.nvmlDeviceGetMinorNumber(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        driver_version=version,
    )
