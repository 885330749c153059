"""What tenants want of each GPU of a domain, from the interfaces of their instances."""

import sqlalchemy as sa

from rackloom.carve.plan.values import Assignment
from rackloom.carve.site import drains
from rackloom.carve.site.tables import instance, machine, machine_gpu, nvlink_interface
from rackloom.carve.site.values import Status

_WANTED = (
    sa.select(machine_gpu.c.guid, nvlink_interface.c.logical_partition_id, instance.c.tenant_id)
    .select_from(nvlink_interface)
    .join(instance, instance.c.id == nvlink_interface.c.instance_id)
    .join(machine, machine.c.id == instance.c.machine_id)
    .join(
        machine_gpu,
        sa.and_(
            machine_gpu.c.machine_id == machine.c.id,
            machine_gpu.c.module_id == nvlink_interface.c.device_instance + 1,
        ),
    )
    .where(
        machine.c.domain == sa.bindparam("domain"),
        machine_gpu.c.guid.is_not(None),
        nvlink_interface.c.status != Status.DELETING,
        instance.c.status != Status.TERMINATING,
        machine.c.id.not_in(drains.drained_machines()),
    )
    .order_by(machine_gpu.c.guid)
)
"""Built once: every pass over a domain asks for it."""


def assignments(conn: sa.Connection, domain: str) -> tuple[Assignment, ...]:
    """The wishes that count: interfaces and instances that stay, on trays that are not drained."""
    return tuple(
        Assignment(guid=int(guid), logical_partition=partition, tenant=tenant)
        for guid, partition, tenant in conn.execute(_WANTED, {"domain": domain})
    )
