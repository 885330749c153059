"""How much room a domain has, as its viewer may use it. Of other tenants it shows numbers of trays only."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import knowledge, machines, placing
from rackloom.carve.site.knowledge import Knowledge
from rackloom.carve.site.tables import domain_pause, instance, machine, nvlink_interface
from rackloom.carve.site.values import Status


class TypeRoom(msgspec.Struct, frozen=True):
    """Room for machines of one instance type."""

    instance_type_id: str
    free: int
    largest_batch: int
    """Within the tenant's quota."""


class DomainRoomView(msgspec.Struct, frozen=True, kw_only=True):
    """A domain: what is known of it, how full it is, and what the viewer has in it."""

    domain: str
    site_id: str | None
    known: Knowledge
    pause_reason: str | None
    trays: int
    free: int
    unhealthy: int
    """Empty, and passed over for what is wrong with their GPUs."""
    closed: int
    """Empty, and not in service: cordoned, missing, in maintenance, or in a paused or disputed domain."""
    types: tuple[TypeRoom, ...]
    own_instances: int
    own_gpus: Mapping[str, int]
    """GPUs by logical partition of the viewer."""

    @property
    def largest_batch(self) -> int:
        """The most machines that one request can have in this domain."""
        return max((one.largest_batch for one in self.types), default=0)

    @property
    def fragmentation(self) -> float:
        """Share of the free trays that no single request can have: of other types, or above the quota."""
        return 1 - self.largest_batch / self.free if self.free else 0.0


def of_domains(
    conn: sa.Connection, domains: Collection[str], tenant_id: str, quota: Mapping[str, int] | None
) -> dict[str, DomainRoomView]:
    """The room in `domains` for a tenant with `quota` (instance type -> machines left; None: a provider)."""
    by_domain: dict[str, list[sa.Row[Any]]] = defaultdict(list)
    for row in _trays(conn, domains):
        by_domain[row.domain].append(row)
    sick = placing.sick_gpus(conn, [row.id for rows in by_domain.values() for row in rows])
    known = knowledge.of_domains(conn, domains)
    pauses = {row.domain: row.reason for row in conn.execute(sa.select(domain_pause))}
    own = _own_gpus(conn, domains, tenant_id)
    return {
        domain: _view(
            domain,
            by_domain[domain],
            sick,
            known[domain],
            pauses.get(domain),
            tenant_id,
            quota,
            own[domain],
        )
        for domain in domains
    }


def _trays(conn: sa.Connection, domains: Collection[str]) -> Iterable[sa.Row[Any]]:
    listed = machines.listing().add_columns(placing.is_in_service.label("in_service"))
    return conn.execute(listed.where(machine.c.domain.in_(domains)).order_by(machine.c.id))


def _own_gpus(conn: sa.Connection, domains: Collection[str], tenant_id: str) -> dict[str, dict[str, int]]:
    partition = nvlink_interface.c.logical_partition_id
    counted = (
        sa.select(machine.c.domain, partition, sa.func.count().label("gpus"))
        .select_from(nvlink_interface)
        .join(instance, instance.c.id == nvlink_interface.c.instance_id)
        .join(machine, machine.c.id == instance.c.machine_id)
        .where(
            instance.c.tenant_id == tenant_id,
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


def _view(
    domain: str,
    rows: list[sa.Row[Any]],
    sick: Mapping[str, str],
    known: Knowledge,
    pause: str | None,
    tenant_id: str,
    quota: Mapping[str, int] | None,
    own: Mapping[str, int],
) -> DomainRoomView:
    empty = [row for row in rows if row.instance_id is None]
    open_trays = [row for row in empty if row.in_service]
    usable = [row for row in open_trays if quota is None or row.instance_type_id in quota]
    free = Counter(row.instance_type_id for row in usable if row.id not in sick and row.instance_type_id)
    return DomainRoomView(
        domain=domain,
        site_id=min((row.site_id for row in rows), default=None),
        known=known,
        pause_reason=pause,
        trays=len(rows),
        free=free.total(),
        unhealthy=sum(row.id in sick for row in usable),
        closed=len(empty) - len(open_trays),
        types=tuple(
            TypeRoom(type_id, count, count if quota is None else max(0, min(count, quota[type_id])))
            for type_id, count in sorted(free.items())
        ),
        own_instances=sum(row.tenant_id == tenant_id for row in rows),
        own_gpus=own,
    )
