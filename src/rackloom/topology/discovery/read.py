"""A whole machine, read once."""

import re

from rackloom.topology.discovery.host import DriverGpu, Host
from rackloom.topology.discovery.network import read_netdevs, read_rdma, read_routes
from rackloom.topology.discovery.pci import pci_address, read_pci
from rackloom.topology.discovery.sysroot import Sysroot

_MINOR = re.compile(r"[0-9]{1,7}")
DRIVER_GPUS = "/proc/driver/nvidia/gpus"


def read_host(sysroot: Sysroot) -> Host:
    """Everything that the kernel and NVIDIA's driver say without being asked through a library."""
    return Host(
        name=sysroot.text("/proc/sys/kernel/hostname") or "unknown",
        pci=read_pci(sysroot),
        rdma=read_rdma(sysroot),
        netdevs=read_netdevs(sysroot),
        gpus=_driver_gpus(sysroot),
        routes=read_routes(sysroot),
    )


def _driver_gpus(sysroot: Sysroot) -> tuple[DriverGpu, ...]:
    return tuple(
        _driver_gpu(address, sysroot.text(f"{DRIVER_GPUS}/{name}/information") or "")
        for name in sysroot.names(DRIVER_GPUS)
        if (address := pci_address(name)) is not None
    )


def _driver_gpu(address: str, information: str) -> DriverGpu:
    """Lines of `Name: value`; a GPU that has not been initialised has question marks for a UUID."""
    lines = (line.partition(":") for line in information.splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    uuid, minor = values.get("GPU UUID", ""), values.get("Device Minor", "")
    return DriverGpu(
        pci_address=address,
        product=values.get("Model") or None,
        uuid=uuid if uuid and "?" not in uuid else None,
        minor=int(minor) if _MINOR.fullmatch(minor) else None,
    )
