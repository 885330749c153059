"""What the kernel of a compute tray shows: read once for all trays, which are of one model.

The profile of the tray's machine is laid out as files and read back through discovery, as on a real host.
Trays differ only in their GPUs' UUIDs, in ports that are down and in what the driver says, so nothing else is
kept for each. Where no machine of the rack's model is published, a tray has its GPUs and no NICs.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rackloom.claim.node.nic.look import Look, Seen
from rackloom.topology.discovery.fuse import machine_of
from rackloom.topology.discovery.host import Host
from rackloom.topology.discovery.read import read_host
from rackloom.topology.discovery.statements import NOTHING_DECLARED, read_nccl_topology
from rackloom.topology.discovery.sysroot import Sysroot
from rackloom.topology.machine import Gpu, Machine
from rackloom.topology.profiles import load_machine
from rackloom.topology.rack import RackProfile
from rackloom.twin.hosts.sysroot import host_files, write_sysroot

_PROC_DEVICES = (
    "Character devices:\n195 nvidia\n234 nvidia-uvm\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n"
    "\nBlock devices:\n"
)
_IMEX_CAPABILITY = "DeviceFileMinor: 512\nDeviceFileMode: 438\nDeviceFileModify: 1\n"


def tray_machine(profile: RackProfile) -> Machine:
    """The machine that one tray of `profile` is."""
    if profile.tray_machine is not None:
        known = load_machine(profile.tray_machine)
        return msgspec.structs.replace(known, gpus=known.gpus[: profile.gpus_per_tray])
    gpus = tuple(
        Gpu(index=index, product=profile.product, pci_address=f"00{index + 8:02x}:01:00.0")
        for index in range(profile.gpus_per_tray)
    )
    return Machine(name=f"{profile.name}-tray", note="made up", origin=(), gpus=gpus, nics=())


class TrayHost:
    """The files of a tray below `root`, and what was read of them."""

    def __init__(self, root: Path, machine: Machine) -> None:
        files = host_files(machine)
        write_sysroot(files, root)
        (root / "proc/devices").write_text(_PROC_DEVICES)
        self.root = root
        self.imex_capability = root / "proc/driver/nvidia/capabilities/fabric-imex-mgmt"
        self.imex_capability.parent.mkdir(parents=True)
        self.imex_capability.write_text(_IMEX_CAPABILITY)
        self._host = read_host(Sysroot(root))
        topology = files.nccl_topology
        vendor = None if topology is None else read_nccl_topology(topology.encode(), machine.name)
        declared = files.declared or NOTHING_DECLARED
        self.machine = machine_of(self._host, vendor=vendor, declared=declared)

    @property
    def proc_devices(self) -> Path:
        """Major numbers of the drivers."""
        return self.root / "proc/devices"

    def machine_with(self, uuids: Mapping[str, str]) -> Machine:
        """The machine as a tray has it whose GPUs, by PCI address, have these UUIDs."""
        gpus = tuple(
            msgspec.structs.replace(gpu, uuid=uuids.get(gpu.pci_address or "")) for gpu in self.machine.gpus
        )
        return msgspec.structs.replace(self.machine, gpus=gpus)

    def host_with(self, down: frozenset[str]) -> Host:
        """The host while the ports of these RDMA devices are down."""
        rdma = tuple(
            dataclasses.replace(
                one, ports=tuple(dataclasses.replace(port, state="down") for port in one.ports)
            )
            if one.name in down
            else one
            for one in self._host.rdma
        )
        return dataclasses.replace(self._host, rdma=rdma)


class TrayLook(Look):
    """The NICs of one tray. Its interfaces are in no network namespace of this machine: none is listed."""

    def __init__(self, host: TrayHost, uuids: Mapping[str, str]) -> None:
        super().__init__(host.root)
        self._host = host
        self._uuids = uuids
        self.down: frozenset[str] = frozenset()
        """RDMA devices whose ports are down."""

    def __call__(self) -> Seen:
        """What the tray shows now."""
        return Seen(
            host=self._host.host_with(self.down), machine=self._host.machine_with(self._uuids), links=()
        )
