"""What nvidia-imex-ctl prints, read into values.

Sources: `-q` prints one status word; `-N -j` prints the domain as JSON (NVIDIA's IMEX service guide).
"""

from collections.abc import Iterable, Mapping

import msgspec

READY = "READY"
CONNECTED = "CONNECTED"


class ImexConnection(msgspec.Struct, frozen=True):
    """One node's connection to another, as that node sees it."""

    status: str
    host: str = ""


class ImexNode(msgspec.Struct, frozen=True, rename="camel"):
    """One node of the domain; `connections` is keyed by the other node's index."""

    status: str
    host: str = ""
    host_name: str = ""
    version: str = ""
    connections: Mapping[str, ImexConnection] = {}


class ImexDomain(msgspec.Struct, frozen=True):
    """The domain as the asked daemon sees it. `status` is UP, DOWN or DEGRADED; nodes are keyed by index."""

    status: str
    nodes: Mapping[str, ImexNode]


class Mesh(msgspec.Struct, frozen=True, rename="camel"):
    """Whether one daemon reaches each of its peers. `missing` says which not, in words."""

    complete: bool
    peers: int
    missing: tuple[str, ...] = ()


class NotUnderstood(Exception):
    """The control tool printed something that this code does not know."""


def parse_local(output: str) -> str:
    """The daemon's own status word, from `nvidia-imex-ctl -q`."""
    word = output.strip()
    if not word or len(word.split()) != 1:
        raise NotUnderstood(f"nvidia-imex-ctl -q printed {output[:200]!r} instead of one word")
    return word


def parse_domain(output: str | bytes) -> ImexDomain:
    """The domain, from `nvidia-imex-ctl -N -j`."""
    try:
        return msgspec.json.decode(output, type=ImexDomain)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotUnderstood(f"nvidia-imex-ctl -N -j printed no domain: {error}") from error


def mesh_of(domain: ImexDomain, own_index: int, peers: Iterable[int]) -> Mesh:
    """Whether the daemon at `own_index` is connected with every other of `peers`, both ways.

    In DNS mode the node file names more nodes than have joined, so the domain's own verdict counts empty
    places as missing; the members of the clique are what matters.
    """
    others = sorted(set(peers) - {own_index})
    missing = [told for other in others for told in _missing(domain, own_index, other)]
    return Mesh(complete=not missing, peers=len(others), missing=tuple(missing))


def _missing(domain: ImexDomain, here: int, there: int) -> list[str]:
    pairs = ((here, there), (there, here))
    return [
        f"{source} -> {target}: {status}"
        for source, target in pairs
        if (status := _connection(domain, source, target)) != CONNECTED
    ]


def _connection(domain: ImexDomain, source: int, target: int) -> str:
    node = domain.nodes.get(str(source))
    if node is None:
        return f"node {source} is not in the domain"
    connection = node.connections.get(str(target))
    return "no connection" if connection is None else connection.status
