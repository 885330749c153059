"""How the NICs of a GPU are wired, in the doctor's own words for what is wrong with them."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from rackloom.prove.doctor.checks.nics import are_apart, is_untold, trouble_with
from rackloom.prove.picture.values import DeviceSeen, GpuChain


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
    if are_apart(gpu.numa, nic.numa, (gpu.partner_class, nic.partner_class)):
        return Wiring.APART
    if gpu.pcie_root is not None and gpu.pcie_root == nic.pcie_root:
        return Wiring.ROOT
    return Wiring.UNKNOWN if gpu.numa is None or nic.numa is None else Wiring.NUMA


def nearest(gpu: DeviceSeen, nics: Sequence[DeviceSeen]) -> Wiring:
    """How near the nearest of some NICs is: a GPU is far from its rail when all are."""
    found = {wiring(gpu, nic) for nic in nics}
    return next(one for one in _NEAREST_FIRST if one in found)


_NEAREST_FIRST = (Wiring.ROOT, Wiring.NUMA, Wiring.UNKNOWN, Wiring.APART)


def fastest(gpus: Iterable[GpuChain]) -> int:
    """The rate (Gb/s) of the fastest NIC that serves a GPU of one tray; 0: nobody tells."""
    return max((nic.gbps or 0 for gpu in gpus for nic in gpu.nics), default=0)


def link_down(nic: DeviceSeen) -> bool:
    """Whether the NIC says that its link is not there."""
    return bool(trouble_with(nic.link, None, 0))


def link_trouble(nic: DeviceSeen, siblings: int) -> str:
    """What is wrong with the link of a NIC whose siblings have such a rate (Gb/s); empty: nothing known."""
    return trouble_with(nic.link, nic.gbps, siblings)


def link_untold(nic: DeviceSeen) -> bool:
    """Whether its driver does not say whether its link is up."""
    return is_untold(nic.link)
