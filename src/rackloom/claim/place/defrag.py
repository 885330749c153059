"""Moves of running jobs that empty a tray, or open larger holes; each with its cost."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from rackloom.claim.place.refusal.moves import Move, Unit, closed_to, listed, moved, units_of
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.ground import Ground
from rackloom.claim.place.search.holes import SIZES, priced
from rackloom.claim.place.values import Site
from rackloom.errors import Refused

EMPTIED = 8
"""Cliques that one defragmentation empties at most: every move restarts somebody."""


Step = tuple[Site, Move]
"""The site after one move."""


class Rearranged(msgspec.Struct, frozen=True):
    """The site after the moves, in the order in which they are safe."""

    site: Site
    moves: tuple[Move, ...]


def drained(site: Site, tray: str) -> Rearranged:
    """What has to move so that `tray` is empty; it takes nothing new meanwhile.

    A member stays in its clique if a tray there can take it, else all of its job moves to another clique.
    Raises Refused where something cannot move.
    """
    check_tray(site, tray)
    clique = {one.name: one.sharing for one in site.trays}
    site = closed_to(site, [tray], "drained")
    elsewhere = [name for name in clique if clique[name] != clique[tray]]
    start, steps = site, list[Step]()
    for unit in (one for one in units_of(site) if tray in one.trays):
        here = Unit(unit.owner, tuple(hold for hold in unit.holds if hold.tray == tray))
        step = moved(site, here, [*elsewhere, *unit.trays], Effort()) or moved(site, unit, [tray], Effort())
        if step is None:
            raise Refused(
                f"{unit.owner} cannot leave {tray}: {_why(unit)}", nearest_fix=f"wait until {unit.owner} ends"
            )
        site = step[0]
        steps.append(step)
    return _rearranged(start, steps)


def check_tray(site: Site, tray: str) -> None:
    """Refuse a name that no tray has."""
    names = [one.name for one in site.trays]
    if tray not in names:
        raise Refused(f"no tray is called {tray}", nearest_fix=f"name one of {listed(names)}")


def defragmented(site: Site) -> Rearranged:
    """Moves that open more of the largest holes, the cheapest clique first; none where none helps."""
    steps: list[Step] = []
    for _ in range(EMPTIED):
        now = steps[-1][0] if steps else site
        found = next((one for one in _emptyings(now) if _holes(one[-1][0]) > _holes(now)), None)
        if found is None:
            break
        steps += found
    return _rearranged(site, steps)


def _rearranged(site: Site, steps: Sequence[Step]) -> Rearranged:
    """The moves, each with the holes before and after it."""
    sites = (site, *(after for after, _ in steps))
    empty = [list(Ground(one).empty.values()) for one in sites]
    moves = (
        replace(move, holes=priced(before, after))
        for (_, move), (before, after) in zip(steps, pairwise(empty), strict=True)
    )
    return Rearranged(sites[-1], tuple(moves))


def _emptyings(site: Site) -> list[list[Step]]:
    """Each clique emptied of what can move, the cheapest first."""
    clique = {one.name: one.sharing for one in site.trays}
    groups: dict[str, list[Unit]] = {}
    for unit in units_of(site):
        groups.setdefault(clique[unit.trays[0]], []).append(unit)
    found = []
    for name, units in sorted(groups.items(), key=lambda item: sum(unit.gpus for unit in item[1])):
        emptied = _emptied(site, units, [tray for tray in clique if clique[tray] == name])
        if emptied:
            found.append(emptied)
    return found


def _emptied(site: Site, units: Sequence[Unit], trays: list[str]) -> list[Step]:
    steps = []
    for unit in sorted(units, key=lambda one: -one.gpus):
        step = moved(site, unit, trays, Effort())
        if step is not None:
            site = step[0]
            steps.append(step)
    return steps


def _holes(site: Site) -> tuple[int, ...]:
    empty = Ground(site).empty.values()
    return tuple(sum(one // size for one in empty) for size in SIZES)


def _why(unit: Unit) -> str:
    if not all(hold.movable for hold in unit.holds):
        return "it is not marked as movable"
    return "no other clique that it may use has room for it"
