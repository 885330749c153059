"""Move running jobs: drain a tray, defragment cliques, replace a lost tray.

A `MovableUnit` is what one owner holds in one clique. It moves whole to another clique, because its
members share memory; its cost is the number of GPUs whose members restart. `move_unit` plans it like a
gang whose members look like its holds, on no tray that its pods may not use or where anti-affinity keeps
it off.

- `plan_drain` empties a tray. Members stay in their clique if a tray there can take them, else all of the
  job's part in this clique moves.
- `plan_defragmentation` empties cliques, the cheapest first, as long as that opens more of the largest
  free regions; at most eight, because every move restarts somebody.
- `replace_member` moves the members of a lost tray to one other tray of the same clique, a reserved spare
  first; nobody else moves.

Moves are in an order in which each is possible. Raises Refused where a job is not movable or nothing has
room.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster.objects import list_names
from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import (
    FreeRegionCount,
    Gang,
    GangGroup,
    GangPlan,
    PlacementSite,
    PlacementTerms,
)
from rackloom.core.place.gang_planner import try_gang
from rackloom.core.place.search.clique_search import fragmentation_price
from rackloom.core.place.search.gang_needs import MemberNeed
from rackloom.core.place.search.site_view import SiteCapacity, SiteView
from rackloom.core.place.search.tray_assignment import SearchBudget, trays_that_carry
from rackloom.errors import Refused

_ONE_PER_TRAY = "each on a tray of its own"


class MovableUnit(msgspec.Struct, frozen=True):
    """The part of a job that shares memory."""

    owner: str
    holds: tuple[TrayHold, ...]

    @property
    def gpus(self) -> int:
        """The cost of moving it: GPUs whose members restart."""
        return sum(hold.gpus for hold in self.holds)

    @property
    def trays(self) -> tuple[str, ...]:
        """Where it is."""
        return tuple(dict.fromkeys(hold.tray for hold in self.holds))


class JobMove(msgspec.Struct, frozen=True):
    """A unit from its trays to others."""

    owner: str
    from_trays: tuple[str, ...]
    to_trays: tuple[str, ...]
    gpus: int
    holes: tuple[FreeRegionCount, ...] = ()
    """The free regions of each size before and after it, where they change."""

    def describe(self) -> str:
        """In words, with the cost."""
        return (
            f"move {self.owner} from {list_names(self.from_trays)} to {list_names(self.to_trays)}"
            f" ({self.gpus} GPUs restart)"
        )

    def gain(self) -> str:
        """In words, the free regions before and after it; empty where they do not change."""
        return ", ".join(f"holes of {hole.trays} trays {hole.before} -> {hole.after}" for hole in self.holes)


def movable_units(site: SiteView, cliques: Iterable[str] | None = None) -> list[MovableUnit]:
    """The holds in some cliques (None: in all) as units, cheapest to move first."""
    units = []
    for clique in site.cliques if cliques is None else cliques:
        found: dict[str, list[TrayHold]] = {}
        for hold in site.cliques[clique].holds:
            found.setdefault(hold.owner, []).append(hold)
        units += [MovableUnit(owner, tuple(holds)) for owner, holds in found.items()]
    return sorted(units, key=lambda unit: (unit.gpus, unit.owner))


def without_units(site: SiteView, units: Iterable[MovableUnit]) -> SiteView:
    """The site without the holds of the units."""
    return site.changed(freed=[hold for unit in units for hold in unit.holds])


MoveStep = tuple[SiteView, JobMove]
"""The site after one move."""


def move_unit(
    site: SiteView, unit: MovableUnit, avoid: Collection[str], budget: SearchBudget
) -> MoveStep | None:
    """Move a unit to a clique where it fits beside what is there.

    It goes to no tray of `avoid`, to none that its pods may not use, and to none with a job that it is never
    beside. None where it is not movable or nothing has room.
    """
    if not all(hold.movable for hold in unit.holds):
        return None
    # The unit leaves before it arrives, so its own holds are not in its way.
    emptied = without_units(site, [unit])
    never_beside = frozenset[str]().union(*(hold.apart for hold in unit.holds))
    barred = frozenset(avoid).union(
        *(hold.kept_off for hold in unit.holds),
        (
            hold.tray
            for owner in never_beside
            for clique in emptied.cliques_of(owner)
            for hold in emptied.cliques[clique].holds
            if hold.owner == owner
        ),
    )
    # The trays are closed for this plan alone. The site that is returned has them as they were.
    why = "to be emptied, or not to be used by it"
    closed = [replace(tray, shut=tray.shut or why) for tray in emptied.trays_named(barred)]
    gang = _unit_as_gang(unit)
    plan = try_gang(emptied.changed(trays=closed), gang, budget)
    if plan is None:
        return None
    groups = {group.name: group for group in gang.groups}
    holds = tuple(
        replace(unit.holds[0], tray=member.tray, gpus=group.gpus, channel=group.has_channel)
        for member in plan.seats
        for group in [groups[member.group]]
    )
    return emptied.changed(taken=holds), JobMove(unit.owner, unit.trays, plan.trays, unit.gpus)


def with_trays_closed(site: PlacementSite, trays: Collection[str], why: str) -> PlacementSite:
    """The site with nothing new on `trays`."""
    if not trays:
        return site
    return site.with_trays(lambda tray: replace(tray, shut=tray.shut or why) if tray.name in trays else tray)


def _unit_as_gang(unit: MovableUnit) -> Gang:
    """A gang whose members look like the holds: nothing else is known of a running job."""
    is_apart = any(hold.owner in hold.apart for hold in unit.holds)
    # A node has one IMEX channel, so all holds on a tray with a channel move together, as one member.
    with_channel = {hold.tray for hold in unit.holds if hold.channel}
    members = Counter((hold.gpus, False) for hold in unit.holds if hold.tray not in with_channel)
    for tray in with_channel:
        members[sum(hold.gpus for hold in unit.holds if hold.tray == tray), True] += 1
    groups = []
    for (gpus, channel), count in sorted(members.items()):
        # Members without terms keep the search on its counting path.
        terms = PlacementTerms(channel=True) if channel else None
        if is_apart:
            terms = PlacementTerms(channel=channel, likeness=_ONE_PER_TRAY, apart=(_ONE_PER_TRAY,))
        name = f"{gpus} GPUs{' and a channel' * channel}"
        groups.append(GangGroup(name=name, members=count, gpus=gpus, terms=terms))
    # Under its own name, the other holds of the job would not count.
    return Gang(name=f"{unit.owner}, moving", groups=tuple(groups))


# Drains and defragmentation.


MAX_EMPTIED_CLIQUES = 8
"""Cliques that one defragmentation empties at most: every move restarts somebody."""


class Rearrangement(msgspec.Struct, frozen=True):
    """The site after the moves, in the order in which they are safe."""

    site: PlacementSite
    moves: tuple[JobMove, ...]


def plan_drain(site: PlacementSite, tray: str) -> Rearrangement:
    """What has to move so that `tray` is empty; it takes nothing new meanwhile.

    A member stays in its clique if a tray there can take it, else all of its job moves to another clique.
    Raises Refused where something cannot move.
    """
    check_tray_exists(site, tray)
    clique = {present.name: present.sharing for present in site.trays}
    other_cliques = [name for name in clique if clique[name] != clique[tray]]
    start = view = SiteView.of(with_trays_closed(site, [tray], "drained"))
    steps: list[MoveStep] = []
    for unit in movable_units(view, [clique[tray]]):
        if tray not in unit.trays:
            continue
        # Within the clique its other members may stay. Elsewhere they share no memory, so all move.
        here = MovableUnit(unit.owner, tuple(hold for hold in unit.holds if hold.tray == tray))
        in_clique = move_unit(view, here, [*other_cliques, *unit.trays], SearchBudget())
        step = in_clique or move_unit(view, unit, [tray], SearchBudget())
        if step is None:
            why = "no other clique that it may use has room for it"
            if not all(hold.movable for hold in unit.holds):
                why = "it is not marked as movable"
            raise Refused(
                f"{unit.owner} cannot leave {tray}: {why}", nearest_fix=f"wait until {unit.owner} ends"
            )
        view = step[0]
        steps.append(step)
    return _rearrangement(start, steps)


def check_tray_exists(site: PlacementSite, tray: str) -> None:
    """Refuse a name that no tray has."""
    names = [present.name for present in site.trays]
    if tray not in names:
        raise Refused(f"no tray is called {tray}", nearest_fix=f"name one of {list_names(names)}")


def plan_defragmentation(site: PlacementSite) -> Rearrangement:
    """Moves that open more of the largest free regions, the cheapest clique first.

    Each round empties one clique and keeps the moves only if they raise the free regions, compared from the
    largest size down. So every round makes progress, and a cost of restarts buys something.
    """
    steps: list[MoveStep] = []
    start = SiteView.of(site)
    for _ in range(MAX_EMPTIED_CLIQUES):
        now = steps[-1][0] if steps else start
        regions = _free_regions(now)
        better = (moves for moves in _emptied_cliques(now) if moves and _free_regions(moves[-1][0]) > regions)
        if (found := next(better, None)) is None:
            break
        steps += found
    return _rearrangement(start, steps)


def _rearrangement(site: SiteView, steps: Sequence[MoveStep]) -> Rearrangement:
    """The moves, each with the free regions before and after it."""
    sites = (site, *(after for after, _ in steps))
    moves = (
        replace(move, holes=fragmentation_price(before, after))
        for (_, move), (before, after) in zip(steps, pairwise(map(_free_regions, sites)), strict=True)
    )
    return Rearrangement(sites[-1].site, tuple(moves))


def _emptied_cliques(site: SiteView) -> Iterator[list[MoveStep]]:
    """For each clique the moves that empty it as far as possible, the cheapest clique first."""
    units: dict[str, list[MovableUnit]] = {}
    for unit in movable_units(site):
        units.setdefault(site.clique_of(unit.trays[0]) or "", []).append(unit)
    for name, inside in sorted(units.items(), key=lambda item: sum(unit.gpus for unit in item[1])):
        trays, now, steps = [tray.name for tray in site.cliques[name].trays], site, list[MoveStep]()
        # The largest first: they find a place the hardest. What stays does not undo the moves of the others.
        for unit in sorted(inside, key=lambda unit: -unit.gpus):
            if step := move_unit(now, unit, trays, SearchBudget()):
                now = step[0]
                steps.append(step)
        yield steps


def _free_regions(site: SiteView) -> tuple[int, ...]:
    return site.states().regions


# A lost tray of a placed gang.


def replace_member(site: PlacementSite, gang: Gang, plan: GangPlan, lost: str) -> GangPlan:
    """The plan without the tray `lost`; the reserved spares are tried first.

    Holds of the gang itself do not count. Raises Refused where no tray of the clique can take over.
    """
    clique = next((tray.sharing for tray in site.trays if tray.name == lost), None)
    if lost not in plan.trays:
        raise Refused(
            f"{plan.gang} has no member on {lost}", nearest_fix=f"name one of {list_names(plan.trays)}"
        )
    if clique is None:
        raise Refused(
            f"{lost} is not in the site that was observed", nearest_fix="pass it, shut, with its clique"
        )
    capacity = SiteCapacity(site, owner=plan.gang, exclusive=gang.exclusive)
    seats = Counter(member.group for member in plan.seats if member.tray == lost)
    # One tray takes over all members of the lost one, as a spare was chosen to do.
    load = Counter[MemberNeed]()
    for group in gang.device_groups:
        load[MemberNeed.of(group)] += seats[group.name]
    able = [
        name
        for at in trays_that_carry(capacity, clique, [load])
        if (name := capacity.tray(at).name) not in plan.trays
    ]
    chosen = min(able, key=lambda name: name not in plan.spares, default=None)
    if chosen is None:
        raise Refused(
            f"{plan.gang}: no other tray of clique {clique} can take over what ran on {lost}",
            nearest_fix=f"return {lost} to service, or start {plan.gang} anew in another clique",
        )
    members = tuple(replace(member, tray=chosen) if member.tray == lost else member for member in plan.seats)
    spares = tuple(spare for spare in plan.spares if spare not in (chosen, lost))
    why = f"{lost} was lost: {chosen} of the same clique took over; {plan.reason}"
    return replace(plan, seats=members, spares=spares, reason=why)
