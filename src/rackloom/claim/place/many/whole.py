"""Gangs of whole trays packed together: what fits then, though not one by one."""

from collections.abc import Sequence

from rackloom.claim.place.many.exact import best_packing
from rackloom.claim.place.many.improve import Improvement
from rackloom.claim.place.many.packing import Assignment, Clique, Item, Where, by_best_fit
from rackloom.claim.place.many.singly import Plans, one_by_one
from rackloom.claim.place.reserve import reserved
from rackloom.claim.place.search.blocks import blocks_of
from rackloom.claim.place.search.fit import plan_in
from rackloom.claim.place.search.ground import Ground
from rackloom.claim.place.values import Gang, Plan, Site


def packed(site: Site, gangs: Sequence[Gang]) -> Plans:
    """Those of whole trays together; where there are others too, priority by priority, the others last."""
    plans: Plans = {}
    for some in _in_turn(site, gangs):
        whole = [gang for gang in some if _takes_whole_trays(site, gang)]
        cliques, items = packed_as_numbers(site, whole)
        for gang, where in zip(whole, packing_of(cliques, items), strict=True):
            if where is not None:
                plans[gang.name] = _planned(site, gang, where)
                site = reserved(site, gang, plans[gang.name])
        rest, site = one_by_one(site, [gang for gang in some if gang.name not in plans])
        plans |= rest
    return plans


def _in_turn(site: Site, gangs: Sequence[Gang]) -> list[list[Gang]]:
    """What is planned at once, the most urgent first."""
    if all(_takes_whole_trays(site, gang) for gang in gangs):
        return [list(gangs)]
    priorities = sorted({gang.priority for gang in gangs}, reverse=True)
    return [[gang for gang in gangs if gang.priority == priority] for priority in priorities]


def packing_of(cliques: Sequence[Clique], items: Sequence[Item]) -> Assignment:
    """The best where that can be told, else a good one."""
    return best_packing(cliques, items) or Improvement(by_best_fit(cliques, items)).run().result()


def packed_as_numbers(site: Site, gangs: Sequence[Gang]) -> tuple[list[Clique], list[Item]]:
    """Cliques and gangs of whole trays as the packing takes them, in their order."""
    ground = Ground(site)
    held = {hold.tray for hold in site.holds}
    cliques = [
        Clique(ground.empty[clique], any(site.trays[at].name in held for at in trays))
        for clique, trays in ground.cliques.items()
    ]
    blocks = [tuple(sum(part.members for part in block) for block in blocks_of(gang)) for gang in gangs]
    weights = _weights(gangs, [sum(some) for some in blocks])
    return cliques, [Item(some, weights[gang.priority]) for some, gang in zip(blocks, gangs, strict=True)]


def _weights(gangs: Sequence[Gang], trays: Sequence[int]) -> dict[int, int]:
    """By priority: one tray is worth more than all trays of lower priorities together."""
    weights: dict[int, int] = {}
    lower = 0
    for priority in sorted({gang.priority for gang in gangs}):
        weights[priority] = lower + 1
        asked = sum(count for gang, count in zip(gangs, trays, strict=True) if gang.priority == priority)
        lower += weights[priority] * asked
    return weights


def _takes_whole_trays(site: Site, gang: Gang) -> bool:
    """Whether each member takes a tray whole, so that counting trays is enough."""
    sizes = {tray.gpus for tray in site.trays}
    serious = [group for group in gang.groups if not group.is_helper]
    choosy = any(group.terms is not None and group.terms.where for group in serious)
    counted = all(group.devices is None and {group.gpus} == sizes for group in serious)
    return gang.spares == 0 and counted and not choosy


def _planned(site: Site, gang: Gang, where: Where) -> Plan:
    cliques = list(Ground(site).cliques)
    return plan_in(site, gang, [cliques[number] for number in where])
