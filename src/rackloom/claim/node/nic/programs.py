"""eBPF programs on a link: traffic control filters by netlink, TCX by the bpf system call.

Numbers: linux/pkt_sched.h, linux/bpf.h.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator

import msgspec

from rackloom.claim.node.nic import messages
from rackloom.claim.node.nic.netlink import Message, Rtnetlink

_INGRESS, _EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
_NOTHING_THERE = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP)
_SYSCALL = {"x86_64": 321, "aarch64": 280}.get(platform.machine())
_FD_BY_ID, _INFO_BY_FD, _QUERY, _DETACH = 13, 15, 16, 9
_TCX_INGRESS, _TCX_EGRESS = 46, 47
_MOST = 64
_NAME_AT, _NAME_BYTES, _INFO_BYTES = 64, 16, 128
_libc = ctypes.CDLL(None, use_errno=True)


class Programs(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the programs on one link."""

    tc: tuple[str, ...] = ()
    tcx: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.tc or self.tcx)


def read_programs(rtnetlink: Rtnetlink, index: int) -> Programs:
    """Programs on the link `index` of the calling thread's namespace."""
    return Programs(
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
        asked = Message(
            "reading traffic control filters",
            "traffic",
            messages.GETTFILTER,
            0,
            {"index": index, "parent": parent},
        )
        try:
            found = rtnetlink.dump(asked)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise
            continue
        for one in found:
            options = one.get_attr("TCA_OPTIONS")
            if one.get_attr("TCA_KIND") == "bpf" and options is not None:
                yield options.get_attr("TCA_BPF_NAME") or "bpf"


def _tcx(index: int, attach: int) -> list[int]:
    """Program numbers; none where the kernel is older than TCX (6.6) or does not let us ask."""
    ids = (ctypes.c_uint32 * _MOST)()
    asked = struct.pack("=IIIIQI", index, attach, 0, 0, ctypes.addressof(ids), _MOST)
    try:
        _, answer = _bpf(_QUERY, asked)
    except OSError:
        return []
    return list(ids[: struct.unpack_from("=I", answer, 24)[0]])


def _name_of(number: int) -> str:
    handle, _ = _bpf(_FD_BY_ID, struct.pack("=III", number, 0, 0))
    try:
        info = ctypes.create_string_buffer(_INFO_BYTES)
        _bpf(_INFO_BY_FD, struct.pack("=IIQ", handle, _INFO_BYTES, ctypes.addressof(info)))
    finally:
        os.close(handle)
    return info.raw[_NAME_AT : _NAME_AT + _NAME_BYTES].partition(b"\0")[0].decode(errors="replace") or "tcx"


def _bpf(command: int, attributes: bytes) -> tuple[int, bytes]:
    if _SYSCALL is None:
        raise OSError(errno.ENOSYS, f"no bpf system call is known for {platform.machine()}")
    block = ctypes.create_string_buffer(attributes.ljust(64, b"\0"), 64)
    result = _libc.syscall(_SYSCALL, command, block, 64)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf command {command}: {os.strerror(code)}")
    return int(result), block.raw
