"""The steps of an import and of its rollback, each in one transaction of the site.

`do_step` creates one record with its id, or adopts one partition, and writes into the journal that the
import did it, in the same transaction. A step that the journal has already is not done again, therefore an
import that was interrupted anywhere is repeated from its beginning. `undo_step` removes the object of a
step only if the journal records that an import created it.

No step calls a switch controller. The domains concerned are paused first, so no operation
begins in them while their records are incomplete. At the end of an import and of a rollback the pause ends
only if the plan of the domain is empty: otherwise the site would change the fabric, which an operator
decides. A pause that someone else ordered stays.

An adoption compares the GPUs again, within its transaction: the partition must hold exactly the GPUs
of the step, and the imported instances must want exactly these in the domain.
"""

from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.inventory import maintenance
from rackloom.carve.partitions import found, intent
from rackloom.carve.reconcile.records import plan_of_domain
from rackloom.carve.store import journal
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.journal import Step as JournalStep
from rackloom.carve.store.prepared import delete_rows, find_row, has_row
from rackloom.carve.store.schema import (
    allocation,
    cordon,
    event_counter,
    instance,
    instance_type,
    logical_partition,
    machine,
    owned_partition,
    site,
    tenant,
    tenant_event,
    tenant_quota,
    tenant_total,
    tray_reservation,
    vpc,
)
from rackloom.carve.store.values import Changed, IdFactory, InterfaceSpec, conflict
from rackloom.carve.tenancy import catalog, entitlements, instance_creation, instances, logical_partitions
from rackloom.carve.tenancy.catalog import NewInstanceType
from rackloom.carve.tenancy.entitlements import NewAllocation
from rackloom.carve.tenancy.instance_creation import CreationPlan, InstanceRequest, MachineAssignment
from rackloom.carve.tenancy.logical_partitions import NewLogicalPartition, NewVpc
from rackloom.core.partitions.domain import UNCERTAIN_REASON
from rackloom.core.takeover.records import (
    AdoptPartition,
    AssignMachineType,
    CordonMachine,
    CreateAllocation,
    CreateInstance,
    CreateInstanceType,
    CreateLogicalPartition,
    CreateTenant,
    CreateVpc,
    PauseDomain,
    RecordedStep,
    SettleDomain,
    Step,
    StepState,
    subject_of_step,
)
from rackloom.errors import Refused
from rackloom.topology.part_names import PartName

PAUSE_REASON = "records are being taken over from NICo"
CORDON_REASON = "NICo uses this machine"
PLACEMENT = "as in NICo"


class StepOutcome(msgspec.Struct, frozen=True):
    """The outcome of a step."""

    state: StepState
    message: str = ""


_DONE = StepOutcome(StepState.DONE)
_ALREADY = StepOutcome(StepState.ALREADY)


class StepOrder(msgspec.Struct, frozen=True):
    """The import's author, reason and time, the source of new ids, and the start of valid readings."""

    by: OperatorOrder
    ids: IdFactory
    valid_from: float = 0.0

    @property
    def now(self) -> float:
        """Seconds since the epoch."""
        return self.by.now


def do_step(conn: sa.Connection, step: Step, order: StepOrder) -> Changed[StepOutcome]:
    """Do one step of a plan, unless it is done. Raises Rejected if the site has changed since the plan."""
    match step:
        case PauseDomain():
            return _pause(conn, step.domain, order)
        case SettleDomain():
            return _settle(conn, step.domain, order)
    subject = subject_of_step(step)
    if journal.is_imported(conn, subject):
        # An object that its tenant deleted since is not created again.
        gone = StepOutcome(StepState.ALREADY, "removed since it was imported")
        return Changed(_ALREADY if _exists(conn, step) else gone, frozenset())
    if _exists(conn, step):
        raise conflict(f"{subject} is here already, and no import created it")
    domains = _create(conn, step, order)
    journal.record_operator_step(conn, JournalStep.IMPORT, subject, _domain_of(step), order.by)
    return Changed(_DONE, domains)


def undo_step(conn: sa.Connection, step: Step, order: StepOrder) -> Changed[StepOutcome]:
    """Remove the object that a step created. Raises Rejected if something else depends on it."""
    match step:
        case PauseDomain():
            return _pause(conn, step.domain, order)
        case SettleDomain():
            return _settle(conn, step.domain, order)
    subject = subject_of_step(step)
    if not journal.is_imported(conn, subject):
        return Changed(_ALREADY, frozenset())
    domains: frozenset[str] = frozenset()
    if _exists(conn, step):
        if isinstance(step, CreateTenant) and (uses := _uses_of_tenant(conn, step.id)):
            kept = f"organisation {step.org} has {uses} that no import created"
            return Changed(StepOutcome(StepState.KEPT, kept), frozenset())
        domains = _remove(conn, step, order)
    journal.record_operator_step(conn, JournalStep.UNDO_IMPORT, subject, _domain_of(step), order.by)
    return Changed(_DONE, domains)


# Pauses.


def _pause(conn: sa.Connection, domain: str, order: StepOrder) -> Changed[StepOutcome]:
    reason = intent.pause_reason(conn, domain)
    if reason == PAUSE_REASON:
        return Changed(_ALREADY, frozenset())
    if reason is not None:
        return Changed(StepOutcome(StepState.ALREADY, f"paused before: {reason}"), frozenset())
    paused = intent.pause_domain(conn, domain, OperatorOrder(order.by.by, PAUSE_REASON, order.now))
    return Changed(_DONE, paused.domains)


def _settle(conn: sa.Connection, domain: str, order: StepOrder) -> Changed[StepOutcome]:
    reason = intent.pause_reason(conn, domain)
    if reason is None:
        return Changed(_ALREADY, frozenset())
    if reason != PAUSE_REASON:
        return Changed(StepOutcome(StepState.KEPT, f"stays paused as before: {reason}"), frozenset())
    try:
        plan = plan_of_domain(conn, domain, order.valid_from)
    except Refused as refused:
        return Changed(StepOutcome(StepState.KEPT, f"stays paused: {refused.reason}"), frozenset())
    if plan.observation.uncertain:
        return Changed(StepOutcome(StepState.KEPT, f"stays paused: {UNCERTAIN_REASON}"), frozenset())
    waiting = plan.operations
    if waiting:
        what = ", ".join(f"{operation.__struct_config__.tag} {operation.name}" for operation in waiting)
        message = f"stays paused, because the site would change the fabric: {what}"
        return Changed(StepOutcome(StepState.KEPT, message), frozenset())
    resumed = intent.resume_domain(conn, domain, order.by)
    return Changed(_DONE, resumed.domains)


# The objects that a step creates, and whether they exist.


_TABLES: dict[type[Any], sa.Table] = {
    CreateTenant: tenant,
    CreateInstanceType: instance_type,
    CreateAllocation: allocation,
    CreateLogicalPartition: logical_partition,
    CreateVpc: vpc,
    CreateInstance: instance,
}


def _exists(conn: sa.Connection, step: RecordedStep) -> bool:
    match step:
        case AssignMachineType():
            return has_row(conn, machine, id=step.machine, instance_type_id=step.type_id)
        case CordonMachine():
            return has_row(conn, cordon, machine_id=step.machine, reason=_cordon_reason(step))
        case AdoptPartition():
            owner = {"domain": step.domain, "name": step.name, "logical_partition_id": step.logical_partition}
            return has_row(conn, owned_partition, **owner)
        case _:
            return has_row(conn, _TABLES[type(step)], id=step.id)


def _domain_of(step: RecordedStep) -> str | None:
    return step.domain if isinstance(step, AdoptPartition) else None


def _site(conn: sa.Connection) -> sa.Row[Any]:
    return conn.execute(sa.select(site)).one()


def _provider_id(conn: sa.Connection) -> str:
    return str(_site(conn).provider_id)


def _create(conn: sa.Connection, step: RecordedStep, order: StepOrder) -> frozenset[str]:
    """Create the record of a step, with its id. Returns the domains to wake."""
    match step:
        case CreateTenant():
            if has_row(conn, tenant, org=step.org):
                raise conflict(f"organisation {step.org} became a tenant since the plan was made; plan again")
            entitlements.ensure_tenant(conn, step.org, order.now, lambda: step.id)
        case CreateInstanceType():
            kind = NewInstanceType(
                _site(conn).id, step.name, step.description, step.labels, step.capabilities
            )
            catalog.create_instance_type(conn, _provider_id(conn), kind, order.now, lambda: step.id)
        case CreateAllocation():
            kept_ids = iter((step.id, *(quota.id for quota in step.quotas)))
            given = NewAllocation(
                entitlements.tenant_id_of(conn, step.org),
                _site(conn).id,
                step.name,
                step.description,
                {quota.type_id: quota.machines for quota in step.quotas},
            )
            entitlements.create_allocation(conn, _provider_id(conn), given, order.now, lambda: next(kept_ids))
        case CreateLogicalPartition():
            tenant_id = entitlements.tenant_id_of(conn, step.org)
            partition = NewLogicalPartition(_site(conn).id, step.name, step.description)
            logical_partitions.create_logical_partition(
                conn, tenant_id, partition, order.now, lambda: step.id
            )
        case CreateVpc():
            wanted = NewVpc(
                site_id=_site(conn).id,
                name=step.name,
                description=step.description,
                logical_partition_id=step.logical_partition,
                extra=step.extra,
                id=step.id,
            )
            tenant_id = entitlements.tenant_id_of(conn, step.org)
            logical_partitions.create_vpc(conn, tenant_id, wanted, order.now, order.ids)
        case AssignMachineType():
            provider_id, machines = _provider_id(conn), [step.machine]
            catalog.assign_machines_to_type(conn, provider_id, step.type_id, machines, order.now)
        case CordonMachine():
            if has_row(conn, cordon, machine_id=step.machine):
                raise conflict(f"machine {step.machine} was cordoned since the plan was made; plan again")
            because = OperatorOrder(order.by.by, _cordon_reason(step), order.now)
            maintenance.cordon_machine(conn, step.machine, because)
        case CreateInstance():
            return _create_instance(conn, step, order)
        case AdoptPartition():
            return _adopt(conn, step, order)
    return frozenset()


def _cordon_reason(step: CordonMachine) -> str:
    return f"{CORDON_REASON}: {step.why}"


def _create_instance(conn: sa.Connection, step: CreateInstance, order: StepOrder) -> frozenset[str]:
    tenant_id = entitlements.tenant_id_of(conn, step.org)
    home = logical_partitions.get_vpc(conn, tenant_id, step.vpc)
    instance_creation.check_instance_name(conn, tenant_id, home.site_id, step.name)
    _check_machine(conn, step)
    wanted = tuple(InterfaceSpec(entry.logical_partition, entry.device) for entry in step.interfaces)
    if wanted:
        gpus = instance_creation.nvlink_gpus_of_instance(conn, _site(conn), None, step.machine)
        instance_creation.check_hardware_and_partitions(conn, home, wanted, gpus)
    kept_ids = iter((step.id, *(entry.id for entry in step.interfaces)))
    domain = catalog.get_machine(conn, step.machine).domain
    request = InstanceRequest(
        names=(step.name,),
        vpc_id=step.vpc,
        instance_type_id=step.type_id,
        machine_id=step.machine,
        description=step.description,
        extra=step.extra,
    )
    planned = CreationPlan(
        request=request,
        tenant_id=tenant_id,
        site_id=home.site_id,
        type_id=step.type_id,
        assignments=(MachineAssignment(step.name, step.machine, domain),),
        reason=PLACEMENT,
        interfaces=wanted,
        warnings=(),
    )
    return instance_creation.execute_creation(conn, planned, order.now, lambda: next(kept_ids)).domains


def _check_machine(conn: sa.Connection, step: CreateInstance) -> None:
    if (occupant := find_row(conn, instance, machine_id=step.machine)) is not None:
        raise conflict(f"machine {step.machine} carries instance {occupant.id} now", id=occupant.id)
    gpus = {
        gpu.module_id - 1: gpu.guid for gpu in catalog.gpus_of_machines(conn, [step.machine])[step.machine]
    }
    for entry in step.interfaces:
        if gpus.get(entry.device) != entry.guid:
            raise conflict(f"{PartName(step.machine, gpu=entry.device)} is another one now; plan again")


def _adopt(conn: sa.Connection, step: AdoptPartition, order: StepOrder) -> frozenset[str]:
    guids = {int(guid) for guid in step.guids}
    listed = [
        view.partition
        for view in found.partitions_of_domains(conn, [step.domain], order.valid_from)
        if view.partition.name == step.name
    ]
    if not listed or listed[0].members != guids:
        raise conflict(
            f"partition {step.name} cannot be read, or has other GPUs than when it was planned; plan again"
        )
    wanted = {
        assignment.guid
        for assignment in intent.gpu_assignments(conn, step.domain)
        if assignment.logical_partition == step.logical_partition
    }
    if wanted != guids:
        raise conflict(f"the instances of logical partition {step.logical_partition} want other GPUs now")
    by = msgspec.structs.replace(order.by, valid_from=order.valid_from)
    adopted = found.adopt_partition(conn, step.domain, step.name, step.logical_partition, by)
    return adopted.domains


# Removals of a rollback.


def _uses_of_tenant(conn: sa.Connection, tenant_id: str) -> str:
    """The kinds of objects that an organisation has, or empty if it has none."""
    kinds = {
        "allocations": allocation,
        "logical partitions": logical_partition,
        "VPCs": vpc,
        "instances": instance,
        "quotas": tenant_quota,
        "tray reservations": tray_reservation,
    }
    return ", ".join(kind for kind, table in kinds.items() if has_row(conn, table, tenant_id=tenant_id))


def _remove(conn: sa.Connection, step: RecordedStep, order: StepOrder) -> frozenset[str]:
    """Remove the record that a step created. Returns the domains to wake."""
    match step:
        case CreateTenant():
            for table in (tenant_event, event_counter, tenant_total):
                delete_rows(conn, table, tenant_id=step.id)
            delete_rows(conn, tenant, id=step.id)
        case CreateInstanceType():
            catalog.delete_instance_type(conn, _provider_id(conn), step.id)
        case CreateAllocation():
            entitlements.delete_allocation(conn, _provider_id(conn), step.id, order.now)
        case CreateLogicalPartition():
            tenant_id = entitlements.tenant_id_of(conn, step.org)
            touched = logical_partitions.delete_logical_partition(conn, tenant_id, step.id, order.now).domains
            if has_row(conn, logical_partition, id=step.id):
                raise conflict(f"logical partition {step.name} has a partition on the fabric or an interface")
            return touched
        case CreateVpc():
            logical_partitions.delete_vpc(conn, entitlements.tenant_id_of(conn, step.org), step.id, order.now)
        case AssignMachineType():
            provider_id = _provider_id(conn)
            catalog.remove_machine_from_type(conn, provider_id, step.type_id, step.machine, order.now)
        case CordonMachine():
            maintenance.uncordon_machine(conn, step.machine, order.by)
        case CreateInstance():
            row = instances.get_instance(conn, entitlements.tenant_id_of(conn, step.org), step.id)
            return instances.forget_instance(conn, row, order.now)
        case AdoptPartition():
            found.give_up_partition(conn, step.domain, step.name)
            here = sa.select(machine.c.id).where(machine.c.domain == step.domain)
            machines = conn.execute(here).scalars().all()
            return instance_creation.publish_intent_change(conn, machines, order.now)
    return frozenset()
