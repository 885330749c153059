"""Reading a host for the checks of a node, below wherever its file system is seen; nothing is run."""

import re
from pathlib import Path

from rackloom.prove.doctor.collectors.containerd import cdi_setting
from rackloom.prove.doctor.collectors.imex import collect_imex
from rackloom.prove.doctor.collectors.namespaces import shows_all_processes
from rackloom.prove.doctor.collectors.sockets import LISTENING, sockets_of
from rackloom.prove.doctor.evidence import HostSeen
from rackloom.topology.discovery.sysroot import Sysroot

_FIRST = 1
"""The process whose network namespace is the host's own."""


def collect_host(here: str, root: Path, runtime: str | None) -> HostSeen:
    """Look at the host below `root`, which findings call `here`.

    `runtime` is the node status' containerRuntimeVersion, where known.
    """
    host = Sysroot(root)
    return HostSeen(
        here=here,
        driver_version=_driver(host),
        runtime=runtime,
        cdi_setting=cdi_setting(host, runtime),
        imex=collect_imex(host),
        busy_ports=_busy_ports(host),
    )


def _driver(host: Sysroot) -> str | None:
    """The version of the loaded module: what counts, whatever packages are installed."""
    found = host.text("sys/module/nvidia/version")
    if found:
        return found
    told = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", host.text("proc/driver/nvidia/version") or "")
    return told[1] if told else None


def _busy_ports(host: Sysroot) -> frozenset[int] | None:
    sockets = sockets_of(host, _FIRST) if shows_all_processes(host) else None
    return None if sockets is None else frozenset(one.port for one in sockets if one.state == LISTENING)
