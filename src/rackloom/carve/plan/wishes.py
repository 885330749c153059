"""The assignments of a domain, read once: where each GPU is wanted, and which contradict each other."""

from collections import defaultdict

import msgspec

from rackloom.carve.plan.values import Intent


class Wishes(msgspec.Struct, frozen=True):
    """Where GPUs are wanted, in the order of fabric GUIDs."""

    partition_of: dict[int, str]
    """GPU -> the logical partition that it is wanted in; a tray's where the policy puts free GPUs there."""
    contradictory: dict[int, str]
    """GPU -> why nothing is done about it. Such a GPU is neither added nor taken out: either would be a
    guess about somebody's memory."""

    @property
    def assigned(self) -> frozenset[int]:
        """All GPUs that somebody was given."""
        return frozenset(self.partition_of) | frozenset(self.contradictory)


def read_wishes(intent: Intent) -> Wishes:
    """Sort the assignments of `intent` into those that can be served and those that cannot be."""
    partitions: dict[int, set[str]] = defaultdict(set)
    tenants: dict[str, set[str]] = defaultdict(set)
    for one in intent.assignments:
        partitions[one.guid].add(one.logical_partition)
        tenants[one.logical_partition].add(one.tenant)
    wanted: dict[int, str] = {}
    contradictory: dict[int, str] = {}
    for guid in sorted(partitions):
        first, *others = sorted(partitions[guid])
        if others:
            contradictory[guid] = f"assigned to logical partitions {', '.join([first, *others])} at once"
        elif len(tenants[first]) > 1:
            contradictory[guid] = f"logical partition {first} has GPUs of several tenants"
        else:
            wanted[guid] = first
    return Wishes(wanted, contradictory)
