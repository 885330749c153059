"""Transactions of the reconciler: intent out, observations in, and a record around each operation.

Each function is one transaction when it runs through the store. Nothing here calls a controller.

`record_observation` handles one complete reading, in this order:

1. Drop a reading if it is older than the recorded one, or if its endpoint no longer represents a chassis.
2. Empty-observation guard: a reading without GPUs, of a domain where GPUs are recorded, loses the
   endpoint, unless another endpoint lists the GPUs of the domain. Then this one is a standby.
3. No-op detection: a reading that repeats the previous one, while no work is pending in the domain,
   only updates the time of the observation. Any doubt leads to the full update, which also runs at
   least every `FULL_UPDATE_SECONDS`.
4. Save the reading, close interrupted operations and confirm answered ones.
5. Apply it to inventory, ownership and statuses. If several controllers report the domain, or
   another domain has machines at the same places, apply it only if they agree. Otherwise return the
   conflict.

`begin_operation` checks in one transaction that the lease is valid (`require_lease`), that the domain has
neither a conflict nor a pause, and that the GPUs are still wanted there. It then records the operation and,
for a create, claims the partition name. Only after its commit may the controller be called.
`finish_operation` records the answer.
"""

from collections.abc import Collection, Sequence

import msgspec
import sqlalchemy as sa

from rackloom.carve.inventory import sync
from rackloom.carve.observation import latest
from rackloom.carve.observation.conflicts import ConflictingControllers, ControllerConflict
from rackloom.carve.partitions import intent, ownership
from rackloom.carve.store import journal
from rackloom.carve.store.prepared import update_rows
from rackloom.carve.store.schema import (
    domain_dispute,
    drain,
    endpoint,
    endpoint_chassis,
    instance,
    is_partition_deleting,
    machine,
    machine_gpu,
    observation,
    operation,
    owned_partition,
    site,
)
from rackloom.carve.store.schema import domain_lease as lease_table
from rackloom.carve.store.values import OperationState, Status
from rackloom.carve.tenancy import status
from rackloom.core.partitions.domain import (
    AddGpus,
    BlockedGpus,
    CreatePartition,
    DomainIntent,
    DomainObservation,
    PartitionOperation,
    PartitionPlan,
    is_tray_partition,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS
from rackloom.errors import Refused
from rackloom.topology.join_key import Source

# No-op detection.


FULL_UPDATE_SECONDS = 600.0
"""A full update runs at least this often, so that no mistake of the no-op detection lasts."""

_endpoint: sa.BindParameter[str] = sa.bindparam("endpoint")
_domain: sa.BindParameter[str] = sa.bindparam("domain")
_serials: sa.BindParameter[str] = sa.bindparam("serials", expanding=True)

_last_full_update = endpoint.c.updated
_machines_here = sa.select(machine.c.id).where(machine.c.domain == _domain)
_instances_here = sa.select(instance.c.id).join(machine, machine.c.id == instance.c.machine_id)
_instances_here = _instances_here.where(machine.c.domain == _domain)
_gpus_here = sa.select(machine_gpu.c.guid).join(machine, machine.c.id == machine_gpu.c.machine_id)
_drains_here = sa.select(drain.c.id).join(machine, machine.c.id == drain.c.machine_id)

# Anything that a repeated reading could change: an unconfirmed operation, a partition without an id, a
# deletion in progress, a site, machine or instance changed since the last full update, a status that is not
# Ready, a drain, a GPU that the controller did not identify, a machine of these chassis in another domain.
_work_pending = sa.or_(
    sa.exists().where(operation.c.endpoint_id == _endpoint, operation.c.observed_after.is_(None)),
    sa.exists().where(owned_partition.c.domain == _domain, owned_partition.c.partition_id.is_(None)),
    sa.exists().where(is_partition_deleting),
    sa.exists().where(site.c.updated > _last_full_update),
    _machines_here.where(
        sa.or_(machine.c.status != Status.READY, machine.c.updated > _last_full_update)
    ).exists(),
    _instances_here.where(
        sa.or_(instance.c.status != Status.READY, instance.c.updated > _last_full_update)
    ).exists(),
    _drains_here.where(machine.c.domain == _domain, drain.c.ended.is_(None)).exists(),
    _gpus_here.where(
        machine.c.domain == _domain, sa.func.coalesce(machine_gpu.c.source, "") != Source.NMX.value
    ).exists(),
    sa.exists().where(
        machine.c.chassis_serial.in_(_serials), sa.func.coalesce(machine.c.domain, "") != _domain
    ),
)

_PREVIOUS_READING = (
    sa.select(observation.c.facts, _last_full_update, _work_pending.label("is_work_pending"))
    .join(endpoint, endpoint.c.id == observation.c.endpoint_id)
    .where(
        observation.c.endpoint_id == _endpoint,
        observation.c.unknown_since.is_(None),
        endpoint.c.domain == _domain,
    )
)
"""Built once: every pass over every domain runs it."""


def is_unchanged_observation(
    conn: sa.Connection, endpoint_id: str, reading: DomainObservation, now: float
) -> bool:
    """Whether `reading` repeats this endpoint's previous one, and no work is pending in the domain."""
    serials = sorted({gpu.chassis_serial for gpu in reading.gpus})
    parameters = {"endpoint": endpoint_id, "domain": reading.domain, "serials": serials}
    row = conn.execute(_PREVIOUS_READING, parameters).one_or_none()
    # The comparison of the facts comes last: it has to encode the whole reading.
    if row is None or row.is_work_pending or now - row.updated > FULL_UPDATE_SECONDS:
        return False
    return bool(row.facts == latest.encode_facts(reading))


# The lease that an operation needs.


# Built once: every operation runs these.
_HOLDER = sa.select(lease_table.c.holder, lease_table.c.epoch).where(
    lease_table.c.endpoint_id == sa.bindparam("mine")
)
_my_domain = sa.select(endpoint.c.domain).where(endpoint.c.id == sa.bindparam("mine")).scalar_subquery()
_SHADOWING = (
    sa.select(lease_table.c.endpoint_id)
    .join(endpoint, endpoint.c.id == lease_table.c.endpoint_id)
    .where(
        endpoint.c.domain == _my_domain,
        lease_table.c.endpoint_id < sa.bindparam("mine"),
        lease_table.c.holder != sa.bindparam("by"),
        lease_table.c.until > sa.bindparam("now"),
    )
    .limit(1)
)


class Lease(msgspec.Struct, frozen=True):
    """The right to reconcile one endpoint. It is void once another epoch is recorded."""

    endpoint_id: str
    holder: str
    epoch: int


class LeaseLost(Refused):
    """The operation was not begun: another replica holds the lease, or may soon."""


def require_lease(conn: sa.Connection, lease: Lease, now: float) -> None:
    """Raise LeaseLost unless `lease` is the newest one of its endpoint and of its domain.

    Only holder and epoch count, not the time: a replica that was stopped and resumed may hold a lease that
    ran out and was taken, and its own clock does not show this. `now` matters for endpoints of one domain
    that different replicas acquired before the domain was known: of their running leases, the one with the
    smallest endpoint id is valid.
    """
    # The epoch counts beside the holder: this replica may have lost the lease and taken it again, while the
    # work that comes here began before.
    row = conn.execute(_HOLDER, {"mine": lease.endpoint_id}).one_or_none()
    shadow = {"mine": lease.endpoint_id, "by": lease.holder, "now": now}
    if (
        row is None
        or (row.holder, row.epoch) != (lease.holder, lease.epoch)
        or conn.execute(_SHADOWING, shadow).first() is not None
    ):
        raise LeaseLost("another replica reconciles this domain now")


# Intent and observations.


def load_intent(conn: sa.Connection, domain: str) -> DomainIntent:
    """The desired state of `domain`, as of this transaction."""
    return DomainIntent(
        domain=domain,
        assignments=intent.gpu_assignments(conn, domain),
        owned=ownership.owned_partitions(conn, domain),
        managed=intent.managed_gpus(conn, domain),
        default_partition=intent.default_partition_policy(conn, domain),
        revision=journal.current_revision(conn, domain),
        paused=intent.pause_reason(conn, domain),
        drained=intent.drained_gpus(conn, domain),
    )


def plan_of_domain(conn: sa.Connection, domain: str, valid_from: float = 0.0) -> PartitionPlan:
    """The checked plan from the newest observation. Refused while the domain cannot be read.

    Readings from before `valid_from` do not count.
    """
    known = latest.latest_of_domain(conn, domain, valid_from)
    if known.observation is None:
        raise Refused(
            f"no plan for domain {domain}: {known.operators_doubt}",
            nearest_fix="make its switch controller reachable, then plan again",
        )
    # A paused domain is planned as well: an operator reads the plan before resuming.
    wanted = msgspec.structs.replace(load_intent(conn, domain), paused=None)
    plan = make_plan(wanted, known.observation)
    check_plan(plan, wanted, known.observation)
    return plan


# Built once: every pass runs these.
_other_endpoint = endpoint.alias()
_domains_concerned = (endpoint.c.domain, sa.bindparam("answered", type_=sa.Text))
_ENDPOINT_STATE = (
    sa.select(
        endpoint.c.domain,
        observation.c.observed_at,
        sa.or_(
            sa.exists().where(
                _other_endpoint.c.domain.in_(_domains_concerned), _other_endpoint.c.id != endpoint.c.id
            ),
            sa.exists().where(domain_dispute.c.domain.in_(_domains_concerned)),
        ).label("is_shared"),
    )
    .join(observation, observation.c.endpoint_id == endpoint.c.id, isouter=True)
    .where(
        endpoint.c.id == sa.bindparam("of"),
        sa.exists().where(endpoint_chassis.c.endpoint_id == endpoint.c.id),
    )
)


class EndpointState(msgspec.Struct, frozen=True):
    """The records about an endpoint, before its newest answer is recorded."""

    domain: str | None
    """Domain uuid that it last answered with."""
    observed_at: float | None
    """The time of its newest reading."""
    is_shared: bool
    """Whether other endpoints report one of its domains too, or one of these has a conflict."""


def endpoint_state(conn: sa.Connection, endpoint_id: str, domain: str | None = None) -> EndpointState | None:
    """The state of an endpoint that was just read and reported `domain` (None: it did not answer).

    None for an endpoint that is no longer registered for any chassis.
    """
    row = conn.execute(_ENDPOINT_STATE, {"of": endpoint_id, "answered": domain}).one_or_none()
    return None if row is None else EndpointState(row.domain, row.observed_at, bool(row.is_shared))


def set_endpoint_domain(conn: sa.Connection, endpoint_id: str, domain: str, now: float) -> None:
    """Record which domain the endpoint reports."""
    update_rows(conn, endpoint, {"id": endpoint_id}, domain=domain, updated=now)


def record_observation(
    conn: sa.Connection,
    endpoint_id: str,
    observation: DomainObservation,
    now: float,
    valid_seconds: float = DEFAULT_VALID_SECONDS,
) -> ControllerConflict | None:
    """Record a complete reading, and update inventory, ownership and statuses if it is valid.

    Returns the conflict of the domain, during which no operation may begin. A reading is outdated at the age
    `valid_seconds`.

    Invariant: statuses follow a reading only when it is the newest of its endpoint, lists the GPUs that are
    recorded (or belongs to a standby), and no other controller contradicts it. Every other reading is at
    most stored.
    """
    state = endpoint_state(conn, endpoint_id, observation.domain)
    # The endpoint was deleted while it was read, or a reading that began later is recorded already.
    if state is None or observation.observed_at < (state.observed_at or 0.0):
        return None
    empty = [] if observation.gpus else [observation.domain]
    empty_reason = latest.empty_reading_reasons(conn, empty).get(observation.domain)
    if empty_reason is not None and not latest.is_standby(conn, endpoint_id, observation.domain):
        # A controller that has just started knows its domain before it knows the GPUs. Taken literally, this
        # reading would release every instance.
        set_endpoint_domain(conn, endpoint_id, observation.domain, now)
        latest.mark_unreadable(conn, endpoint_id, empty_reason, now, now - valid_seconds)
        _withdraw_readings(conn, {state.domain, observation.domain}, now)
        return None
    # If several controllers report the domain, another one may have changed the outcome since then.
    if not state.is_shared and is_unchanged_observation(conn, endpoint_id, observation, now):
        latest.confirm_reading(conn, endpoint_id, observation.observed_at)
        return None
    latest.save_reading(conn, endpoint_id, observation)
    set_endpoint_domain(conn, endpoint_id, observation.domain, now)
    # An operation requested before this reading began shows in it, or did not happen.
    ownership.close_interrupted_operations(conn, endpoint_id, observation.observed_at, now)
    ownership.confirm_operations(conn, endpoint_id, observation.observed_at)
    if state.is_shared:
        ownership.close_abandoned_operations(conn, observation.domain, observation.observed_at, now)
    previous_domains = frozenset(() if state.domain is None else (state.domain,)) - {observation.domain}
    rivals = sync.domains_sharing_hardware(conn, observation)
    if not state.is_shared and not rivals - previous_domains:
        sync.apply_observations(conn, [observation], now, previous_domains)
        return None
    conflict = sync.apply_if_consistent(conn, observation.domain, now, rivals)
    # The endpoint left these domains, so their statuses no longer rest on it.
    for domain in previous_domains:
        sync.withdraw_reading(conn, domain, now)
    return conflict


def record_unreadable(
    conn: sa.Connection,
    endpoint_id: str,
    reason: str,
    now: float,
    began: float | None = None,
    valid_seconds: float = DEFAULT_VALID_SECONDS,
) -> None:
    """Record that the endpoint could not be read. Statuses that rested on its readings become unknown.

    `began` is when the attempt began. A failure that is older than a reading, because its replica was stopped
    in between, makes nothing unknown. A reading is outdated at the age `valid_seconds`.
    """
    # Another replica may have read the endpoint since this attempt began.
    read_at = latest.read_at(conn, endpoint_id)
    if began is not None and read_at is not None and read_at > began:
        return
    state = endpoint_state(conn, endpoint_id)
    if state is not None:
        latest.mark_unreadable(conn, endpoint_id, reason, now, now - valid_seconds)
        _withdraw_readings(conn, {state.domain}, now)


def _withdraw_readings(conn: sa.Connection, domains: Collection[str | None], now: float) -> None:
    for domain in sorted(filter(None, domains)):
        sync.withdraw_reading(conn, domain, now)


def record_blocked(conn: sa.Connection, domain: str, blocked: Sequence[BlockedGpus], now: float) -> None:
    """Record the blockers of the newest plan of `domain`, and show them in the tenants' statuses."""
    if intent.replace_blocked_gpus(conn, domain, blocked, now):
        status.update_statuses(conn, domain, now)


# Operations.


_CONFLICT_OF_ENDPOINT = (
    sa.select(endpoint.c.domain, domain_dispute.c.reason, domain_dispute.c.since, domain_dispute.c.rival)
    .join(domain_dispute, domain_dispute.c.domain == endpoint.c.domain, isouter=True)
    .where(endpoint.c.id == sa.bindparam("of"))
)


def conflict_of_endpoint(
    conn: sa.Connection, endpoint_id: str
) -> tuple[str | None, ControllerConflict | None]:
    """The domain that the endpoint last reported, and the conflict of that domain."""
    row = conn.execute(_CONFLICT_OF_ENDPOINT, {"of": endpoint_id}).one_or_none()
    if row is None or row.domain is None:
        return None, None
    known = None if row.reason is None else ControllerConflict(row.domain, row.reason, row.since, row.rival)
    return row.domain, known


def begin_operation(
    conn: sa.Connection, lease: Lease, operation: PartitionOperation, observed_at: float, now: float
) -> str:
    """Record an operation before the controller is called. Return the id that `finish_operation` takes.

    Raises LeaseLost, ConflictingControllers, or Refused: the endpoint never answered, the partition name is
    taken, or a GPU is no longer wanted in the target of the operation. Then the plan is out of date.
    """
    # Fencing. The lease is checked in the transaction that records the operation, so a replica that lost
    # it can record nothing, and an unrecorded operation is never requested.
    require_lease(conn, lease, now)
    domain, conflict = conflict_of_endpoint(conn, lease.endpoint_id)
    if domain is None:
        raise Refused("no operation can be planned for an endpoint that was never observed")
    if conflict is not None:
        raise ConflictingControllers(conflict)
    pause_reason = intent.pause_reason(conn, domain)
    if pause_reason is not None:
        raise Refused(f"domain {domain} is paused: {pause_reason}", nearest_fix="resume the domain")
    # Write-ahead. If the process dies after this commit, the record shows the possible request, and
    # the claimed name shows that the partition belongs to the site, even if the answer never arrives.
    operation_id = ownership.begin_operation_record(
        conn, lease.endpoint_id, domain, operation, observed_at, now
    )
    if isinstance(operation, CreatePartition):
        ownership.claim_name(conn, domain, operation, operation_id, now)
    _check_still_wanted(conn, domain, operation)
    return str(operation_id)


def finish_operation(
    conn: sa.Connection, operation_id: str, state: str, code: str | None, message: str | None, now: float
) -> None:
    """Record the answer: `state` is `done`, `refused` or `unknown` (no answer came)."""
    ownership.finish_operation_record(conn, int(operation_id), OperationState(state), code, message, now)


def _check_still_wanted(conn: sa.Connection, domain: str, operation: PartitionOperation) -> None:
    """Refuse to add a GPU whose intent changed after the plan was made: it may be another tenant's now."""
    if not isinstance(operation, CreatePartition | AddGpus):
        return
    owners = {
        partition.name: partition.logical_partition for partition in ownership.owned_partitions(conn, domain)
    }
    # By the recorded name: the claim of this transaction has recorded that of a create.
    owner = owners.get(operation.name)
    assignments = intent.gpu_assignments(conn, domain)
    if owner is None or is_tray_partition(owner):
        # The default partition and those of trays are for unassigned GPUs.
        assigned = {assignment.guid for assignment in assignments}
        wanted = intent.managed_gpus(conn, domain) - assigned - intent.drained_gpus(conn, domain)
    else:
        wanted = frozenset(
            assignment.guid for assignment in assignments if assignment.logical_partition == owner
        )
    if not wanted.issuperset(operation.guids):
        raise Refused(
            f"GPUs that {operation.name} would get are no longer wanted there", nearest_fix="plan again"
        )
