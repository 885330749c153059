"""Machines: where they sit, what they carry, and what an observation taught about their GPUs."""

from collections.abc import Collection
from functools import cache
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import cordon, instance, machine, machine_gpu

IN_USE = "InUse"
MAINTENANCE = "Maintenance"

_cordons = cordon.alias()
is_cordoned = sa.exists().where(_cordons.c.machine_id == machine.c.id)
shown_status = sa.case(
    (instance.c.id.is_not(None), IN_USE), (is_cordoned, MAINTENANCE), else_=machine.c.status
)
"""A machine that carries an instance is in use, whatever its own health."""


def any_known(conn: sa.Connection) -> bool:
    """Whether the store has any machine."""
    return conn.execute(sa.select(machine.c.id).limit(1)).first() is not None


def get(conn: sa.Connection, machine_id: str) -> sa.Row[Any]:
    """The machine; refused when there is none of that id."""
    found = conn.execute(sa.select(machine).where(machine.c.id == machine_id)).one_or_none()
    if found is None:
        raise not_found("Could not find Machine with specified ID")
    return found


@cache
def listing() -> sa.Select[Any]:
    """Machines with their instance (instance_id, tenant_id; None when free), shown_status, cordon_reason."""
    return sa.select(
        machine,
        instance.c.id.label("instance_id"),
        instance.c.tenant_id.label("tenant_id"),
        shown_status.label("shown_status"),
        cordon.c.reason.label("cordon_reason"),
    ).select_from(
        machine.join(instance, instance.c.machine_id == machine.c.id, isouter=True).join(
            cordon, cordon.c.machine_id == machine.c.id, isouter=True
        )
    )


def gpus_of(conn: sa.Connection, machine_ids: Collection[str]) -> dict[str, list[sa.Row[Any]]]:
    """The GPU rows of machines, in module order."""
    rows = conn.execute(
        sa.select(machine_gpu)
        .where(machine_gpu.c.machine_id.in_(machine_ids))
        .order_by(machine_gpu.c.machine_id, machine_gpu.c.module_id)
    )
    found: dict[str, list[sa.Row[Any]]] = {machine_id: [] for machine_id in machine_ids}
    for row in rows:
        found[row.machine_id].append(row)
    return found


def largest_domain(conn: sa.Connection, site_id: str) -> int:
    """Machines of the largest NVLink domain of the site; of the whole site while no domain is known."""
    per_domain = (
        sa.select(sa.func.count())
        .where(machine.c.site_id == site_id, machine.c.domain.is_not(None))
        .group_by(machine.c.domain)
    )
    at_site = sa.select(sa.func.count()).where(machine.c.site_id == site_id)
    return max(conn.execute(per_domain).scalars(), default=0) or conn.execute(at_site).scalar_one()


def domains_of(conn: sa.Connection, machine_ids: Collection[str]) -> dict[str, str | None]:
    """The NVLink domain of each machine; None until a switch controller told it."""
    rows = conn.execute(sa.select(machine.c.id, machine.c.domain).where(machine.c.id.in_(machine_ids)))
    return {row.id: row.domain for row in rows}
