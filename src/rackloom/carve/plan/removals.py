"""Which GPUs leave which partitions."""

from rackloom.carve.plan.blockers import Blocker, Blockers
from rackloom.carve.plan.layout import Layout, OurPartition
from rackloom.carve.plan.values import (
    DefaultPartition,
    DeletePartition,
    Intent,
    ObservedPartition,
    Operation,
    RemoveGpus,
)
from rackloom.carve.plan.wishes import Wishes


def plan_removals(intent: Intent, wishes: Wishes, layout: Layout, blockers: Blockers) -> list[Operation]:
    """Removals and deletions by partition id, the default partition (highest id) last."""
    # A GPU that is gone for good (its tray was swapped) is on no machine any more. Its name in a partition of
    # ours was put there by the site, and would keep other GPUs from joining for ever.
    touchable = intent.managed | layout.absent
    planned = [_of_ours(one, touchable, wishes, blockers) for one in layout.ours]
    if layout.default:
        planned.append(_of_default(layout.default, intent, wishes, blockers))
    return [operation for operation in planned if operation]


def _of_ours(
    one: OurPartition, touchable: frozenset[int], wishes: Wishes, blockers: Blockers
) -> Operation | None:
    excess = one.partition.members - one.wanted
    _tell_strangers(one.partition, excess - touchable, blockers)
    leaving = (excess & touchable) - wishes.contradictory.keys()
    if leaving == one.partition.members and not _waits_for_gpus(one, wishes):
        return DeletePartition(partition_id=one.partition.id, name=one.partition.name)
    return _remove(one.partition, leaving)


def _waits_for_gpus(one: OurPartition, wishes: Wishes) -> bool:
    """Whether an empty partition is to be filled."""
    if one.partition.members or not one.is_home:
        return False
    return one.logical_partition in wishes.partition_of.values()


def _of_default(
    default: ObservedPartition, intent: Intent, wishes: Wishes, blockers: Blockers
) -> Operation | None:
    """KEEP takes out what a tenant was given, so that no tenant shares it, and drained trays.

    The other policies take out everything.
    """
    if intent.default_partition is DefaultPartition.KEEP:
        leaving = intent.drained | wishes.assigned
        return _remove(default, default.members & intent.managed & leaving)
    strangers = default.members - intent.managed
    if not strangers:
        return DeletePartition(partition_id=default.id, name=default.name)
    _tell_strangers(default, strangers, blockers)
    return _remove(default, default.members & intent.managed)


def _remove(partition: ObservedPartition, guids: frozenset[int]) -> RemoveGpus | None:
    if not guids:
        return None
    return RemoveGpus(partition_id=partition.id, name=partition.name, guids=tuple(sorted(guids)))


def _tell_strangers(partition: ObservedPartition, strangers: frozenset[int], blockers: Blockers) -> None:
    if strangers:
        reason = f"partition {partition.name!r} also holds GPUs of no machine that the site knows"
        fix = "register their machines with the site, or take the GPUs out on the switch controller"
        blockers.add(Blocker(reason, fix), strangers)
