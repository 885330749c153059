"""RPCs that only this project has: partition plans as files, and the machine inventory."""

import msgspec
import sqlalchemy as sa

from rackloom.carve.admin import machine_book
from rackloom.carve.admin import operator_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.admin.machine_book import MachineRecord
from rackloom.carve.plan.check import check
from rackloom.carve.plan.planner import make_plan
from rackloom.carve.plan.values import Plan
from rackloom.carve.reconcile.meter import Outcome
from rackloom.carve.site import adoption, drains, fabric_book, knowledge, pauses, tray_steps
from rackloom.carve.site.problems import invalid
from rackloom.carve.site.tables import site
from rackloom.carve.site.values import Changed
from rackloom.errors import Refused
from rackloom.topology.facts import Source

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Plan)


async def make(deps: AdminDeps, request: pb.PlanRequest) -> pb.PlanReply:
    """The plan that the reconciler would carry out now, with the observation it was made from."""
    plan = await deps.store.read(_plan, request.domain)
    return pb.PlanReply(plan=_encoder.encode(plan).decode())


async def apply(deps: AdminDeps, request: pb.ApplyRequest) -> pb.ApplyReply:
    """Carry out a plan; refused when the fabric or the intent is no longer as it found them."""
    try:
        plan = _decoder.decode(request.plan)
    except msgspec.DecodeError as error:
        raise invalid(f"this is not a plan: {error}") from error
    outcomes = await deps.apply(plan)
    return pb.ApplyReply(outcomes=[_outcome(one) for one in outcomes])


async def import_machines(deps: AdminDeps, request: pb.ImportRequest) -> pb.ImportReply:
    """Add machines that an operator wrote down; all of them or none."""
    if not deps.imports:
        raise Refused(
            "this site takes no machines from files", nearest_fix='add "import" to site.machine_sources'
        )
    records = [
        MachineRecord(
            id=one.id,
            chassis_serial=one.chassis_serial,
            slot=one.slot,
            tray_index=one.tray_index,
            rack=one.rack,
            gpus=one.gpus,
        )
        for one in request.machines
    ]
    created, unchanged = await deps.store.run(_import, records, deps.new_machine_status, deps.clock())
    deps.wake(frozenset())
    return pb.ImportReply(created=created, unchanged=unchanged)


async def pause(deps: AdminDeps, request: pb.DomainRequest) -> pb.Done:
    """Do nothing to a domain from now on; it is observed as ever."""
    await deps.change(lambda conn: pauses.pause(conn, request.domain, deps.order(request.reason)))
    return pb.Done(message=f"domain {request.domain} is paused")


async def resume(deps: AdminDeps, request: pb.DomainRequest) -> pb.Done:
    """Work on a domain again."""
    await deps.change(lambda conn: pauses.resume(conn, request.domain, deps.order(request.reason)))
    return pb.Done(message=f"domain {request.domain} is resumed")


async def cordon(deps: AdminDeps, request: pb.TrayRequest) -> pb.Done:
    """Place nothing new on a tray."""
    await deps.store.run(lambda conn: tray_steps.cordon(conn, request.machine_id, deps.order(request.reason)))
    return pb.Done(message=f"machine {request.machine_id} is cordoned")


async def uncordon(deps: AdminDeps, request: pb.TrayRequest) -> pb.Done:
    """Use a tray again; a drain of it ends first."""

    def work(conn: sa.Connection) -> Changed[None]:
        order = deps.order(request.reason)
        ended: Changed[None] = Changed(None, frozenset())
        if drains.active(conn, [request.machine_id]):
            ended = tray_steps.end_drain(conn, request.machine_id, order)
        tray_steps.uncordon(conn, request.machine_id, order)
        return ended

    await deps.change(work)
    return pb.Done(message=f"machine {request.machine_id} is in use again")


async def drain(deps: AdminDeps, request: pb.TrayRequest) -> pb.Done:
    """Take a tray's GPUs out of all partitions, and record it."""
    await deps.change(
        lambda conn: tray_steps.drain(conn, request.machine_id, deps.order(request.reason), deps.ids)
    )
    return pb.Done(message=f"machine {request.machine_id} is being drained")


async def adopt(deps: AdminDeps, request: pb.AdoptRequest) -> pb.Done:
    """Make a found partition that of a logical partition; no GPU moves."""
    order = deps.order(request.reason)
    await deps.change(
        lambda conn: adoption.adopt(
            conn, request.domain, request.partition_name, request.logical_partition_id, order
        )
    )
    return pb.Done(message=f"partition {request.partition_name} is adopted")


async def release(deps: AdminDeps, request: pb.ReleaseRequest) -> pb.Done:
    """Let the reconciler take a found partition apart."""
    order = deps.order(request.reason)
    await deps.change(lambda conn: adoption.release(conn, request.domain, request.partition_name, order))
    return pb.Done(message=f"partition {request.partition_name} is released")


def _outcome(one: Outcome) -> pb.OperationOutcome:
    return pb.OperationOutcome(
        kind=one.kind, partition_name=one.partition_name, state=one.state, message=one.message
    )


def _plan(conn: sa.Connection, domain: str) -> Plan:
    known = knowledge.of_domain(conn, domain)
    if known.observation is None:
        raise Refused(
            f"no plan for domain {domain}: {known.operators_doubt}",
            nearest_fix="make its switch controller reachable, then plan again",
        )
    # A paused domain is planned for as well: what would be done is what one wants to see before resuming.
    intent = msgspec.structs.replace(fabric_book.intent(conn, domain), paused=None)
    plan = make_plan(intent, known.observation)
    check(plan, intent, known.observation)
    return plan


def _import(
    conn: sa.Connection, records: list[MachineRecord], status: str, now: float
) -> tuple[list[str], list[str]]:
    site_id = conn.execute(sa.select(site.c.id)).scalar_one()
    return machine_book.enrol(conn, site_id, records, Source.DECLARED, status, now)
