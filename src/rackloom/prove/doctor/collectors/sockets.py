"""TCP sockets of a process' network namespace, out of /proc."""

from collections.abc import Iterator

import msgspec

from rackloom.topology.discovery.sysroot import Sysroot

LISTENING, ESTABLISHED = "0A", "01"
"""In the column `st` of /proc/net/tcp (include/net/tcp_states.h)."""
_MAPPED = "0000000000000000FFFF0000"
"""::ffff:0:0/96, IPv4 within IPv6 (RFC 4291), in words of a little-endian machine."""


class Socket(msgspec.Struct, frozen=True):
    """One socket; `own` and `peer` are the addresses of both sides as the kernel prints them, in hex.

    An IPv4 address is in its short form, whichever family its socket has.
    """

    own: str
    port: int
    peer: str
    peer_port: int
    state: str


def sockets_of(host: Sysroot, process: int) -> tuple[Socket, ...] | None:
    """Those of the namespace of `process`, of both families; None where they cannot be read in full."""
    ipv4, ipv6 = (host.whole(f"proc/{process}/net/{name}") for name in ("tcp", "tcp6"))
    if ipv4 is None:
        return None
    try:
        return tuple(one for table in (ipv4, ipv6 or "") for one in _rows(table))
    except ValueError:
        return None


def _rows(table: str) -> Iterator[Socket]:
    """Columns: number, own side, other side, state, ... Raises ValueError for what is no such table."""
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 3:
            yield Socket(*_side(fields[1]), *_side(fields[2]), fields[3])


def _side(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    return address.removeprefix(_MAPPED), int(port, 16)
