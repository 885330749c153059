"""One host with NVIDIA GPUs, below wherever its file system is seen: read and examined."""

from pathlib import Path

import msgspec

from rackloom.errors import Refused
from rackloom.prove.doctor.checks.host_links import check_host_links
from rackloom.prove.doctor.checks.host_nics import check_host_nics
from rackloom.prove.doctor.checks.hosts import check_host
from rackloom.prove.doctor.collectors.host import collect_host
from rackloom.prove.doctor.findings import Finding, State
from rackloom.topology.discovery.fuse import machine_of
from rackloom.topology.discovery.read import read_host
from rackloom.topology.discovery.sysroot import Sysroot

OWN = Path("/")


def has_gpus(root: Path) -> bool:
    """Whether NVIDIA's kernel module is loaded."""
    return (root / "sys/module/nvidia").is_dir()


def name_of(root: Path) -> str:
    """What the host below `root` calls itself. Raises Refused where none is."""
    told = Sysroot(root).text("proc/sys/kernel/hostname")
    if told is None or not (root / "sys").is_dir():
        raise Refused(
            f"{root} holds no sys and proc of a host",
            nearest_fix="name where the host's own / is mounted, such as /host in a pod",
        )
    return told


def examine_host(root: Path, runtime: str | None = None, *, meshed: bool = False) -> tuple[Finding, ...]:
    """What is wrong with the host, or unknown. No program is run, and no library asked.

    Where a cluster was asked too, `runtime` is what runs its containers, as its node's status says, and
    `meshed` whether its IMEX daemon's pod has told of its mesh.
    """
    node = name_of(root)
    host = read_host(Sysroot(root))
    machine = machine_of(host)
    seen = msgspec.structs.replace(collect_host(node, root, runtime), meshed=meshed)
    found = (*check_host(seen), *check_host_nics(node, machine), *check_host_links(host, machine))
    return tuple(one for one in found if one.state is not State.HOLDS)
