"""Trees of sysfs with PCI functions that have several interfaces, RDMA devices and ports."""

import os
from pathlib import Path

PKEY_MAC = "00:00:10:8b:fe:80:00:00:00:00:00:00:94:6d:ae:03:00:00:00:01"
ABOVE = "pci0000:40/0000:40:01.0/0000:41:00.0"


class NicTree:
    """A tree below `root`, to which each call adds a part."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._interfaces = 1
        self._verbs = 0
        self.write("proc/net/route", "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT")

    def write(self, path: str | Path, text: object) -> None:
        """A file with one line."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str | Path, target: Path) -> None:
        """A relative symbolic link to an absolute path in the tree."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(os.path.relpath(target, file.parent))

    def function(
        self, address: str, device: str, *, driver: str = "mlx5_core", code: str = "0x020000"
    ) -> Path:
        """A network function of Mellanox."""
        at = self.root / "sys/devices" / ABOVE / address
        for name, text in {"class": code, "vendor": "0x15b3", "device": device, "numa_node": "0"}.items():
            self.write(at / name, text)
        drivers = self.root / "sys/bus/pci/drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        self.link(at / "driver", drivers)
        self.link(f"sys/bus/pci/devices/{address}", at)
        return at

    def netdev(self, device: Path | None, name: str, **files: object) -> None:
        """An interface on a device, or a virtual one. Keywords are more files of it."""
        self._interfaces += 1
        at = self.root / "sys/devices/virtual/net" / name if device is None else device / "net" / name
        own = self._interfaces
        known = {"ifindex": own, "iflink": own, "type": 1, "address": "02:00:00:00:00:01", "dev_port": 0}
        for file, text in {**known, "mtu": 1500, "operstate": "up", **files}.items():
            self.write(at / file, text)
        self.link(f"sys/class/net/{name}", at)
        if device is not None:
            self.link(at / "device", device)

    def rdma(self, device: Path, name: str, *rates: str, layer: str = "Ethernet", verbs: bool = True) -> Path:
        """An RDMA device with a port for each rate, and its character devices."""
        at = device / "infiniband" / name
        for number, rate in enumerate(rates, start=1):
            self.write(at / f"ports/{number}/state", "4: ACTIVE")
            self.write(at / f"ports/{number}/rate", rate)
            self.write(at / f"ports/{number}/link_layer", layer)
            self._mad("umad", name, number)
        self._mad("issm", name, 1)
        if verbs:
            uverbs = f"sys/class/infiniband_verbs/uverbs{self._verbs}"
            self.write(f"{uverbs}/ibdev", name)
            self.write(f"{uverbs}/dev", f"231:{192 + self._verbs}")
            self._verbs += 1
        self.link(at / "device", device)
        self.link(f"sys/class/infiniband/{name}", at)
        return at

    def _mad(self, kind: str, device: str, port: int) -> None:
        folder = self.root / "sys/class/infiniband_mad"
        number = len(list(folder.glob(f"{kind}*")))
        self.write(folder / f"{kind}{number}/ibdev", device)
        self.write(folder / f"{kind}{number}/port", port)
        self.write(folder / f"{kind}{number}/dev", f"231:{number + (64 if kind == 'issm' else 0)}")


def partition_and_two_ports(root: Path) -> None:
    """An InfiniBand partition (pkey) beside its parent, and a ConnectX-3: one function, two ports."""
    tree = NicTree(root)
    infiniband = tree.function("0000:44:00.0", "0x1021", code="0x020700")
    tree.netdev(infiniband, "ib0", type=32, address=PKEY_MAC)
    tree.netdev(infiniband, "ib0.8001", type=32, address=PKEY_MAC, iflink=2, parent="ib0", pkey="0x8001")
    tree.rdma(infiniband, "mlx5_0", "400 Gb/sec (4X NDR)", layer="InfiniBand")
    old = tree.function("0000:45:00.0", "0x1007", driver="mlx4_core")
    tree.netdev(old, "enp69s0")
    tree.netdev(old, "enp69s0d1", dev_port=1)
    tree.rdma(old, "mlx4_0", "40 Gb/sec (4X QDR)", "10 Gb/sec (4X SDR)")


def planes(root: Path) -> None:
    """A ConnectX-8 with XDR: `mlx5_0` carries data, `smi1` manages its four planes and has no uverbs."""
    tree = NicTree(root)
    tree.write("sys/class/misc/rdma_cm/dev", "10:58")
    function = tree.function("0000:0b:00.0", "0x1023", code="0x020700")
    tree.netdev(function, "ibs192", type=32, address=PKEY_MAC)
    tree.rdma(function, "mlx5_0", "800 Gb/sec (4X XDR)", layer="InfiniBand")
    tree.rdma(function, "smi1", *["200 Gb/sec (1X XDR)"] * 4, layer="InfiniBand", verbs=False)


def switchdev(root: Path) -> None:
    """A card in switchdev mode: the uplink, three representors, and a subfunction with an interface."""
    tree = NicTree(root)
    function = tree.function("0000:08:00.0", "0x1021")
    tree.netdev(function, "uplink", phys_port_name="p0", phys_switch_id="e8ebd3")
    for number in range(3):
        port = f"pf0vf{number}"
        tree.netdev(
            function, f"uplink_{number}", phys_port_name=port, phys_switch_id="e8ebd3", operstate="down"
        )
    rdma = tree.rdma(function, "mlx5_0", "400 Gb/sec (4X NDR)", "10 Gb/sec (4X SDR)", "10 Gb/sec (4X SDR)")
    for number, name in enumerate(("uplink", "uplink_0", "uplink_1"), start=1):
        tree.write(rdma / f"ports/{number}/gid_attrs/ndevs/0", name)
    subfunction = function / "mlx5_core.sf.4"
    tree.write(subfunction / "sfnum", 88)
    tree.netdev(subfunction, "enp8s0f0s88")
    tree.rdma(subfunction, "mlx5_1", "400 Gb/sec (4X NDR)")
