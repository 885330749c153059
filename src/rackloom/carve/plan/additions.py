"""Which GPUs join which partitions, once nothing is left to be removed."""

from collections import defaultdict

from rackloom.carve.plan.blockers import Blocker, Blockers
from rackloom.carve.plan.layout import Layout, OurPartition
from rackloom.carve.plan.names import flaw, partition_name
from rackloom.carve.plan.values import (
    AddGpus,
    CreatePartition,
    DefaultPartition,
    GpuHealth,
    Intent,
    Observation,
    Operation,
)
from rackloom.carve.plan.wishes import Wishes


def plan_additions(
    intent: Intent,
    observation: Observation,
    wishes: Wishes,
    layout: Layout,
    blocked: frozenset[int],
    blockers: Blockers,
) -> list[Operation]:
    """Additions in the order of logical partitions, the default partition last.

    `blocked` are GPUs that are told of already; what else stands in the way is added to `blockers`.
    """
    namer = _Namer(intent, observation)
    planned: list[Operation] = []
    for logical_partition, guids in _joining(wishes, layout, blocked):
        home = layout.home.get(logical_partition)
        step = _join(home, guids) if home else namer.create(logical_partition, guids)
        if isinstance(step, Blocker):
            blockers.add(step, frozenset(guids))
        else:
            planned.append(step)
    return planned + _return_to_default(intent, observation, wishes, layout)


def _joining(wishes: Wishes, layout: Layout, blocked: frozenset[int]) -> list[tuple[str, tuple[int, ...]]]:
    joining: dict[str, list[int]] = defaultdict(list)
    for guid, logical_partition in wishes.partition_of.items():
        if guid not in layout.held and guid not in blocked:
            joining[logical_partition].append(guid)
    return sorted((name, tuple(guids)) for name, guids in joining.items())


def _join(home: OurPartition, guids: tuple[int, ...]) -> AddGpus | Blocker:
    partition = home.partition
    if strangers := len(partition.members - home.wanted):
        # Who they belong to is not known: joining them would share memory with nobody knows whom.
        return Blocker(
            f"partition {partition.name!r} holds {strangers} GPUs that do not belong there and that the "
            "site may not take out",
            "take those GPUs out on the switch controller, or correct their assignment",
        )
    return AddGpus(partition_id=partition.id, name=partition.name, guids=guids)


class _Namer:
    """Hands out names for new partitions, as many as the domain can hold."""

    def __init__(self, intent: Intent, observation: Observation) -> None:
        self.standing = {partition.name for partition in observation.partitions}
        self.count = len(observation.partitions)
        self.limit = observation.limits.max_partitions
        self.recorded: dict[str, list[str]] = defaultdict(list)
        for one in intent.owned:
            self.recorded[one.logical_partition].append(one.name)

    def create(self, logical_partition: str, guids: tuple[int, ...]) -> CreatePartition | Blocker:
        # A name that is recorded may stand for a create whose reply was lost: the same name makes the
        # controller refuse a second one.
        name = min(self.recorded[logical_partition], default=partition_name(logical_partition))
        if wrong := flaw(name):
            return Blocker(f"{name!r} cannot name a partition: {wrong}", None)
        if name in self.standing:
            return Blocker(
                f"partition {name!r} stands already, and is not one that the site can use",
                "adopt that partition, or delete it on the switch controller",
            )
        if self.limit is not None and self.count >= self.limit:
            return Blocker(
                f"the domain has {self.count} partitions of at most {self.limit}",
                "delete a logical partition that has GPUs in this domain",
            )
        self.count += 1
        return CreatePartition(name=name, logical_partition=logical_partition, guids=guids)


def _return_to_default(
    intent: Intent, observation: Observation, wishes: Wishes, layout: Layout
) -> list[Operation]:
    """With KEEP, GPUs that nobody was given go back to where the factory had them."""
    default = layout.default
    assigned = wishes.assigned
    if default is None or intent.default_partition is not DefaultPartition.KEEP or default.members & assigned:
        return []
    usable = {gpu.guid for gpu in observation.gpus if gpu.health is not GpuHealth.NO_NVLINK}
    free = tuple(sorted((usable & intent.managed) - intent.drained - layout.held - assigned))
    return [AddGpus(partition_id=default.id, name=default.name, guids=free)] if free else []
