"""The partitions of a domain, sorted by whose they are.

Ours is what has a name that the records hold. Everything else is somebody else's and is left alone, except
the factory default partition, for which the site has a policy.
"""

from collections import defaultdict
from collections.abc import Collection

import msgspec

from rackloom.carve.plan.values import DEFAULT_PARTITION_ID, Intent, Observation, ObservedPartition
from rackloom.carve.plan.wishes import Wishes


class OurPartition(msgspec.Struct, frozen=True):
    """A partition that the site made."""

    partition: ObservedPartition
    logical_partition: str
    is_home: bool
    """Whether it is the one physical partition that its logical partition has, or keeps, in this domain."""
    wanted: frozenset[int]
    """The members that belong there; none where it is not the home."""


class Layout(msgspec.Struct, frozen=True):
    """Who holds what."""

    ours: tuple[OurPartition, ...]
    """By partition id."""
    home: dict[str, OurPartition]
    """Logical partition -> its home."""
    default: ObservedPartition | None
    untouchable: dict[int, ObservedPartition]
    """GPU -> the partition that holds it and that is not ours to change."""
    held: frozenset[int]
    """GPUs in any partition."""
    absent: frozenset[int]
    """Members of partitions that the controller does not list as GPUs: their tray is away or was swapped, and
    a GUID-based partition keeps their names."""


def read_layout(intent: Intent, observation: Observation, wishes: Wishes) -> Layout:
    """Sort the observed partitions by owner."""
    recorded = {one.name: one.logical_partition for one in intent.owned}
    default: ObservedPartition | None = None
    named: dict[str, list[ObservedPartition]] = defaultdict(list)
    for partition in sorted(observation.partitions, key=lambda one: one.id):
        if partition.id == DEFAULT_PARTITION_ID:
            default = partition
        elif _is_ours(partition, recorded):
            named[recorded[partition.name]].append(partition)
    ours = [one for wanted, standing in named.items() for one in _claimed(wanted, standing, wishes)]
    held = frozenset(guid for partition in observation.partitions for guid in partition.members)
    return Layout(
        ours=tuple(sorted(ours, key=lambda one: one.partition.id)),
        home={one.logical_partition: one for one in ours if one.is_home},
        default=default,
        untouchable=left_alone(intent, observation),
        held=held,
        absent=held - {gpu.guid for gpu in observation.gpus},
    )


def left_alone(intent: Intent, observation: Observation) -> dict[int, ObservedPartition]:
    """GPU -> the partition that holds it and that is not ours to change."""
    recorded = {one.name for one in intent.owned}
    return {
        guid: partition
        for partition in sorted(observation.partitions, key=lambda one: one.id)
        if partition.id != DEFAULT_PARTITION_ID and not _is_ours(partition, recorded)
        for guid in partition.members
    }


def _is_ours(partition: ObservedPartition, recorded: Collection[str]) -> bool:
    # A location-based partition under our name was made by another hand: we make none, and it takes no GUIDs
    # (NMX-C fixes the type at creation).
    return partition.name in recorded and partition.guid_based


def _claimed(logical_partition: str, standing: list[ObservedPartition], wishes: Wishes) -> list[OurPartition]:
    """The partitions of one logical partition. The one with most of its GPUs stays: the fewest are moved."""
    belonging = [
        frozenset(guid for guid in partition.members if wishes.partition_of.get(guid) == logical_partition)
        for partition in standing
    ]
    home = max(range(len(standing)), key=lambda index: (len(belonging[index]), -index))
    return [
        OurPartition(partition, logical_partition, index == home, members if index == home else frozenset())
        for index, (partition, members) in enumerate(zip(standing, belonging, strict=True))
    ]
