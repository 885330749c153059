"""Plan a gang, or refuse it: why it does not fit, and changes with which it was found to fit, nearest first.

`plan_gang` returns a plan, or raises Refused with the shortage and the nearest fix that was found to work.
`describe_shortage` names what was asked, the clique that comes nearest, and what blocks its other trays.
`find_fixes` yields fixes; each was planned (`gang_planner`) before it is named:

1. Fewer spares.
2. Nothing that runs is lost: return closed trays to service, or move movable jobs to other cliques.
3. A smaller demand on the topology: a clique per group, or smaller segments.
4. Preempt jobs of lower priority, where the gang may preempt.
5. Fewer members, where one group alone takes devices.
6. Wait until jobs end.

Remedies are tried on the four cliques that lack least, first on one, then on several together.
`minimal_subset` keeps a remedy small: one item if one is enough, else a set from which no item can be
spared. All searches share the search budget that the gang itself has left, so the answer is bounded.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import list_names
from rackloom.core.cluster.trays import Gang, GangPlan, PlacementSite, PlacementTray, without_foreign_names
from rackloom.core.place.gang_planner import gang_fits, plan_or_refuse
from rackloom.core.place.job_moves import (
    JobMove,
    MovableUnit,
    movable_units,
    move_unit,
    without_units,
)
from rackloom.core.place.search.clique_search import CliqueRequest, choose_cliques
from rackloom.core.place.search.gang_needs import (
    ColocationGroup,
    MemberNeed,
    colocation_groups,
    groups_apart,
    rank_sequences,
)
from rackloom.core.place.search.site_view import (
    CliqueShape,
    SiteCapacity,
    SiteView,
    TrayPosition,
    capacity_for,
)
from rackloom.core.place.search.tray_assignment import SearchBudget, TrialPlacement
from rackloom.errors import Refused


def plan_gang(site: PlacementSite | SiteView, gang: Gang) -> GangPlan:
    """A tray for every member. Raises Refused with the shortage and, if there is one, a fix.

    A fix was planned, but for the advice to make a partition where none holds the trays.

    Keep the `SiteView` between plans: rebuilding it costs more than the plan.
    """
    return plan_or_refuse(site, gang, gang_refusal)


def gang_refusal(capacity: SiteCapacity, gang: Gang, budget: SearchBudget) -> Refused:
    """Why a gang does not fit, and the nearest fix. `budget`: of the search for the gang."""
    # Fixes may only use what the search for the gang itself has left of the budget.
    if (advice := partition_advice(capacity.view, gang)) is None:
        fix = next(find_fixes(capacity, gang, budget), None)
        advice = None if fix is None else fix.text
    return Refused(describe_shortage(capacity, gang), nearest_fix=advice)


# Why a gang does not fit, in one sentence.


MAX_NAMED_TRAYS = 3
"""Trays that a sentence names; it counts the others."""


def describe_shortage(
    capacity: SiteCapacity,
    gang: Gang,
    clique_label: str = SchedulerLabels().clique,
    viewer: str | None = None,
) -> str:
    """What is asked for, the most that one clique has of it, and what blocks the other trays there.

    `viewer`: the namespace that reads it, to which owners in others have no names. None: all have.
    """
    subgroups = colocation_groups(gang)
    largest = subgroups[0]
    asked = []
    for group in gang.device_groups:
        devices = f"{group.gpus} GPUs" if group.gpus else "devices" if group.devices else "an IMEX channel"
        asked.append(f"{group.members} {group.name} with {devices} each")
    cliques = "one clique" if len(subgroups) == 1 else f"{len(subgroups)} segments, each in one clique"
    request = f"{gang.name} asks for {' and '.join(asked)} in {cliques}"
    # Where no tray is in question at all, no clique is nearest.
    if not capacity.cliques:
        return f"{request}, but the site has no tray with GPUs"
    trays = [tray for clique in capacity.cliques.values() for tray in clique.trays]
    if all(tray.is_unfit for tray in trays):
        why = ", ".join(dict.fromkeys(tray.shut or "" for tray in trays))
        return f"{request}, but it may use none of the {len(trays)} nodes ({why})"
    wanted = [part.members for part in largest]
    # The clique that can serve most members; of several, the first.
    nearest = max(
        capacity.states.shapes.values(),
        key=lambda alike: (sum(map(min, _served(alike.shape, largest), wanted)), -alike.orders[0]),
    )
    best = capacity.view.clique_named(nearest.orders[0])
    room = " and ".join(
        f"{count} of {part.members} {part.group.name}"
        for count, part in zip(_served(nearest.shape, largest), largest, strict=True)
    )
    spare = f" and is to keep {gang.spares} spare" if gang.spares else ""
    blocking = ", ".join(blocking_trays(capacity, best, largest[0].need, viewer))
    found = f"{request}; the nearest, clique {best}, has room for {room}{spare}"
    found += f": {blocking}" if blocking else ""
    # No GPUs of two trays without a clique label are known to share memory.
    alone = [tray.name for tray in trays if tray.clique is None]
    if alone and not has_cliques(capacity.view):
        return f"{found}; no NVLink partition holds these trays: no node carries {clique_label}"
    return f"{found}; no NVLink partition holds {list_names(alone, MAX_NAMED_TRAYS)}" if alone else found


def _served(shape: CliqueShape, subgroup: ColocationGroup) -> list[int]:
    """How many members of each part a clique can serve."""
    return [shape.bounds(part.need).capacity for part in subgroup]


def has_cliques(site: SiteView) -> bool:
    """Whether any node has a clique label."""
    return any(tray.clique is not None for clique in site.cliques.values() for tray in clique.trays)


def partition_advice(site: SiteView, gang: Gang, clique_label: str = SchedulerLabels().clique) -> str | None:
    """What helps a gang of several members where no node has a clique label.

    It cannot be planned as other fixes are: which of the trays share a rack is unknown.
    """
    alone = max((sum(part.members for part in group) for group in colocation_groups(gang)), default=0) < 2
    if alone or not site.cliques or has_cliques(site):
        return None
    return (
        "make a partition that holds them: rackloom partition create, vpc create, instance create."
        f" Their nodes then carry {clique_label}"
    )


def blocking_trays(
    capacity: SiteCapacity, clique: str, need: MemberNeed, viewer: str | None = None
) -> Iterator[str]:
    """Trays of the clique that cannot serve a member, with the reason; the most common reason first."""
    # The view has the gang's own holds too; a tray that they fill still has slots for the gang.
    owners: dict[str, set[str]] = {}
    holds = capacity.view.cliques[clique].holds
    # In order of their names, so that the number of an alias does not depend on who came first.
    for hold in without_foreign_names(sorted(holds, key=lambda hold: (hold.tray, hold.owner)), viewer):
        owners.setdefault(hold.tray, set()).add(hold.owner)
    names: dict[str, list[str]] = {}
    for number, slots in enumerate(capacity.cliques[clique].slots(need)):
        if not slots:
            at = TrayPosition(clique, number)
            tray = capacity.tray(at).name
            reason = _why_unusable(capacity, at, need, sorted(owners.get(tray, ())))
            names.setdefault(reason, []).append(tray)
    for reason, trays in sorted(names.items(), key=lambda item: -len(item[1])):
        yield f"{list_names(trays, MAX_NAMED_TRAYS)} ({reason})"


def _why_unusable(capacity: SiteCapacity, at: TrayPosition, need: MemberNeed, owners: Sequence[str]) -> str:
    tray, terms, by = capacity.tray(at), need.terms, f" by {' and '.join(owners)}" if owners else ""
    if tray.shut is not None:
        return tray.shut
    if terms is not None and terms.where in tray.closed:
        return tray.closed[terms.where]
    if terms is not None and (barred := capacity.why_barred(at, terms)) is not None:
        return f"{barred}{by}"
    if need.devices is not None and need.devices in tray.scarce:
        return f"has {tray.scarce[need.devices]}"
    return f"in use{by}" if owners else "has too few devices for a member"


# Fixes, nearest first.


OFFERED_SEGMENTS = (16, 8, 4, 2, 1)
"""Segments that are offered: 16 of an NVL72's 18 trays, then its halves."""
MAX_REMEDIED_CLIQUES = 4
"""Cliques for which a remedy is searched: those that lack least."""
MAX_NAMED_JOBS = 3
"""Jobs that a fix names; it counts the others."""

T = TypeVar("T")


class PlacementFix(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the request or of the site, with which the gang was found to fit."""

    text: str
    view: SiteView
    """The site afterwards."""
    gang: Gang
    moves: tuple[JobMove, ...] = ()

    @property
    def site(self) -> PlacementSite:
        """The site afterwards, as a value."""
        return self.view.site


_Remedy = Callable[[SiteView, str], PlacementFix | None]
"""Makes room for the largest subgroup in a clique of a site; None where it cannot. All may still not fit."""
_NewRequest = tuple[str, Gang]
"""A smaller demand: in words, and as a gang."""


def find_fixes(capacity: SiteCapacity, gang: Gang, budget: SearchBudget) -> Iterator[PlacementFix]:
    """The nearest first; `budget`: what the search for the gang on the same capacity has left of it."""
    fixes = _FixSearch(capacity, gang, budget)
    yield from fixes.relaxed(fixes.fewer_spares())
    cliques = cliques_by_shortfall(capacity.view, gang)
    yield from fixes.remedied(cliques, fixes.return_trays)
    yield from fixes.remedied(cliques, fixes.move_jobs_away)
    # Where no node has a clique label, each is a clique by itself, and smaller segments would fit only
    # because of that: the fix would hide that the label is missing.
    segmented = fixes.smaller_segments() if has_cliques(capacity.view) else ()
    yield from fixes.relaxed([*fixes.clique_per_group(), *segmented])
    yield from fixes.remedied(cliques, fixes.preempt_jobs)
    yield from fixes.relaxed(fixes.fewer_members())
    yield from fixes.remedied(cliques, fixes.await_jobs)


class _FixSearch:
    """Relaxed requests and remedied sites for one gang; all plans that are tried share its budget."""

    def __init__(self, capacity: SiteCapacity, gang: Gang, budget: SearchBudget) -> None:
        self._capacity = capacity
        self._gang = gang
        self._budget = budget
        self._shapes = list(capacity.states.shapes.values())
        self._largest_clique = max([alike.shape.trays for alike in self._shapes], default=0)

    def relaxed(self, requests: Iterable[_NewRequest]) -> Iterator[PlacementFix]:
        """The first of the requests that fits."""
        for text, gang in requests:
            if gang_fits(self._capacity, gang, self._budget):
                yield PlacementFix(text=text, view=self._capacity.view, gang=gang)
                return

    def fewer_spares(self) -> Iterator[_NewRequest]:
        """The most spares with which it fits. Fitting is monotone in the spares, so bisection finds them."""
        gang = self._gang
        requests = [
            replace(gang, spares=spares) for spares in range(min(gang.spares, self._largest_clique + 1))
        ]
        fitting = bisect_left(
            requests, True, key=lambda request: not gang_fits(self._capacity, request, self._budget)
        )
        if fitting:
            yield f"keep {fitting - 1} spare trays instead of {gang.spares}", requests[fitting - 1]

    def clique_per_group(self) -> Iterator[_NewRequest]:
        """Groups that shared a clique may be in several."""
        gang = self._gang
        shares = [group.share for group in gang.device_groups]
        # Groups that follow each other stay together, so a gang of one sequence has nothing to take apart.
        if gang.segment is None and len(rank_sequences(gang)) > len(set(shares)):
            groups = groups_apart(gang.groups)
            yield "let each group have a clique of its own", replace(gang, groups=groups)

    def smaller_segments(self) -> Iterator[_NewRequest]:
        """Segments of usual sizes, the largest first."""
        largest = max(sum(group.members for group in groups) for groups in rank_sequences(self._gang))
        for segment in OFFERED_SEGMENTS:
            if segment < min(largest, self._gang.segment or largest):
                text = f"cut it into segments of {segment}: GPUs of different segments share no memory"
                yield text, replace(self._gang, segment=segment)

    def fewer_members(self) -> Iterator[_NewRequest]:
        """From the most members that could fit, where one group alone takes devices."""
        gang = self._gang
        if len(gang.device_groups) > 1:
            return
        only = gang.device_groups[0]
        capacities = [
            (alike.shape.bounds(MemberNeed.of(only)).capacity, len(alike.orders)) for alike in self._shapes
        ]
        if gang.segment is None:
            most = max([capacity for capacity, _ in capacities], default=0)
        else:
            most = sum(capacity // gang.segment * gang.segment * cliques for capacity, cliques in capacities)
        # `most` ignores the spares. Each request is a search, so only spares + 1 of them are offered.
        least = max(0, most - min(gang.spares, self._largest_clique) - 1)
        for members in range(min(most, only.members - 1), least, -1):
            groups = tuple(
                replace(group, members=members) if group is only else group for group in gang.groups
            )
            yield f"ask for {members} {only.name} instead of {only.members}", replace(gang, groups=groups)

    # Remedies: each makes room in one clique.

    def remedied(self, cliques: Sequence[str], remedy: _Remedy) -> Iterator[PlacementFix]:
        """One of the cliques is remedied if that is enough, else several."""
        site = self._capacity.view
        found = [fix for clique in cliques if (fix := remedy(site, clique)) is not None]
        for fix in found:
            if self._makes_it_fit(fix):
                yield fix
                return
        if len(found) < 2:
            return
        # Each segment may need a clique that is remedied. A step changes which clique lacks least, so the
        # next one is chosen anew, among those that do not take the largest segment yet.
        done = PlacementFix(text="", view=site, gang=self._gang)
        for _ in range(MAX_REMEDIED_CLIQUES):
            step = next(
                (
                    fix
                    for clique in cliques_by_shortfall(done.view, self._gang)
                    if not self._fits_in_clique(done.view.only(clique))
                    and (fix := remedy(done.view, clique)) is not None
                ),
                None,
            )
            if step is None:
                return
            text = f"{done.text}; {step.text}" if done.text else step.text
            done = replace(step, text=text, moves=(*done.moves, *step.moves))
            if self._makes_it_fit(done):
                yield done
                return

    def _makes_it_fit(self, fix: PlacementFix) -> bool:
        return gang_fits(capacity_for(fix.view, self._gang), self._gang, self._budget)

    def _fits_in_clique(self, clique: SiteView) -> bool:
        """Whether the largest subgroup fits in the clique that the site is."""
        trial = TrialPlacement(capacity_for(clique, self._gang))
        request = CliqueRequest(colocation_groups(self._gang)[:1], self._gang.spares, fewest=False)
        return choose_cliques(trial, request, self._budget) is not None

    def _units_to_free(self, clique: SiteView, units: Sequence[MovableUnit]) -> list[MovableUnit]:
        return minimal_subset(units, lambda some: self._fits_in_clique(without_units(clique, some)))

    def return_trays(self, site: SiteView, clique: str) -> PlacementFix | None:
        """Closed trays go back into service."""
        alone = site.only(clique)
        # A tray that the gang may not use at all stays of no use when it is returned.
        closed = [tray for tray in site.cliques[clique].trays if tray.shut is not None and not tray.is_unfit]
        chosen = minimal_subset(closed, lambda some: self._fits_in_clique(_with_trays_open(alone, some)))
        if not chosen:
            return None
        why = list_names(sorted({tray.shut or "" for tray in chosen}))
        text = f"return {list_names([tray.name for tray in chosen])} to service (now: {why})"
        return PlacementFix(text=text, view=_with_trays_open(site, chosen), gang=self._gang)

    def move_jobs_away(self, site: SiteView, clique: str) -> PlacementFix | None:
        """Movable jobs go to other cliques."""
        units = [unit for unit in movable_units(site, [clique]) if all(hold.movable for hold in unit.holds)]
        chosen = self._units_to_free(site.only(clique), units)
        here = {tray.name for tray in site.cliques[clique].trays}
        moves: list[JobMove] = []
        # The largest first: they find a place the hardest.
        for unit in sorted(chosen, key=lambda unit: -unit.gpus):
            step = move_unit(site, unit, here, self._budget)
            if step is None:
                return None
            site, move = step
            moves.append(move)
        if not moves:
            return None
        text = "; ".join(move.describe() for move in moves)
        return PlacementFix(text=text, view=site, gang=self._gang, moves=tuple(moves))

    def preempt_jobs(self, site: SiteView, clique: str) -> PlacementFix | None:
        """Jobs of lower priority make way, where the gang may preempt."""
        if not self._gang.preempts:
            return None
        # A unit goes whole, so one hold that is not lower protects all of it.
        lower = [
            unit
            for unit in movable_units(site, [clique])
            if all(hold.priority < self._gang.priority for hold in unit.holds)
        ]
        return self._end_jobs(site, clique, lower, "preempt {} (lower priority, {} GPUs)")

    def await_jobs(self, site: SiteView, clique: str) -> PlacementFix | None:
        """Jobs end by themselves."""
        return self._end_jobs(site, clique, movable_units(site, [clique]), "wait until {} ends ({} GPUs)")

    def _end_jobs(
        self, site: SiteView, clique: str, units: Sequence[MovableUnit], text: str
    ) -> PlacementFix | None:
        chosen = self._units_to_free(site.only(clique), units)
        if not chosen:
            return None
        owners = list(dict.fromkeys(unit.owner for unit in chosen))
        # A job ends everywhere, not only in this clique.
        where = dict.fromkeys(name for owner in owners for name in site.cliques_of(owner))
        ended = [unit for unit in movable_units(site, where) if unit.owner in owners]
        few = len(owners) <= MAX_NAMED_JOBS
        names = " and ".join(owners) if few else list_names(owners, most=MAX_NAMED_JOBS)
        text = text.format(names, sum(unit.gpus for unit in ended))
        return PlacementFix(text=text, view=without_units(site, ended), gang=self._gang)


def minimal_subset(items: Sequence[T], is_enough: Callable[[Sequence[T]], bool]) -> list[T]:
    """Some of `items` (cheapest first) that are enough: one if one is, else a set that can spare none.

    Items are added, dearest first, until they are enough; then each is left out again if the rest is enough
    without it, the dearest first. The result is minimal, not of minimum cost: that would take exponentially
    many plans.
    """
    for item in items:
        if is_enough([item]):
            return [item]
    # Dear items free most, and a few of them are enough, and the second pass has few to try.
    chosen: list[T] = []
    for item in reversed(items):
        chosen.append(item)
        if is_enough(chosen):
            break
    else:
        return []
    for item in list(chosen):
        rest = [kept for kept in chosen if kept is not item]
        if is_enough(rest):
            chosen = rest
    return chosen


def cliques_by_shortfall(site: SiteView, gang: Gang) -> list[str]:
    """The cliques that are large enough for the largest subgroup, those that lack least first."""
    # A clique that is too small when it is empty gains nothing by any remedy.
    needed = sum(part.group.gpus * part.members for part in colocation_groups(gang)[0])
    able = [(name, inside) for name, inside in site.cliques.items() if inside.gpus >= needed]
    return [name for name, _ in nlargest(MAX_REMEDIED_CLIQUES, able, key=lambda clique: clique[1].free_gpus)]


def _with_trays_open(site: SiteView, trays: Iterable[PlacementTray]) -> SiteView:
    return site.changed(trays=[replace(tray, shut=None) for tray in trays])
