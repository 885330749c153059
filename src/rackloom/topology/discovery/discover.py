"""Discovery from end to end: read, ask the library, read the files, fuse."""

from pathlib import Path

from rackloom.errors import Refused
from rackloom.topology.discovery.fuse import machine_of, unmatched
from rackloom.topology.discovery.nvml import read_nvml
from rackloom.topology.discovery.read import read_host
from rackloom.topology.discovery.statements import NOTHING_DECLARED, read_declared, read_nccl_topology
from rackloom.topology.discovery.sysroot import OWN, Sysroot, content_of
from rackloom.topology.machine import Machine


def discover(
    sysroot: Path = OWN, *, nccl_topology: Path | None = None, declared: Path | None = None
) -> Machine:
    """The machine below `sysroot`. NVML is asked only of this machine itself.

    Raises Refused for a root without /sys and for files that cannot be read or that speak of devices which
    are not there; Retry while the GPU driver does not answer.
    """
    root = Sysroot(sysroot)
    if not root.names("/sys/bus/pci/devices") and not root.names("/sys/class/net"):
        raise Refused(
            f"{sysroot} holds no sys directory of a machine", nearest_fix="copy /sys and /proc there"
        )
    stated = NOTHING_DECLARED if declared is None else read_declared(content_of(declared), str(declared))
    machine = machine_of(
        read_host(root),
        nvml=(read_nvml() or ()) if sysroot == OWN else (),
        vendor=None
        if nccl_topology is None
        else read_nccl_topology(content_of(nccl_topology), str(nccl_topology)),
        declared=stated,
    )
    strangers = unmatched(stated, machine)
    if strangers:
        raise Refused(
            f"{declared} speaks of {', '.join(strangers)}, which this machine does not have",
            nearest_fix="name devices as `rackloom topology discover` prints them",
        )
    return machine
