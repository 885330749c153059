"""Partitions that controllers show: who owns each, and adoption or release of foreign ones.

`partitions_of_domains` lists the partitions of the latest observations. The recorded name decides the
owner: the site (for a logical partition), the site for free GPUs of one tray, the factory default
partition, a released partition, or foreign. A domain that cannot be read contributes nothing.

A foreign partition has no owner until an operator decides. `adopt_partition` makes it the physical
partition of a logical partition and never moves a GPU: the partition may hold only GPUs that the
logical partition wants (`inventory.adoption` creates an owner that wants them). `release_partition` lets
the reconciler remove it. Both refuse the default partition, which follows the site's policy, and a
location-based partition, because NMX-C fixes the type at creation and the site works by GUID. They also
refuse a partition with GPUs of machines that the site does not know. Both steps are recorded as operations,
and the trays are no longer foreign from then on. `give_up_partition` undoes an adoption in the records.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.partitions import intent, ownership
from rackloom.carve.store import journal
from rackloom.carve.store.journal import OperatorOrder, Step
from rackloom.carve.store.schema import logical_partition, owned_partition
from rackloom.carve.store.values import RELEASED_OWNER, Changed, Status, conflict, invalid, not_found
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    UNCERTAIN_REASON,
    DomainObservation,
    ObservedPartition,
    as_known,
    is_tray_partition,
)

# Partitions of the latest observations.


class Owner(StrEnum):
    """The owner of a partition."""

    SITE = "site"
    """Made or adopted for a logical partition."""
    TRAY = "tray"
    """Made by the site for the free GPUs of one tray."""
    DEFAULT = "default"
    """The factory default partition."""
    RELEASED = "released"
    """Found, released by an operator, and about to be removed."""
    FOREIGN = "foreign"
    """Found, and without an owner until an operator adopts or releases it."""


class FoundPartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """A partition in the newest observation of its domain.

    Its health is unknown if any reading contradicts itself about one of its GPUs.
    """

    domain: str
    observed_at: float
    partition: ObservedPartition
    owner: Owner
    logical_partition: str | None


def partitions_of_domains(
    conn: sa.Connection, domains: Collection[str], valid_from: float = 0.0
) -> list[FoundPartitionView]:
    """The partitions in the newest observations of `domains`, by domain and id.

    A domain that cannot be read, or was not since `valid_from`, adds nothing: what it holds is not known.
    """
    rows = conn.execute(sa.select(owned_partition).where(owned_partition.c.domain.in_(domains)))
    owners = {(row.domain, row.name): row.logical_partition_id for row in rows}
    return [
        FoundPartitionView(
            domain=domain,
            observed_at=known.observation.observed_at,
            partition=as_known(partition, known.uncertain),
            owner=classify_owner(partition, owners.get((domain, partition.name))),
            logical_partition=_logical_partition_of(owners.get((domain, partition.name))),
        )
        for domain, known in sorted(latest.latest_of_domains(conn, domains, valid_from).items())
        if known.observation is not None
        for partition in sorted(known.observation.partitions, key=lambda partition: partition.id)
    ]


def classify_owner(partition: ObservedPartition, recorded: str | None) -> Owner:
    """The owner of a partition, from the logical partition that the records have for its name."""
    if partition.id == DEFAULT_PARTITION_ID:
        return Owner.DEFAULT
    if recorded is None:
        return Owner.FOREIGN
    if is_tray_partition(recorded):
        return Owner.TRAY
    return Owner.RELEASED if recorded == RELEASED_OWNER else Owner.SITE


def _logical_partition_of(recorded: str | None) -> str | None:
    return None if recorded is None or recorded == RELEASED_OWNER or is_tray_partition(recorded) else recorded


# Adoption and release.


def adopt_partition(
    conn: sa.Connection, domain: str, name: str, logical_partition_id: str, order: OperatorOrder
) -> Changed[None]:
    """Make a found partition the physical partition of a logical partition in its domain."""
    readings, partition = foreign_partition(conn, domain, name, order.valid_from)
    row = conn.execute(
        sa.select(logical_partition).where(logical_partition.c.id == logical_partition_id)
    ).one_or_none()
    if row is None or row.status != Status.READY:
        raise invalid(
            "Could not find a ready NVLink Logical Partition with ID specified in request",
            nvLinkLogicalPartitionId="does not exist, or is being deleted",
        )
    # One physical partition for each logical partition and domain: the planner relies on it.
    for owned in ownership.owned_partitions(conn, domain):
        if owned.logical_partition == row.id:
            raise conflict(f"NVLink Logical Partition already has partition {owned.name} in the domain")
    wanted = {
        assignment.guid
        for assignment in intent.gpu_assignments(conn, domain)
        if assignment.logical_partition == logical_partition_id
    }
    if unwanted := len(partition.members - wanted):
        raise conflict(
            f"{unwanted} GPUs of the partition are not wanted in the NVLink Logical Partition",
            nearest_fix="create its Instances on the machines of these GPUs first, name an owner for whom"
            " they are created, or release the partition",
        )
    return _record_takeover(conn, readings, partition, row.id, Step.ADOPT, order)


def release_partition(conn: sa.Connection, domain: str, name: str, order: OperatorOrder) -> Changed[None]:
    """Let the reconciler remove a found partition. The record names the operator and the reason."""
    readings, partition = foreign_partition(conn, domain, name, order.valid_from)
    return _record_takeover(conn, readings, partition, RELEASED_OWNER, Step.RELEASE, order)


def give_up_partition(conn: sa.Connection, domain: str, name: str) -> None:
    """Own an adopted partition no more: it is foreign again, keeps its GPUs, and so do its trays."""
    ownership.give_up_ownership(conn, domain, name)
    if readings := latest.latest_of_domain(conn, domain).shown:
        ownership.update_foreign_trays(conn, domain, readings)


def foreign_partition(
    conn: sa.Connection, domain: str, name: str, valid_from: float
) -> tuple[Sequence[DomainObservation], ObservedPartition]:
    """The valid readings of `domain`, the newest first, and the partition as the newest shows it.

    Raises Rejected if it may be neither adopted nor released.
    """
    known = latest.latest_of_domain(conn, domain, valid_from)
    if known.observation is None:
        raise conflict(f"What the domain holds cannot be told: {known.operators_doubt}")
    found = [partition for partition in known.observation.partitions if partition.name == name]
    if not found:
        raise not_found("Could not find a partition with specified name in the newest observation")
    if not known.uncertain.isdisjoint(found[0].members):
        raise conflict(f"What the partition holds cannot be told: {UNCERTAIN_REASON}")
    _check_adoptable(conn, domain, found[0])
    return known.shown, found[0]


def _check_adoptable(conn: sa.Connection, domain: str, partition: ObservedPartition) -> None:
    if partition.id == DEFAULT_PARTITION_ID:
        raise conflict("The factory default partition follows the site's policy for it")
    if any(owned.name == partition.name for owned in ownership.owned_partitions(conn, domain)):
        raise conflict("The partition is the site's own already")
    if not partition.guid_based:
        # NMX-C fixes the type of a partition at its creation, and the site works by GUID.
        raise conflict(
            "The partition is location-based, and the site only works on GUID-based ones",
            nearest_fix="delete it on the switch controller",
        )
    if unknown := len(partition.members - intent.managed_gpus(conn, domain)):
        raise conflict(
            f"{unknown} GPUs of the partition are on no machine that the site knows",
            nearest_fix="register their machines with the site",
        )


def _record_takeover(
    conn: sa.Connection,
    readings: Sequence[DomainObservation],
    partition: ObservedPartition,
    owner: str,
    step: Step,
    order: OperatorOrder,
) -> Changed[None]:
    observation = readings[0]
    operation_id = ownership.record_operator_takeover(conn, observation, step, partition, order)
    ownership.take_ownership(conn, observation, partition, owner, operation_id, order.now)
    ownership.update_foreign_trays(conn, observation.domain, readings)
    journal.record_operator_step(conn, step, partition.name, observation.domain, order)
    return Changed(None, journal.increment_revisions(conn, [observation.domain]))
