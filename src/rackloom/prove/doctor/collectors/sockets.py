"""TCP sockets of a process' network namespace, out of /proc."""

from collections.abc import Iterator

import msgspec

from rackloom.topology.discovery.sysroot import Sysroot

LISTENING, ESTABLISHED = "0A", "01"
"""In the column `st` of /proc/net/tcp (include/net/tcp_states.h)."""


class Socket(msgspec.Struct, frozen=True):
    """One socket; `peer` is the address of the other side as the kernel prints it, in hex."""

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
            peer, _, port = fields[2].rpartition(":")
            yield Socket(int(fields[1].rpartition(":")[2], 16), peer, int(port, 16), fields[3])
