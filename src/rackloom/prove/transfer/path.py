"""Which device carried the bytes: counters before and after, beside what UCX says it used.

A rate cannot tell a wrong device from a slow one, and a fast wrong device looks perfect. Counters can:
/sys/class/net/<device>/statistics count bytes with headers in the namespace of the reader;
/sys/class/infiniband/<hca>/ports/<n>/counters/port_xmit_data count 4-byte words. They belong to the device,
not to one process, so other traffic on it shows up too.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rackloom.prove.transfer.links import SYS, children
from rackloom.prove.transfer.values import DeviceTraffic, Op, PathProof, Verdict

Kind = Literal["netdev", "rdma"]
Counters = Mapping[tuple[Kind, str], tuple[int, int]]
"""(kind, device) -> bytes sent and received since the device came up."""

IN_MEMORY = frozenset({"cma", "posix", "sysv", "self", "xpmem", "knem", "cuda_ipc", "cuda_copy", "gdr_copy"})
"""UCX transports that move bytes within one host, through no network device."""
SHARE = 0.05
"""A device that moved less than this share of the payload did not carry it."""
ACCOUNTED = 0.95
"""The counters have to show at least this share of the payload, or they prove nothing."""
_WORD = 4


def read_counters(sys: Path = SYS) -> Counters:
    """The byte counters of all devices visible here; devices that vanish while reading are left out."""
    counters: dict[tuple[Kind, str], tuple[int, int]] = {}
    for device in children(sys / "class/net"):
        with suppress(OSError, ValueError):
            statistics = device / "statistics"
            counters["netdev", device.name] = _pair(statistics / "tx_bytes", statistics / "rx_bytes", 1)
    for hca in children(sys / "class/infiniband"):
        for port in children(hca / "ports"):
            with suppress(OSError, ValueError):
                words = port / "counters"
                pair = _pair(words / "port_xmit_data", words / "port_rcv_data", _WORD)
                counters["rdma", f"{hca.name}:{port.name}"] = pair
    return counters


def traffic(before: Counters, after: Counters) -> tuple[DeviceTraffic, ...]:
    """What each device moved in between, busiest first; idle devices and ones that came or went left out."""
    moved = [
        DeviceTraffic(name, kind, sent - before[kind, name][0], received - before[kind, name][1])
        for (kind, name), (sent, received) in after.items()
        if (kind, name) in before
    ]
    busy = [device for device in moved if device.sent_bytes or device.received_bytes]
    return tuple(sorted(busy, key=lambda device: -(device.sent_bytes + device.received_bytes)))


def prove(
    op: Op,
    expected_bytes: int,
    protocols: Sequence[str],
    initiator: tuple[DeviceTraffic, ...],
    target: tuple[DeviceTraffic, ...],
    promised: str | None,
    companions: frozenset[str] = frozenset(),
) -> PathProof:
    """Compare what was counted at both ends with the device that was promised at the initiator's.

    `expected_bytes` is the payload of all timed iterations. A promise holds only if that device counted the
    payload and no other one did. `companions` are promised to transfers that ran at the same time: what they
    counted is not held against this one, but then UCX itself has to name the promised device and no other.
    """
    every = _carriers(initiator, expected_bytes, outgoing=op == "WRITE")
    carried = {name: count for name, count in every.items() if not _is_one_of(name, companions)}
    counted = sum(carried.values())
    verdict, evidence = _judge(tuple(carried), counted / expected_bytes, protocols, promised)
    if verdict == "holds" and companions and {lane.split("/")[1] for lane in protocols} != set(carried):
        verdict, evidence = "does not hold", f"{evidence}, but beside other transfers UCX has to name it too"
    arrived = sum(_carriers(target, expected_bytes, outgoing=op == "READ").values())
    if verdict == "holds" and arrived < ACCOUNTED * expected_bytes:
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
    return {name: count for name, count in moved.items() if count >= SHARE * expected}


def _is_one_of(name: str, promised: frozenset[str]) -> bool:
    """An HCA may be promised without its port."""
    return name in promised or name.removesuffix(":1") in promised


def _judge(
    carried: tuple[str, ...], share: float, protocols: Sequence[str], promised: str | None
) -> tuple[Verdict, str]:
    said = f"UCX reports {' and '.join(protocols)}" if protocols else "UCX reported no protocol"
    in_memory = bool(protocols) and all(lane.split("/")[0] in IN_MEMORY for lane in protocols)
    if in_memory and not carried:
        evidence = f"{said}: within the memory of one host, through no network device"
        return ("no promise" if promised is None else "does not hold"), evidence
    if share < ACCOUNTED:
        return "unknown", f"{said}; device counters account for {share:.0%} of the payload"
    evidence = f"{said}; {' and '.join(carried)} counted {share:.1%} of the payload"
    if promised is None:
        return "no promise", evidence
    if carried == (promised,) or carried == (f"{promised}:1",):
        return "holds", evidence
    return "does not hold", f"{evidence}, {promised} was promised"


def _pair(sent: Path, received: Path, unit: int) -> tuple[int, int]:
    return int(sent.read_text()) * unit, int(received.read_text()) * unit
