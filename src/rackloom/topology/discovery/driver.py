"""Where NVIDIA's user-space driver is: its libraries, programs and firmware, below a root.

The driver is installed in the root that is given, or a container of it shows its own root at
/run/nvidia/driver below that one (GPU Operator). Both are searched:

1. A root counts if it has `libcuda.so.*` or `libnvidia-ml.so.*` in one of `LIBRARY_PLACES`. The numbers that
   end the names of these files are the versions that it has.
2. The root with the version of the kernel module (`loaded_version`) wins, else the first that counts. While a
   driver is being replaced there may be two.
3. Within it, the version of the kernel module counts, else the newest. Files of other versions are left out.

A directory with two paths (/lib is a link to /usr/lib on most distributions) is searched once. Links are
followed inside the root, whose absolute links mean nothing outside of it.

Source of the places: nvidia-container-toolkit 1.20 (pkg/lookup, internal/lookup/root), NVIDIA's DRA driver.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from rackloom.topology.discovery.sysroot import OWN, Sysroot

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
CONTAINERISED = "run/nvidia/driver"
_VERSION = re.compile(r"\d{3,}\.\d+(?:\.\d+)?")
_VERSIONED = re.compile(rf"lib.+\.so\.({_VERSION.pattern})")
_CORE = re.compile(r"lib(?:cuda|nvidia-ml)\.so\..+")
_LOADED = "/proc/driver/nvidia/version"


@dataclass(frozen=True, slots=True, order=True)
class DriverFile:
    """A file of the driver, with paths as its root has them. `link` is the text of a symbolic link."""

    path: PurePosixPath
    real: PurePosixPath
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver: its root as seen from here and as the host has it, and where the host's own root is seen."""

    root: Path
    host_root: Path
    base: Path
    version: str | None
    """`580.95.05`; None where no name of a library tells."""

    def libraries(self, *stems: str) -> tuple[DriverFile, ...]:
        """The driver's libraries, and the links to them; `stems` are patterns such as `libcuda`.

        They are the files that end with the driver's version, of any stem where none is given. Where no name
        tells a version, they are all of these stems.
        """
        sysroot = Sysroot(self.root)
        if self.version is None:
            return tuple(_files(sysroot, LIBRARY_PLACES, lambda name: _has_stem(name, stems)))
        places = (*LIBRARY_PLACES, *(f"{place}/vdpau" for place in LIBRARY_PLACES))
        mine = {
            _stem(name)
            for place in places
            for name in sysroot.names(f"/{place}")
            if library_version(name) == self.version and (not stems or _has_stem(name, stems))
        }
        found = _files(sysroot, places, lambda name: _stem(name) in mine)
        return tuple(file for file in found if library_version(file.real.name) == self.version)

    def programs(self, *names: str) -> tuple[DriverFile, ...]:
        """Programs by name, each from the first place that has it."""
        found: dict[str, DriverFile] = {}
        for file in _files(Sysroot(self.root), PROGRAM_PLACES, frozenset(names).__contains__):
            found.setdefault(file.path.name, file)
        return tuple(found[name] for name in names if name in found)

    def firmware(self) -> tuple[DriverFile, ...]:
        """What the kernel module loads into the GPU System Processor."""
        sysroot = Sysroot(self.root)
        versions = [self.version] if self.version else sorted({*_below(sysroot, FIRMWARE_PLACES)})
        places = tuple(f"{place}/{version}" for place in FIRMWARE_PLACES for version in versions)
        return tuple(_files(sysroot, places, _is_firmware))

    @property
    def devices(self) -> Path:
        """Where its device files are seen: a driver's container may have a /dev of its own."""
        own = self.root / "dev"
        return own if any(own.glob("nvidia*")) else self.base / "dev"


def find_driver(base: Path, host_base: Path = OWN, loaded: str | None = None) -> Driver | None:
    """The driver below `base`, which the host has at `host_base`; `loaded` is the kernel module's version."""
    found: list[Driver] = []
    for below in ("", CONTAINERISED):
        root = base / below
        core = tuple(_files(Sysroot(root), LIBRARY_PLACES, lambda name: _CORE.fullmatch(name) is not None))
        if not core:
            continue
        versions = {library_version(file.real.name) for file in core} - {None}
        version = loaded if loaded in versions else max(versions, key=_numbers, default=None)
        found.append(Driver(root, host_base / below, base, version))
    return next((driver for driver in found if driver.version == loaded), next(iter(found), None))


def loaded_version(sysroot: Path = OWN) -> str | None:
    """The version of the kernel module; None while it is not loaded."""
    said = _VERSION.search((Sysroot(sysroot).text(_LOADED) or "").partition("\n")[0])
    return None if said is None else said[0]


def library_version(name: str) -> str | None:
    """`580.95.05` of `libcuda.so.580.95.05`."""
    versioned = _VERSIONED.fullmatch(name)
    return None if versioned is None else versioned[1]


def trace(base: Path, loaded: str | None, *more: str) -> tuple[object, ...]:
    """Something that becomes another whenever a file may have come or gone in the places, or in `more`."""
    places = (*LIBRARY_PLACES, *PROGRAM_PLACES, *FIRMWARE_PLACES, "dev", *more)
    roots = (base, base / CONTAINERISED)
    return (loaded, *(_changed(root / place) for root in roots for place in places))


def _changed(directory: Path) -> tuple[int, int] | None:
    try:
        info = directory.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


def _files(sysroot: Sysroot, places: tuple[str, ...], wanted: Callable[[str], bool]) -> Iterator[DriverFile]:
    """Files with wanted names in the places, in their order and by name; each directory once."""
    seen: set[PurePosixPath] = set()
    for place in places:
        directory = sysroot.real(f"/{place}")
        if directory is None or directory in seen:
            continue
        seen.add(directory)
        for name in filter(wanted, sysroot.names(str(directory))):
            file = _file(sysroot, directory / name)
            if file is not None:
                yield file


def _file(sysroot: Sysroot, path: PurePosixPath) -> DriverFile | None:
    """None for what is no file, or goes while it is looked at."""
    real = sysroot.real(str(path))
    if real is None:
        return None
    here, at = (sysroot.root.joinpath(*one.parts[1:]) for one in (path, real))
    try:
        link = None if here == at else str(here.readlink())
        return DriverFile(path, real, link) if at.is_file() else None
    except OSError:
        return None


def _below(sysroot: Sysroot, places: tuple[str, ...]) -> Iterator[str]:
    return (name for place in places for name in sysroot.names(f"/{place}"))


def _stem(name: str) -> str:
    """`libcuda` of `libcuda.so.1`; the whole name of what is no library."""
    return name.partition(".so")[0]


def _has_stem(name: str, stems: tuple[str, ...]) -> bool:
    return ".so" in name and any(fnmatchcase(_stem(name), stem) for stem in stems)


def _is_firmware(name: str) -> bool:
    return name.startswith("gsp") and name.endswith(".bin")


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(map(int, (version or "0").split(".")))
