"""One host with NVIDIA GPUs, below wherever its file system is seen: read and examined."""

from pathlib import Path

import msgspec

from rackloom.errors import Refused
from rackloom.prove.doctor.checks.here import here_of
from rackloom.prove.doctor.checks.host_links import check_host_links
from rackloom.prove.doctor.checks.host_nics import check_host_nics
from rackloom.prove.doctor.checks.hosts import check_host
from rackloom.prove.doctor.collectors.host import collect_host
from rackloom.prove.doctor.findings import Finding
from rackloom.prove.picture.values import Picture
from rackloom.topology.discovery.fuse import machine_of
from rackloom.topology.discovery.read import read_host
from rackloom.topology.discovery.sysroot import Sysroot


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


def findings_on(root: Path, picture: Picture) -> tuple[Finding, ...]:
    """Every check of the host, also what is well. No program is run, and no library asked.

    The cluster of `picture` tells what runs the host's containers, whether its IMEX daemon's pod has told of
    its mesh, and what its devices are called, if the host is one of its nodes.
    """
    host = read_host(Sysroot(root))
    machine = machine_of(host)
    here = here_of(machine, name_of(root), picture)
    runtime = next((one.runtime for one in picture.nodes if one.name == here.node), None)
    meshed = any(one.node == here.node and one.complete is not None for one in picture.meshes)
    seen = msgspec.structs.replace(collect_host(here.name, root, runtime), meshed=meshed)
    links = check_host_links(host, machine, here)
    return (*check_host(seen), *check_host_nics(machine, here), *links)
