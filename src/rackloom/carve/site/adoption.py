"""Partitions that were found and not made: an operator adopts them for a logical partition, or releases them.

Until then they are nobody's and are left alone. To adopt one never moves a GPU: it must hold exactly what its
logical partition wants of it. To release one lets the reconciler take it apart.
"""

import sqlalchemy as sa

from rackloom.carve.plan.values import DEFAULT_PARTITION_ID, Observation, ObservedPartition
from rackloom.carve.site import holdings, intents, knowledge, operations, operator_steps, ownership, revisions
from rackloom.carve.site.operator_steps import Order, Step
from rackloom.carve.site.problems import Kind, Rejected, conflict, invalid, not_found
from rackloom.carve.site.tables import logical_partition
from rackloom.carve.site.values import RELEASED, Changed, Status


def adopt(
    conn: sa.Connection, domain: str, name: str, logical_partition_id: str, order: Order
) -> Changed[None]:
    """Make a found partition the physical partition of a logical partition in its domain."""
    seen, partition = _foreign(conn, domain, name)
    row = conn.execute(
        sa.select(logical_partition).where(logical_partition.c.id == logical_partition_id)
    ).one_or_none()
    if row is None or row.status != Status.READY:
        raise invalid(
            "Could not find a ready NVLink Logical Partition with ID specified in request",
            nvLinkLogicalPartitionId="does not exist, or is being deleted",
        )
    standing = [one for one in ownership.of_domain(conn, domain) if one.logical_partition == row.id]
    if standing:
        raise conflict(f"NVLink Logical Partition already has partition {standing[0].name} in the domain")
    wanted = {
        one.guid for one in intents.assignments(conn, domain) if one.logical_partition == logical_partition_id
    }
    if strangers := len(partition.members - wanted):
        raise Rejected(
            Kind.CONFLICT,
            f"{strangers} GPUs of the partition are not wanted in the NVLink Logical Partition",
            nearest_fix="create its Instances on the machines of these GPUs first, or release the partition",
        )
    return _own(conn, seen, partition, row.id, Step.ADOPT, order)


def release(conn: sa.Connection, domain: str, name: str, order: Order) -> Changed[None]:
    """Let the reconciler take a found partition apart; the record says who wanted it and why."""
    seen, partition = _foreign(conn, domain, name)
    return _own(conn, seen, partition, RELEASED, Step.RELEASE, order)


def _foreign(conn: sa.Connection, domain: str, name: str) -> tuple[Observation, ObservedPartition]:
    known = knowledge.of_domain(conn, domain)
    if known.observation is None:
        raise conflict(f"What the domain holds cannot be told: {known.operators_doubt}")
    found = [one for one in known.observation.partitions if one.name == name]
    if not found:
        raise not_found("Could not find a partition with specified name in the newest observation")
    _check_adoptable(conn, domain, found[0])
    return known.observation, found[0]


def _check_adoptable(conn: sa.Connection, domain: str, partition: ObservedPartition) -> None:
    if partition.id == DEFAULT_PARTITION_ID:
        raise conflict("The factory default partition follows the site's policy for it")
    if any(one.name == partition.name for one in ownership.of_domain(conn, domain)):
        raise conflict("The partition is the site's own already")
    if not partition.guid_based:
        # NMX-C fixes the type of a partition at its creation, and the site works by GUID.
        raise Rejected(
            Kind.CONFLICT,
            "The partition is location-based, and the site only works on GUID-based ones",
            nearest_fix="delete it on the switch controller",
        )
    if unknown := len(partition.members - holdings.managed(conn, domain)):
        raise Rejected(
            Kind.CONFLICT,
            f"{unknown} GPUs of the partition are on no machine that the site knows",
            nearest_fix="register their machines with the site",
        )


def _own(
    conn: sa.Connection,
    seen: Observation,
    partition: ObservedPartition,
    owner: str,
    step: Step,
    order: Order,
) -> Changed[None]:
    operation_id = operations.note_by_hand(conn, seen, step, partition, order)
    ownership.adopt(conn, seen, partition, owner, operation_id, order.now)
    operator_steps.record(conn, step, partition.name, seen.domain, order)
    touched = revisions.touch(conn, [seen.domain])
    return Changed(None, touched)
