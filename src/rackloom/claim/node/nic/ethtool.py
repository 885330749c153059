"""Features and private flags of an interface, through the ethtool ioctl. Numbers: linux/ethtool.h.

The calling thread's network namespace counts.
"""

import array
import fcntl
import socket
import struct
from collections.abc import Mapping

_SIOCETHTOOL = 0x8946
_GET_STRING_COUNT, _GET_STRINGS = 0x37, 0x1B
_GET_FEATURES, _SET_FEATURES, _GET_FLAGS, _SET_FLAGS = 0x3A, 0x3B, 0x27, 0x28
_PRIVATE_FLAGS, _FEATURES = 2, 4
_NAME_BYTES = 32
_NOT_TAKEN = 0x1
"""ETHTOOL_F_UNSUPPORTED in the answer to a change of features."""

_LEGACY: Mapping[str, tuple[str, ...]] = {
    "rx-checksumming": ("rx-checksum",),
    "tx-checksumming": ("tx-checksum-ipv4", "tx-checksum-ip-generic", "tx-checksum-ipv6"),
    "scatter-gather": ("tx-scatter-gather",),
    "tcp-segmentation-offload": ("tx-tcp-segmentation", "tx-tcp6-segmentation"),
    "tso": ("tx-tcp-segmentation", "tx-tcp6-segmentation"),
    "generic-segmentation-offload": ("tx-generic-segmentation",),
    "gso": ("tx-generic-segmentation",),
    "generic-receive-offload": ("rx-gro",),
    "gro": ("rx-gro",),
    "large-receive-offload": ("rx-lro",),
    "lro": ("rx-lro",),
    "ntuple-filters": ("rx-ntuple-filter",),
    "receive-hashing": ("rx-hashing",),
    "rx-vlan-offload": ("rx-vlan-hw-parse",),
    "tx-vlan-offload": ("tx-vlan-hw-insert",),
}
"""What the ethtool command calls them, in the kernel's own names."""


def features(name: str) -> dict[str, bool]:
    """Features of an interface that can be switched, as asked for last."""
    names = _strings(name, _FEATURES)
    blocks = (len(names) + 31) // 32
    data = array.array("I", [_GET_FEATURES, blocks, *([0] * 4 * blocks)])
    _call(name, data)
    found = {}
    for number, feature in enumerate(names):
        available, requested, active, never = data[2 + 4 * (number // 32) :][:4]
        bit = 1 << number % 32
        if available & bit and not never & bit:
            found[feature] = bool((requested | active) & bit)
    return found


def set_features(name: str, wanted: Mapping[str, bool]) -> None:
    """Switch features. Raises `OSError` naming those that the interface does not have or cannot switch."""
    if not wanted:
        return
    numbers = {feature: number for number, feature in enumerate(_strings(name, _FEATURES))}
    has = features(name)
    asked = in_kernel_names(wanted, has)
    lacking = [one for one in asked if one not in has]
    if lacking:
        raise OSError(f"setting features of {name}: it cannot switch {', '.join(sorted(lacking))}")
    blocks = (len(numbers) + 31) // 32
    data = array.array("I", [_SET_FEATURES, blocks, *([0] * 2 * blocks)])
    for feature, on in asked.items():
        number = numbers[feature]
        data[2 + 2 * (number // 32)] |= 1 << number % 32
        data[3 + 2 * (number // 32)] |= on << number % 32
    if _call(name, data) & _NOT_TAKEN:
        raise OSError(
            f"setting features of {name}: the driver did not take all of {', '.join(sorted(asked))}"
        )


def in_kernel_names(wanted: Mapping[str, bool], has: Mapping[str, bool]) -> dict[str, bool]:
    """Features by the kernel's names. A name of the ethtool command may stand for several."""
    asked: dict[str, bool] = {}
    for name, on in wanted.items():
        known = [one for one in _LEGACY.get(name, ()) if one in has]
        asked |= dict.fromkeys(known or (name,), on)
    return asked


def private_flags(name: str) -> dict[str, bool]:
    """The driver's own switches."""
    names = _strings(name, _PRIVATE_FLAGS)
    if not names:
        return {}
    data = array.array("I", [_GET_FLAGS, 0])
    _call(name, data)
    return {flag: bool(data[1] >> number & 1) for number, flag in enumerate(names)}


def set_private_flags(name: str, wanted: Mapping[str, bool]) -> None:
    """Switch some of the driver's own switches. Raises `OSError` naming those that it does not have."""
    if not wanted:
        return
    has = private_flags(name)
    lacking = wanted.keys() - has.keys()
    if lacking:
        raise OSError(f"setting private flags of {name}: its driver has no {', '.join(sorted(lacking))}")
    value = sum(on << number for number, on in enumerate({**has, **wanted}.values()))
    _call(name, array.array("I", [_SET_FLAGS, value]))


def _strings(name: str, kind: int) -> list[str]:
    count = array.array("I", [_GET_STRING_COUNT, 0, 1 << kind, 0, 0])
    try:
        _call(name, count)
    except OSError:
        return []
    many = count[4] if count[2] else 0
    data = array.array("I", [_GET_STRINGS, kind, many, *([0] * (many * _NAME_BYTES // 4))])
    if many:
        _call(name, data)
    raw = data.tobytes()[12:]
    names = [raw[at : at + _NAME_BYTES] for at in range(0, many * _NAME_BYTES, _NAME_BYTES)]
    return [one.partition(b"\0")[0].decode(errors="replace") for one in names]


def _call(name: str, data: "array.array[int]") -> int:
    """The request holds the interface's name and a pointer to `data`, where the answer goes."""
    address, _ = data.buffer_info()
    request = struct.pack("16sP16x", name.encode(), address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as handle:
        return int(fcntl.ioctl(handle, _SIOCETHTOOL, bytearray(request), True))
