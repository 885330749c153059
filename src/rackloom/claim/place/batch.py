"""Many gangs at once: which of them run, and in which clique each."""

from collections.abc import Sequence

import msgspec

from rackloom.claim.place.blocks import blocks_of
from rackloom.claim.place.board import Board
from rackloom.claim.place.exact import best_packing
from rackloom.claim.place.fit import plan_in, try_gang
from rackloom.claim.place.improve import Improvement
from rackloom.claim.place.packing import Assignment, Item, Room, Where, by_best_fit
from rackloom.claim.place.reserve import reserved
from rackloom.claim.place.values import Gang, Plan, Site


class Batch(msgspec.Struct, frozen=True):
    """The plans, and the names of the gangs that did not fit beside them."""

    plans: tuple[Plan, ...]
    left_over: tuple[str, ...]


def plan_batch(site: Site, gangs: Sequence[Gang]) -> Batch:
    """Plans that can all run together. A tray of one priority counts as one more than of the next lower.

    Gangs of whole trays are packed together; others are placed one by one into what these leave, highest
    priority first.
    """
    packed = [gang for gang in gangs if _is_packed(site, gang)]
    rooms, items = packed_as_numbers(site, packed)
    plans: dict[str, Plan] = {}
    for gang, where in zip(packed, packing_of(rooms, items), strict=True):
        if where is not None:
            plans[gang.name] = _planned(site, gang, where)
            site = reserved(site, gang, plans[gang.name])
    for gang in sorted(gangs, key=lambda one: -one.priority):
        if gang.name not in plans and (plan := try_gang(site, gang)) is not None:
            plans[gang.name] = plan
            site = reserved(site, gang, plan)
    done = tuple(plans[gang.name] for gang in gangs if gang.name in plans)
    return Batch(done, tuple(gang.name for gang in gangs if gang.name not in plans))


def packing_of(rooms: Sequence[Room], items: Sequence[Item]) -> Assignment:
    """The best where that can be told, else a good one."""
    return best_packing(rooms, items) or Improvement(by_best_fit(rooms, items)).run().result()


def packed_as_numbers(site: Site, gangs: Sequence[Gang]) -> tuple[list[Room], list[Item]]:
    """Cliques and gangs of whole trays as the packing takes them, in their order."""
    board = Board(site)
    held = {hold.tray for hold in site.holds}
    rooms = [
        Room(board.empty(clique), any(board.trays[at].name in held for at in board.positions(clique)))
        for clique in board.cliques
    ]
    ranks = {priority: rank for rank, priority in enumerate(sorted({gang.priority for gang in gangs}), 1)}
    items = [
        Item(tuple(sum(part.members for part in block) for block in blocks_of(gang)), ranks[gang.priority])
        for gang in gangs
    ]
    return rooms, items


def _is_packed(site: Site, gang: Gang) -> bool:
    """Whether each member takes a tray whole, so that counting trays is enough."""
    sizes = {tray.gpus for tray in site.trays}
    serious = [group for group in gang.groups if not group.is_helper]
    return gang.spares == 0 and all(group.devices is None and {group.gpus} == sizes for group in serious)


def _planned(site: Site, gang: Gang, where: Where) -> Plan:
    cliques = list(Board(site).cliques)
    return plan_in(site, gang, [cliques[number] for number in where])
