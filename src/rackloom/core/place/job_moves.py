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

from rackloom.core.place.placement_values import (
    FreeRegionCount,
    Gang,
    GangGroup,
    GangPlan,
    MemberAssignment,
    PlacementSite,
    PlacementTerms,
    TrayHold,
)
from rackloom.core.place.search.clique_ranking import REGION_SIZES, fragmentation_price
from rackloom.core.place.search.gang_search import try_gang
from rackloom.core.place.search.joint_assignment import SearchBudget
from rackloom.core.place.search.site_capacity import MemberNeed, SiteCapacity
from rackloom.core.place.search.tray_assignment import TrialPlacement
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
    """What it opens of each size, and what it closes."""

    def told(self) -> str:
        """In words, with the cost."""
        return (
            f"move {self.owner} from {list_names(self.from_trays)} to {list_names(self.to_trays)}"
            f" ({self.gpus} GPUs restart)"
        )

    def gain(self) -> str:
        """In words, the holes before and after it; empty where there are as many."""
        return ", ".join(f"holes of {hole.trays} trays {hole.before} -> {hole.after}" for hole in self.holes)


def movable_units(site: PlacementSite) -> list[MovableUnit]:
    """What is in use, cheapest to move first."""
    clique = {tray.name: tray.sharing for tray in site.trays}
    found: dict[tuple[str, str], list[TrayHold]] = {}
    for hold in site.holds:
        if hold.tray in clique:
            found.setdefault((hold.owner, clique[hold.tray]), []).append(hold)
    units = [MovableUnit(owner, tuple(holds)) for (owner, _), holds in found.items()]
    return sorted(units, key=lambda unit: (unit.gpus, unit.owner))


def without_units(site: PlacementSite, units: Iterable[MovableUnit]) -> PlacementSite:
    """The site when what the units hold is free."""
    gone = {hold for unit in units for hold in unit.holds}
    return PlacementSite(site.trays, tuple(hold for hold in site.holds if hold not in gone))


def move_unit(
    site: PlacementSite, unit: MovableUnit, avoid: Collection[str], effort: SearchBudget
) -> tuple[PlacementSite, JobMove] | None:
    """The unit in a clique where it fits beside what is there, on no tray to `avoid` or it is kept off."""
    if not all(hold.movable for hold in unit.holds):
        return None
    emptied = without_units(site, [unit])
    barred = frozenset(avoid).union(
        *(hold.kept_off for hold in unit.holds), _anti_affine_trays(emptied, unit)
    )
    rest = with_trays_closed(emptied, barred, "to be emptied, or not to be used by it")
    gang = _unit_as_gang(unit)
    plan = try_gang(rest, gang, effort)
    if plan is None:
        return None
    like, groups = unit.holds[0], {group.name: group for group in gang.groups}
    holds = tuple(
        replace(like, tray=seat.tray, gpus=group.gpus, channel=group.has_channel)
        for seat in plan.seats
        for group in [groups[seat.group]]
    )
    now = PlacementSite(site.trays, (*emptied.holds, *holds))
    return now, JobMove(unit.owner, unit.trays, plan.trays, unit.gpus)


def _anti_affine_trays(site: PlacementSite, unit: MovableUnit) -> Iterator[str]:
    """Trays where those are by now that it is never beside."""
    foes = frozenset[str]().union(*(hold.apart for hold in unit.holds))
    return (hold.tray for hold in site.holds if hold.owner in foes)


def with_trays_closed(site: PlacementSite, trays: Collection[str], why: str) -> PlacementSite:
    """The site with nothing new on `trays`."""
    return PlacementSite(
        tuple(replace(tray, shut=tray.shut or why) if tray.name in trays else tray for tray in site.trays),
        site.holds,
    )


def _unit_members(unit: MovableUnit) -> Iterator[tuple[int, bool]]:
    """GPUs of each hold, and whether it has a channel: all on a tray that has one go where one is."""
    linked = {hold.tray for hold in unit.holds if hold.channel}
    yield from ((hold.gpus, False) for hold in unit.holds if hold.tray not in linked)
    for tray in linked:
        yield sum(hold.gpus for hold in unit.holds if hold.tray == tray), True


def list_names(names: Collection[str], most: int = 3) -> str:
    """The first few, and how many more."""
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _unit_as_gang(unit: MovableUnit) -> Gang:
    """Members that look like the holds: that is all that is known of a running job."""
    is_apart = any(hold.owner in hold.apart for hold in unit.holds)
    groups = tuple(
        GangGroup(
            name=f"{gpus} GPUs{' and a channel' * linked}",
            members=members,
            gpus=gpus,
            terms=_unit_terms(linked, is_apart),
        )
        for (gpus, linked), members in sorted(Counter(_unit_members(unit)).items())
    )
    # Its own name would have the other holds of the job overlooked.
    return Gang(name=f"{unit.owner}, moving", groups=groups)


def _unit_terms(linked: bool, is_apart: bool) -> PlacementTerms | None:
    if is_apart:
        return PlacementTerms(channel=linked, likeness=_ONE_PER_TRAY, apart=(_ONE_PER_TRAY,))
    return PlacementTerms(channel=True) if linked else None


# Drains and defragmentation.


MAX_EMPTIED_CLIQUES = 8
"""Cliques that one defragmentation empties at most: every move restarts somebody."""


MoveStep = tuple[PlacementSite, JobMove]
"""The site after one move."""


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
    clique = {one.name: one.sharing for one in site.trays}
    site = with_trays_closed(site, [tray], "drained")
    elsewhere = [name for name in clique if clique[name] != clique[tray]]
    start, steps = site, list[MoveStep]()
    for unit in (movable_unit for movable_unit in movable_units(site) if tray in movable_unit.trays):
        here = MovableUnit(unit.owner, tuple(hold for hold in unit.holds if hold.tray == tray))
        step = move_unit(site, here, [*elsewhere, *unit.trays], SearchBudget()) or move_unit(
            site, unit, [tray], SearchBudget()
        )
        if step is None:
            raise Refused(
                f"{unit.owner} cannot leave {tray}: {_why_immovable(unit)}",
                nearest_fix=f"wait until {unit.owner} ends",
            )
        site = step[0]
        steps.append(step)
    return _rearrangement(start, steps)


def check_tray_exists(site: PlacementSite, tray: str) -> None:
    """Refuse a name that no tray has."""
    names = [one.name for one in site.trays]
    if tray not in names:
        raise Refused(f"no tray is called {tray}", nearest_fix=f"name one of {list_names(names)}")


def plan_defragmentation(site: PlacementSite) -> Rearrangement:
    """Moves that open more of the largest holes, the cheapest clique first; none where none helps."""
    steps: list[MoveStep] = []
    for _ in range(MAX_EMPTIED_CLIQUES):
        now = steps[-1][0] if steps else site
        found = next(
            (clique for clique in _emptied_cliques(now) if _free_regions(clique[-1][0]) > _free_regions(now)),
            None,
        )
        if found is None:
            break
        steps += found
    return _rearrangement(site, steps)


def _rearrangement(site: PlacementSite, steps: Sequence[MoveStep]) -> Rearrangement:
    """The moves, each with the holes before and after it."""
    sites = (site, *(after for after, _ in steps))
    empty = [list(SiteCapacity(one).empty.values()) for one in sites]
    moves = (
        replace(move, holes=fragmentation_price(before, after))
        for (_, move), (before, after) in zip(steps, pairwise(empty), strict=True)
    )
    return Rearrangement(sites[-1], tuple(moves))


def _emptied_cliques(site: PlacementSite) -> list[list[MoveStep]]:
    """Each clique emptied of what can move, the cheapest first."""
    clique = {tray.name: tray.sharing for tray in site.trays}
    groups: dict[str, list[MovableUnit]] = {}
    for unit in movable_units(site):
        groups.setdefault(clique[unit.trays[0]], []).append(unit)
    found = []
    for name, units in sorted(groups.items(), key=lambda item: sum(unit.gpus for unit in item[1])):
        emptied = _empty_clique(site, units, [tray for tray in clique if clique[tray] == name])
        if emptied:
            found.append(emptied)
    return found


def _empty_clique(site: PlacementSite, units: Sequence[MovableUnit], trays: list[str]) -> list[MoveStep]:
    steps = []
    for unit in sorted(units, key=lambda one: -one.gpus):
        step = move_unit(site, unit, trays, SearchBudget())
        if step is not None:
            site = step[0]
            steps.append(step)
    return steps


def _free_regions(site: PlacementSite) -> tuple[int, ...]:
    empty = SiteCapacity(site).empty.values()
    return tuple(sum(one // size for one in empty) for size in REGION_SIZES)


def _why_immovable(unit: MovableUnit) -> str:
    if not all(hold.movable for hold in unit.holds):
        return "it is not marked as movable"
    return "no other clique that it may use has room for it"


# A lost tray of a placed gang.


def replace_member(site: PlacementSite, gang: Gang, plan: GangPlan, lost: str) -> GangPlan:
    """The plan without the tray `lost`; the reserved spares are asked first.

    Holds of the gang itself do not count. Raises Refused where no tray of the clique can take over.
    """
    clique = next((tray.sharing for tray in site.trays if tray.name == lost), None)
    moving = [seat for seat in plan.seats if seat.tray == lost]
    if not moving:
        raise Refused(
            f"{plan.gang} has no member on {lost}", nearest_fix=f"name one of {list_names(plan.trays)}"
        )
    if clique is None:
        raise Refused(
            f"{lost} is not in the site that was observed", nearest_fix="pass it, shut, with its clique"
        )
    chosen = _replacement_tray(
        TrialPlacement(SiteCapacity(site, owner=plan.gang, exclusive=gang.exclusive)),
        gang,
        plan,
        clique,
        lost,
    )
    if chosen is None:
        raise Refused(
            f"{plan.gang}: no other tray of clique {clique} can take over what ran on {lost}",
            nearest_fix=f"return {lost} to service, or start {plan.gang} anew in another clique",
        )
    seats = tuple(replace(seat, tray=chosen) if seat.tray == lost else seat for seat in plan.seats)
    kept = tuple(spare for spare in plan.spares if spare not in (chosen, lost))
    why = f"{lost} was lost: {chosen} of the same clique took over; {plan.reason}"
    return replace(plan, seats=seats, spares=kept, reason=why)


def _replacement_tray(
    board: TrialPlacement, gang: Gang, plan: GangPlan, clique: str, lost: str
) -> str | None:
    mine = set(plan.trays)
    trays = board.ground.trays
    able = [
        trays[at].name
        for at in board.ground.cliques[clique]
        if trays[at].name not in mine and _can_take_over(board, at, gang, plan, lost)
    ]
    return min(able, key=lambda name: name not in plan.spares, default=None)


def _can_take_over(board: TrialPlacement, at: int, gang: Gang, plan: GangPlan, lost: str) -> bool:
    """Whether the tray can take all members of the lost one."""
    taken: list[tuple[MemberNeed, int]] = []
    seats: list[MemberAssignment] = [seat for seat in plan.seats if seat.tray == lost]
    fits = True
    for group in gang.groups:
        members = sum(seat.group == group.name for seat in seats)
        if not members or group.is_helper:
            continue
        fits = fits and board.slots(at, MemberNeed.of(group)) >= members
        if fits:
            board.take(at, MemberNeed.of(group), members)
            taken.append((MemberNeed.of(group), members))
    for need, members in taken:
        board.put_back(at, need, members)
    return fits
