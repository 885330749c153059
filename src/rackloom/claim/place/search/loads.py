"""What one tray can carry of members that are unlike."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from rackloom.claim.place.values import Group, Terms

REMEMBERED = 4096
"""Trays whose loads are remembered: those of a site are mostly alike."""


class Need(NamedTuple):
    """What one member takes of its tray."""

    gpus: int
    devices: str | None
    terms: Terms | None = None

    @classmethod
    def of(cls, group: Group) -> "Need":
        """The need of each member of a group."""
        return cls(group.gpus, group.devices, group.terms)

    def bars(self, other: "Need") -> bool:
        """Whether a member with this need and one with the other are never on one tray."""
        return self.terms is not None and other.terms is not None and self.terms.bar(other.terms)


NEEDS = 8
"""With more kinds of members the loads of one tray are too many to be looked through."""

Load = tuple[int, ...]
"""Members of each need."""


class Vacancy(NamedTuple):
    """What is left of a tray; trays with the same are alike."""

    is_empty: bool
    """Nothing is in use."""
    free: int
    """GPUs; 0 where nothing may go."""
    rooms: tuple[int, ...]
    """By need: members that its devices can serve, whatever their GPUs; 0 where none may go."""


def in_order(wanted: Mapping[Need, int]) -> tuple[Need, ...]:
    """The needs, those of most members last: the others make the states of a search."""
    return tuple(
        sorted(wanted, key=lambda need: (wanted[need], need.gpus, need.devices or "", str(need.terms)))
    )


@lru_cache(REMEMBERED)
def loads_of(vacancy: Vacancy, needs: tuple[Need, ...], most: Load) -> frozenset[Load]:
    """Every load that the tray can carry, with at most so many members of each need.

    Claims of two kinds are not mixed on a tray: whether both fit was not asked.
    """
    kinds = {need.devices for need in needs}
    foes = [(a, b) for b in range(len(needs)) for a in range(b + 1) if needs[a].bars(needs[b])]
    loads = (load for kind in kinds for load in _of_kind(kind, vacancy, needs, most))
    return frozenset(load for load in loads if not foes or _is_at_peace(load, foes))


@lru_cache(REMEMBERED)
def largest(loads: frozenset[Load]) -> tuple[Load, ...]:
    """Those to which nobody can be added."""
    return tuple(
        load
        for load in sorted(loads)
        if not any((*load[:at], load[at] + 1, *load[at + 1 :]) in loads for at in range(len(load)))
    )


def _of_kind(kind: str | None, vacancy: Vacancy, needs: tuple[Need, ...], most: Load) -> Iterator[Load]:
    rooms = [room if need.devices == kind else 0 for need, room in zip(needs, vacancy.rooms, strict=True)]
    # What is counted shares GPUs alone.
    shared = max(rooms) if kind is not None else sum(most)
    loads: list[tuple[Load, int, int]] = [((), vacancy.free, shared)]
    for need, members, room in zip(needs, most, rooms, strict=True):
        top = min(members, room)
        loads = [
            ((*load, here), gpus - here * need.gpus, seats - here)
            for load, gpus, seats in loads
            for here in range(min(top, seats) + 1)
            if here * need.gpus <= gpus
        ]
    return (load for load, _, _ in loads)


def _is_at_peace(load: Load, foes: Sequence[tuple[int, int]]) -> bool:
    """No two of its members bar each other."""
    return not any(load[a] > 1 if a == b else load[a] and load[b] for a, b in foes)
