"""What a switch controller makes of one operation: the observation before in, the observation after out.

The safety check and what-if questions replay plans on it, so it knows nothing of intent, and shares nothing
with the planner.
"""

import msgspec

from rackloom.carve.plan.values import (
    AddGpus,
    CreatePartition,
    DeletePartition,
    Observation,
    ObservedPartition,
    Operation,
    PartitionHealth,
    RemoveGpus,
)
from rackloom.errors import Refused


def apply(observation: Observation, operation: Operation) -> Observation:
    """The domain after `operation`. Raises Refused where a controller would refuse.

    The time of the observation stays as it was. A created partition gets the lowest free id, which a real
    controller need not do.
    """
    match operation:
        case CreatePartition():
            partitions = _created(observation, operation)
        case DeletePartition():
            gone = _target(observation, operation)
            partitions = [one for one in observation.partitions if one is not gone]
        case AddGpus() | RemoveGpus():
            partitions = _edited(observation, operation)
    return msgspec.structs.replace(observation, partitions=tuple(partitions))


def _created(observation: Observation, operation: CreatePartition) -> list[ObservedPartition]:
    _require_free(observation, operation.guids)
    if any(one.name == operation.name for one in observation.partitions):
        raise Refused(f"a partition named {operation.name!r} stands already")
    used = {one.id for one in observation.partitions}
    made = ObservedPartition(
        id=next(number for number in range(1, len(used) + 2) if number not in used),
        name=operation.name,
        members=frozenset(operation.guids),
        health=PartitionHealth.HEALTHY,
        guid_based=True,
        multicast_groups=0,
    )
    return [*observation.partitions, made]


def _edited(observation: Observation, operation: AddGpus | RemoveGpus) -> list[ObservedPartition]:
    target = _target(observation, operation)
    guids = _named_once(operation.guids)
    if isinstance(operation, AddGpus):
        _require_free(observation, operation.guids)
        members = target.members | guids
    elif strangers := guids - target.members:
        raise Refused(f"{_hex(strangers)} not in partition {target.name!r}")
    else:
        members = target.members - guids
    changed = msgspec.structs.replace(target, members=members)
    return [changed if one is target else one for one in observation.partitions]


def _target(observation: Observation, operation: AddGpus | RemoveGpus | DeletePartition) -> ObservedPartition:
    for one in observation.partitions:
        if (one.id, one.name) == (operation.partition_id, operation.name):
            return one
    raise Refused(f"no partition {operation.partition_id} is named {operation.name!r}")


def _require_free(observation: Observation, guids: tuple[int, ...]) -> None:
    wanted = _named_once(guids)
    if missing := wanted - {gpu.guid for gpu in observation.gpus}:
        raise Refused(f"the controller does not list {_hex(missing)}")
    for one in observation.partitions:
        if taken := wanted & one.members:
            raise Refused(f"{_hex(taken)} already in partition {one.name!r}")


def _named_once(guids: tuple[int, ...]) -> frozenset[int]:
    if not guids or len(set(guids)) != len(guids):
        raise Refused("an operation names at least one GPU, and each of them once")
    return frozenset(guids)


def _hex(guids: frozenset[int]) -> str:
    return ", ".join(f"{guid:#x}" for guid in sorted(guids))
