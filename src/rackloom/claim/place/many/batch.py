"""Many gangs at once: which of them run, and in which clique each."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rackloom.claim.place.many.singly import Plans, one_by_one
from rackloom.claim.place.values import Gang, Plan, Site


class Batch(msgspec.Struct, frozen=True):
    """The plans, and the names of the gangs that did not fit beside them."""

    plans: tuple[Plan, ...]
    left_over: tuple[str, ...]


def plan_batch(site: Site, gangs: Sequence[Gang]) -> Batch:
    """Plans that can all run together: as many trays as can be for the highest priority, then for the next.

    One by one, the most urgent first, each goes where it closes fewest holes. If that leaves somebody over,
    gangs of whole trays are packed together, if that places more.
    """
    plans, _ = one_by_one(site, gangs)
    if len(plans) < len(gangs):
        # Mostly there is one gang, or all fit one by one.
        from rackloom.claim.place.many.whole import packed

        plans = max(plans, packed(site, gangs), key=lambda some: _placed(some, gangs))
    done = tuple(plans[gang.name] for gang in gangs if gang.name in plans)
    return Batch(done, tuple(gang.name for gang in gangs if gang.name not in plans))


def _placed(plans: Plans, gangs: Sequence[Gang]) -> list[int]:
    """GPUs of the members that are placed, by priority, the highest first."""
    gpus = Counter[int]()
    for gang in gangs:
        members = sum(group.gpus * group.members for group in gang.groups)
        gpus[gang.priority] += members if gang.name in plans else 0
    return [gpus[priority] for priority in sorted(gpus, reverse=True)]
