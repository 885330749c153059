"""What one tray can carry of members that are unlike."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from rackloom.claim.place.values import Group

REMEMBERED = 4096
"""Trays whose loads are remembered: those of a site are mostly alike."""


class Need(NamedTuple):
    """What one member takes of its tray."""

    gpus: int
    devices: str | None

    @classmethod
    def of(cls, group: Group) -> "Need":
        """The need of each member of a group."""
        return cls(group.gpus, group.devices)


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
    """By need: members that its devices can serve, whatever their GPUs."""


def in_order(wanted: Mapping[Need, int]) -> tuple[Need, ...]:
    """The needs, those of most members last: the others make the states of a search."""
    return tuple(sorted(wanted, key=lambda need: (wanted[need], need.gpus, need.devices or "")))


@lru_cache(REMEMBERED)
def loads_of(vacancy: Vacancy, needs: tuple[Need, ...], most: Load) -> frozenset[Load]:
    """Every load that the tray can carry, with at most so many members of each need.

    Claims of two kinds are not mixed on a tray: whether both fit was not asked.
    """
    kinds = {need.devices for need in needs}
    return frozenset(load for kind in kinds for load in _of_kind(kind, vacancy, needs, most))


@lru_cache(REMEMBERED)
def largest(loads: frozenset[Load]) -> tuple[Load, ...]:
    """Those to which nobody can be added."""
    return tuple(
        load
        for load in sorted(loads)
        if not any((*load[:at], load[at] + 1, *load[at + 1 :]) in loads for at in range(len(load)))
    )


def _of_kind(kind: str | None, vacancy: Vacancy, needs: tuple[Need, ...], most: Load) -> Iterator[Load]:
    room = next(room for need, room in zip(needs, vacancy.rooms, strict=True) if need.devices == kind)
    loads: list[tuple[Load, int, int]] = [((), vacancy.free, room)]
    for need, members in zip(needs, most, strict=True):
        top = members if need.devices == kind else 0
        loads = [
            ((*load, here), gpus - here * need.gpus, seats - here)
            for load, gpus, seats in loads
            for here in range(min(top, seats) + 1)
            if here * need.gpus <= gpus
        ]
    return (load for load, _, _ in loads)
