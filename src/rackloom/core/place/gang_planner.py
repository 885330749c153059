"""Plan one gang, or refuse it with the shortage and the nearest fix that was found to work.

`plan_gang` first searches for a plan. If there is none, `describe_shortage` names what was asked, the
clique that comes nearest, and what blocks its other trays. `find_fixes` then yields fixes, nearest first;
each was planned before it is named:

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from rackloom.core.place.job_moves import (
    JobMove,
    MovableUnit,
    list_names,
    movable_units,
    move_unit,
    without_units,
)
from rackloom.core.place.placement_values import (
    Gang,
    GangGroup,
    GangPlan,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
    SchedulerLabels,
    TrayHold,
)
from rackloom.core.place.search.clique_search import can_choose_cliques
from rackloom.core.place.search.gang_search import gang_fits, try_gang_on
from rackloom.core.place.search.joint_assignment import SearchBudget
from rackloom.core.place.search.site_capacity import MemberNeed, SiteCapacity, capacity_for
from rackloom.core.place.search.tray_assignment import (
    ColocationGroup,
    MemberRange,
    TrialPlacement,
    colocation_groups,
)
from rackloom.errors import Refused

# The entry point.


def plan_gang(site: PlacementSite, gang: Gang) -> GangPlan:
    """A seat for every member. Raises Refused with the shortage, and with a fix that was planned, if any."""
    ground, effort = capacity_for(site, gang), SearchBudget()
    plan = try_gang_on(ground, gang, effort)
    if plan is None:
        fix = next(find_fixes(ground, gang, effort), None)
        raise Refused(describe_shortage(ground, gang), nearest_fix=None if fix is None else fix.text)
    return plan


# Why a gang does not fit, in one sentence.


MAX_NAMED_TRAYS = 3
"""Trays that a sentence names; it counts the others."""


def describe_shortage(ground: SiteCapacity, gang: Gang, clique_label: str = SchedulerLabels().clique) -> str:
    """What is asked for, the most that one clique has of it, and what is in the way there."""
    blocks = colocation_groups(gang)
    best = nearest_clique(ground, blocks[0])
    if best is None:
        return f"{_request_text(gang, blocks)}, but the site has no tray with GPUs"
    if all(tray.is_unfit for tray in ground.trays):
        why = ", ".join(dict.fromkeys(tray.shut or "" for tray in ground.trays))
        return f"{_request_text(gang, blocks)}, but it may use none of the {len(ground.trays)} nodes ({why})"
    has = _capacity_text(ground, best, blocks[0])
    found = f"{_request_text(gang, blocks)}; the nearest, clique {best}, has room for {has}"
    spare = f" and is to keep {gang.spares} spare" if gang.spares else ""
    blocking = ", ".join(blocking_trays(ground, best, blocks[0][0].need))
    alone = "" if has_cliques(ground.site) else f"; no node carries {clique_label}, so each is a clique alone"
    return f"{found}{spare}" + (f": {blocking}" if blocking else "") + alone


def has_cliques(site: PlacementSite) -> bool:
    """Whether any node says to which clique it belongs: without its label nobody shares memory."""
    return any(tray.clique is not None for tray in site.trays)


def nearest_clique(ground: SiteCapacity, block: ColocationGroup) -> str | None:
    """The clique that can serve most of the block."""
    return max(ground.cliques, key=lambda clique: _members_served(ground, clique, block), default=None)


def blocking_trays(ground: SiteCapacity, clique: str, need: MemberNeed) -> Iterator[str]:
    """Trays of the clique that cannot serve a member, with the reason."""
    owners: dict[str, list[str]] = {}
    for hold in ground.site.holds:
        owners.setdefault(hold.tray, []).append(hold.owner)
    why = Counter[str]()
    named: dict[str, list[str]] = {}
    slots = ground.slots(need)
    for at in ground.cliques[clique]:
        if slots[at]:
            continue
        tray = ground.trays[at]
        text = _why_unusable(ground, at, need.terms, sorted(set(owners.get(tray.name, []))))
        why[text] += 1
        named.setdefault(text, []).append(tray.name)
    for text, count in why.most_common():
        more = f" and {count - MAX_NAMED_TRAYS} more" if count > MAX_NAMED_TRAYS else ""
        yield f"{', '.join(named[text][:MAX_NAMED_TRAYS])}{more} ({text})"


def _why_unusable(ground: SiteCapacity, at: int, terms: PlacementTerms | None, owners: Sequence[str]) -> str:
    tray, by = ground.trays[at], f" by {' and '.join(owners)}" if owners else ""
    if tray.shut is not None:
        return tray.shut
    if terms is not None and terms.where in tray.closed:
        return tray.closed[terms.where]
    if terms is not None and (barred := ground.why_barred(at, terms)) is not None:
        return f"{barred}{by}"
    return f"in use{by}" if owners else "has too few devices for a member"


def _members_served(ground: SiteCapacity, clique: str, block: ColocationGroup) -> int:
    return sum([min(_clique_capacity(ground, clique, part), part.members) for part in block])


def _capacity_text(ground: SiteCapacity, clique: str, block: ColocationGroup) -> str:
    return " and ".join(
        f"{_clique_capacity(ground, clique, part)} of {part.members} {part.group.name}" for part in block
    )


def _clique_capacity(ground: SiteCapacity, clique: str, part: MemberRange) -> int:
    return ground.outlooks(part.need)[clique].capacity


def _request_text(gang: Gang, blocks: list[ColocationGroup]) -> str:
    groups = [group for group in gang.groups if not group.is_helper]
    asked = " and ".join(_group_text(group) for group in groups)
    if len(blocks) == 1:
        return f"{gang.name} asks for {asked} in one clique"
    return f"{gang.name} asks for {asked} in {len(blocks)} segments, each in one clique"


def _group_text(group: GangGroup) -> str:
    devices = f"{group.gpus} GPUs" if group.gpus else "devices" if group.devices else "an IMEX channel"
    return f"{group.members} {group.name} with {devices} each"


# Fixes, nearest first.


OFFERED_SEGMENTS = (16, 8, 4, 2, 1)
"""Segments that are offered: 16 of an NVL72's 18 trays, then its halves."""


class PlacementFix(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the request or of the site, with which the gang was found to fit."""

    text: str
    site: PlacementSite
    gang: Gang
    moves: tuple[JobMove, ...] = ()


def find_fixes(ground: SiteCapacity, gang: Gang, effort: SearchBudget) -> Iterator[PlacementFix]:
    """The request is eased first; then nothing that runs is lost; then something is.

    `effort`: what the gang itself, which was tried before on the same ground, has left of it.
    """
    yield from _relaxed_request(ground, _fewer_spares(ground, gang, effort), effort)
    cliques = cliques_by_shortfall(ground.site, gang)
    for remedy in (return_trays, move_jobs_away):
        yield from _remedied_clique(ground.site, cliques, gang, remedy, effort)
    # Where no node tells its clique, segments of one would hide that its label is missing.
    segmented = _smaller_segments(gang) if has_cliques(ground.site) else ()
    yield from _relaxed_request(ground, [*_clique_per_group(gang), *segmented], effort)
    yield from _remedied_clique(ground.site, cliques, gang, preempt_jobs, effort)
    yield from _relaxed_request(ground, _fewer_members(ground, gang), effort)
    yield from _remedied_clique(ground.site, cliques, gang, await_jobs, effort)


def _relaxed_request(
    ground: SiteCapacity, wishes: Iterable[tuple[str, Gang]], effort: SearchBudget
) -> Iterator[PlacementFix]:
    """The first wish of the list that fits."""
    for text, wish in wishes:
        if gang_fits(ground, wish, effort):
            yield PlacementFix(text=text, site=ground.site, gang=wish)
            return


# Remedies of one clique.


class RemediedSite(NamedTuple):
    """The site afterwards, what was done in words, and its moves."""

    site: PlacementSite
    text: str
    moves: tuple[JobMove, ...] = ()


Remedy = Callable[[PlacementSite, PlacementSite, Gang, SearchBudget], RemediedSite | None]
"""Makes room for the first block of a gang in the second argument, a clique; None where it cannot."""


def _remedied_clique(
    site: PlacementSite, cliques: Sequence[PlacementSite], gang: Gang, remedy: Remedy, effort: SearchBudget
) -> Iterator[PlacementFix]:
    """One of the cliques cured if that is enough, else several."""
    cured = [one for clique in cliques if (one := remedy(site, clique, gang, effort)) is not None]
    for one in cured:
        if gang_fits(capacity_for(one.site, gang), gang, effort):
            yield PlacementFix(text=one.text, site=one.site, gang=gang, moves=one.moves)
            return
    if len(cured) > 1:
        yield from _remedied_cliques(site, gang, remedy, effort)


def _remedied_cliques(
    site: PlacementSite, gang: Gang, remedy: Remedy, effort: SearchBudget
) -> Iterator[PlacementFix]:
    """For segments, of which each may need a clique that is cured."""
    done = RemediedSite(site, "")
    for number in range(MAX_REMEDIED_CLIQUES):
        one = next(
            (
                found
                for clique in cliques_by_shortfall(done.site, gang)
                if not fits_in_clique(clique, gang, effort)
                and (found := remedy(done.site, clique, gang, effort)) is not None
            ),
            None,
        )
        if one is None:
            return
        text = f"{done.text}; {one.text}" if number else one.text
        done = RemediedSite(one.site, text, (*done.moves, *one.moves))
        if gang_fits(capacity_for(done.site, gang), gang, effort):
            yield PlacementFix(text=done.text, site=done.site, gang=gang, moves=done.moves)
            return


def _fewer_spares(ground: SiteCapacity, gang: Gang, effort: SearchBudget) -> Iterator[tuple[str, Gang]]:
    """The most spares with which it fits; where some fit, fewer do."""
    wishes = [replace(gang, spares=spares) for spares in range(min(gang.spares, _largest_clique(ground) + 1))]
    fitting = bisect_left(wishes, True, key=lambda wish: not gang_fits(ground, wish, effort))
    if fitting:
        wish = wishes[fitting - 1]
        yield f"keep {wish.spares} spare trays instead of {gang.spares}", wish


def _largest_clique(ground: SiteCapacity) -> int:
    """Trays of the largest clique."""
    return max(map(len, ground.cliques.values()), default=0)


def _clique_per_group(gang: Gang) -> Iterator[tuple[str, Gang]]:
    shares = [group.share for group in gang.groups if not group.is_helper]
    if gang.segment is None and len(set(shares)) < len(shares):
        groups = tuple(replace(group, share=group.name) for group in gang.groups)
        yield "let each group have a clique of its own", replace(gang, groups=groups)


def _smaller_segments(gang: Gang) -> Iterator[tuple[str, Gang]]:
    largest = max(group.members for group in gang.groups if not group.is_helper)
    for segment in OFFERED_SEGMENTS:
        if segment < min(largest, gang.segment or largest):
            text = f"cut it into segments of {segment}: GPUs of different segments share no memory"
            yield text, replace(gang, segment=segment)


def _fewer_members(ground: SiteCapacity, gang: Gang) -> Iterator[tuple[str, Gang]]:
    """The most members that fit, where one group alone takes devices."""
    serious = [group for group in gang.groups if not group.is_helper]
    if len(serious) > 1:
        return
    only = serious[0]
    capacities = [outlook.capacity for outlook in ground.outlooks(MemberNeed.of(only)).values()]
    if gang.segment is None:
        most = max(capacities, default=0)
    else:
        most = sum(capacity // gang.segment * gang.segment for capacity in capacities)
    least = max(0, most - min(gang.spares, _largest_clique(ground)) - 1)
    for members in range(min(most, only.members - 1), least, -1):
        yield f"ask for {members} {only.name} instead of {only.members}", _with_members(gang, only, members)


def _with_members(gang: Gang, only: GangGroup, members: int) -> Gang:
    groups = tuple(replace(group, members=members) if group is only else group for group in gang.groups)
    return replace(gang, groups=groups)


MAX_REMEDIED_CLIQUES = 4
"""Cliques for which a cure is looked for: those that lack least."""

MAX_NAMED_JOBS = 3
"""Jobs that a fix names; it counts the others."""

T = TypeVar("T")


def return_trays(
    site: PlacementSite, clique: PlacementSite, gang: Gang, effort: SearchBudget
) -> RemediedSite | None:
    """Trays that are shut go back into service."""
    shut = [tray for tray in clique.trays if tray.shut is not None and not tray.is_unfit]
    chosen = minimal_subset(
        shut, lambda some: fits_in_clique(PlacementSite(_reopened(clique, some), clique.holds), gang, effort)
    )
    if not chosen:
        return None
    why = sorted({tray.shut or "" for tray in chosen})
    text = f"return {list_names([tray.name for tray in chosen])} to service (now: {list_names(why)})"
    return RemediedSite(PlacementSite(_reopened(site, chosen), site.holds), text)


def move_jobs_away(
    site: PlacementSite, clique: PlacementSite, gang: Gang, effort: SearchBudget
) -> RemediedSite | None:
    """Movable jobs go to other cliques."""
    units = [unit for unit in movable_units(clique) if all(hold.movable for hold in unit.holds)]
    chosen = minimal_subset(units, lambda some: fits_in_clique(without_units(clique, some), gang, effort))
    if not chosen:
        return None
    here = {tray.name for tray in clique.trays}
    done: list[JobMove] = []
    for unit in sorted(chosen, key=lambda one: -one.gpus):
        step = move_unit(site, unit, here, effort)
        if step is None:
            return None
        site = step[0]
        done.append(step[1])
    return RemediedSite(site, "; ".join(move.told() for move in done), tuple(done))


def preempt_jobs(
    site: PlacementSite, clique: PlacementSite, gang: Gang, effort: SearchBudget
) -> RemediedSite | None:
    """Jobs of lower priority make way, where the gang may preempt."""
    if not gang.preempts:
        return None
    lower = [
        unit for unit in movable_units(clique) if all(hold.priority < gang.priority for hold in unit.holds)
    ]
    return _end_jobs(site, clique, gang, effort, lower, "preempt {} (lower priority, {} GPUs)")


def await_jobs(
    site: PlacementSite, clique: PlacementSite, gang: Gang, effort: SearchBudget
) -> RemediedSite | None:
    """Jobs end."""
    return _end_jobs(site, clique, gang, effort, movable_units(clique), "wait until {} ends ({} GPUs)")


def cliques_by_shortfall(site: PlacementSite, gang: Gang) -> list[PlacementSite]:
    """The cliques that are large enough for the first block, as sites of their own, least lacking first."""
    block = colocation_groups(gang)[0]
    gpus = sum(part.group.gpus * part.members for part in block)
    sites = [one for one in _site_per_clique(site) if sum(tray.gpus for tray in one.trays) >= gpus]
    return sorted(sites, key=_free_gpus, reverse=True)[:MAX_REMEDIED_CLIQUES]


def fits_in_clique(clique: PlacementSite, gang: Gang, effort: SearchBudget) -> bool:
    """Whether the first block of a gang fits in the clique that the site is."""
    block: ColocationGroup = colocation_groups(gang)[0]
    return can_choose_cliques(TrialPlacement(capacity_for(clique, gang)), [block], gang.spares, effort)


def minimal_subset(items: Sequence[T], enough: Callable[[Sequence[T]], bool]) -> list[T]:
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


def _end_jobs(
    site: PlacementSite,
    clique: PlacementSite,
    gang: Gang,
    effort: SearchBudget,
    units: Sequence[MovableUnit],
    text: str,
) -> RemediedSite | None:
    chosen = minimal_subset(units, lambda some: fits_in_clique(without_units(clique, some), gang, effort))
    if not chosen:
        return None
    owners = list(dict.fromkeys(unit.owner for unit in chosen))
    ended = [unit for unit in movable_units(site) if unit.owner in owners]
    names = " and ".join(owners) if len(owners) <= MAX_NAMED_JOBS else list_names(owners, most=MAX_NAMED_JOBS)
    return RemediedSite(without_units(site, ended), text.format(names, sum(unit.gpus for unit in ended)))


def _reopened(site: PlacementSite, trays: Iterable[PlacementTray]) -> tuple[PlacementTray, ...]:
    names = {tray.name for tray in trays}
    return tuple(
        msgspec.structs.replace(tray, shut=None) if tray.name in names else tray for tray in site.trays
    )


def _site_per_clique(site: PlacementSite) -> list[PlacementSite]:
    trays: dict[str, list[PlacementTray]] = {}
    clique_of: dict[str, str] = {}
    for tray in site.trays:
        clique_of[tray.name] = tray.sharing
        trays.setdefault(clique_of[tray.name], []).append(tray)
    holds: dict[str, list[TrayHold]] = {name: [] for name in trays}
    for hold in site.holds:
        if hold.tray in clique_of:
            holds[clique_of[hold.tray]].append(hold)
    return [PlacementSite(tuple(trays[name]), tuple(holds[name])) for name in trays]


def _free_gpus(clique: PlacementSite) -> int:
    open_gpus = sum(tray.gpus for tray in clique.trays if tray.shut is None)
    return open_gpus - sum(hold.gpus for hold in clique.holds)
