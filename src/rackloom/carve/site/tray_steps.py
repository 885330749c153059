"""What an operator does to a tray: cordon it, drain it, and give it back.

A cordoned tray keeps what runs on it and gets nothing new. A drained one is cordoned too.
"""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import drains, history, instances, machines, operator_steps
from rackloom.carve.site.operator_steps import Order, Step
from rackloom.carve.site.problems import Kind, Rejected, conflict
from rackloom.carve.site.tables import cordon as cordon_table
from rackloom.carve.site.tables import drain as drain_table
from rackloom.carve.site.tables import instance
from rackloom.carve.site.values import Changed, Ids

STARTED = "waiting for the switch controller to be read after the drain began"


def cordon(conn: sa.Connection, machine_id: str, order: Order) -> None:
    """Place nothing new on the machine; a second cordon keeps the first reason."""
    machine = machines.get(conn, machine_id)
    if _cordoned(conn, machine_id):
        return
    row = {"machine_id": machine_id, "reason": order.reason, "asked_by": order.by, "created": order.now}
    conn.execute(sa.insert(cordon_table).values(**row))
    history.record(conn, machine_id, machines.MAINTENANCE, f"cordoned: {order.reason}", order.now)
    operator_steps.record(conn, Step.CORDON, machine_id, machine.domain, order)


def uncordon(conn: sa.Connection, machine_id: str, order: Order) -> None:
    """Let the machine be used again. Refused while it is drained."""
    machine = machines.get(conn, machine_id)
    if drains.active(conn, [machine_id]):
        raise Rejected(Kind.CONFLICT, "Machine is drained", nearest_fix="end its drain first")
    if not _cordoned(conn, machine_id):
        raise conflict("Machine is not cordoned")
    conn.execute(sa.delete(cordon_table).where(cordon_table.c.machine_id == machine_id))
    history.record(conn, machine_id, machine.status, "uncordoned", order.now)
    operator_steps.record(conn, Step.UNCORDON, machine_id, machine.domain, order)


def drain(conn: sa.Connection, machine_id: str, order: Order, ids: Ids) -> Changed[str]:
    """Take the machine's GPUs out of all partitions and record it; returns the id of the drain.

    The instance on the machine, if any, stays and says why its GPUs are not joined.
    """
    machine = machines.get(conn, machine_id)
    running = drains.active(conn, [machine_id]).get(machine_id)
    if running is not None:
        raise conflict("Machine is already drained", id=running.id)
    cordon(conn, machine_id, order)
    carried = conn.execute(sa.select(instance.c.id).where(instance.c.machine_id == machine_id))
    new = ids()
    row: dict[str, Any] = {"id": new, "machine_id": machine_id, "instance_id": carried.scalar_one_or_none()}
    row |= {"reason": order.reason, "asked_by": order.by, "message": STARTED, "started": order.now}
    conn.execute(sa.insert(drain_table).values(**row))
    operator_steps.record(conn, Step.DRAIN, machine_id, machine.domain, order)
    return Changed(new, instances.announce(conn, [machine_id], order.now))


def end_drain(conn: sa.Connection, machine_id: str, order: Order) -> Changed[None]:
    """Join the instance's GPUs again; the machine stays cordoned."""
    machine = machines.get(conn, machine_id)
    running = drains.active(conn, [machine_id]).get(machine_id)
    if running is None:
        raise conflict("Machine is not drained")
    conn.execute(sa.update(drain_table).where(drain_table.c.id == running.id).values(ended=order.now))
    operator_steps.record(conn, Step.END_DRAIN, machine_id, machine.domain, order)
    return Changed(None, instances.announce(conn, [machine_id], order.now))


def force_delete(conn: sa.Connection, machine_id: str, order: Order) -> Changed[str]:
    """Release the instance on the machine, whoever owns it; returns its id.

    The same clean-up as for a tenant's own release: the instance is gone once its GPUs were seen outside the
    partitions of the site.
    """
    machine = machines.get(conn, machine_id)
    found = conn.execute(sa.select(instance).where(instance.c.machine_id == machine_id)).one_or_none()
    if found is None:
        raise conflict("Machine carries no Instance")
    operator_steps.record(conn, Step.FORCE_DELETE, machine_id, machine.domain, order)
    released = instances.release(conn, found, f"released by the operator: {order.reason}", order.now)
    return Changed(found.id, released)


def _cordoned(conn: sa.Connection, machine_id: str) -> bool:
    found = sa.select(cordon_table.c.machine_id).where(cordon_table.c.machine_id == machine_id)
    return conn.execute(found).first() is not None
