"""Maintenance of trays by operators: cordon, drain, return to service, force-delete of an instance.

A cordoned machine keeps its instance and gets no new one. A drain cordons the machine, and the
reconciler moves its GPUs out of all partitions; the instance stays and says why it is not joined.
Ending a drain joins the GPUs again, and the machine stays cordoned. A drained machine cannot be
uncordoned.

`force_delete_instance` releases the instance, whoever owns it, with the same clean-up as a release by
the tenant. Every step is recorded with who asked and why. Pauses of domains are in `partitions.intent`.
"""

import sqlalchemy as sa

from rackloom.carve.partitions import intent
from rackloom.carve.store import journal
from rackloom.carve.store.journal import OperatorOrder, Step
from rackloom.carve.store.prepared import delete_and_count, find_row, has_row, insert_row, update_rows
from rackloom.carve.store.schema import cordon as cordon_table
from rackloom.carve.store.schema import drain as drain_table
from rackloom.carve.store.schema import instance
from rackloom.carve.store.values import Changed, IdFactory, RefusalKind, Rejected, conflict
from rackloom.carve.tenancy import catalog, instance_creation, instances

DRAIN_STARTED_MESSAGE = "waiting for the switch controller to be read after the drain began"


def cordon_machine(conn: sa.Connection, machine_id: str, order: OperatorOrder) -> None:
    """Place nothing new on the machine; a second cordon keeps the first reason."""
    machine = catalog.get_machine(conn, machine_id)
    if has_row(conn, cordon_table, machine_id=machine_id):
        return
    row = {"machine_id": machine_id, "reason": order.reason, "asked_by": order.by, "created": order.now}
    insert_row(conn, cordon_table, **row)
    journal.record_status(
        conn, machine_id, catalog.MACHINE_MAINTENANCE, f"cordoned: {order.reason}", order.now
    )
    journal.record_operator_step(conn, Step.CORDON, machine_id, machine.domain, order)


def begin_maintenance(conn: sa.Connection, machine_id: str, order: OperatorOrder) -> None:
    """Cordon the machine; on a cordoned machine the new reason replaces the first."""
    cordon_machine(conn, machine_id, order)
    if find_row(conn, cordon_table, machine_id=machine_id, reason=order.reason) is None:
        update_rows(conn, cordon_table, {"machine_id": machine_id}, reason=order.reason)
        domain = catalog.get_machine(conn, machine_id).domain
        journal.record_operator_step(conn, Step.CORDON, machine_id, domain, order)


def uncordon_machine(conn: sa.Connection, machine_id: str, order: OperatorOrder) -> None:
    """Let the machine be used again. Refused while it is drained."""
    machine = catalog.get_machine(conn, machine_id)
    if intent.active_drains(conn, [machine_id]):
        raise Rejected(RefusalKind.CONFLICT, "Machine is drained", nearest_fix="end its drain first")
    if not delete_and_count(conn, cordon_table, machine_id=machine_id):
        raise conflict("Machine is not cordoned")
    journal.record_status(conn, machine_id, machine.status, "uncordoned", order.now)
    journal.record_operator_step(conn, Step.UNCORDON, machine_id, machine.domain, order)


def drain_machine(conn: sa.Connection, machine_id: str, order: OperatorOrder, ids: IdFactory) -> Changed[str]:
    """Take the machine's GPUs out of all partitions and record it; returns the id of the drain.

    The instance on the machine, if any, stays and says why its GPUs are not joined.
    """
    machine = catalog.get_machine(conn, machine_id)
    running = intent.active_drains(conn, [machine_id]).get(machine_id)
    if running is not None:
        raise conflict("Machine is already drained", id=running.id)
    cordon_machine(conn, machine_id, order)
    carried, new = find_row(conn, instance, machine_id=machine_id), ids()
    insert_row(
        conn,
        drain_table,
        id=new,
        machine_id=machine_id,
        instance_id=None if carried is None else carried.id,
        reason=order.reason,
        asked_by=order.by,
        message=DRAIN_STARTED_MESSAGE,
        started=order.now,
    )
    journal.record_operator_step(conn, Step.DRAIN, machine_id, machine.domain, order)
    return Changed(new, instance_creation.publish_intent_change(conn, [machine_id], order.now))


def end_machine_drain(conn: sa.Connection, machine_id: str, order: OperatorOrder) -> Changed[None]:
    """Join the instance's GPUs again; the machine stays cordoned."""
    machine = catalog.get_machine(conn, machine_id)
    running = intent.active_drains(conn, [machine_id]).get(machine_id)
    if running is None:
        raise conflict("Machine is not drained")
    update_rows(conn, drain_table, {"id": running.id}, ended=order.now)
    journal.record_operator_step(conn, Step.END_DRAIN, machine_id, machine.domain, order)
    return Changed(None, instance_creation.publish_intent_change(conn, [machine_id], order.now))


def force_delete_instance(conn: sa.Connection, machine_id: str, order: OperatorOrder) -> Changed[str]:
    """Release the instance on the machine, whoever owns it; returns its id.

    The same clean-up as for a tenant's own release: the instance is gone once its GPUs were seen outside the
    partitions of the site.
    """
    machine = catalog.get_machine(conn, machine_id)
    found = find_row(conn, instance, machine_id=machine_id)
    if found is None:
        raise conflict("Machine carries no Instance")
    journal.record_operator_step(conn, Step.FORCE_DELETE, machine_id, machine.domain, order)
    released = instances.release_instance(conn, found, f"released by the operator: {order.reason}", order.now)
    return Changed(found.id, released)
