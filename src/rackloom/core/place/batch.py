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

import msgspec

from rackloom.core.place.packing import (
    ItemCliques,
    PackingAssignment,
    PackingClique,
    PackingItem,
    PairwiseImprovement,
    best_fit_decreasing,
    pack_exactly,
)
from rackloom.core.place.placement_values import Gang, GangPlan, PlacementSite
from rackloom.core.place.search.gang_search import plan_in_cliques, try_gang, with_plan_reserved
from rackloom.core.place.search.joint_assignment import SearchBudget
from rackloom.core.place.search.site_capacity import SiteCapacity
from rackloom.core.place.search.tray_assignment import colocation_groups


class BatchPlan(msgspec.Struct, frozen=True):
    """The plans, and the names of the gangs that did not fit beside them."""

    plans: tuple[GangPlan, ...]
    left_over: tuple[str, ...]


def plan_batch(site: PlacementSite, gangs: Sequence[Gang]) -> BatchPlan:
    """Plans that can all run together: as many trays as can be for the highest priority, then for the next.

    One by one, the most urgent first, each goes where it closes fewest holes. If that leaves somebody over,
    gangs of whole trays are packed together, if that places more.
    """
    plans, _ = plan_in_turn(site, gangs)
    if len(plans) < len(gangs):
        # Mostly there is one gang, or all fit one by one.

        plans = max(plans, plan_packed(site, gangs), key=lambda some: _gpus_by_priority(some, gangs))
    done = tuple(plans[gang.name] for gang in gangs if gang.name in plans)
    return BatchPlan(done, tuple(gang.name for gang in gangs if gang.name not in plans))


# One by one.


PlansByGang = dict[str, GangPlan]
"""By the name of the gang."""


def _gpus_by_priority(plans: PlansByGang, gangs: Sequence[Gang]) -> list[int]:
    """GPUs of the members that are placed, by priority, the highest first."""
    gpus = Counter[int]()
    for gang in gangs:
        members = sum(group.gpus * group.members for group in gang.groups)
        gpus[gang.priority] += members if gang.name in plans else 0
    return [gpus[priority] for priority in sorted(gpus, reverse=True)]


def plan_in_turn(site: PlacementSite, gangs: Sequence[Gang]) -> tuple[PlansByGang, PlacementSite]:
    """What fits beside each other, and the site then."""
    plans: PlansByGang = {}
    for gang in sorted(gangs, key=lambda one: -one.priority):
        plan = try_gang(site, gang, SearchBudget())
        if plan is not None:
            plans[gang.name] = plan
            site = with_plan_reserved(site, gang, plan)
    return plans, site


# Gangs of whole trays, packed together.


def plan_packed(site: PlacementSite, gangs: Sequence[Gang]) -> PlansByGang:
    """Those of whole trays together; where there are others too, priority by priority, the others last."""
    plans: PlansByGang = {}
    for some in _packing_rounds(site, gangs):
        whole = [gang for gang in some if _takes_whole_trays(site, gang)]
        cliques, items = packing_problem(site, whole)
        for gang, where in zip(whole, solve_packing(cliques, items), strict=True):
            if where is not None:
                plans[gang.name] = _plan_as_packed(site, gang, where)
                site = with_plan_reserved(site, gang, plans[gang.name])
        rest, site = plan_in_turn(site, [gang for gang in some if gang.name not in plans])
        plans |= rest
    return plans


def _packing_rounds(site: PlacementSite, gangs: Sequence[Gang]) -> list[list[Gang]]:
    """What is planned at once, the most urgent first."""
    if all(_takes_whole_trays(site, gang) for gang in gangs):
        return [list(gangs)]
    priorities = sorted({gang.priority for gang in gangs}, reverse=True)
    return [[gang for gang in gangs if gang.priority == priority] for priority in priorities]


def solve_packing(cliques: Sequence[PackingClique], items: Sequence[PackingItem]) -> PackingAssignment:
    """The best where that can be told, else a good one."""
    return (
        pack_exactly(cliques, items)
        or PairwiseImprovement(best_fit_decreasing(cliques, items)).run().result()
    )


def packing_problem(
    site: PlacementSite, gangs: Sequence[Gang]
) -> tuple[list[PackingClique], list[PackingItem]]:
    """Cliques and gangs of whole trays as the packing takes them, in their order."""
    capacity = SiteCapacity(site)
    held = {hold.tray for hold in site.holds}
    cliques = [
        PackingClique(capacity.empty[clique], any(site.trays[at].name in held for at in trays))
        for clique, trays in capacity.cliques.items()
    ]
    subgroups = [
        tuple(sum(part.members for part in subgroup) for subgroup in colocation_groups(gang))
        for gang in gangs
    ]
    weights = _priority_weights(gangs, [sum(some) for some in subgroups])
    return cliques, [
        PackingItem(some, weights[gang.priority]) for some, gang in zip(subgroups, gangs, strict=True)
    ]


def _priority_weights(gangs: Sequence[Gang], trays: Sequence[int]) -> dict[int, int]:
    """By priority: one tray is worth more than all trays of lower priorities together."""
    weights: dict[int, int] = {}
    lower = 0
    for priority in sorted({gang.priority for gang in gangs}):
        weights[priority] = lower + 1
        asked = sum(count for gang, count in zip(gangs, trays, strict=True) if gang.priority == priority)
        lower += weights[priority] * asked
    return weights


def _takes_whole_trays(site: PlacementSite, gang: Gang) -> bool:
    """Whether each member takes a tray whole, so that counting trays is enough."""
    sizes = {tray.gpus for tray in site.trays}
    serious = [group for group in gang.groups if not group.is_helper]
    choosy = any(group.terms is not None and group.terms.where for group in serious)
    counted = all(group.devices is None and {group.gpus} == sizes for group in serious)
    return gang.spares == 0 and counted and not choosy


def _plan_as_packed(site: PlacementSite, gang: Gang, where: ItemCliques) -> GangPlan:
    cliques = list(SiteCapacity(site).cliques)
    return plan_in_cliques(site, gang, [cliques[number] for number in where])
