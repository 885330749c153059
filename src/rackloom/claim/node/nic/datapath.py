"""The processing of a link's packets: ethtool features, private flags, and eBPF programs.

Features and the driver's private flags go through the ethtool ioctl (linux/ethtool.h), in the network
namespace of the calling thread. A setting that the interface lacks or did not take is an error that names
it. Names of the ethtool command stand for one or more kernel names (`gro` is `rx-gro`).

Programs on a link are traffic control filters, read by netlink (linux/pkt_sched.h), and TCX programs,
read and detached by the bpf system call (linux/bpf.h, Linux 6.6). An older kernel, or one that denies
the plugin this call, has none.
"""

import array
import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterator, Mapping

from rackloom.claim.node.nic import netlink
from rackloom.claim.node.nic.netlink import NetlinkRequest, Rtnetlink
from rackloom.core.nics.devices import EbpfPrograms

# Features and private flags.


_SIOCETHTOOL = 0x8946
_GET_STRING_COUNT, _GET_STRINGS = 0x37, 0x1B
_GET_FEATURES, _SET_FEATURES, _GET_FLAGS, _SET_FLAGS = 0x3A, 0x3B, 0x27, 0x28
_PRIVATE_FLAG_STRINGS, _FEATURE_STRINGS = 2, 4
_STRING_BYTES = 32
_UNSUPPORTED = 0x1
"""ETHTOOL_F_UNSUPPORTED in the answer to a change of features."""

_COMMAND_NAMES: Mapping[str, tuple[str, ...]] = {
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
"""The kernel's own names for the feature names of the ethtool command."""


def read_features(name: str) -> dict[str, bool]:
    """Features of an interface that can be switched, with the values last requested."""
    return _read_all_features(name)[0]


def _read_all_features(name: str) -> tuple[dict[str, bool], dict[str, bool]]:
    """Features that can be switched, with the values last requested, and those that are fixed."""
    names = _strings(name, _FEATURE_STRINGS)
    blocks = (len(names) + 31) // 32
    data = array.array("I", [_GET_FEATURES, blocks, *([0] * 4 * blocks)])
    _ethtool_ioctl(name, data)
    found: dict[str, bool] = {}
    fixed: dict[str, bool] = {}
    for number, feature in enumerate(names):
        # struct ethtool_get_features_block: one bit of each word for each of 32 features.
        available, requested, active, never = data[2 + 4 * (number // 32) :][:4]
        bit = 1 << number % 32
        if available & bit and not never & bit:
            found[feature] = bool((requested | active) & bit)
        else:
            fixed[feature] = bool(active & bit)
    return found, fixed


def set_features(name: str, wanted: Mapping[str, bool]) -> None:
    """Switch features.

    A fixed feature that has the wanted value is fine. Raises `OSError` with the names of features that the
    interface lacks or cannot switch.
    """
    if not wanted:
        return
    numbers = {feature: number for number, feature in enumerate(_strings(name, _FEATURE_STRINGS))}
    has, fixed = _read_all_features(name)
    named = kernel_feature_names(wanted, has)
    asked = {feature: on for feature, on in named.items() if feature in has}
    lacking = [
        feature for feature in named.keys() - asked.keys() if not _is_fixed(fixed, feature, named[feature])
    ]
    if lacking:
        raise OSError(f"setting features of {name}: it cannot switch {', '.join(sorted(lacking))}")
    if not asked:
        return
    blocks = (len(numbers) + 31) // 32
    data = array.array("I", [_SET_FEATURES, blocks, *([0] * 2 * blocks)])
    for feature, on in asked.items():
        number = numbers[feature]
        # struct ethtool_set_features_block: the features to set, and their values.
        data[2 + 2 * (number // 32)] |= 1 << number % 32
        data[3 + 2 * (number // 32)] |= on << number % 32
    if _ethtool_ioctl(name, data) & _UNSUPPORTED:
        raise OSError(
            f"setting features of {name}: the driver did not take all of {', '.join(sorted(asked))}"
        )


def kernel_feature_names(wanted: Mapping[str, bool], has: Mapping[str, bool]) -> dict[str, bool]:
    """Features by the kernel's names. A name of the ethtool command may stand for several."""
    asked: dict[str, bool] = {}
    for name, on in wanted.items():
        known = [command_name for command_name in _COMMAND_NAMES.get(name, ()) if command_name in has]
        asked |= dict.fromkeys(known or (name,), on)
    return asked


def _is_fixed(fixed: Mapping[str, bool], feature: str, on: bool) -> bool:
    """Whether all that a name stands for is fixed in this state."""
    states = [fixed[name] for name in _COMMAND_NAMES.get(feature, (feature,)) if name in fixed]
    return bool(states) and all(state is on for state in states)


def read_private_flags(name: str) -> dict[str, bool]:
    """The driver's own switches."""
    names = _strings(name, _PRIVATE_FLAG_STRINGS)
    if not names:
        return {}
    data = array.array("I", [_GET_FLAGS, 0])
    _ethtool_ioctl(name, data)
    return {flag: bool(data[1] >> number & 1) for number, flag in enumerate(names)}


def set_private_flags(name: str, wanted: Mapping[str, bool]) -> None:
    """Switch some of the driver's own switches. Raises `OSError` naming those that it does not have."""
    if not wanted:
        return
    has = read_private_flags(name)
    lacking = wanted.keys() - has.keys()
    if lacking:
        raise OSError(f"setting private flags of {name}: its driver has no {', '.join(sorted(lacking))}")
    value = sum(on << number for number, on in enumerate({**has, **wanted}.values()))
    _ethtool_ioctl(name, array.array("I", [_SET_FLAGS, value]))


def _strings(name: str, kind: int) -> list[str]:
    count = array.array("I", [_GET_STRING_COUNT, 0, 1 << kind, 0, 0])
    try:
        _ethtool_ioctl(name, count)
    except OSError:
        return []
    many = count[4] if count[2] else 0
    data = array.array("I", [_GET_STRINGS, kind, many, *([0] * (many * _STRING_BYTES // 4))])
    if many:
        _ethtool_ioctl(name, data)
    raw = data.tobytes()[12:]
    names = [raw[at : at + _STRING_BYTES] for at in range(0, many * _STRING_BYTES, _STRING_BYTES)]
    return [raw_name.partition(b"\0")[0].decode(errors="replace") for raw_name in names]


def _ethtool_ioctl(name: str, data: "array.array[int]") -> int:
    """The request (struct ifreq) has the interface's name and a pointer to `data`, which gets the answer."""
    address, _ = data.buffer_info()
    request = struct.pack("16sP16x", name.encode(), address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as handle:
        return int(fcntl.ioctl(handle, _SIOCETHTOOL, bytearray(request), True))


# eBPF programs.


_INGRESS, _EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
"""Parents of filters: TC_H_CLSACT with the minors of ingress and egress."""
_NOTHING_THERE = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP)
_SYSCALL = {"x86_64": 321, "aarch64": 280}.get(platform.machine())
_FD_BY_ID, _INFO_BY_FD, _QUERY, _DETACH = 13, 15, 16, 9
"""BPF_PROG_GET_FD_BY_ID, BPF_OBJ_GET_INFO_BY_FD, BPF_PROG_QUERY, BPF_PROG_DETACH."""
_TCX_INGRESS, _TCX_EGRESS = 46, 47
"""Attach types."""
_MOST_PROGRAMS = 64
_NAME_AT, _PROGRAM_NAME_BYTES, _INFO_BYTES = 64, 16, 128
"""Place and length of the name in struct bpf_prog_info, and how much of that struct is read."""
_libc = ctypes.CDLL(None, use_errno=True)


def read_ebpf_programs(rtnetlink: Rtnetlink, index: int) -> EbpfPrograms:
    """Programs on the link `index` of the calling thread's namespace."""
    return EbpfPrograms(
        tc=tuple(dict.fromkeys(_filters(rtnetlink, index))),
        tcx=tuple(
            _name_of(number) for attach in (_TCX_INGRESS, _TCX_EGRESS) for number in _tcx(index, attach)
        ),
    )


def detach_tcx(index: int) -> None:
    """Take every TCX program off a link. Raises `OSError`."""
    for attach in (_TCX_INGRESS, _TCX_EGRESS):
        for number in _tcx(index, attach):
            handle = _bpf(_FD_BY_ID, struct.pack("=III", number, 0, 0))[0]
            try:
                _bpf(_DETACH, struct.pack("=IIIIII", index, handle, attach, 0, 0, 0))
            finally:
                os.close(handle)


def _filters(rtnetlink: Rtnetlink, index: int) -> Iterator[str]:
    for parent in (_INGRESS, _EGRESS):
        fields = {"index": index, "parent": parent}
        asked = NetlinkRequest(
            "reading traffic control filters", "traffic", netlink.GETTFILTER, fields=fields
        )
        try:
            found = rtnetlink.dump(asked)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise
            continue
        for message in found:
            options = message.get_attr("TCA_OPTIONS")
            if message.get_attr("TCA_KIND") == "bpf" and options is not None:
                yield options.get_attr("TCA_BPF_NAME") or "bpf"


def _tcx(index: int, attach: int) -> list[int]:
    """Program numbers. Empty if the kernel is older than TCX (6.6) or denies the query."""
    ids = (ctypes.c_uint32 * _MOST_PROGRAMS)()
    asked = struct.pack("=IIIIQI", index, attach, 0, 0, ctypes.addressof(ids), _MOST_PROGRAMS)
    try:
        _, answer = _bpf(_QUERY, asked)
    except OSError:
        return []
    # The kernel writes the number of programs over the capacity of the array, the last field.
    return list(ids[: struct.unpack_from("=I", answer, 24)[0]])


def _name_of(number: int) -> str:
    handle, _ = _bpf(_FD_BY_ID, struct.pack("=III", number, 0, 0))
    try:
        info = ctypes.create_string_buffer(_INFO_BYTES)
        _bpf(_INFO_BY_FD, struct.pack("=IIQ", handle, _INFO_BYTES, ctypes.addressof(info)))
    finally:
        os.close(handle)
    name = info.raw[_NAME_AT : _NAME_AT + _PROGRAM_NAME_BYTES].partition(b"\0")[0]
    return name.decode(errors="replace") or "tcx"


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    if _SYSCALL is None:
        raise OSError(errno.ENOSYS, f"no bpf system call is known for {platform.machine()}")
    block = ctypes.create_string_buffer(attributes.ljust(64, b"\0"), 64)
    result = _libc.syscall(_SYSCALL, command, block, 64)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf command {command}: {os.strerror(code)}")
    return int(result), block.raw
