"""The free capacity of each NVLink domain, as a viewer may see it.

`capacity_of_domains` counts free, reserved, unhealthy, foreign, unlisted and closed trays by the rules of
`placement`, and the largest batch that one request can get. Fragmentation is the share of free trays that no
single request can get. About other tenants it shows only numbers of trays, and to operators the tenant that
each tray is reserved for.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.observation.latest import LatestObservation
from rackloom.carve.partitions import ownership
from rackloom.carve.partitions.ownership import ForeignTray
from rackloom.carve.store.prepared import owned_by
from rackloom.carve.store.schema import domain_pause, instance, machine, nvlink_interface
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import catalog
from rackloom.carve.tenancy.placement import (
    ReservedTray,
    is_in_service,
    reserved_trays,
    unhealthy_gpus,
    unlisted_gpus,
)
from rackloom.core.place.instance_trays import AllocationUse


class InstanceTypeCapacity(msgspec.Struct, frozen=True):
    """Room for machines of one instance type."""

    instance_type_id: str
    free: int
    largest_batch: int
    """Within the tenant's quota."""


class DomainCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a domain, its free capacity, and the viewer's trays in it."""

    domain: str
    site_id: str | None
    known: LatestObservation
    pause_reason: str | None
    trays: int
    free: int
    unhealthy: int
    """Empty, and not used because of unhealthy GPUs."""
    foreign: tuple[ForeignTray, ...]
    """Empty, and not used because a partition that the site did not make holds GPUs of theirs. A tray in
    several such partitions is listed with each of them."""
    unlisted: Mapping[str, Collection[int]]
    """Empty, not foreign, and not used because their controller does not list these device instances."""
    reserved: tuple[ReservedTray, ...]
    """Empty and in service, and reserved for other organisations than the viewer's."""
    own_reserved: int
    """Free, and reserved for the viewer."""
    closed: int
    """Empty, and not in service: cordoned, missing, in maintenance, or in a paused or conflicting domain."""
    types: tuple[InstanceTypeCapacity, ...]
    own_instances: int
    own_gpus: Mapping[str, int]
    """GPUs by logical partition of the viewer."""

    @property
    def foreign_count(self) -> int:
        """Trays that are not used because of partitions that the site did not make."""
        return len({tray.machine_id for tray in self.foreign})

    @property
    def largest_batch(self) -> int:
        """The most machines that one request can have in this domain."""
        return max((type_.largest_batch for type_ in self.types), default=0)

    @property
    def fragmentation(self) -> float:
        """Share of the free trays that no single request can have: of other types, or above the quota."""
        return 1 - self.largest_batch / self.free if self.free else 0.0


def capacity_of_domains(
    conn: sa.Connection,
    domains: Collection[str],
    tenant_id: str,
    quota: Mapping[str, AllocationUse] | None,
    now: float,
    valid_from: float = 0.0,
) -> dict[str, DomainCapacity]:
    """The room in `domains` now for a tenant with `quota` (by instance type), or for a provider (None).

    Readings from before `valid_from` do not count.
    """
    by_domain: dict[str, list[sa.Row[Any]]] = defaultdict(list)
    listed = catalog.machine_listing().add_columns(is_in_service.label("in_service"))
    for row in conn.execute(listed.where(machine.c.domain.in_(domains)).order_by(machine.c.id)):
        by_domain[row.domain].append(row)
    machine_ids = [row.id for rows in by_domain.values() for row in rows]
    unhealthy = unhealthy_gpus(conn, machine_ids)
    held = ownership.foreign_trays(conn, machine_ids)
    unlisted = unlisted_gpus(conn, machine_ids)
    reserved = reserved_trays(conn, now, machine_ids)
    others = {tray.machine_id for tray in reserved.values() if tray.tenant_id != tenant_id}
    known = latest.latest_of_domains(conn, domains, valid_from)
    pauses = {row.domain: row.reason for row in conn.execute(sa.select(domain_pause))}
    own = _gpus_of_tenant(conn, domains, tenant_id)
    allocated = {type_id for type_id, use in (quota or {}).items() if use.allocated is not None}
    capacities = {}
    for domain in domains:
        rows = by_domain[domain]
        # From all trays to those that a request can have: empty, in service, of an allocated type, not shut,
        # not kept for others, healthy. Each number of the result counts the trays that one step leaves out.
        empty = [row for row in rows if row.instance_id is None]
        open_trays = [row for row in empty if row.in_service]
        allowed = [row for row in open_trays if quota is None or row.instance_type_id in allocated]
        unshut = [row for row in allowed if row.id not in held and row.id not in unlisted]
        usable = [row for row in unshut if row.id not in others]
        healthy = [row for row in usable if row.id not in unhealthy and row.instance_type_id]
        # A tray that is kept for others stays hidden from a tenant. A provider sees its partition.
        unkept = [row for row in allowed if quota is None or row.id not in others]
        free = Counter(row.instance_type_id for row in healthy)
        own_reserved = Counter(row.instance_type_id for row in healthy if row.id in reserved)
        capacities[domain] = DomainCapacity(
            domain=domain,
            site_id=min((row.site_id for row in rows), default=None),
            known=known[domain],
            pause_reason=pauses.get(domain),
            trays=len(rows),
            free=free.total(),
            unhealthy=sum(row.id in unhealthy for row in usable),
            foreign=tuple(tray for row in unkept for tray in held.get(row.id, ())),
            unlisted={
                row.id: unlisted[row.id] for row in unkept if row.id in unlisted and row.id not in held
            },
            reserved=tuple(reserved[row.id] for row in unshut if row.id in others),
            own_reserved=own_reserved.total(),
            closed=len(empty) - len(open_trays),
            types=tuple(
                InstanceTypeCapacity(
                    type_id,
                    count,
                    count if quota is None else quota[type_id].largest_request(count, own_reserved[type_id]),
                )
                for type_id, count in sorted(free.items())
            ),
            own_instances=sum(row.tenant_id == tenant_id for row in rows),
            own_gpus=own[domain],
        )
    return capacities


def _gpus_of_tenant(
    conn: sa.Connection, domains: Collection[str], tenant_id: str
) -> dict[str, dict[str, int]]:
    partition = nvlink_interface.c.logical_partition_id
    counted = (
        sa.select(machine.c.domain, partition, sa.func.count().label("gpus"))
        .select_from(nvlink_interface)
        .join(instance, instance.c.id == nvlink_interface.c.instance_id)
        .join(machine, machine.c.id == instance.c.machine_id)
        .where(
            owned_by(instance.c.tenant_id, tenant_id),
            machine.c.domain.in_(domains),
            nvlink_interface.c.status != Status.DELETING,
        )
        .group_by(machine.c.domain, partition)
        .order_by(partition)
    )
    found: dict[str, dict[str, int]] = {domain: {} for domain in domains}
    for row in conn.execute(counted):
        found[row.domain][row.logical_partition_id] = row.gpus
    return found
