"""The partitions that switch controllers show, and whose they are."""

from collections.abc import Collection
from enum import StrEnum

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.trays import is_tray
from rackloom.carve.plan.values import DEFAULT_PARTITION_ID, ObservedPartition
from rackloom.carve.site import knowledge
from rackloom.carve.site.tables import owned_partition
from rackloom.carve.site.values import RELEASED


class Owner(StrEnum):
    """Whose a partition is."""

    SITE = "site"
    """Made or adopted for a logical partition."""
    TRAY = "tray"
    """Made by the site for the free GPUs of one tray."""
    DEFAULT = "default"
    """The factory default partition."""
    RELEASED = "released"
    """Found, given up by an operator, and about to be taken apart."""
    FOREIGN = "foreign"
    """Found, and nobody's until an operator adopts or releases it."""


class PhysicalPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition in the newest observation of its domain."""

    domain: str
    observed_at: float
    seen: ObservedPartition
    owner: Owner
    logical_partition: str | None


def of_domains(conn: sa.Connection, domains: Collection[str]) -> list[PhysicalPartition]:
    """The partitions in the newest observations of `domains`, by domain and id.

    A domain that cannot be read adds nothing: what it holds is not known.
    """
    owners = _owners(conn, domains)
    return [
        PhysicalPartition(
            domain=domain,
            observed_at=known.observation.observed_at,
            seen=partition,
            owner=owner_of(partition, owners.get((domain, partition.name))),
            logical_partition=_logical(owners.get((domain, partition.name))),
        )
        for domain, known in sorted(knowledge.of_domains(conn, domains).items())
        if known.observation is not None
        for partition in sorted(known.observation.partitions, key=lambda one: one.id)
    ]


def _owners(conn: sa.Connection, domains: Collection[str]) -> dict[tuple[str, str], str]:
    rows = conn.execute(sa.select(owned_partition).where(owned_partition.c.domain.in_(domains)))
    return {(row.domain, row.name): row.logical_partition_id for row in rows}


def owner_of(partition: ObservedPartition, recorded: str | None) -> Owner:
    """Whose a partition is, given the logical partition that the records have for its name."""
    if partition.id == DEFAULT_PARTITION_ID:
        return Owner.DEFAULT
    if recorded is None:
        return Owner.FOREIGN
    if is_tray(recorded):
        return Owner.TRAY
    return Owner.RELEASED if recorded == RELEASED else Owner.SITE


def _logical(recorded: str | None) -> str | None:
    return None if recorded is None or recorded == RELEASED or is_tray(recorded) else recorded
