"""Changes of one clique after which a block fits there, with as little as possible changed."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from rackloom.claim.place.refusal.moves import Move, Unit, listed, moved, units_of, without
from rackloom.claim.place.search.blocks import Block, blocks_of
from rackloom.claim.place.search.board import Board
from rackloom.claim.place.search.choose import can_be_chosen
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.ground import ground_of
from rackloom.claim.place.values import Gang, Hold, Site, Tray

CLIQUES = 4
"""Cliques for which a cure is looked for: those that lack least."""

NAMED = 3
"""Jobs that a fix names; it counts the others."""

T = TypeVar("T")


class Cured(NamedTuple):
    """The site afterwards, what was done in words, and its moves."""

    site: Site
    text: str
    moves: tuple[Move, ...] = ()


Remedy = Callable[[Site, Site, Gang, Effort], Cured | None]
"""Makes room for the first block of a gang in the second argument, a clique; None where it cannot."""


def returned(site: Site, clique: Site, gang: Gang, effort: Effort) -> Cured | None:
    """Trays that are shut go back into service."""
    shut = [tray for tray in clique.trays if tray.shut is not None and not tray.is_unfit]
    chosen = fewest(shut, lambda some: fits(Site(_opened(clique, some), clique.holds), gang, effort))
    if not chosen:
        return None
    why = sorted({tray.shut or "" for tray in chosen})
    text = f"return {listed([tray.name for tray in chosen])} to service (now: {listed(why)})"
    return Cured(Site(_opened(site, chosen), site.holds), text)


def moved_away(site: Site, clique: Site, gang: Gang, effort: Effort) -> Cured | None:
    """Movable jobs go to other cliques."""
    units = [unit for unit in units_of(clique) if all(hold.movable for hold in unit.holds)]
    chosen = fewest(units, lambda some: fits(without(clique, some), gang, effort))
    if not chosen:
        return None
    here = {tray.name for tray in clique.trays}
    done: list[Move] = []
    for unit in sorted(chosen, key=lambda one: -one.gpus):
        step = moved(site, unit, here, effort)
        if step is None:
            return None
        site = step[0]
        done.append(step[1])
    return Cured(site, "; ".join(move.told() for move in done), tuple(done))


def preempted(site: Site, clique: Site, gang: Gang, effort: Effort) -> Cured | None:
    """Jobs of lower priority make way, where the gang may preempt."""
    if not gang.preempts:
        return None
    lower = [unit for unit in units_of(clique) if all(one.priority < gang.priority for one in unit.holds)]
    return _ended(site, clique, gang, effort, lower, "preempt {} (lower priority, {} GPUs)")


def awaited(site: Site, clique: Site, gang: Gang, effort: Effort) -> Cured | None:
    """Jobs end."""
    return _ended(site, clique, gang, effort, units_of(clique), "wait until {} ends ({} GPUs)")


def cliques_by_lack(site: Site, gang: Gang) -> list[Site]:
    """The cliques that are large enough for the first block, as sites of their own, least lacking first."""
    block = blocks_of(gang)[0]
    gpus = sum(part.group.gpus * part.members for part in block)
    sites = [one for one in _split(site) if sum(tray.gpus for tray in one.trays) >= gpus]
    return sorted(sites, key=_free, reverse=True)[:CLIQUES]


def fits(clique: Site, gang: Gang, effort: Effort) -> bool:
    """Whether the first block of a gang fits in the clique that the site is."""
    block: Block = blocks_of(gang)[0]
    return can_be_chosen(Board(ground_of(clique, gang)), [block], gang.spares, effort)


def fewest(items: Sequence[T], enough: Callable[[Sequence[T]], bool]) -> list[T]:
    """Some of `items` (cheapest first) that are enough: one if one is, else a set that can spare none."""
    for item in items:
        if enough([item]):
            return [item]
    chosen: list[T] = []
    for item in reversed(items):
        chosen.append(item)
        if enough(chosen):
            break
    else:
        return []
    for item in list(chosen):
        rest = [one for one in chosen if one is not item]
        if enough(rest):
            chosen = rest
    return chosen


def _ended(
    site: Site, clique: Site, gang: Gang, effort: Effort, units: Sequence[Unit], text: str
) -> Cured | None:
    chosen = fewest(units, lambda some: fits(without(clique, some), gang, effort))
    if not chosen:
        return None
    owners = list(dict.fromkeys(unit.owner for unit in chosen))
    ended = [unit for unit in units_of(site) if unit.owner in owners]
    names = " and ".join(owners) if len(owners) <= NAMED else listed(owners, most=NAMED)
    return Cured(without(site, ended), text.format(names, sum(unit.gpus for unit in ended)))


def _opened(site: Site, trays: Iterable[Tray]) -> tuple[Tray, ...]:
    names = {tray.name for tray in trays}
    return tuple(
        msgspec.structs.replace(tray, shut=None) if tray.name in names else tray for tray in site.trays
    )


def _split(site: Site) -> list[Site]:
    trays: dict[str, list[Tray]] = {}
    clique_of: dict[str, str] = {}
    for tray in site.trays:
        clique_of[tray.name] = tray.sharing
        trays.setdefault(clique_of[tray.name], []).append(tray)
    holds: dict[str, list[Hold]] = {name: [] for name in trays}
    for hold in site.holds:
        if hold.tray in clique_of:
            holds[clique_of[hold.tray]].append(hold)
    return [Site(tuple(trays[name]), tuple(holds[name])) for name in trays]


def _free(clique: Site) -> int:
    open_gpus = sum(tray.gpus for tray in clique.trays if tray.shut is None)
    return open_gpus - sum(hold.gpus for hold in clique.holds)
