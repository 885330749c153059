"""Where a NIC hangs, seen from the GPU that it serves."""

from enum import StrEnum

from rackloom.prove.picture.values import DeviceSeen


class Wiring(StrEnum):
    """The nearest thing that both hang from."""

    ROOT = "root"
    NUMA = "numa"
    APART = "apart"
    UNKNOWN = "unknown"


def wiring(gpu: DeviceSeen, nic: DeviceSeen) -> Wiring:
    """How near two devices are, as their plugins published it.

    A GPU that is coupled to its processor (GB200) shares a PCIe root with no NIC: there the NUMA node is as
    near as it gets.
    """
    if gpu.pcie_root is not None and gpu.pcie_root == nic.pcie_root:
        return Wiring.ROOT
    if gpu.numa is None or nic.numa is None:
        return Wiring.UNKNOWN
    return Wiring.NUMA if gpu.numa == nic.numa else Wiring.APART


def link_down(nic: DeviceSeen) -> bool:
    """Whether the NIC says that its link is not there."""
    return nic.link is not None and nic.link.lower() not in ("up", "active")
