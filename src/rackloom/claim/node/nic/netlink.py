"""Talking to the kernel's rtnetlink: requests as values, and a socket that sends them and waits.

pyroute2 encodes and decodes. The socket is blocking and belongs to the network namespace of the thread that
opens it, which is why it is ours: threads come and go with namespaces here.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from pyroute2.netlink import nla_base_string  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.fibmsg import fibmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.ndmsg import ndmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.rtmsg import rtmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.tcmsg import tcmsg  # type: ignore[import-untyped]

REQUEST, ACK, REPLACE, EXCLUSIVE, CREATE, DUMP = 0x1, 0x4, 0x100, 0x200, 0x400, 0x300
"""NLM_F_* of a request."""
_ERROR, _DONE = 2, 3
_ACK_TLVS = 0x200
_HEADER = struct.Struct("=LHHLL")
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_RECEIVE = 1 << 18
_DUMP_INTERRUPTED = 0x10
MOST_DUMPS = 20
TIMEOUT_SECONDS = 10.0
"""The kernel answers at once, unless a driver hangs while it holds the lock that all links share."""

Decoded = Any


class _HardwareAddress(nla_base_string):  # type: ignore[misc]
    """An address of any length: the library's own type has no room for the 20 bytes of InfiniBand."""

    def encode(self) -> None:
        self["value"] = bytes.fromhex(self.value.replace(":", ""))
        super().encode()

    def decode(self) -> None:
        super().decode()
        self.value = self["value"].hex(":")


_OF_ANY_LENGTH = frozenset({"IFLA_ADDRESS", "IFLA_BROADCAST", "IFLA_PERM_ADDRESS", "NDA_LLADDR"})


def _with_hardware_addresses(known: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((name, "hardware" if name in _OF_ANY_LENGTH else kind) for name, kind in known)


class NeighborMessage(ndmsg):  # type: ignore[misc]
    """A neighbour on any medium."""

    hardware = _HardwareAddress
    nla_map = _with_hardware_addresses(ndmsg.nla_map)


class LinkMessage(ifinfmsg):  # type: ignore[misc]
    """A link, with the attributes (Linux 6.3) that the library does not know yet."""

    hardware = _HardwareAddress
    nla_map = (
        *_with_hardware_addresses(ifinfmsg.nla_map),
        ("IFLA_DEVLINK_PORT", "hex"),
        ("IFLA_GSO_IPV4_MAX_SIZE", "uint32"),
        ("IFLA_GRO_IPV4_MAX_SIZE", "uint32"),
    )


SHAPES: Mapping[str, Any] = {
    "link": LinkMessage,
    "address": ifaddrmsg,
    "route": rtmsg,
    "rule": fibmsg,
    "neighbor": NeighborMessage,
    "traffic": tcmsg,
}

for _message in (NeighborMessage, LinkMessage):
    # The library keeps the compiled table on the class: a subclass inherits its base's, once that is used.
    _message().compile_nla_table()


@dataclass(frozen=True, slots=True)
class Message:
    """One request. `already` are the errors that say that it is so without it."""

    doing: str
    """In words, for the error that it may end in."""
    shape: str
    type: int
    flags: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    attrs: tuple[tuple[str, Any], ...] = ()
    already: frozenset[int] = frozenset()

    def encode(self, sequence: int = 0) -> bytes:
        """The bytes that are sent."""
        body = SHAPES[self.shape]()
        body["header"]["type"] = self.type
        body["header"]["flags"] = REQUEST | self.flags
        body["header"]["sequence_number"] = sequence
        for name, value in self.fields.items():
            body[name] = value
        body["attrs"] = [[name, value] for name, value in self.attrs]
        body.encode()
        return bytes(body.data)


class Rtnetlink:
    """A socket into the network namespace of the calling thread. Errors are `OSError` and say what failed."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
        self._socket.settimeout(TIMEOUT_SECONDS)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def tell(self, message: Message) -> None:
        """Have something done."""
        for code, reason in self._answers(message, ACK):
            if code and code not in message.already:
                said = f"{os.strerror(code)}{f' ({reason})' if reason else ''}"
                raise OSError(code, f"{message.doing}: {said}")

    def dump(self, message: Message) -> list[Decoded]:
        """Read all there is of a kind."""
        for _ in range(MOST_DUMPS):
            # Something may change under the kernel's hands (NLM_F_DUMP_INTR): what it told then has holes.
            with suppress(InterruptedError):
                return list(self._dumped(message))
        raise OSError(errno.EAGAIN, f"{message.doing}: it changes all the time")

    def _dumped(self, message: Message) -> Iterator[Decoded]:
        shape = SHAPES[message.shape]
        for kind, flags, part in self._parts(message, DUMP):
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -struct.unpack_from("=i", part, _HEADER.size)[0]
                raise OSError(code, f"{message.doing}: {os.strerror(code)}")
            if flags & _DUMP_INTERRUPTED:
                raise InterruptedError(errno.EINTR, message.doing)
            found = shape(part)
            found.decode()
            yield found

    def _answers(self, message: Message, flags: int) -> Iterator[tuple[int, str]]:
        for kind, told, part in self._parts(message, flags):
            if kind == _ERROR:
                code = -struct.unpack_from("=i", part, _HEADER.size)[0]
                yield code, _reason(part) if told & _ACK_TLVS else ""
                return

    def _parts(self, message: Message, flags: int) -> Iterator[tuple[int, int, bytes]]:
        self._sequence += 1
        data = bytearray(message.encode(self._sequence))
        data[6:8] = struct.pack("=H", struct.unpack_from("=H", data, 6)[0] | flags)
        self._socket.send(data)
        while True:
            data = bytearray(self._socket.recv(_RECEIVE))
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, told, sequence, _ = _HEADER.unpack_from(data, at)
                if sequence == self._sequence:
                    yield kind, told, bytes(data[at : at + length])
                at += (length + 3) & ~3


def _reason(part: bytes) -> str:
    """The kernel's own words: attribute 1 after the error code and the header that it quotes."""
    at = _HEADER.size + 4 + _HEADER.size
    while at + 4 <= len(part):
        length, kind = struct.unpack_from("=HH", part, at)
        if length < 4:
            break
        if kind & 0x3FFF == 1:
            return part[at + 4 : at + length].rstrip(b"\0").decode(errors="replace")
        at += (length + 3) & ~3
    return ""
