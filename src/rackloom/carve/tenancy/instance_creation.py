"""New instances: the rules of a request, the machines that it gets, and the NVLink interfaces of each GPU.

An instance is a tenant's use of one machine. `plan_creation` applies every rule (VPC, site, allocation,
names, interfaces, quota), places the instances and returns a plan. `execute_creation` writes it in the
same transaction. A batch creates all instances or none, and a dry run stops after the plan.
`publish_intent_change` increments the revisions of the machines' domains and updates statuses. The
fabric's response to the intent is decided from observations.

An interface names the logical partition that a GPU shall join. A list of interfaces is always the complete
desired state: a GPU that is not in it is detached. `replace_interfaces` keeps the row, and with it the
readiness, of a GPU that stays in its logical partition. A detached row stays in Deleting until an observation
shows the GPU outside the partition. `check_interfaces` refuses device instances that the hardware does not
have or that repeat, and partitions that are not Ready, at another site, or of another tenant. The last is
answered as not found. If the VPC has a default logical partition, every interface must name that one.

Warnings go with the answer and refuse nothing. There is one if a logical partition spans several NVLink
domains, because GPUs share no memory across domains, and one if a machine's GPUs are split between
partitions, because GPU feature discovery then drops its `nvidia.com/gpu.clique` label. There is one if a
chosen machine has GPUs in a partition that the site did not make: they join nothing until an operator adopts
or releases it.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from hashlib import sha256
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.partitions.ownership import foreign_partition_text, foreign_trays
from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind, EventNote
from rackloom.carve.store.prepared import find_row, insert_row, require_unused
from rackloom.carve.store.schema import instance as table
from rackloom.carve.store.schema import logical_partition, machine, nvlink_interface
from rackloom.carve.store.values import (
    Changed,
    IdFactory,
    InterfaceSpec,
    Rejected,
    Status,
    conflict,
    forbidden,
    invalid,
)
from rackloom.carve.tenancy import catalog, entitlements, logical_partitions, placement, status
from rackloom.carve.tenancy.entitlements import QuotaKind, check_object_quota
from rackloom.core.partitions.status_rules import WAITING_REASON
from rackloom.core.place.instance_trays import AllocationUse, TrayChoice, TrayRequest

# Warnings.


class WarningKind(StrEnum):
    """The subject of a warning."""

    SPANS_DOMAINS = "LogicalPartitionSpansDomains"
    TRAY_SPLIT = "TraySplit"
    FOREIGN_PARTITION = "ForeignPartition"


class InstanceWarning(msgspec.Struct, frozen=True):
    """A legal request that is probably not meant."""

    kind: WarningKind
    message: str


def warnings_for(
    conn: sa.Connection, wanted: Sequence[InterfaceSpec], domains: Collection[str | None], gpus: int
) -> tuple[InstanceWarning, ...]:
    """The warnings about instances with `wanted` on machines with `gpus` NVLink GPUs in `domains`."""
    partitions = sorted({spec.logical_partition_id for spec in wanted})
    members, found = placement.partition_members(conn, partitions), list[InstanceWarning]()
    for partition in partitions:
        spanned = {*members.get(partition, {}), *domains}
        if len(spanned) > 1:
            names = ", ".join(sorted(domain or "not yet observed" for domain in spanned))
            message = (
                f"NVLink Logical Partition {partition} spans {len(spanned)} NVLink domains ({names}): GPUs in"
                " different domains share no memory"
            )
            found.append(InstanceWarning(WarningKind.SPANS_DOMAINS, message))
    # GPU feature discovery labels a node only when all its GPUs are in one clique.
    if wanted and (len(partitions) > 1 or len(wanted) < gpus):
        several = len(partitions) > 1
        how = f"between {len(partitions)} partitions" if several else f"{len(wanted)} of {gpus} joined"
        message = f"The GPUs of one machine are split ({how}): its nvidia.com/gpu.clique label will vanish"
        found.append(InstanceWarning(WarningKind.TRAY_SPLIT, message))
    return tuple(found)


def check_instance_name(conn: sa.Connection, tenant_id: str, site_id: str, name: str) -> None:
    """Refuse a name that another instance of the tenant has at the site."""
    existing = find_row(conn, table, tenant_id=tenant_id, site_id=site_id, name=name)
    require_unused(existing, "An Instance with specified name already exists at Site")


def nvlink_gpus_of_instance(
    conn: sa.Connection, site: sa.Row[Any], type_id: str | None, machine_id: str | None
) -> int:
    """NVLink GPUs of an instance, from its type, or else from its machine."""
    if type_id is None:
        return len(catalog.gpus_of_machines(conn, [machine_id])[machine_id]) if machine_id else 0
    try:
        kind = catalog.get_instance_type(conn, type_id)
    except Rejected as refusal:
        raise invalid(
            "Could not find Instance Type with ID specified in request", instanceTypeId=refusal.reason
        ) from None
    if kind.site_id != site.id:
        raise invalid("Instance Type does not belong to the Site of the VPC")
    return catalog.nvlink_gpu_count(kind.capabilities)


def publish_intent_change(conn: sa.Connection, machine_ids: Sequence[str], now: float) -> frozenset[str]:
    """Increment the revisions of the machines' domains, and update their statuses."""
    found = conn.execute(sa.select(machine.c.domain).where(machine.c.id.in_(machine_ids)).distinct())
    domains = found.scalars().all()
    for domain in domains:
        status.update_statuses(conn, domain, now)
    return journal.increment_revisions(conn, domains)


# Interfaces.


LEAVING_REASON = "leaving the partition"


def initial_interfaces(
    conn: sa.Connection, vpc: sa.Row[Any], wanted: Sequence[InterfaceSpec] | None, gpus: int
) -> tuple[InterfaceSpec, ...]:
    """The interfaces of a new instance with `gpus` NVLink GPUs: those requested, else the VPC's default."""
    if wanted is not None:
        check_interfaces(conn, vpc, wanted, gpus)
        return tuple(wanted)
    if vpc.logical_partition_id is None:
        return ()
    return tuple(InterfaceSpec(vpc.logical_partition_id, index) for index in range(gpus))


def check_interfaces(
    conn: sa.Connection, vpc: sa.Row[Any], wanted: Sequence[InterfaceSpec], gpus: int
) -> None:
    """Refuse interfaces that the hardware, the VPC or the logical partitions do not allow."""
    if not wanted:
        return
    if vpc.logical_partition_id is None:
        check_hardware_and_partitions(conn, vpc, wanted, gpus)
        return
    _check_devices(wanted, gpus)
    for spec in wanted:
        if spec.logical_partition_id != vpc.logical_partition_id:
            raise invalid(
                f"NVLink Logical Partition {spec.logical_partition_id} of deviceInstance"
                f" {spec.device_instance} does not match NVLink Logical Partition of VPC"
            )


def check_hardware_and_partitions(
    conn: sa.Connection, vpc: sa.Row[Any], wanted: Sequence[InterfaceSpec], gpus: int
) -> None:
    """As `check_interfaces`, without the default of the VPC: an instance may be older than the default."""
    _check_devices(wanted, gpus)
    _check_logical_partitions(conn, vpc, wanted)


def _check_logical_partitions(conn: sa.Connection, vpc: sa.Row[Any], wanted: Sequence[InterfaceSpec]) -> None:
    ids = {spec.logical_partition_id for spec in wanted}
    rows = conn.execute(sa.select(logical_partition).where(logical_partition.c.id.in_(ids))).all()
    # Another tenant's partition is answered like one that does not exist, so that ids disclose nothing.
    found = {row.id: row for row in rows if row.tenant_id == vpc.tenant_id}
    for spec in wanted:
        partition = found.get(spec.logical_partition_id)
        if partition is None:
            raise invalid(f"Could not find NVLink Logical Partition {spec.logical_partition_id} of Tenant")
        if partition.site_id != vpc.site_id:
            raise invalid(f"NVLink Logical Partition {partition.id} does not belong to the Site of the VPC")
        if partition.status != Status.READY:
            raise invalid(f"NVLink Logical Partition {partition.id} is not in Ready state")


def interfaces_of(conn: sa.Connection, instance_id: str) -> Sequence[sa.Row[Any]]:
    """The interfaces of an instance, the ones being detached too."""
    return conn.execute(
        sa.select(nvlink_interface).where(nvlink_interface.c.instance_id == instance_id)
    ).all()


def replace_interfaces(
    conn: sa.Connection, instance_id: str, wanted: Sequence[InterfaceSpec], now: float, ids: IdFactory
) -> bool:
    """Make `wanted` the interfaces of the instance, or return False if they already are.

    A GPU that stays in its logical partition keeps its row, and with it its readiness.
    """
    live = {
        InterfaceSpec(row.logical_partition_id, row.device_instance): row.id
        for row in interfaces_of(conn, instance_id)
        if row.status != Status.DELETING
    }
    unwanted = [row_id for spec, row_id in live.items() if spec not in wanted]
    new = [spec for spec in wanted if spec not in live]
    detached = sa.update(nvlink_interface).where(nvlink_interface.c.id.in_(unwanted))
    conn.execute(detached.values(status=Status.DELETING, reason=LEAVING_REASON, intent_at=now, updated=now))
    if new:
        row = {"instance_id": instance_id, "status": Status.PENDING, "reason": WAITING_REASON}
        times = {"intent_at": now, "created": now, "updated": now}
        rows = [
            {
                **row,
                **times,
                "id": ids(),
                "logical_partition_id": spec.logical_partition_id,
                "device_instance": spec.device_instance,
            }
            for spec in new
        ]
        conn.execute(sa.insert(nvlink_interface), rows)
    return bool(unwanted or new)


def _check_devices(wanted: Sequence[InterfaceSpec], gpus: int) -> None:
    if gpus == 0:
        raise invalid(
            "NVLink Interfaces require GPUs with device type NVLink",
            nvLinkInterfaces="neither the Instance Type nor the Machine has GPUs with device type NVLink",
        )
    devices = [spec.device_instance for spec in wanted]
    if any(not 0 <= device < gpus for device in devices):
        raise invalid(
            f"deviceInstance must be between 0 and {gpus - 1}",
            nvLinkInterfaces=f"each deviceInstance must be between 0 and {gpus - 1}",
        )
    if len(set(devices)) < len(devices):
        raise invalid(
            "deviceInstance must be unique", nvLinkInterfaces="a GPU may be in one logical partition only"
        )


# Creation.


class InstanceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """New instances that differ in their names only. All are created or none."""

    names: tuple[str, ...]
    vpc_id: str
    instance_type_id: str | None
    machine_id: str | None = None
    interfaces: tuple[InterfaceSpec, ...] | None = None
    """None stands for the interfaces that follow from the VPC's default."""
    one_domain: bool = True
    same_domain: bool = False
    """All in one domain, one where their logical partitions have members already, if they have any."""
    allow_unhealthy: bool = False
    description: str | None = None
    extra: Mapping[str, Any] = {}
    """Fields of networks and operating systems: stored and returned, never acted on."""


def check_batch_size(conn: sa.Connection, tenant_id: str, vpc_id: str, count: int) -> None:
    """Refuse a batch larger than the largest NVLink domain of the VPC's site."""
    limit = max(catalog.largest_domain_size(conn, _ready_vpc(conn, tenant_id, vpc_id).site_id), 2)
    if not 2 <= count <= limit:
        raise invalid("Error validating batch", count=f"must be between 2 and {limit}")


class MachineAssignment(msgspec.Struct, frozen=True):
    """A new instance and its machine."""

    name: str
    machine_id: str
    domain: str | None


class CreationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The instances that would be created. `execute_creation` writes them in the same transaction.

    Its `id` is a digest of the facts that a tenant decides on: the VPC, the machines and their domains, the
    interfaces and the warnings. Names of a batch are new in each plan, and the reason counts the remaining
    trays: a plan that differs in these alone is the same.
    """

    request: InstanceRequest
    tenant_id: str
    site_id: str
    type_id: str | None
    assignments: tuple[MachineAssignment, ...]
    reason: str
    interfaces: tuple[InterfaceSpec, ...]
    warnings: tuple[InstanceWarning, ...]

    @property
    def id(self) -> str:
        """Equal plans have equal ids, and different plans different ones."""
        machines = [(assignment.machine_id, assignment.domain) for assignment in self.assignments]
        decided = (self.tenant_id, self.request.vpc_id, machines, self.interfaces, self.warnings)
        return sha256(msgspec.json.encode(decided)).hexdigest()


def check_same_plan(planned: CreationPlan, wanted_id: str | None) -> None:
    """Refuse a plan that is not the one with this id. With None, any plan will do."""
    if wanted_id is not None and planned.id != wanted_id:
        raise conflict(
            "The site has changed: the request would be carried out otherwise than in the plan that it names",
            nearest_fix="make a new plan (dryRun=true), and name its planId",
        )


def create_instances(
    conn: sa.Connection, tenant: sa.Row[Any], request: InstanceRequest, now: float, ids: IdFactory
) -> Changed[tuple[str, ...]]:
    """New instances on machines that placement chose. Returns their ids in the order of the names."""
    return execute_creation(conn, plan_creation(conn, tenant, request, now), now, ids)


def plan_creation(
    conn: sa.Connection, tenant: sa.Row[Any], request: InstanceRequest, now: float
) -> CreationPlan:
    """Apply every rule to `request`, and choose its machines."""
    vpc = _ready_vpc(conn, tenant.id, request.vpc_id)
    site = catalog.get_site(conn, vpc.site_id)
    catalog.check_site_registered(site)
    entitlements.check_site_access(conn, tenant.id, site.id)
    for name in request.names:
        check_instance_name(conn, tenant.id, site.id, name)
    target = None if request.machine_id is None else _chosen_machine(conn, tenant, site, request, now)
    type_id = request.instance_type_id if target is None else target.instance_type_id
    gpus = nvlink_gpus_of_instance(conn, site, type_id, request.machine_id)
    wanted = initial_interfaces(conn, vpc, request.interfaces, gpus)
    if wanted:
        catalog.check_nvlink_enabled(site)
    check_object_quota(conn, tenant.id, QuotaKind.INSTANCES, len(request.names), now)
    check_object_quota(conn, tenant.id, QuotaKind.INTERFACES, len(request.names) * len(wanted), now)
    use: AllocationUse | None = None
    if type_id is not None:
        # Refused now if it is not enough even on reserved trays. Which trays are taken is known only later.
        use = entitlements.allocation_uses(conn, tenant.id, now).get(type_id, AllocationUse(None, 0, 0))
        entitlements.check_quota(use, len(request.names), reserved=len(request.names))
    chosen = _choose_within_quota(conn, tenant, request, type_id, wanted, use, now)
    domains = catalog.domains_of_machines(conn, chosen.trays)
    foreign = [
        InstanceWarning(
            WarningKind.FOREIGN_PARTITION,
            f"Machine {machine_id} has GPUs {foreign_partition_text([tray.partition_id for tray in trays])}:"
            " they join nothing until the operator of the site adopts or releases it",
        )
        for machine_id, trays in sorted(foreign_trays(conn, chosen.trays).items())
    ]
    # The search keeps to the domain of the members. A machine that the request names has to be in it as well.
    members: Mapping[str, Mapping[str, int]] = {}
    if target is not None and request.same_domain:
        members = placement.partition_members(conn, {spec.logical_partition_id for spec in wanted})
    for partition, in_domain in sorted(members.items()):
        if target is not None and target.domain not in in_domain:
            raise conflict(
                f"requireSameDomain: NVLink Logical Partition {partition} lives in NVLink domain"
                f" {', '.join(sorted(in_domain))}, the machine is in {target.domain or 'none yet observed'}",
                nearest_fix="choose a machine in that domain, or set requireSameDomain to false",
            )
    return CreationPlan(
        request=request,
        tenant_id=tenant.id,
        site_id=site.id,
        type_id=type_id,
        assignments=tuple(
            MachineAssignment(name, machine_id, domains[machine_id])
            for name, machine_id in zip(request.names, chosen.trays, strict=True)
        ),
        reason=chosen.reason,
        interfaces=wanted,
        warnings=(*warnings_for(conn, wanted, set(domains.values()), gpus), *foreign),
    )


def execute_creation(
    conn: sa.Connection, planned: CreationPlan, now: float, ids: IdFactory
) -> Changed[tuple[str, ...]]:
    """Create the planned instances of this transaction. Returns the ids in the order of the names."""
    created, request = [], planned.request
    for assignment in planned.assignments:
        new = ids()
        created.append(new)
        insert_row(
            conn,
            table,
            id=new,
            tenant_id=planned.tenant_id,
            site_id=planned.site_id,
            vpc_id=request.vpc_id,
            name=assignment.name,
            description=request.description,
            instance_type_id=planned.type_id,
            machine_id=assignment.machine_id,
            placement=planned.reason,
            extra=request.extra,
            status=Status.PENDING,
            intent_at=now,
            created=now,
            updated=now,
        )
        note = EventNote(EventKind.INSTANCE, new, Status.PENDING, f"Placed {planned.reason}")
        journal.record_and_publish(conn, planned.tenant_id, note, now)
        replace_interfaces(conn, new, planned.interfaces, now, ids)
    # Statuses are updated once for all of them: each domain is read and judged as a whole.
    machine_ids = [assignment.machine_id for assignment in planned.assignments]
    return Changed(tuple(created), publish_intent_change(conn, machine_ids, now))


def _ready_vpc(conn: sa.Connection, tenant_id: str, vpc_id: str) -> sa.Row[Any]:
    try:
        vpc = logical_partitions.get_vpc(conn, tenant_id, vpc_id)
    except Rejected as refusal:
        raise invalid(
            "Could not find VPC of Tenant with ID specified in request", vpcId=refusal.reason
        ) from None
    if vpc.status != Status.READY:
        raise invalid("VPC specified in request is not in Ready state")
    return vpc


def _chosen_machine(
    conn: sa.Connection, tenant: sa.Row[Any], site: sa.Row[Any], request: InstanceRequest, now: float
) -> sa.Row[Any]:
    if not tenant.targeted_instance_creation:
        raise forbidden("Tenant does not have capability to create Instances on a chosen Machine")
    found = conn.execute(catalog.machine_listing().where(machine.c.id == request.machine_id)).one_or_none()
    if found is None or found.site_id != site.id:
        raise invalid(
            "Could not find Machine with ID specified in request", machineId="does not exist at Site"
        )
    if found.shown_status != Status.READY:
        raise conflict(f"Machine specified in request is not available: it is {found.shown_status}")
    kept = placement.reserved_trays(conn, now, [found.id]).get(found.id)
    if kept is not None and kept.tenant_id != tenant.id:
        # Only operators of the machine may know its reservation.
        raise conflict("Machine specified in request is not available")
    if gpus := placement.unlisted_gpus(conn, [found.id]).get(found.id):
        raise conflict(
            f"Machine specified in request is not available: {placement.unlisted_text(gpus)}",
            nearest_fix=placement.UNLISTED_FIX,
        )
    unhealthy = placement.unhealthy_gpus(conn, [found.id]).get(found.id)
    if unhealthy is not None and not request.allow_unhealthy:
        raise conflict(
            f"Machine specified in request is unhealthy: {unhealthy}",
            nearest_fix="set allowUnhealthyMachine to true, or choose another machine",
        )
    return found


def _choose_within_quota(
    conn: sa.Connection,
    tenant: sa.Row[Any],
    request: InstanceRequest,
    type_id: str | None,
    wanted: Sequence[InterfaceSpec],
    use: AllocationUse | None,
    now: float,
) -> TrayChoice[str]:
    """The best machines. If the tenant may not use these, the best of those that it may use."""

    def choose(most_unreserved: int | None = None) -> TrayChoice[str]:
        if request.machine_id is not None:
            return TrayChoice((request.machine_id,), "on the machine that the request names")
        if type_id is None:
            raise invalid(
                "Exactly one of instanceTypeId and machineId must be specified", instanceTypeId="is missing"
            )
        asked = TrayRequest(
            len(request.names),
            request.one_domain,
            beside_members=request.same_domain,
            allow_sick=request.allow_unhealthy,
            tenant=tenant.id,
            most_unreserved=most_unreserved,
        )
        partitions = {spec.logical_partition_id for spec in wanted}
        return placement.place_instances(conn, asked, type_id=type_id, logical_partitions=partitions, now=now)

    best = choose()
    if use is None or not use.idle:
        return best
    count = len(best.trays)
    # Which of the reserved trays are used is known only now.
    kept = placement.reserved_trays(conn, now, best.trays).values()
    own = sum(tray.tenant_id == tenant.id for tray in kept)
    if use.lacking(count, own) and request.machine_id is None:
        with suppress(Rejected):
            return choose(max(0, use.unreserved))
    entitlements.check_quota(use, count, own)
    return best
