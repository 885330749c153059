"""Proof of a transfer: which device carried the bytes, and whether the rate met the promise.

A rate cannot distinguish a wrong device from a slow one, and a fast wrong device looks perfect. Byte
counters of the devices can. They belong to a device, not to one process, so other traffic shows up too.

`prove_path` compares counters before and after. A device that moved less than 5% of the payload did not
carry it. All devices together must account for 95%, at both ends. The promise holds if the promised
device carried the payload and no other device did. Beside simultaneous transfers, devices promised to
those do not count against it, but then UCX's own log has to name the promised device. Transfers within
the memory of one host use no device.

`expect_rate` compares the rate with the line rate of the slower end (or the declared rate of an emulated
link). 75% counts as met. A shortfall is explained by an observed cause: wrong rail, contention, degraded
link, or a pair of GPU and NIC that is farther apart than necessary. `contention_reason`: both ends poll,
so each needs a processor. An end that got less than 95% of one was pushed aside by another process or by
the hypervisor.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rackloom.core.transfer.values import (
    DeviceTraffic,
    EndUsage,
    HostFacts,
    Link,
    PathProof,
    PathVerdict,
    Promise,
    RateExpectation,
    RunEnvironment,
    ShortfallCause,
    TransferOp,
)

# Path: device counters and UCX's own report.


DeviceKind = Literal["netdev", "rdma"]
DeviceCounters = Mapping[tuple[DeviceKind, str], tuple[int, int]]
"""(kind, device) -> bytes sent and received since the device came up."""

IN_MEMORY = frozenset({"cma", "posix", "sysv", "self", "xpmem", "knem", "cuda_ipc", "cuda_copy", "gdr_copy"})
"""UCX transports that move bytes within one host, through no network device."""
CARRIED_SHARE = 0.05
"""A device that moved less than this share of the payload did not carry it."""
ACCOUNTED_SHARE = 0.95
"""The counters have to show at least this share of the payload, or they prove nothing."""


def traffic_between(before: DeviceCounters, after: DeviceCounters) -> tuple[DeviceTraffic, ...]:
    """The traffic of each device in between, busiest first. Idle, new and vanished devices are left out."""
    moved = [
        DeviceTraffic(name, kind, sent - before[kind, name][0], received - before[kind, name][1])
        for (kind, name), (sent, received) in after.items()
        if (kind, name) in before
    ]
    busy = [device for device in moved if device.sent_bytes or device.received_bytes]
    return tuple(sorted(busy, key=lambda device: -(device.sent_bytes + device.received_bytes)))


def prove_path(
    op: TransferOp,
    expected_bytes: int,
    protocols: Sequence[str],
    initiator: tuple[DeviceTraffic, ...],
    target: tuple[DeviceTraffic, ...],
    promised: str | None,
    companions: frozenset[str] = frozenset(),
) -> PathProof:
    """Compare the counters of both ends with the device that was promised at the initiator's end.

    `expected_bytes` is the payload of all timed iterations. A promise holds only if that device counted the
    payload and no other one did. `companions` are promised to transfers that ran at the same time. Their
    counts do not break this promise, but then UCX itself has to name the promised device and no other.
    """
    # Counters belong to devices, not to processes. The counts of companions may be their own payload, so
    # they are left out, and UCX's protocol table has to confirm the promised device instead.
    every = _carriers(initiator, expected_bytes, outgoing=op == "WRITE")
    carried = {name: count for name, count in every.items() if not _is_promised(name, companions)}
    counted = sum(carried.values())
    verdict, evidence = _judge_path(tuple(carried), counted / expected_bytes, protocols, promised)
    if verdict == "holds" and companions and {lane.split("/")[1] for lane in protocols} != set(carried):
        verdict, evidence = "does not hold", f"{evidence}, but beside other transfers UCX has to name it too"
    # Bytes that left one host and reached no device of the other prove nothing about the path between them.
    arrived = sum(_carriers(target, expected_bytes, outgoing=op == "READ").values())
    if verdict == "holds" and arrived < ACCOUNTED_SHARE * expected_bytes:
        verdict, evidence = "unknown", f"{evidence}, but the target's devices counted only {arrived} bytes"
    return PathProof(
        verdict=verdict,
        evidence=evidence,
        promised=promised,
        carried_by=tuple(carried),
        expected_bytes=expected_bytes,
        protocols=tuple(protocols),
        initiator=initiator,
        target=target,
    )


def _carriers(devices: Sequence[DeviceTraffic], expected: int, *, outgoing: bool) -> dict[str, int]:
    moved = {device.name: device.sent_bytes if outgoing else device.received_bytes for device in devices}
    return {name: count for name, count in moved.items() if count >= CARRIED_SHARE * expected}


def _is_promised(name: str, promised: frozenset[str]) -> bool:
    """An HCA may be promised without its port."""
    return name in promised or name.removesuffix(":1") in promised


def _judge_path(
    carried: tuple[str, ...], share: float, protocols: Sequence[str], promised: str | None
) -> tuple[PathVerdict, str]:
    report = f"UCX reports {' and '.join(protocols)}" if protocols else "UCX reported no protocol"
    in_memory = bool(protocols) and all(lane.split("/")[0] in IN_MEMORY for lane in protocols)
    if in_memory and not carried:
        evidence = f"{report}: within the memory of one host, through no network device"
        return ("no promise" if promised is None else "does not hold"), evidence
    if share < ACCOUNTED_SHARE:
        return "unknown", f"{report}; device counters account for {share:.0%} of the payload"
    evidence = f"{report}; {' and '.join(carried)} counted {share:.1%} of the payload"
    if promised is None:
        return "no promise", evidence
    if carried == (promised,) or carried == (f"{promised}:1",):
        return "holds", evidence
    return "does not hold", f"{evidence}, {promised} was promised"


# Rate: measured against promised.


MET_SHARE = 0.75
"""Of line rate. One pair of the nixl-kv-transfer example's aligned placement reached 78%, unaligned 55%."""
_NEAREST_FIRST = ("PIX", "PXB", "PHB", "NODE", "SYS")
_WORKING_STATES = frozenset({"up", "unknown", "ACTIVE"})
"""Tunnels and other virtual netdevs that work say `unknown`."""


def expect_rate(
    rate_gbps: float,
    promise: Promise,
    path: PathProof,
    environment: RunEnvironment,
    copy_gbps: float | None = None,
) -> RateExpectation:
    """`rate_gbps` and `copy_gbps` are decimal GB/s, as measured. Line rates are Gb/s, as sold."""
    if promise.device is None:
        return RateExpectation() if copy_gbps is None else _against_copy(rate_gbps, copy_gbps)
    causes = tuple(_shortfall_causes(promise, path, environment))
    rates = [
        link.gigabits for link in _promised_links(promise, path, environment) if link.gigabits is not None
    ]
    gigabits = promise.declared_gigabits if promise.emulated else min(rates, default=None)
    if gigabits is None:
        sentence = f"the line rate of {promise.device} is not known"
        return RateExpectation("unknown", None, None, causes, sentence)
    share = rate_gbps * 8 / gigabits
    where = "the declared rate" if promise.emulated else "line rate"
    got = f"{share:.0%} of {where} ({gigabits:g} Gb/s) of {promise.device}"
    if share >= MET_SHARE:
        return RateExpectation("met", gigabits, share, causes, got)
    why = ", ".join(causes) if causes else "nothing that was observed explains it"
    return RateExpectation("short", gigabits, share, causes, f"{got}, short of {MET_SHARE:.0%}: {why}")


def _against_copy(rate_gbps: float, copy_gbps: float) -> RateExpectation:
    """Within one GPU nothing promises a rate, so compare with the GPU's own copies."""
    share = rate_gbps / copy_gbps
    sentence = (
        f"{share:.0%} of what the GPU copies within itself ({copy_gbps:.0f} GB/s); no device was promised"
    )
    return RateExpectation("unknown", None, share, (), sentence)


def degraded_reason(link: Link) -> str | None:
    """One sentence if the link runs below its capability, else None."""
    if link.state is not None and link.state not in _WORKING_STATES:
        return f"{link.name} is {link.state}"
    if link.pcie and link.pcie_best and link.pcie != link.pcie_best:
        return f"the PCIe link of {link.name} runs at {link.pcie} of {link.pcie_best}"
    return None


def link_named(host: HostFacts, device: str) -> Link | None:
    """The link named `device`. An HCA may be named without its port."""
    return next((link for link in host.links if link.name in (device, f"{device}:1")), None)


def is_farther(path_class: str | None, nearest: str | None) -> bool:
    """Whether a pair is of a farther class than another. False if either is not known."""
    known = path_class in _NEAREST_FIRST and nearest in _NEAREST_FIRST
    return known and _NEAREST_FIRST.index(str(path_class)) > _NEAREST_FIRST.index(str(nearest))


def _shortfall_causes(
    promise: Promise, path: PathProof, environment: RunEnvironment
) -> Iterator[ShortfallCause]:
    if path.verdict == "does not hold":
        yield "wrong rail"
    if environment.contention is not None:
        yield "contention"
    if any(degraded_reason(link) for link in _promised_links(promise, path, environment)):
        yield "degraded link"
    if is_farther(promise.path_class, promise.nearest_class):
        yield "misalignment"


def _promised_links(promise: Promise, path: PathProof, environment: RunEnvironment) -> list[Link]:
    """The promised link, and the one that the target's bytes came in by: hosts name devices differently."""
    there = path.target[0].name if path.target else None
    named = ((environment.initiator, promise.device), (environment.target, there))
    found = (link_named(host, device) for host, device in named if device is not None)
    return [link for link in found if link is not None]


# Contention for processors.


POLLING_SHARE = 0.95
"""Below this share of one processor an end was not polling all the time. Undisturbed ends reach 0.98."""


def contention_reason(initiator: EndUsage, target: EndUsage) -> str | None:
    """One sentence if an end was pushed off its processor while it polled, else None."""
    shares = {"initiator": _polling_share(initiator), "target": _polling_share(target)}
    name = min(shares, key=lambda end: shares[end])
    if shares[name] >= POLLING_SHARE:
        return None
    return f"the {name} got {shares[name]:.0%} of a processor while it polled"


def _polling_share(usage: EndUsage) -> float:
    return usage.cpu_seconds / usage.wall_seconds if usage.wall_seconds > 0 else 1.0
