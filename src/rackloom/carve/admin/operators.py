"""RPCs of this project: plans as files, machine import, domain state, and operator steps.

`MakePlan` returns the plan that the reconciler would execute now, also for a paused domain, with the
observation that it was made from. `ApplyPlan` executes such a plan after a new observation, and refuses it if
fabric or intent have changed. `ImportMachines` adds all machines of a file or none. `ShowDomains` returns for
each domain the time of the observation or the doubt, the pause, the blocked GPUs, and the trays that get no
instance: those in partitions that the site did not make, and those with GPUs that their switch controller
does not list.

A takeover from NICo reads this site for its planner, and runs one step of a plan at a time. `rackloom admin
import nico` reads NICo and makes the plan, so no token of NICo reaches the site. The site decides about each
step in one transaction, and does not trust the plan.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.admin import operator_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps, timestamp
from rackloom.carve.inventory import adoption, endpoints, enrolment, maintenance
from rackloom.carve.inventory.adoption import PartitionOwner
from rackloom.carve.inventory.enrolment import MachineRecord
from rackloom.carve.observation import latest
from rackloom.carve.observation.latest import LatestObservation
from rackloom.carve.partitions import found, intent, ownership
from rackloom.carve.partitions.ownership import ForeignTray
from rackloom.carve.reconcile.domain_pass import OperationOutcome
from rackloom.carve.reconcile.records import plan_of_domain
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.migrate import analyze
from rackloom.carve.store.schema import site
from rackloom.carve.store.values import Changed, invalid, not_found
from rackloom.carve.takeover.site_reading import read_site
from rackloom.carve.takeover.steps import StepOrder, StepOutcome, do_step, undo_step
from rackloom.carve.tenancy import catalog, placement
from rackloom.core.partitions.domain import PartitionPlan
from rackloom.core.takeover.records import Step
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json
from rackloom.topology.join_key import Source

# Plans, import and operator steps.


_encoder = msgspec.json.Encoder(order="deterministic")


async def make_domain_plan(deps: AdminDeps, request: pb.PlanRequest) -> pb.PlanReply:
    """The plan that the reconciler would carry out now, with the observation that it was made from."""
    plan = await deps.store.read(plan_of_domain, request.domain, deps.valid_from())
    return pb.PlanReply(plan=_encoder.encode(plan).decode())


async def apply_plan(deps: AdminDeps, request: pb.ApplyRequest) -> pb.ApplyReply:
    """Carry out a plan. Refused if the fabric or the intent has changed since it was made."""
    try:
        plan = decode_json(request.plan, "the request", PartitionPlan)
    except Undecodable as error:
        raise invalid(f"this is not a plan: {error.reason}") from error
    outcomes = await deps.apply(plan)
    return pb.ApplyReply(outcomes=[_outcome_message(outcome) for outcome in outcomes])


async def import_machines(deps: AdminDeps, request: pb.ImportRequest) -> pb.ImportReply:
    """Add the machines of an operator's file, all of them or none."""
    if not deps.imports:
        raise Refused(
            "this site takes no machines from files", nearest_fix='add "import" to site.machine_sources'
        )
    records = [
        MachineRecord(
            id=machine.id,
            chassis_serial=machine.chassis_serial,
            slot=machine.slot,
            tray_index=machine.tray_index,
            rack=machine.rack,
            gpus=machine.gpus,
        )
        for machine in request.machines
    ]
    created, unchanged = await deps.store.run(
        _import_machines, records, deps.new_machine_status, deps.clock()
    )
    deps.wake(frozenset())
    return pb.ImportReply(created=created, unchanged=unchanged)


async def pause(deps: AdminDeps, request: pb.DomainRequest) -> pb.Done:
    """Begin no more operations in a domain. It is still observed."""
    await _run_step(deps, request, lambda conn, order: intent.pause_domain(conn, request.domain, order))
    return pb.Done(message=f"domain {request.domain} is paused")


async def resume(deps: AdminDeps, request: pb.DomainRequest) -> pb.Done:
    """Begin operations in a domain again."""
    await _run_step(deps, request, lambda conn, order: intent.resume_domain(conn, request.domain, order))
    return pb.Done(message=f"domain {request.domain} is resumed")


async def cordon(deps: AdminDeps, request: pb.TrayRequest) -> pb.Done:
    """Place nothing new on a tray."""
    # This wakes no reconciler, because a cordon changes no intent.
    await deps.store.run(
        lambda conn: maintenance.cordon_machine(conn, request.machine_id, deps.order(request.reason))
    )
    return pb.Done(message=f"machine {request.machine_id} is cordoned")


async def uncordon(deps: AdminDeps, request: pb.TrayRequest) -> pb.Done:
    """Use a tray again. A drain of it ends first."""

    def work(conn: sa.Connection, order: OperatorOrder) -> Changed[None]:
        ended: Changed[None] = Changed(None, frozenset())
        if intent.active_drains(conn, [request.machine_id]):
            ended = maintenance.end_machine_drain(conn, request.machine_id, order)
        maintenance.uncordon_machine(conn, request.machine_id, order)
        return ended

    await _run_step(deps, request, work)
    return pb.Done(message=f"machine {request.machine_id} is in use again")


async def drain(deps: AdminDeps, request: pb.TrayRequest) -> pb.Done:
    """Take a tray's GPUs out of all partitions, and record it."""
    machine_id = request.machine_id
    await _run_step(
        deps, request, lambda conn, order: maintenance.drain_machine(conn, machine_id, order, deps.ids)
    )
    return pb.Done(message=f"machine {machine_id} is being drained")


async def adopt(deps: AdminDeps, request: pb.AdoptRequest) -> pb.Done:
    """Make a found partition the physical partition of a logical partition. No GPU moves."""
    names = (request.domain, request.partition_name)
    if request.HasField("owner") == bool(request.logical_partition_id):
        raise invalid("exactly one of logical_partition_id and owner must be given")
    if not request.HasField("owner"):
        wanted = request.logical_partition_id
        await _run_step(deps, request, lambda conn, order: found.adopt_partition(conn, *names, wanted, order))
        return pb.Done(message=f"partition {request.partition_name} is adopted")
    owner = PartitionOwner(
        org=request.owner.tenant_organization_id.lower(),
        vpc=request.owner.vpc,
        logical_partition=request.owner.logical_partition,
    )
    created = await deps.change(
        lambda conn: adoption.adopt_for_owner(conn, *names, owner, deps.order(request.reason), deps.ids)
    )
    new = f"; created: {', '.join(created)}" if created else ""
    return pb.Done(message=f"partition {request.partition_name} is adopted{new}")


async def release(deps: AdminDeps, request: pb.ReleaseRequest) -> pb.Done:
    """Let the reconciler remove a found partition."""
    names = (request.domain, request.partition_name)
    await _run_step(deps, request, lambda conn, order: found.release_partition(conn, *names, order))
    return pb.Done(message=f"partition {request.partition_name} is released")


async def _run_step(
    deps: AdminDeps, request: Any, step: Callable[[sa.Connection, OperatorOrder], Changed[Any]]
) -> None:
    # The order is dated inside the transaction, so no observation from before the step can seem to answer it.
    await deps.change(lambda conn: step(conn, deps.order(request.reason)))


def _outcome_message(outcome: OperationOutcome) -> pb.OperationOutcome:
    return pb.OperationOutcome(
        kind=outcome.kind, partition_name=outcome.partition_name, state=outcome.state, message=outcome.message
    )


def _import_machines(
    conn: sa.Connection, records: list[MachineRecord], status: str, now: float
) -> tuple[list[str], list[str]]:
    site_id = conn.execute(sa.select(site.c.id)).scalar_one()
    imported = enrolment.enrol_machines(conn, site_id, records, Source.DECLARED, status, now)
    analyze(conn)
    return imported


# Takeover from NICo.


async def show_takeover_site(deps: AdminDeps, _request: pb.TakeoverSiteRequest) -> pb.TakeoverSite:
    """The state of the site that a takeover plan depends on."""
    return pb.TakeoverSite(
        reading=msgspec.json.encode(await deps.store.read(read_site, deps.valid_from())).decode()
    )


async def run_takeover_step(deps: AdminDeps, request: pb.TakeoverStepRequest) -> pb.TakeoverStepReply:
    """Do or undo one step."""
    try:
        step = decode_json(request.step, "the request", Step)
    except Undecodable as error:
        raise invalid(f"this is not a step of a takeover: {error.reason}") from error

    def work(conn: sa.Connection) -> Changed[StepOutcome]:
        # The order is dated inside the transaction, as for every operator step.
        order = StepOrder(deps.order(request.reason), deps.ids, deps.valid_from())
        return undo_step(conn, step, order) if request.undo else do_step(conn, step, order)

    outcome = await deps.change(work)
    return pb.TakeoverStepReply(state=outcome.state, message=outcome.message)


# Domain state.


async def show_domains(deps: AdminDeps, request: pb.DomainsRequest) -> pb.DomainList:
    """Every domain by uuid, or one. NOT_FOUND if no switch controller has reported that domain."""
    return await deps.store.read(_domain_list, request.domain, deps.valid_from())


def _domain_list(conn: sa.Connection, wanted: str, valid_from: float) -> pb.DomainList:
    reported = {endpoint.domain for endpoint in endpoints.all_endpoints(conn) if endpoint.domain is not None}
    if wanted and wanted not in reported:
        raise not_found(f"no switch controller speaks for domain {wanted}")
    chosen = sorted(reported & {wanted} if wanted else reported)
    known = latest.latest_of_domains(conn, chosen, valid_from)
    blocked = intent.blocked_gpus_of_domains(conn, chosen)
    unlisted = placement.unlisted_gpus(conn, None)
    domain_of = catalog.domains_of_machines(conn, unlisted)
    return pb.DomainList(
        domains=[
            _domain_state(
                domain,
                known[domain],
                intent.pause_reason(conn, domain),
                blocked[domain],
                ownership.foreign_trays_in_domain(conn, domain),
                {tray: devices for tray, devices in unlisted.items() if domain_of[tray] == domain},
            )
            for domain in chosen
        ]
    )


def _domain_state(
    domain: str,
    known: LatestObservation,
    paused: str | None,
    blocked: list[sa.Row[Any]],
    trays: list[ForeignTray],
    unlisted: Mapping[str, Collection[int]],
) -> pb.DomainState:
    observation = known.observation
    return pb.DomainState(
        domain=domain,
        observed_at=None if observation is None else timestamp(observation.observed_at),
        doubt=known.operators_doubt,
        pause_reason=paused,
        blocked=[
            pb.BlockedGpu(guid=int(row.guid), reason=row.reason, fix=row.fix, since=timestamp(row.since))
            for row in blocked
        ],
        foreign_trays=[
            pb.ForeignTray(
                machine_id=tray.machine_id, partition_id=tray.partition_id, partition_name=tray.name
            )
            for tray in trays
        ],
        unlisted_trays=[
            pb.UnlistedTray(machine_id=machine_id, device_instances=devices)
            for machine_id, devices in unlisted.items()
        ],
    )
