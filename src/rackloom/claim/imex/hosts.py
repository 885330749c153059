"""The entries for IMEX peers in a pod's hosts file."""

from collections.abc import Mapping

from rackloom.claim.imex.config import DAEMON_PREFIX, daemon_host

MARKER = "# Compute Domain Daemon mappings"


def with_peers(hosts: str, addresses: Mapping[int, str]) -> str:
    """The hosts file with exactly these peers (index in the clique to address); all other lines stay."""
    kept = [line for line in hosts.splitlines() if not _is_ours(line)]
    peers = [f"{address}\t{daemon_host(index)}" for index, address in sorted(addresses.items())]
    return "".join(f"{line}\n" for line in [*kept, MARKER, *peers])


def _is_ours(line: str) -> bool:
    return line == MARKER or DAEMON_PREFIX in line
