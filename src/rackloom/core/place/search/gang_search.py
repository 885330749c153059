"""Plan one gang on a site, or return None where it does not fit.

`try_gang` runs the search and builds the plan: members in the order of the gang, helpers beside the first
member of their share, spare trays, the price in free regions, and the reason. `gang_fits` only asks
whether a plan exists. `plan_in_cliques` builds the plan for given cliques.

`exclusive_cliques` gives each colocation group a clique that no other group of the gang uses, largest
first. This greedy order is sufficient because groups of one job are equal but for a smaller last one, and
a clique that fits a group fits any smaller one. Exclusive topology of LeaderWorkerSet needs this.

`with_plan_reserved` is the site once a plan holds its trays. Trays with claimed devices are held whole,
because the allocator was not asked what is left on them.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from rackloom.core.place.placement_values import Gang, GangPlan, MemberAssignment, PlacementSite, TrayHold
from rackloom.core.place.search.clique_ranking import fragmentation_price
from rackloom.core.place.search.clique_search import CliqueChoice, can_choose_cliques, choose_cliques
from rackloom.core.place.search.joint_assignment import SearchBudget
from rackloom.core.place.search.site_capacity import SiteCapacity, capacity_for
from rackloom.core.place.search.tray_assignment import (
    ColocationGroup,
    TrialPlacement,
    assign_best_fit,
    colocation_groups,
    spare_trays,
)
from rackloom.errors import Refused


def try_gang(site: PlacementSite, gang: Gang, effort: SearchBudget) -> GangPlan | None:
    """The plan, or None where the gang does not fit. Raises Refused for a gang that cannot be meant.

    `effort` is taken from, and is shared by all plans that are tried for the sake of one gang.
    """
    return try_gang_on(capacity_for(site, gang), gang, effort)


def try_gang_on(ground: SiteCapacity, gang: Gang, effort: SearchBudget) -> GangPlan | None:
    """The same on the ground of a gang of that name, for whoever asks it more than that."""
    board = TrialPlacement(ground)
    chosen = choose_cliques(board, colocation_groups(gang), gang.spares, effort)
    return None if chosen is None else _gang_plan(gang, board, chosen)


def gang_fits(ground: SiteCapacity, gang: Gang, effort: SearchBudget) -> bool:
    """Whether there is a plan; the best is not looked for."""
    return can_choose_cliques(TrialPlacement(ground), colocation_groups(gang), gang.spares, effort)


def plan_in_cliques(site: PlacementSite, gang: Gang, cliques: Sequence[str]) -> GangPlan:
    """The plan with a given clique for each block. Raises Refused where a block does not fit in its own."""
    board = TrialPlacement(capacity_for(site, gang))
    chosen = []
    for block, clique in zip(colocation_groups(gang), cliques, strict=True):
        sitting = assign_best_fit(board, clique, block)
        if sitting is None:
            raise Refused(
                f"{gang.name} does not fit in clique {clique}", nearest_fix="let its clique be chosen"
            )
        chosen.append(CliqueChoice(block, clique, sitting))
    return _gang_plan(gang, board, chosen)


def _gang_plan(gang: Gang, board: TrialPlacement, chosen: Sequence[CliqueChoice]) -> GangPlan:
    ground = board.ground
    cliques = tuple(dict.fromkeys(one.clique for one in sorted(chosen, key=_first_member)))
    spares = [at for clique in cliques for at in _spares_in_clique(board, clique, chosen)[: gang.spares]]
    kept = Counter(ground.clique[at] for at in spares if board.is_empty(at))
    after = [board.empty(clique) - kept[clique] for clique in ground.cliques]
    return GangPlan(
        gang=gang.name,
        seats=_member_assignments(gang, board, chosen),
        cliques=cliques,
        spares=tuple(ground.trays[at].name for at in spares),
        price=fragmentation_price(list(ground.empty.values()), after),
        reason=_plan_reason(board, chosen, cliques),
    )


def _spares_in_clique(board: TrialPlacement, clique: str, chosen: Sequence[CliqueChoice]) -> list[int]:
    return spare_trays(board, clique, [one.sitting for one in chosen if one.clique == clique])


def _member_assignments(
    gang: Gang, board: TrialPlacement, chosen: Sequence[CliqueChoice]
) -> tuple[MemberAssignment, ...]:
    """All seats in the order of the gang; helpers stand beside the first member of their share."""
    taken = sorted(
        (
            MemberAssignment(place.part.group.name, member, board.ground.trays[place.at].name)
            for one in chosen
            for place in one.sitting
            for member in range(place.first, place.first + place.members)
        ),
        key=lambda seat: seat.member,
    )
    by_group = {group.name: [seat for seat in taken if seat.group == group.name] for group in gang.groups}
    serious = [group for group in gang.groups if not group.is_helper]
    for group in gang.groups:
        if group.is_helper:
            beside = next((one for one in serious if one.share == group.share), serious[0])
            tray = by_group[beside.name][0].tray
            by_group[group.name] = [
                MemberAssignment(group.name, member, tray) for member in range(group.members)
            ]
    return tuple(seat for seats in by_group.values() for seat in seats)


def _first_member(chosen: CliqueChoice) -> tuple[int, str]:
    part = chosen.block[0]
    return part.first, part.group.name


def _plan_reason(board: TrialPlacement, chosen: Sequence[CliqueChoice], cliques: Sequence[str]) -> str:
    trays = {place.at for one in chosen for place in one.sitting}
    left = ", ".join(f"{clique} ({board.empty(clique)} empty trays left)" for clique in cliques)
    what = f"{len(chosen)} segments on " if len(chosen) > 1 else ""
    where = f"clique {left}" if len(cliques) == 1 else f"the {len(cliques)} cliques {left}"
    return f"{what}{len(trays)} trays of {where}: fewest cliques, then fewest holes closed, then tightest fit"


# The site once a plan holds its trays.


def with_plan_reserved(site: PlacementSite, gang: Gang, plan: GangPlan) -> PlacementSite:
    """The site with the members seated and the spare trays kept.

    Trays with claimed devices are taken whole, those without GPUs too: what is left of their NICs was not
    asked.
    """
    whole = {tray.name: tray.gpus for tray in site.trays}
    groups = {group.name: group for group in gang.groups}
    gpus = dict.fromkeys((*plan.trays, *plan.spares), 0)
    for seat in plan.seats:
        group = groups[seat.group]
        if gang.exclusive or group.devices is not None:
            gpus[seat.tray] = whole[seat.tray]
        else:
            gpus[seat.tray] = min(gpus[seat.tray] + group.gpus, whole[seat.tray])
    gpus |= {spare: whole[spare] for spare in plan.spares}
    taken = {*plan.spares, *(seat.tray for seat in plan.seats if groups[seat.group].devices is not None)}
    linked = {seat.tray for seat in plan.seats if groups[seat.group].has_channel}
    mine = tuple(
        TrayHold(
            owner=gang.name,
            tray=tray,
            gpus=count,
            priority=gang.priority,
            is_whole=tray in taken,
            channel=tray in linked,
        )
        for tray, count in gpus.items()
        if count or tray in taken or tray in linked
    )
    return PlacementSite(site.trays, (*site.holds, *mine))


# A clique for each group of the gang.


def plan_exclusive_cliques(site: PlacementSite, gang: Gang, effort: SearchBudget) -> GangPlan | None:
    """The plan, or None where there are too few cliques."""
    cliques = exclusive_cliques(site, gang, effort)
    return plan_in_cliques(site, gang, cliques) if len(cliques) == len(colocation_groups(gang)) else None


def exclusive_cliques(site: PlacementSite, gang: Gang, effort: SearchBudget) -> list[str]:
    """A clique for each block, the largest first, up to the first block that finds none.

    Whatever clique takes a block could have taken any smaller one, so none is taken from a block that needs
    it: replicas and segments of one job are alike but for a smaller last one.
    """
    cliques: list[str] = []
    for block in colocation_groups(gang):
        plan = try_gang(with_cliques_closed(site, cliques), _gang_of_one(gang, block), effort)
        if plan is None:
            break
        cliques += plan.cliques
    return cliques


def shares_clique(gang: Gang, plan: GangPlan) -> bool:
    """Whether two blocks of the gang are in one clique."""
    return len(plan.cliques) < len(colocation_groups(gang))


def with_cliques_closed(site: PlacementSite, cliques: Collection[str]) -> PlacementSite:
    """The site with nothing new in some of its cliques."""
    why = "in a clique that another group has to itself"
    trays = tuple(
        replace(tray, shut=tray.shut or why, is_unfit=True) if tray.sharing in cliques else tray
        for tray in site.trays
    )
    return PlacementSite(trays, site.holds)


def _gang_of_one(gang: Gang, block: ColocationGroup) -> Gang:
    groups = tuple(replace(part.group, members=part.members, share="") for part in block)
    return replace(gang, groups=groups, segment=None)
