"""A measured rate against the line rate of its device, and why it falls short. Pure."""

from collections.abc import Iterator

from rackloom.prove.transfer.links import Link
from rackloom.prove.transfer.values import Cause, Environment, Expectation, Host, PathProof, Promise

MET_SHARE = 0.75
"""Of line rate. One pair of the nixl-kv-transfer example's aligned placement reached 78%, unaligned 55%."""
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")
_UP = frozenset({"up", "unknown", "ACTIVE"})
"""Tunnels and other virtual netdevs that work say `unknown`."""


def expect(
    rate_gbps: float,
    promise: Promise,
    path: PathProof,
    environment: Environment,
    copy_gbps: float | None = None,
) -> Expectation:
    """`rate_gbps` and `copy_gbps` are decimal GB/s, as measured; line rates are Gb/s, as sold."""
    if promise.device is None:
        return Expectation() if copy_gbps is None else _against_copy(rate_gbps, copy_gbps)
    causes = tuple(_causes(promise, path, environment))
    gigabits = promise.declared_gigabits if promise.emulated else _slowest(_ends(promise, path, environment))
    if gigabits is None:
        return Expectation("unknown", None, None, causes, f"the line rate of {promise.device} is not known")
    share = rate_gbps * 8 / gigabits
    where = "the declared rate" if promise.emulated else "line rate"
    got = f"{share:.0%} of {where} ({gigabits:g} Gb/s) of {promise.device}"
    if share >= MET_SHARE:
        return Expectation("met", gigabits, share, causes, got)
    why = ", ".join(causes) if causes else "nothing that was observed explains it"
    return Expectation("short", gigabits, share, causes, f"{got}, short of {MET_SHARE:.0%}: {why}")


def _against_copy(rate_gbps: float, copy_gbps: float) -> Expectation:
    """Within one GPU nothing promises a rate; its own copies are what to compare with."""
    share = rate_gbps / copy_gbps
    said = f"{share:.0%} of what the GPU copies within itself ({copy_gbps:.0f} GB/s); no device was promised"
    return Expectation("unknown", None, share, (), said)


def degraded(link: Link) -> str | None:
    """One sentence if the link runs below what it can, else None."""
    if link.state is not None and link.state not in _UP:
        return f"{link.name} is {link.state}"
    if link.pcie and link.pcie_best and link.pcie != link.pcie_best:
        return f"the PCIe link of {link.name} runs at {link.pcie} of {link.pcie_best}"
    return None


def link_named(host: Host, device: str) -> Link | None:
    """The link of that name; an HCA may be named without its port."""
    return next((link for link in host.links if link.name in (device, f"{device}:1")), None)


def farther(path_class: str | None, nearest: str | None) -> bool:
    """Whether a pair is of a farther class than another; False where either is not known."""
    known = path_class in _NEAREST_FIRST and nearest in _NEAREST_FIRST
    return known and _NEAREST_FIRST.index(str(path_class)) > _NEAREST_FIRST.index(str(nearest))


def _causes(promise: Promise, path: PathProof, environment: Environment) -> Iterator[Cause]:
    if path.verdict == "does not hold":
        yield "wrong rail"
    if environment.contention is not None:
        yield "contention"
    if any(degraded(link) for link in _ends(promise, path, environment)):
        yield "degraded link"
    if farther(promise.path_class, promise.nearest_class):
        yield "misalignment"


def _ends(promise: Promise, path: PathProof, environment: Environment) -> list[Link]:
    """The promised link, and the one that the target's bytes came in by: hosts name devices differently."""
    there = path.target[0].name if path.target else None
    named = ((environment.initiator, promise.device), (environment.target, there))
    found = (link_named(host, device) for host, device in named if device is not None)
    return [link for link in found if link is not None]


def _slowest(links: list[Link]) -> float | None:
    return min((link.gigabits for link in links if link.gigabits is not None), default=None)
