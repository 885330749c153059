"""What an IMEX daemon needs of NVIDIA's driver: its programs, its libraries and the GPUs' device files.

The daemon's image brings none of them, because they must be those of the kernel module on the node. All are
mounted where the host has them, and the loader is told where to look, so that no hook has to run.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rackloom.claim.node.values import DeviceNode, Edits, Mount
from rackloom.topology.discovery.nvml import LIBRARY_PLACES

PROGRAMS = ("nvidia-imex", "nvidia-imex-ctl", "nvidia-smi")
PROGRAM_PLACES = ("usr/bin", "usr/sbin", "opt/bin")
_LIBRARIES = ("libnvidia-ml.so*", "libcuda.so*", "libnvidia-cfg.so*", "libnvidia-nscq.so*")
_DEVICES = ("nvidiactl", "nvidia[0-9]*")
_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")


def base_edits(driver_root: Path, host_root: Path) -> Edits:
    """Edits for what is found below `driver_root`, which the host sees as `host_root`; none without IMEX."""
    programs = found(driver_root, PROGRAM_PLACES, PROGRAMS)
    libraries = found(driver_root, LIBRARY_PLACES, _LIBRARIES)
    if not programs or not libraries:
        return Edits()
    folders = sorted({f"/{file.parent}" for file in libraries})
    return Edits(
        env=("NVIDIA_VISIBLE_DEVICES=void", f"LD_LIBRARY_PATH={':'.join(folders)}"),
        mounts=tuple(mount_of(file, host_root) for file in (*programs, *libraries)),
        device_nodes=tuple(_device_nodes(driver_root / "dev")),
    )


def found(root: Path, places: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[Path, ...]:
    """Files below `root` that match in one of `places`, relative to it."""
    globs = ((root / place).glob(pattern) for place in places for pattern in patterns)
    return tuple(sorted(file.relative_to(root) for files in globs for file in files))


def mount_of(relative: Path, host_root: Path) -> Mount:
    """A read-only mount of the driver's file at the place that it has on the host."""
    return Mount(host_path=str(host_root / relative), container_path=f"/{relative}", options=_OPTIONS)


def device_node(path: str, info: os.stat_result) -> DeviceNode:
    """A character device as the host has it."""
    return DeviceNode(
        path=path,
        major=os.major(info.st_rdev),
        minor=os.minor(info.st_rdev),
        file_mode=stat.S_IMODE(info.st_mode),
    )


def _device_nodes(directory: Path) -> Iterator[DeviceNode]:
    for pattern in _DEVICES:
        for path in sorted(directory.glob(pattern)):
            info = path.stat()
            if stat.S_ISCHR(info.st_mode):
                yield device_node(f"/dev/{path.name}", info)
