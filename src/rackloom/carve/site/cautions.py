"""What is allowed, and probably not meant: said with the answer, and never a refusal."""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import instance_types, interfaces, placing
from rackloom.carve.site.tables import instance_type, machine
from rackloom.carve.site.values import InterfaceWish, Status


class Matter(StrEnum):
    """What a caution is about."""

    SPANS_DOMAINS = "LogicalPartitionSpansDomains"
    TRAY_SPLIT = "TraySplit"


class Caution(msgspec.Struct, frozen=True):
    """One thing to think about."""

    matter: Matter
    message: str


def foresee(
    conn: sa.Connection, wishes: Sequence[InterfaceWish], domains: Collection[str | None], gpus: int
) -> tuple[Caution, ...]:
    """What to say of machines of `gpus` NVLink GPUs in `domains`, each with `wishes`."""
    partitions = sorted({wish.logical_partition_id for wish in wishes})
    standing = placing.members(conn, partitions)
    spanning = [
        caution
        for partition in partitions
        if (caution := _spans(partition, {*standing.get(partition, {}), *domains}))
    ]
    return (*spanning, *_splits(wishes, gpus))


def of_instance(conn: sa.Connection, row: sa.Row[Any]) -> tuple[Caution, ...]:
    """What to say of an instance as it is wanted now."""
    wishes = [
        InterfaceWish(one.logical_partition_id, one.device_instance)
        for one in interfaces.of(conn, row.id)
        if one.status != Status.DELETING
    ]
    domain = conn.execute(sa.select(machine.c.domain).where(machine.c.id == row.machine_id)).scalar_one()
    kind = sa.select(instance_type.c.capabilities).where(instance_type.c.id == row.instance_type_id)
    capabilities = conn.execute(kind).scalar_one_or_none() or []
    return foresee(conn, wishes, [domain], instance_types.nvlink_gpus(capabilities) or len(wishes))


def _spans(partition: str, domains: set[str | None]) -> Caution | None:
    if len(domains) < 2:
        return None
    names = ", ".join(sorted(domain or "not yet observed" for domain in domains))
    return Caution(
        Matter.SPANS_DOMAINS,
        f"NVLink Logical Partition {partition} spans {len(domains)} NVLink domains ({names}): GPUs in"
        " different domains share no memory",
    )


def _splits(wishes: Sequence[InterfaceWish], gpus: int) -> list[Caution]:
    partitions = {wish.logical_partition_id for wish in wishes}
    if not wishes or (len(partitions) == 1 and len(wishes) >= gpus):
        return []
    several = len(partitions) > 1
    how = f"between {len(partitions)} partitions" if several else f"{len(wishes)} of {gpus} joined"
    # GPU feature discovery labels a node only when all its GPUs are in one clique.
    return [
        Caution(
            Matter.TRAY_SPLIT,
            f"The GPUs of one machine are split ({how}): its nvidia.com/gpu.clique label will vanish",
        )
    ]
