"""GPUs as NVIDIA's management library knows them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.driver import find_driver, loaded_version
from rackloom.topology.discovery.pci import pci_address

RETRY_SECONDS = 10.0
_NVML = "libnvidia-ml"


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

    _exchange_library(pynvml, driver_root)
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


def driver_missing(driver_root: Path) -> Refused:
    """What a machine without a session lacks: the kernel module, or the library that speaks with it."""
    if loaded_version() is None:
        return Refused(
            "NVIDIA's driver is not loaded: there is no /proc/driver/nvidia/version",
            nearest_fix="load the nvidia module on the node",
        )
    return Refused(
        f"{_NVML}.so.1 is in none of the library directories below {driver_root}",
        nearest_fix="name the root of NVIDIA's driver as --driver-root",
    )


def _exchange_library(nvml: Any, driver_root: Path) -> None:
    """Have the bindings use the library below the root; the loader's, where there is none.

    They load a library once for all time. After an upgrade of the driver it would not work with the newer
    kernel module, so it is exchanged for the one that is there now: but never under a session, whose handles
    belong to the library that made them.
    """
    driver = find_driver(driver_root, loaded=loaded_version())
    file = None if driver is None else next((one for one in driver.libraries(_NVML)), None)
    if driver is None or file is None:
        return
    library = driver.root.joinpath(*file.real.parts[1:])
    with nvml.libLoadLock:
        used = None if nvml.nvmlLib is None else nvml.nvmlLib._name
        if nvml._nvmlLib_refcount > 0 or used == str(library):
            return
        try:
            nvml.nvmlLib = CDLL(str(library))
        except OSError as error:
            raise Retry(f"{library} cannot be loaded: {error}", after=RETRY_SECONDS) from error
        nvml._nvmlGetFunctionPointer_cache.clear()


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
