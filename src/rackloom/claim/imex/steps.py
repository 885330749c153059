"""What a change of membership asks of a running daemon, decided from values.

nvidia-imex reads its node file once, at start. With DNS names the file never changes: a peer that moves is
found again by SIGUSR1, which resolves the names anew. With addresses in the file every change is a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rackloom.claim.imex.config import Mode, daemon_host, nodes_text

Action = Literal["wait", "start", "reload", "restart", "nothing"]


@dataclass(frozen=True, slots=True)
class Peers:
    """The daemons of one clique: index to address, this daemon's own included once it has joined.

    `unusable` are members whose entry cannot be used, each with the reason, in words.
    """

    own_index: int | None
    addresses: Mapping[int, str]
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """How peers are told to the daemon. `places` is the most nodes that a domain may have.

    `quorum` (`ip` mode only) is the number of nodes that must have joined before any daemon starts.
    """

    mode: Mode
    places: int
    quorum: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What to do, and why; `nodes` is the node file that the daemon is to run with."""

    action: Action
    reason: str
    nodes: str = ""


def next_step(layout: Layout, running: Peers | None, now: Peers) -> Step:
    """The step from the peers that the daemon runs with (None: it does not run) to those of now."""
    if now.own_index is None:
        return Step("wait", "this node has not joined its clique yet")
    if layout.mode == "ip" and len(now.addresses) != layout.quorum:
        return Step("wait", f"{len(now.addresses)} of {layout.quorum} nodes have joined")
    nodes = _nodes(layout, now)
    if running is None:
        return Step("start", "all that it needs is known", nodes)
    if running.own_index != now.own_index:
        # The index is the daemon's identity: exports of a daemon that runs under a stale one are refused
        # by its peers as invalid handles.
        return Step("restart", f"its index went from {running.own_index} to {now.own_index}", nodes)
    if dict(running.addresses) == dict(now.addresses):
        return Step("nothing", "no peer has changed", nodes)
    return Step("reload" if layout.mode == "dns" else "restart", "peers have changed", nodes)


def _nodes(layout: Layout, peers: Peers) -> str:
    if layout.mode == "dns":
        return nodes_text([daemon_host(index) for index in range(layout.places)])
    return nodes_text([address for _, address in sorted(peers.addresses.items())])
