"""Plan several gangs at once: which of them run, and in which cliques.

`plan_batch` first places the gangs one by one, by priority, each where it closes fewest free regions. If
one is left over, the gangs whose members take whole trays are packed together (`packing`), priority by
priority unless all gangs are of this kind, and the others follow one by one. The result with more GPUs
placed wins, compared by priority from the highest down; equal results keep the first.

In the packing, one tray of a priority weighs more than all trays of lower priorities together, so a gang
never yields to less urgent ones. Gangs with spares or with terms on trays are not packed, because
counting trays does not describe them.
"""

from collections import Counter
from collections.abc import Sequence

from rackloom.core.cluster.trays import Gang, GangPlan, PlacementSite
from rackloom.core.place.gang_planner import plan_in_cliques, try_gang, view_with_plan_reserved
from rackloom.core.place.search.gang_needs import colocation_groups
from rackloom.core.place.search.packing import PackingClique, PackingItem, pack
from rackloom.core.place.search.site_view import SiteCapacity, SiteView
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.core.progress import EachInTurn, in_turn


def plan_batch(
    site: PlacementSite | SiteView, gangs: Sequence[Gang], each: EachInTurn = in_turn
) -> tuple[GangPlan, ...]:
    """Plans that can all run together: most GPUs for the highest priority, then for the next.

    The gangs are planned in turn. If one is left over, gangs of whole trays are packed together, and the
    result that places more is kept. Gangs that do not fit have no plan.
    """
    view = SiteView.of(site)
    plans, _ = plan_in_turn(view, gangs, each)
    is_alone = len(gangs) == 1 and len(colocation_groups(gangs[0])) == 1
    # A gang that is one group in one clique was tried in each, so packing would find nothing else.
    if len(plans) < len(gangs) and not is_alone:
        # max() keeps the first of equals: the plans in turn close fewer free regions.
        plans = max(plans, plan_packed(view, gangs), key=lambda plans: _gpus_by_priority(plans, gangs))
    return tuple(plans[gang.name] for gang in gangs if gang.name in plans)


# In turn.


PlansByGang = dict[str, GangPlan]


def _gpus_by_priority(plans: PlansByGang, gangs: Sequence[Gang]) -> list[int]:
    """GPUs of the members that are placed, by priority, the highest first."""
    gpus = Counter({gang.priority: 0 for gang in gangs})
    for gang in gangs:
        if gang.name in plans:
            gpus[gang.priority] += sum(group.gpus * group.members for group in gang.groups)
    return [gpus[priority] for priority in sorted(gpus, reverse=True)]


def plan_in_turn(
    site: SiteView, gangs: Sequence[Gang], each: EachInTurn = in_turn
) -> tuple[PlansByGang, SiteView]:
    """A plan for each gang that fits beside those before it, the most urgent first; and the site then."""
    plans: PlansByGang = {}
    for gang in each(sorted(gangs, key=lambda gang: -gang.priority), "jobs planned"):
        plan = try_gang(site, gang, SearchBudget())
        if plan is not None:
            plans[gang.name] = plan
            site = view_with_plan_reserved(site, gang, plan)
    return plans, site


# Gangs of whole trays, packed together.


def plan_packed(site: SiteView, gangs: Sequence[Gang]) -> PlansByGang:
    """Gangs of whole trays are packed together; the others follow in turn.

    Priority by priority, unless all gangs are packed: a packing weighs the priorities itself, but a gang that
    is planned in turn must not wait for less urgent ones that are packed.
    """
    # Counting trays describes a gang only if each member takes a tray whole, whichever it is.
    sizes = {tray.gpus for inside in site.cliques.values() for tray in inside.trays}
    packable = {
        gang.name
        for gang in gangs
        if gang.spares == 0
        and all(
            group.devices is None and {group.gpus} == sizes and not (group.terms and group.terms.where)
            for group in gang.device_groups
        )
    }
    rounds = [list(gangs)]
    if not all(gang.name in packable for gang in gangs):
        priorities = sorted({gang.priority for gang in gangs}, reverse=True)
        rounds = [[gang for gang in gangs if gang.priority == priority] for priority in priorities]
    plans: PlansByGang = {}
    for waiting in rounds:
        whole = [gang for gang in waiting if gang.name in packable]
        for gang, numbers in zip(whole, pack(*packing_problem(site, whole)), strict=True):
            if numbers is not None:
                names = [site.clique_named(number) for number in numbers]
                plans[gang.name] = plan_in_cliques(site, gang, names)
                site = view_with_plan_reserved(site, gang, plans[gang.name])
        rest, site = plan_in_turn(site, [gang for gang in waiting if gang.name not in plans])
        plans |= rest
    return plans


def packing_problem(site: SiteView, gangs: Sequence[Gang]) -> tuple[list[PackingClique], list[PackingItem]]:
    """Cliques and gangs of whole trays as the packing takes them, in their order."""
    cliques = [
        PackingClique(state.shape.empty, bool(site.cliques[clique].holds))
        for clique, state in SiteCapacity(site).cliques.items()
    ]
    sizes = [
        tuple(sum(part.members for part in subgroup) for subgroup in colocation_groups(gang))
        for gang in gangs
    ]
    # One tray is worth more than all trays of lower priorities together.
    weights: dict[int, int] = {}
    lower = 0
    for priority in sorted({gang.priority for gang in gangs}):
        weights[priority] = lower + 1
        asked = sum(sum(trays) for gang, trays in zip(gangs, sizes, strict=True) if gang.priority == priority)
        lower += weights[priority] * asked
    items = [PackingItem(trays, weights[gang.priority]) for trays, gang in zip(sizes, gangs, strict=True)]
    return cliques, items
