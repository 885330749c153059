"""Reading a host for the checks of a node. `root` is where its file system is seen; nothing is run."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rackloom.prove.doctor.evidence import HostSeen

_LISTENING = "0A"
"""TCP_LISTEN in the column `st` of /proc/net/tcp (include/net/tcp_states.h)."""
_CONTAINERD = "etc/containerd/config.toml"
_CRI_PLUGINS = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")
"""The table that has enable_cdi, in version 2 and version 3 of containerd's configuration."""
_UNIT_FOLDERS = ("etc/systemd/system", "run/systemd/system")


def collect_host(node: str, root: Path, runtime: str | None) -> HostSeen:
    """Look at the host below `root`. `runtime` is the node status' containerRuntimeVersion, where known."""
    return HostSeen(
        node=node,
        driver_version=_driver(root),
        runtime=runtime,
        cdi_setting=_cdi_setting(root / _CONTAINERD),
        imex_processes=_imex_processes(root / "proc"),
        imex_enabled=_imex_enabled(root),
        busy_ports=_busy_ports(root / "proc/1/net"),
    )


def _driver(root: Path) -> str | None:
    """The version of the loaded module: what counts, whatever packages are installed."""
    found = _text(root / "sys/module/nvidia/version")
    if found:
        return found.strip()
    told = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _text(root / "proc/driver/nvidia/version") or "")
    return told[1] if told else None


def _cdi_setting(path: Path) -> bool | None:
    try:
        config: dict[str, Any] = tomllib.loads(_text(path) or "")
    except tomllib.TOMLDecodeError:
        return None
    plugins = config.get("plugins") or {}
    said = [plugins[name]["enable_cdi"] for name in _CRI_PLUGINS if "enable_cdi" in (plugins.get(name) or {})]
    return bool(said[-1]) if said else None


def _imex_processes(proc: Path) -> tuple[int, ...] | None:
    if not (proc / "1").exists():
        return None
    found = (
        folder for folder in proc.glob("[0-9]*") if (_text(folder / "comm") or "").strip() == "nvidia-imex"
    )
    return tuple(sorted(int(folder.name) for folder in found if not _is_in_pod(folder)))


def _is_in_pod(process: Path) -> bool:
    """Kubelet names the control groups of pods so, with both of its cgroup drivers."""
    return "kubepods" in (_text(process / "cgroup") or "")


def _imex_enabled(root: Path) -> bool | None:
    folders = [root / folder for folder in _UNIT_FOLDERS if (root / folder).is_dir()]
    if not folders:
        return None
    return any(True for folder in folders for _ in folder.glob("*.wants/nvidia-imex.service"))


def _busy_ports(net: Path) -> frozenset[int] | None:
    tables = [_text(net / name) for name in ("tcp", "tcp6")]
    if tables[0] is None:
        return None
    return frozenset(port for table in tables if table is not None for port in _listening(table))


def _listening(table: str) -> Iterator[int]:
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[3] == _LISTENING:
            yield int(fields[1].rpartition(":")[2], 16)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
