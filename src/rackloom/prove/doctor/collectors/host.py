"""Reading a host for the checks of a node, below wherever its file system is seen; nothing is run."""

import re
from collections.abc import Iterator
from pathlib import Path

from rackloom.prove.doctor.collectors.containerd import cdi_setting
from rackloom.prove.doctor.evidence import HostSeen
from rackloom.topology.discovery.sysroot import Sysroot

_LISTENING = "0A"
"""TCP_LISTEN in the column `st` of /proc/net/tcp (include/net/tcp_states.h)."""
_IMEX_UNIT = "nvidia-imex.service"
_POD = re.compile(
    r"kubepods|/(?:[\w.-]*-)?pod[0-9a-f][0-9a-f_-]*(?:\.slice)?(?:/|$)|/(?:cri-containerd|crio)-",
    re.MULTILINE,
)
"""How kubelet and the runtimes name the control groups of pods, with both cgroup drivers."""
_UNIT_FOLDERS = ("etc/systemd/system", "run/systemd/system")


def collect_host(node: str, root: Path, runtime: str | None) -> HostSeen:
    """Look at the host below `root`. `runtime` is the node status' containerRuntimeVersion, where known."""
    host = Sysroot(root)
    return HostSeen(
        node=node,
        driver_version=_driver(host),
        runtime=runtime,
        cdi_setting=cdi_setting(host),
        imex_processes=_imex_processes(host),
        imex_enabled=_imex_enabled(host),
        busy_ports=_busy_ports(host),
    )


def _driver(host: Sysroot) -> str | None:
    """The version of the loaded module: what counts, whatever packages are installed."""
    found = host.text("sys/module/nvidia/version")
    if found:
        return found
    told = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", host.text("proc/driver/nvidia/version") or "")
    return told[1] if told else None


def _imex_processes(host: Sysroot) -> tuple[int, ...] | None:
    numbers = [name for name in host.names("proc") if name.isascii() and name.isdigit()]
    if "1" not in numbers:
        return None
    found = [one for one in numbers if host.text(f"proc/{one}/comm") == "nvidia-imex"]
    in_pods = {one: _is_in_pod(host, one) for one in found}
    own = tuple(sorted(int(one) for one in found if in_pods[one] is False))
    return None if not own and None in in_pods.values() else own


def _is_in_pod(host: Sysroot, process: str) -> bool | None:
    """None where only a part of its control group's name is seen.

    From within a cgroup namespace the names of others are relative to it, `/../..`, and what they have in
    common with its own is left out (cgroup_namespaces(7)).
    """
    group = host.text(f"proc/{process}/cgroup") or ""
    if _POD.search(group):
        return True
    return None if ":/.." in group and not group.endswith(f"/{_IMEX_UNIT}") else False


def _imex_enabled(host: Sysroot) -> bool | None:
    folders = [folder for folder in _UNIT_FOLDERS if host.real(folder) is not None]
    if not folders:
        return None
    wanting = [f"{at}/{name}" for at in folders for name in host.names(at) if name.endswith(".wants")]
    return any(_IMEX_UNIT in host.names(one) for one in wanting)


def _busy_ports(host: Sysroot) -> frozenset[int] | None:
    tables = [host.whole(f"proc/1/net/{name}") for name in ("tcp", "tcp6")]
    if tables[0] is None:
        return None
    try:
        return frozenset(port for table in tables if table is not None for port in _listening(table))
    except ValueError:
        return None


def _listening(table: str) -> Iterator[int]:
    """Raises ValueError for what is no such table."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3 and fields[3] == _LISTENING:
            yield int(fields[1].rpartition(":")[2], 16)
