"""The `tray` policy: GPUs that nobody was given share memory with the rest of their tray, and nobody else.

A tray is one host, and a host has one tenant, so a partition within a tray never joins two of them. To the
planner a tray is a logical partition of the site's own, in which its free GPUs are wanted.
"""

from collections import defaultdict

from rackloom.carve.plan.layout import left_alone
from rackloom.carve.plan.values import DefaultPartition, GpuHealth, Intent, Observation, ObservedGpu
from rackloom.carve.plan.wishes import Wishes

_PREFIX = "tray-"
"""No logical partition of a tenant begins like this: their names are uuids."""
MAX_SERIAL = 48
"""Characters, so that the name fits into the records."""


def is_tray(logical_partition: str) -> bool:
    """Whether it is a tray's, not a tenant's."""
    return logical_partition.startswith(_PREFIX)


def tray_of(gpu: ObservedGpu) -> str | None:
    """What the GPU's tray is called among logical partitions; None where it cannot be told from another."""
    serial = gpu.chassis_serial
    if not serial or len(serial) > MAX_SERIAL or not (serial.isascii() and serial.isprintable()):
        return None
    return f"{_PREFIX}{serial}-{gpu.slot}"


def with_trays(wishes: Wishes, intent: Intent, observation: Observation) -> Wishes:
    """The wishes of tenants, and with the `tray` policy those of trays with free GPUs, if there is room.

    A GPU in a partition that is not ours is left where it is, and one without NVLink is not brought in.
    """
    if intent.default_partition is not DefaultPartition.TRAY:
        return wishes
    inside = _in_trays(intent, observation)
    movable = intent.managed - intent.drained - wishes.assigned - left_alone(intent, observation).keys()
    free: dict[str, list[int]] = defaultdict(list)
    for gpu in observation.gpus:
        tray = tray_of(gpu)
        works = gpu.health is not GpuHealth.NO_NVLINK or gpu.guid in inside
        if tray is not None and works and gpu.guid in movable:
            free[tray].append(gpu.guid)
    served = sorted(free)[: _room(wishes, intent, observation)]
    trays = {guid: tray for tray in served for guid in free[tray]}
    return Wishes(dict(sorted({**wishes.partition_of, **trays}.items())), wishes.contradictory)


def _in_trays(intent: Intent, observation: Observation) -> frozenset[int]:
    names = {one.name for one in intent.owned if is_tray(one.logical_partition)}
    return frozenset(guid for one in observation.partitions if one.name in names for guid in one.members)


def _room(wishes: Wishes, intent: Intent, observation: Observation) -> int | None:
    """How many partitions tenants and strangers leave to trays; None where there is no limit."""
    limit = observation.limits.max_partitions
    if limit is None:
        return None
    names = {one.name for one in intent.owned}
    others = [one for one in observation.partitions if one.name not in names or not one.guid_based]
    return max(0, limit - len(others) - len(set(wishes.partition_of.values())))
