"""What a GPU is coloured by: the group that it is in, as one layer says it.

A group is a name. Colours go by first come: a name keeps its colour while the process lives, so that a new
partition never repaints the racks it is not in.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from rackloom.prove.picture.values import GpuChain, Layer
from rackloom.web.details import clique, partition_hidden, use_hidden
from rackloom.web.frames import Frame
from rackloom.web.scene import Seat

COLOURS = 8
"""Hues that people can tell apart; the letter in the cell tells the groups of one hue apart."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class Mode(StrEnum):
    """What the colours mean."""

    PARTITION = "partition"
    TENANT = "tenant"
    CLIQUE = "clique"
    WORKLOAD = "workload"


class State(StrEnum):
    """Of one GPU, in one mode."""

    GROUP = "group"
    FREE = "free"
    OTHERS = "others"
    """Somebody else's: all that a tenant is told."""
    UNKNOWN = "unknown"


class Group(msgspec.Struct, frozen=True, order=True):
    """One group of GPUs: `key` tells groups apart, `name` is what people call it."""

    key: str
    name: str


class Shade(msgspec.Struct, frozen=True):
    """What a GPU is in: the last that was known where its state is unknown."""

    state: State
    group: Group | None = None


def shade(frame: Frame, mode: Mode, seat: Seat) -> Shade:
    """What a seat is coloured by. Unknown where what says so was not read, not lately, or is hidden."""
    chain = seat.chain
    if chain is None:
        return Shade(_without_name(seat.taken))
    group = _GROUP[mode](frame, chain)
    if not _current(frame, mode, seat, chain):
        return Shade(State.UNKNOWN, group)
    return Shade(State.FREE if group is None else State.GROUP, group)


def _without_name(taken: bool | None) -> State:
    if taken is None:
        return State.UNKNOWN
    return State.OTHERS if taken else State.FREE


def _partition(_: Frame, chain: GpuChain) -> Group | None:
    if chain.partition is None:
        return None
    if chain.logical is not None:
        return Group(chain.logical.id, chain.logical.name)
    if chain.partition.owner == "tray":
        return Group("tray", "each tray by itself")
    return Group(f"{chain.partition.domain}/{chain.partition.id}", chain.partition.name)


def _tenant(frame: Frame, chain: GpuChain) -> Group | None:
    tenant = chain.machine.tenant if chain.machine else None
    return Group(tenant, frame.tenants.get(tenant, tenant)) if tenant else None


def _clique(_: Frame, chain: GpuChain) -> Group | None:
    found = clique(chain)
    return Group(found, found) if found else None


def _workload(_: Frame, chain: GpuChain) -> Group | None:
    if chain.use is None or use_hidden(chain):
        return None
    if chain.compute_domain is not None:
        return Group(chain.compute_domain.uid, chain.compute_domain.key)
    return Group(chain.use.claim, chain.use.claim)


_GROUP: Mapping[Mode, Callable[[Frame, GpuChain], Group | None]] = {
    Mode.PARTITION: _partition,
    Mode.TENANT: _tenant,
    Mode.CLIQUE: _clique,
    Mode.WORKLOAD: _workload,
}


def _current(frame: Frame, mode: Mode, seat: Seat, chain: GpuChain) -> bool:
    if mode is Mode.PARTITION:
        answered = Layer.FABRIC in frame.known and frame.answers(seat.domain)
        return answered and chain.fabric is not None and not partition_hidden(chain)
    if mode is Mode.TENANT:
        return chain.machine is not None and Layer.SITE in frame.known
    if mode is Mode.WORKLOAD and use_hidden(chain):
        return False
    return (chain.node or chain.device) is not None and Layer.CLUSTER in frame.known


class Palette:
    """The colour and letter of each group that was ever asked for."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, group: Group) -> int:
        """The group's number: 0 for the first that came."""
        return self._numbers.setdefault(group.key, len(self._numbers))


class Colours:
    """What one map has given away: groups have colours and letters, ComputeDomains have numbers."""

    def __init__(self) -> None:
        self.groups = Palette()
        self.badges = Palette()


def letter(number: int) -> str:
    """What stands in the cells of a group; after 62 groups the colours alone go on."""
    return LETTERS[number] if number < len(LETTERS) else "+"


def hue(number: int) -> int:
    """Which of the colours a group has."""
    return number % COLOURS
