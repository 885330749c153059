"""GPUs as NVIDIA's management library knows them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackloom.errors import Retry
from rackloom.topology.discovery.pci import pci_address

RETRY_SECONDS = 10.0
LIBRARY_PLACES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
"""Where distributions keep the driver's libraries, below its root."""


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU. `memory_bytes` is all of it; `minor` is the N of /dev/nvidiaN."""

    pci_address: str
    product: str
    uuid: str
    minor: int
    memory_bytes: int
    driver_version: str


def read_nvml(driver_root: Path = Path("/")) -> tuple[NvmlGpu, ...] | None:
    """All GPUs of this machine; None where there is no driver. Raises Retry while it is in trouble."""
    with nvml_session(driver_root) as nvml:
        if nvml is None:
            return None
        version = str(nvml.nvmlSystemGetDriverVersion())
        return tuple(_gpu(nvml, index, version) for index in range(nvml.nvmlDeviceGetCount()))


@contextmanager
def nvml_session(driver_root: Path) -> Iterator[Any]:
    """The started library of the driver below `driver_root`, else the system's; None without a driver.

    It also starts where the driver has no GPU. NVML's errors become `Retry`.
    """
    import pynvml

    _load_library(driver_root)
    try:
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as error:
        raise Retry(f"NVML does not start: {error}", after=RETRY_SECONDS) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise Retry(f"NVML does not answer: {error}", after=RETRY_SECONDS) from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _load_library(driver_root: Path) -> None:
    """The bindings ask the loader for the library by name; it answers with one that is loaded already."""
    for place in LIBRARY_PLACES:
        library = driver_root / place / "libnvidia-ml.so.1"
        if library.exists():
            try:
                CDLL(str(library))
            except OSError as error:
                raise Retry(f"{library} cannot be loaded: {error}", after=RETRY_SECONDS) from error
            return


def _gpu(nvml: Any, index: int, version: str) -> NvmlGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    printed = str(nvml.nvmlDeviceGetPciInfo(handle).busId)
    return NvmlGpu(
        pci_address=pci_address(printed) or printed.lower(),
        product=str(nvml.nvmlDeviceGetName(handle)),
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        minor=int(nvml.nvmlDeviceGetMinorNumber(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        driver_version=version,
    )
