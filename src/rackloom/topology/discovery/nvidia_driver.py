"""Find NVIDIA's user-space driver below a root, and read the GPUs that its NVML library reports.

The driver is installed in the given root, or a driver container shows its own root at /run/nvidia/driver
below it (GPU Operator). Both are searched:

1. A root counts if it has `libcuda.so.*` or `libnvidia-ml.so.*` in one of `LIBRARY_PLACES`. The suffixes
   of these file names are its versions.
2. The root with the version of the loaded kernel module wins, else the first that counts. Two versions
   exist while a driver is being replaced.
3. Within the root, the version of the kernel module counts, else the newest. Files of other versions are
   left out.

A driver container comes and goes while programs use it: GPU Operator ends every use of the kernel module,
unloads it and takes the root away, and the next container brings another. So if the operator's
`VALIDATIONS` exist, the root below /run/nvidia/driver counts only while they call it ready: the driver's pod
does so (`.driver-ctr-ready`, which it removes before it ends), or the operator's validator (`driver-ready`,
for a container that the operator does not manage). Source: GPU Operator 26.7, its driver container of August
2026 and k8s-driver-manager 0.12.

A directory with two paths is searched once. Links are resolved inside the root. `driver_fingerprint`
changes whenever a file may have been added to or removed from the searched directories. Source of the
places: nvidia-container-toolkit 1.20 (pkg/lookup, internal/lookup/root), NVIDIA's DRA driver.

`nvml_session` starts NVML from the library that was found. The Python bindings load a library once per
process, which would not work with a newer kernel module after an upgrade, so the library is exchanged,
but never while a session holds handles of the old one. The kernel module cannot be
unloaded while a session is open: a long session ends when `nvml_fingerprint` changes. NVML errors become
`Retry`. A machine without a driver yields None.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.sysfs import OWN_ROOT, Sysroot, normal_pci_address

_MULTIARCH = ("x86_64-linux-gnu", "aarch64-linux-gnu")
LIBRARY_PLACES = (
    "usr/lib64",
    *(f"usr/lib/{arch}{kind}" for kind in ("", "/nvidia/current") for arch in _MULTIARCH),
    "lib64",
    *(f"lib/{arch}{kind}" for kind in ("", "/nvidia/current") for arch in _MULTIARCH),
    "usr/lib",
    "lib",
)
PROGRAM_PLACES = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "usr/local/sbin", "opt/bin")
FIRMWARE_PLACES = ("lib/firmware/updates/nvidia", "lib/firmware/nvidia", "usr/lib/firmware/nvidia")
CONTAINER_DRIVER_ROOT = "run/nvidia/driver"
VALIDATIONS = "run/nvidia/validations"
_READY_FILES = (".driver-ctr-ready", "driver-ready")
_VERSION = re.compile(r"\d{3,}\.\d+(?:\.\d+)?")
_VERSIONED = re.compile(rf"lib.+\.so\.({_VERSION.pattern})")
_CORE_LIBRARY = re.compile(r"lib(?:cuda|nvidia-ml)\.so\..+")
_VERSION_FILE = "/proc/driver/nvidia/version"


@dataclass(frozen=True, slots=True, order=True)
class DriverFile:
    """A file of the driver, with paths as its root has them. `link` is the text of a symbolic link."""

    path: PurePosixPath
    real: PurePosixPath
    link: str | None = None


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """A driver: its root as a path here and on the host, and where the host's root is mounted here."""

    root: Path
    host_root: Path
    base: Path
    version: str | None
    """`580.95.05`, or None if no library name has a version."""

    def libraries(self, *stems: str) -> tuple[DriverFile, ...]:
        """The driver's libraries, and the links to them. `stems` are patterns such as `libcuda`.

        Only files of the driver's version are returned, of any stem if none is given. If no name has a
        version, all files of these stems are returned.
        """
        sysroot = Sysroot(self.root)
        if self.version is None:
            return tuple(_driver_files(sysroot, LIBRARY_PLACES, lambda name: _has_stem(name, stems)))
        places = (*LIBRARY_PLACES, *(f"{place}/vdpau" for place in LIBRARY_PLACES))
        mine = {
            _stem(name)
            for place in places
            for name in sysroot.names(f"/{place}")
            if library_version(name) == self.version and (not stems or _has_stem(name, stems))
        }
        found = _driver_files(sysroot, places, lambda name: _stem(name) in mine)
        return tuple(file for file in found if library_version(file.real.name) == self.version)

    def programs(self, *names: str) -> tuple[DriverFile, ...]:
        """Programs by name, each from the first place that has it."""
        found: dict[str, DriverFile] = {}
        for file in _driver_files(Sysroot(self.root), PROGRAM_PLACES, frozenset(names).__contains__):
            found.setdefault(file.path.name, file)
        return tuple(found[name] for name in names if name in found)

    def firmware(self) -> tuple[DriverFile, ...]:
        """The files that the kernel module loads into the GPU System Processor."""
        sysroot = Sysroot(self.root)
        versions = (
            [self.version]
            if self.version
            else sorted({name for place in FIRMWARE_PLACES for name in sysroot.names(f"/{place}")})
        )
        places = tuple(f"{place}/{version}" for place in FIRMWARE_PLACES for version in versions)
        is_firmware = re.compile(r"gsp.*\.bin", re.DOTALL).fullmatch
        return tuple(_driver_files(sysroot, places, lambda name: is_firmware(name) is not None))

    @property
    def devices(self) -> Path:
        """The directory of its device files: a driver container may have its own /dev."""
        own = self.root / "dev"
        return own if any(own.glob("nvidia*")) else self.base / "dev"


def find_driver(base: Path, host_base: Path = OWN_ROOT, loaded: str | None = None) -> NvidiaDriver | None:
    """The driver below `base`, which the host has at `host_base`. `loaded`: the kernel module's version."""
    found: list[NvidiaDriver] = []
    for below in ("", CONTAINER_DRIVER_ROOT) if _container_is_ready(base) else ("",):
        root = base / below
        core = tuple(
            _driver_files(
                Sysroot(root), LIBRARY_PLACES, lambda name: _CORE_LIBRARY.fullmatch(name) is not None
            )
        )
        if not core:
            continue
        versions = {library_version(file.real.name) for file in core} - {None}
        version = loaded if loaded in versions else max(versions, key=_version_numbers, default=None)
        found.append(NvidiaDriver(root, host_base / below, base, version))
    return next((driver for driver in found if driver.version == loaded), next(iter(found), None))


def loaded_version(sysroot: Path = OWN_ROOT) -> str | None:
    """The version of the kernel module, or None if it is not loaded."""
    found = _VERSION.search((Sysroot(sysroot).text(_VERSION_FILE) or "").partition("\n")[0])
    return None if found is None else found[0]


def library_version(name: str) -> str | None:
    """`580.95.05` of `libcuda.so.580.95.05`."""
    versioned = _VERSIONED.fullmatch(name)
    return None if versioned is None else versioned[1]


def driver_fingerprint(base: Path, loaded: str | None, *more: str) -> tuple[object, ...]:
    """A value that changes whenever a file may have been added or removed in the places, or in `more`."""
    return _fingerprint(base, loaded, (*LIBRARY_PLACES, *PROGRAM_PLACES, *FIRMWARE_PLACES, "dev", *more))


def nvml_fingerprint(base: Path) -> tuple[object, ...]:
    """A value that changes whenever another NVML library may count, or none any more."""
    return _fingerprint(base, loaded_version(), LIBRARY_PLACES)


def _fingerprint(base: Path, loaded: str | None, places: tuple[str, ...]) -> tuple[object, ...]:
    roots = (base, base / CONTAINER_DRIVER_ROOT)
    states = (_directory_state(root / place) for root in roots for place in places)
    return (loaded, _container_is_ready(base), *states)


def _container_is_ready(base: Path) -> bool:
    """Whether a driver container below `base` may be used, if there is one."""
    validations = base / VALIDATIONS
    return not validations.is_dir() or any((validations / name).exists() for name in _READY_FILES)


def _directory_state(directory: Path) -> tuple[int, int] | None:
    try:
        info = directory.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


def _driver_files(
    sysroot: Sysroot, places: tuple[str, ...], wanted: Callable[[str], bool]
) -> Iterator[DriverFile]:
    """Files with wanted names in the places, in their order and by name. Each directory is read once."""
    seen: set[PurePosixPath] = set()
    for place in places:
        directory = sysroot.real(f"/{place}")
        if directory is None or directory in seen:
            continue
        seen.add(directory)
        for name in filter(wanted, sysroot.names(str(directory))):
            file = _driver_file(sysroot, directory / name)
            if file is not None:
                yield file


def _driver_file(sysroot: Sysroot, path: PurePosixPath) -> DriverFile | None:
    """None if it is not a file, or has just been removed."""
    real = sysroot.real(str(path))
    if real is None:
        return None
    here, at = (sysroot.root.joinpath(*file.parts[1:]) for file in (path, real))
    try:
        link = None if here == at else str(here.readlink())
        return DriverFile(path, real, link) if at.is_file() else None
    except OSError:
        return None


def _stem(name: str) -> str:
    """`libcuda` of `libcuda.so.1`. Of any other file, the whole name."""
    return name.partition(".so")[0]


def _has_stem(name: str, stems: tuple[str, ...]) -> bool:
    return ".so" in name and any(fnmatchcase(_stem(name), stem) for stem in stems)


def _version_numbers(version: str | None) -> tuple[int, ...]:
    return tuple(map(int, (version or "0").split(".")))


NVML_RETRY_SECONDS = 10.0
_NVML_LIBRARY = "libnvidia-ml"


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU. `memory_bytes`: all of it. `minor`: the N of /dev/nvidiaN."""

    pci_address: str
    product: str
    uuid: str
    minor: int
    memory_bytes: int
    driver_version: str


def read_nvml(driver_root: Path = Path("/")) -> tuple[NvmlGpu, ...] | None:
    """All GPUs of this machine, or None if no driver is installed. Raises Retry while the driver fails."""
    with nvml_session(driver_root) as nvml:
        if nvml is None:
            return None
        version = str(nvml.nvmlSystemGetDriverVersion())
        return tuple(_read_nvml_gpu(nvml, index, version) for index in range(nvml.nvmlDeviceGetCount()))


@contextmanager
def nvml_session(driver_root: Path) -> Iterator[Any]:
    """The started library of the driver below `driver_root`, else the system's. None without a driver.

    None also while a driver container is not ready. A driver without GPUs has a session, too. NVML's errors
    become `Retry`.
    """
    import pynvml

    loaded = loaded_version()
    driver = find_driver(driver_root, loaded=loaded)
    if driver is None and not _container_is_ready(driver_root):
        yield None
        return
    _select_library(pynvml, driver, loaded)
    try:
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield None
        return
    except pynvml.NVMLError as error:
        raise Retry(f"NVML does not start: {error}", after=NVML_RETRY_SECONDS) from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise Retry(f"NVML does not answer: {error}", after=NVML_RETRY_SECONDS) from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def driver_missing_error(driver_root: Path) -> Refused:
    """Why a machine has no NVML session: the kernel module or the library is missing, or is not ready."""
    if not _container_is_ready(driver_root) and find_driver(driver_root) is None:
        return Refused(
            f"NVIDIA's driver container is not ready: {driver_root / VALIDATIONS} has neither"
            f" {' nor '.join(_READY_FILES)}",
            nearest_fix="wait for the driver's pod on this node: kubectl get pods -A -o wide"
            " -l app.kubernetes.io/component=nvidia-driver",
        )
    if loaded_version() is None:
        return Refused(
            "NVIDIA's driver is not loaded: there is no /proc/driver/nvidia/version",
            nearest_fix="load the nvidia module on the node",
        )
    return Refused(
        f"{_NVML_LIBRARY}.so.1 is in none of the library directories below {driver_root}",
        nearest_fix="name the root of NVIDIA's driver as --driver-root",
    )


def _select_library(nvml: Any, driver: NvidiaDriver | None, loaded: str | None) -> None:
    """Make the bindings use the library of the driver. Without one they use the system's.

    They load a library once per process. After a driver upgrade it would not work with the newer kernel
    module, so it is exchanged for the present one. While a session is open nothing is exchanged, because its
    handles belong to the library that created them: raises `Retry`.
    """
    file = None if driver is None else next(iter(driver.libraries(_NVML_LIBRARY)), None)
    if driver is None or file is None:
        return
    library = driver.root.joinpath(*file.real.parts[1:])
    with nvml.libLoadLock:
        used = None if nvml.nvmlLib is None else nvml.nvmlLib._name
        if used == str(library):
            return
        fits = loaded is not None and library_version(Path(used or "").name) == loaded
        if fits and driver.version != loaded:
            # Packages of another version are installed, and their module waits for a reboot. Only the
            # library that was loaded works with the present module.
            return
        if nvml._nvmlLib_refcount > 0:
            raise Retry(f"{library} waits: a session of {used} is still open", after=NVML_RETRY_SECONDS)
        try:
            nvml.nvmlLib = CDLL(str(library))
        except OSError as error:
            raise Retry(f"{library} cannot be loaded: {error}", after=NVML_RETRY_SECONDS) from error
        nvml._nvmlGetFunctionPointer_cache.clear()


def _read_nvml_gpu(nvml: Any, index: int, version: str) -> NvmlGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    printed = str(nvml.nvmlDeviceGetPciInfo(handle).busId)
    return NvmlGpu(
        pci_address=normal_pci_address(printed) or printed.lower(),
        product=str(nvml.nvmlDeviceGetName(handle)),
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        minor=int(nvml.nvmlDeviceGetMinorNumber(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        driver_version=version,
    )
