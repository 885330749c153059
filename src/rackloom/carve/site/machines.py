"""Machines: where they sit, what they carry, and what an observation taught about their GPUs."""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site.tables import instance, machine, machine_gpu

IN_USE = "InUse"

shown_status = sa.case((instance.c.id.is_not(None), IN_USE), else_=machine.c.status)
"""A machine that carries an instance is in use, whatever its own health."""


def listing() -> sa.Select[Any]:
    """Machines with the instance they carry (instance_id, tenant_id; None when free) and `shown_status`."""
    return sa.select(
        machine,
        instance.c.id.label("instance_id"),
        instance.c.tenant_id.label("tenant_id"),
        shown_status.label("shown_status"),
    ).select_from(machine.join(instance, instance.c.machine_id == machine.c.id, isouter=True))


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
