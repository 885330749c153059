"""Many gangs at once: which of them run, and in which clique each."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rackloom.claim.place.many.exact import best_packing
from rackloom.claim.place.many.improve import Improvement
from rackloom.claim.place.many.packing import Assignment, Clique, Item, Where, by_best_fit
from rackloom.claim.place.reserve import reserved
from rackloom.claim.place.search.blocks import blocks_of
from rackloom.claim.place.search.board import Board
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import plan_in, try_gang
from rackloom.claim.place.values import Gang, Plan, Site

Plans = dict[str, Plan]
"""By the name of the gang."""


class Batch(msgspec.Struct, frozen=True):
    """The plans, and the names of the gangs that did not fit beside them."""

    plans: tuple[Plan, ...]
    left_over: tuple[str, ...]


def plan_batch(site: Site, gangs: Sequence[Gang]) -> Batch:
    """Plans that can all run together: as many trays as can be for the highest priority, then for the next.

    One by one, the most urgent first, each goes where it closes fewest holes. If that leaves somebody over,
    gangs of whole trays are packed together, if that places more.
    """
    plans, _ = _one_by_one(site, gangs)
    if len(plans) < len(gangs):
        plans = max(plans, _packed(site, gangs), key=lambda some: _placed(some, gangs))
    done = tuple(plans[gang.name] for gang in gangs if gang.name in plans)
    return Batch(done, tuple(gang.name for gang in gangs if gang.name not in plans))


def _one_by_one(site: Site, gangs: Sequence[Gang]) -> tuple[Plans, Site]:
    """What fits beside each other, and the site then."""
    plans: Plans = {}
    for gang in sorted(gangs, key=lambda one: -one.priority):
        plan = try_gang(site, gang, Effort())
        if plan is not None:
            plans[gang.name] = plan
            site = reserved(site, gang, plan)
    return plans, site


def _packed(site: Site, gangs: Sequence[Gang]) -> Plans:
    """Those of whole trays together; where there are others too, priority by priority, the others last."""
    plans: Plans = {}
    for some in _in_turn(site, gangs):
        whole = [gang for gang in some if _takes_whole_trays(site, gang)]
        cliques, items = packed_as_numbers(site, whole)
        for gang, where in zip(whole, packing_of(cliques, items), strict=True):
            if where is not None:
                plans[gang.name] = _planned(site, gang, where)
                site = reserved(site, gang, plans[gang.name])
        rest, site = _one_by_one(site, [gang for gang in some if gang.name not in plans])
        plans |= rest
    return plans


def _placed(plans: Plans, gangs: Sequence[Gang]) -> list[int]:
    """GPUs of the members that are placed, by priority, the highest first."""
    gpus = Counter[int]()
    for gang in gangs:
        members = sum(group.gpus * group.members for group in gang.groups)
        gpus[gang.priority] += members if gang.name in plans else 0
    return [gpus[priority] for priority in sorted(gpus, reverse=True)]


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
    board = Board(site)
    held = {hold.tray for hold in site.holds}
    cliques = [
        Clique(board.empty(clique), any(board.trays[at].name in held for at in board.positions(clique)))
        for clique in board.cliques
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
    return gang.spares == 0 and all(group.devices is None and {group.gpus} == sizes for group in serious)


def _planned(site: Site, gang: Gang, where: Where) -> Plan:
    cliques = list(Board(site).cliques)
    return plan_in(site, gang, [cliques[number] for number in where])
