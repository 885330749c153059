"""Plan one gang on a site.

`try_gang` runs the search and builds the plan: members in the order of the gang, helpers beside the first
member of their share, spare trays, the price in free regions, and the reason. It returns None if the gang
does not fit. `plan_or_refuse` refuses such a gang, as `gang_fixes` explains it. `gang_fits` only shows
whether a plan exists. `plan_in_cliques` builds the plan for given cliques.

`with_plan_reserved` is the site once a plan holds its trays. Trays with claimed devices are held whole,
because the allocator was not asked what is left on them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import PlacementSite, PlacementTray
from rackloom.core.place.placement_values import Gang, GangPlan, MemberAssignment
from rackloom.core.place.search.clique_search import (
    CliqueChoice,
    CliqueRequest,
    choose_cliques,
    fragmentation_price,
    regions_closed,
)
from rackloom.core.place.search.gang_needs import colocation_groups
from rackloom.core.place.search.site_view import SiteCapacity, SiteView, TrayPosition, capacity_for
from rackloom.core.place.search.tray_assignment import (
    SearchBudget,
    TrialPlacement,
    assign_best_fit,
    spare_trays,
)
from rackloom.errors import Refused


def try_gang(
    site: PlacementSite | SiteView | SiteCapacity, gang: Gang, budget: SearchBudget, *, apart: bool = False
) -> GangPlan | None:
    """The plan, or None where the gang does not fit. Raises Refused for a gang that contradicts itself.

    All plans that are tried for one gang share a `budget`, and perhaps the capacity for it. `apart`: no two
    colocation groups share a clique, as exclusive topology of LeaderWorkerSet needs.
    """
    trial = TrialPlacement(capacity_for(site, gang))
    request = CliqueRequest(colocation_groups(gang), gang.spares, apart)
    chosen = choose_cliques(trial, request, budget)
    return None if chosen is None else _gang_plan(gang, trial, chosen)


def plan_or_refuse(
    site: PlacementSite | SiteView, gang: Gang, refusal: Callable[[SiteCapacity, Gang, SearchBudget], Refused]
) -> GangPlan:
    """The plan. Raises what `refusal` makes of a gang that does not fit, and of the budget that is left."""
    capacity, budget = capacity_for(site, gang), SearchBudget()
    plan = try_gang(capacity, gang, budget)
    if plan is None:
        raise refusal(capacity, gang, budget)
    return plan


def gang_fits(capacity: SiteCapacity, gang: Gang, budget: SearchBudget) -> bool:
    """Whether there is a plan; the search stops at the first one."""
    request = CliqueRequest(colocation_groups(gang), gang.spares, fewest=False)
    return choose_cliques(TrialPlacement(capacity), request, budget) is not None


def plan_in_cliques(site: PlacementSite | SiteView, gang: Gang, cliques: Sequence[str]) -> GangPlan:
    """The plan with a given clique for each subgroup. Raises Refused where one does not fit."""
    trial = TrialPlacement(capacity_for(site, gang))
    chosen = []
    for subgroup, clique in zip(colocation_groups(gang), cliques, strict=True):
        assignments = assign_best_fit(trial, clique, subgroup)
        if assignments is None:
            raise Refused(
                f"{gang.name} does not fit in clique {clique}", nearest_fix="let its clique be chosen"
            )
        chosen.append(CliqueChoice(subgroup, clique, assignments))
    return _gang_plan(gang, trial, chosen)


def _gang_plan(gang: Gang, trial: TrialPlacement, chosen: Sequence[CliqueChoice]) -> GangPlan:
    capacity = trial.capacity
    # The cliques in the order of the members that use them, not of the search, which takes the largest first.
    first_members = {
        (choice.subgroup[0].first, choice.subgroup[0].group.name): choice.clique for choice in chosen
    }
    cliques = tuple(dict.fromkeys(clique for _, clique in sorted(first_members.items())))
    spares: list[TrayPosition] = []
    for clique in cliques if gang.spares else ():
        used = [choice.assignments for choice in chosen if choice.clique == clique]
        spares += spare_trays(trial, clique, used)[: gang.spares]
    # A spare is not empty for later gangs, so it counts in the price.
    kept = Counter(at.clique for at in spares if trial.is_empty(at))
    after = list(capacity.states.regions)
    for clique in cliques:
        empty = capacity.shape(clique).empty
        taken = empty - trial.empty(clique) + kept[clique]
        after = [now - closed for now, closed in zip(after, regions_closed(empty, taken), strict=True)]
    # The reason names the order of the aims, so that a reader sees why no other clique was taken.
    trays = {assignment.at for choice in chosen for assignment in choice.assignments}
    left = ", ".join(f"{clique} ({trial.empty(clique)} empty trays left)" for clique in cliques)
    what = f"{len(chosen)} segments on " if len(chosen) > 1 else ""
    where = f"clique {left}" if len(cliques) == 1 else f"the {len(cliques)} cliques {left}"
    aims = "fewest cliques, then fewest holes closed, then tightest fit"
    return GangPlan(
        gang=gang.name,
        seats=_member_assignments(gang, trial, chosen),
        cliques=cliques,
        spares=tuple(capacity.tray(at).name for at in spares),
        price=fragmentation_price(capacity.states.regions, after),
        reason=f"{what}{len(trays)} trays of {where}: {aims}",
    )


def _member_assignments(
    gang: Gang, trial: TrialPlacement, chosen: Sequence[CliqueChoice]
) -> tuple[MemberAssignment, ...]:
    """All members in the order of the gang; helpers are beside the first member of their share."""
    by_group: dict[str, list[MemberAssignment]] = {group.name: [] for group in gang.groups}
    for choice in chosen:
        for at, part, first, members in choice.assignments:
            tray, group = trial.capacity.tray(at).name, part.group.name
            by_group[group] += (
                MemberAssignment(group, member, tray) for member in range(first, first + members)
            )
    # The search takes the largest subgroup first, so the segments of a group may come in any order.
    for assignments in by_group.values():
        assignments.sort(key=lambda assignment: assignment.member)
    # A launcher talks to its workers, so it goes where the first of them is. Without a share of its own it
    # goes to the first group with devices.
    for helper in (group for group in gang.groups if group.is_helper):
        beside = next(
            (group for group in gang.device_groups if group.share == helper.share), gang.device_groups[0]
        )
        tray = by_group[beside.name][0].tray
        by_group[helper.name] = [
            MemberAssignment(helper.name, member, tray) for member in range(helper.members)
        ]
    return tuple(assignment for assignments in by_group.values() for assignment in assignments)


# The site once a plan holds its trays.


def with_plan_reserved(site: PlacementSite, gang: Gang, plan: GangPlan) -> PlacementSite:
    """The site with holds for the members and the spare trays."""
    used = {*plan.trays, *plan.spares}
    trays = (tray for tray in site.trays if tray.name in used)
    return PlacementSite(site.trays, (*site.holds, *_holds_of_plan(trays, gang, plan)))


def view_with_plan_reserved(view: SiteView, gang: Gang, plan: GangPlan) -> SiteView:
    """`with_plan_reserved` for a view."""
    trays = view.trays_named((*plan.trays, *plan.spares))
    return view.changed(taken=_holds_of_plan(trays, gang, plan))


def _holds_of_plan(trays: Iterable[PlacementTray], gang: Gang, plan: GangPlan) -> tuple[TrayHold, ...]:
    """Holds for the members and the spare trays; `trays`: those of the plan.

    Trays with claimed devices are held whole, those without GPUs too: the allocator was not asked what is
    left of their NICs.
    """
    whole: Mapping[str, int] = {tray.name: tray.gpus for tray in trays}
    groups = {group.name: group for group in gang.groups}
    gpus = dict.fromkeys((*plan.trays, *plan.spares), 0)
    taken, with_channel = set(plan.spares), set[str]()
    for assignment in plan.seats:
        tray, group = assignment.tray, groups[assignment.group]
        # Members without claims share a tray's GPUs. All others have the tray to themselves.
        exclusive = gang.exclusive or group.devices is not None
        gpus[tray] = whole[tray] if exclusive else min(gpus[tray] + group.gpus, whole[tray])
        taken |= {tray} if group.devices is not None else set()
        with_channel |= {tray} if group.has_channel else set()
    gpus |= {spare: whole[spare] for spare in plan.spares}
    return tuple(
        TrayHold(
            owner=gang.name,
            tray=tray,
            gpus=count,
            priority=gang.priority,
            is_whole=tray in taken,
            channel=tray in with_channel,
        )
        for tray, count in gpus.items()
        if count or tray in taken or tray in with_channel
    )


# A clique for each group of the gang.


def exclusive_cliques(site: PlacementSite, gang: Gang, budget: SearchBudget) -> tuple[str, ...]:
    """Cliques for as many of the first subgroups as fit if no two share one."""
    capacity, subgroups = capacity_for(site, gang), colocation_groups(gang)
    # Subgroups are sorted, the largest first, so what is left out in the end is the smallest.
    for count in range(len(subgroups), 0, -1):
        request = CliqueRequest(subgroups[:count], gang.spares, apart=True)
        if chosen := choose_cliques(TrialPlacement(capacity), request, budget):
            return tuple(choice.clique for choice in chosen)
    return ()


def shares_clique(gang: Gang, plan: GangPlan) -> bool:
    """Whether two subgroups of the gang are in one clique."""
    return len(plan.cliques) < len(colocation_groups(gang))


def with_cliques_closed(site: PlacementSite, cliques: Collection[str]) -> PlacementSite:
    """The site with nothing new in some of its cliques."""
    why = "in a clique that another group has to itself"
    return site.with_trays(
        lambda tray: replace(tray, shut=tray.shut or why, is_unfit=True) if tray.sharing in cliques else tray
    )
