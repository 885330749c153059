"""Transactions of the reconciler: intent out, observations in, and a record around each operation.

Each function is one transaction when it runs through the store. Nothing here calls a controller.

`record_observation` handles one complete reading, in this order:

1. Drop a reading that is older than the recorded one, or whose endpoint no longer speaks for a chassis.
2. Empty-observation guard: a reading without GPUs, of a domain where GPUs are recorded, loses the
   endpoint, unless another endpoint lists the GPUs of the domain; then this one is a standby.
3. No-op detection: a reading that repeats the previous one, while no work is pending in the domain,
   only updates the time of the observation. Any doubt leads to the full update, which also runs at
   least every `FULL_UPDATE_SECONDS`.
4. Save the reading, close interrupted operations and confirm answered ones.
5. Apply it to inventory, ownership and statuses. Where several controllers report the domain, or
   another domain has machines at the same places, apply it only if they agree; else return the
   conflict.

`begin_operation` checks in one transaction that the lease is valid, that the domain has neither a
conflict nor a pause, and that the GPUs are still wanted there. It then records the operation and, for a
create, claims the partition name. Only after its commit may the controller be called.
`finish_operation` records the answer.
"""

from collections.abc import Collection, Sequence

import sqlalchemy as sa

from rackloom.carve.inventory import endpoints, sync
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.carve.observation import conflicts, latest
from rackloom.carve.observation.conflicts import ConflictingControllers, ControllerConflict
from rackloom.carve.partitions import intent, ownership
from rackloom.carve.reconcile import leases
from rackloom.carve.reconcile.leases import Lease
from rackloom.carve.store import journal, values
from rackloom.carve.store.schema import (
    drain,
    endpoint,
    instance,
    logical_partition,
    machine,
    machine_gpu,
    observation,
    operation,
    owned_partition,
    site,
)
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import status
from rackloom.core.partitions.domain import (
    AddGpus,
    BlockedGpus,
    CreatePartition,
    DomainIntent,
    DomainObservation,
    PartitionOperation,
)
from rackloom.core.partitions.partition_layout import is_tray_partition
from rackloom.errors import Refused
from rackloom.topology.join_key import Source

# No-op detection.


FULL_UPDATE_SECONDS = 600.0
"""The whole work is done at least this often, so that nothing that was overlooked stays."""

_endpoint: sa.BindParameter[str] = sa.bindparam("endpoint")
_domain: sa.BindParameter[str] = sa.bindparam("domain")
_serials: sa.BindParameter[str] = sa.bindparam("serials", expanding=True)

_last_full_update = endpoint.c.updated
_machines_here = sa.select(machine.c.id).where(machine.c.domain == _domain)
_instances_here = sa.select(instance.c.id).join(machine, machine.c.id == instance.c.machine_id)
_instances_here = _instances_here.where(machine.c.domain == _domain)
_gpus_here = sa.select(machine_gpu.c.guid).join(machine, machine.c.id == machine_gpu.c.machine_id)
_drains_here = sa.select(drain.c.id).join(machine, machine.c.id == drain.c.machine_id)

_work_pending = sa.or_(
    sa.exists().where(operation.c.endpoint_id == _endpoint, operation.c.observed_after.is_(None)),
    sa.exists().where(owned_partition.c.domain == _domain, owned_partition.c.partition_id.is_(None)),
    sa.exists().where(logical_partition.c.status == Status.DELETING),
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
    sa.select(observation.c.facts, _last_full_update, _work_pending.label("restless"))
    .join(endpoint, endpoint.c.id == observation.c.endpoint_id)
    .where(
        observation.c.endpoint_id == _endpoint,
        observation.c.unknown_since.is_(None),
        endpoint.c.domain == _domain,
    )
)
"""Built once: it is asked for each domain in each pass."""


def is_unchanged_observation(
    conn: sa.Connection, endpoint_id: str, seen: DomainObservation, now: float
) -> bool:
    """Whether `seen` shows what this endpoint alone showed of the domain before, and nothing waits there."""
    serials = sorted({gpu.chassis_serial for gpu in seen.gpus})
    asked = {"endpoint": endpoint_id, "domain": seen.domain, "serials": serials}
    row = conn.execute(_PREVIOUS_READING, asked).one_or_none()
    if row is None or row.restless or now - row.updated > FULL_UPDATE_SECONDS:
        return False
    return bool(row.facts == latest.encode_facts(seen))


# Transactions.


def list_endpoints(conn: sa.Connection) -> tuple[Endpoint, ...]:
    """All switch controller endpoints of the site."""
    return endpoints.all_endpoints(conn)


def get_endpoint_domain(conn: sa.Connection, endpoint_id: str) -> str | None:
    """Domain uuid that the endpoint last answered with; None until it has answered."""
    return endpoints.domain_of_endpoint(conn, endpoint_id)


def load_intent(conn: sa.Connection, domain: str) -> DomainIntent:
    """What the site wants of `domain` now."""
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


def record_observation(
    conn: sa.Connection, endpoint_id: str, observation: DomainObservation, now: float
) -> ControllerConflict | None:
    """Take over all that a complete reading shows: identities, partitions of ours, and every status.

    A reading older than the one already recorded teaches nothing and is dropped, and so does one by an
    endpoint that was given up while it was being read. One that another controller contradicts, of
    this domain or of another that lists the same hardware, is kept and teaches nothing: then returns the
    dispute, in which nothing may be done. One that lists no GPU where some are recorded is none, and its
    endpoint is lost.
    """
    standing = endpoints.endpoint_state(conn, endpoint_id, observation.domain)
    if standing is None or observation.observed_at < (standing.observed_at or 0.0):
        return None
    why_not = latest.empty_reading_reasons(conn, [observation]).get(observation.domain)
    if why_not is not None and not latest.is_standby(conn, endpoint_id, observation.domain):
        endpoints.set_endpoint_domain(conn, endpoint_id, observation.domain, now)
        _mark_lost(conn, endpoint_id, why_not, now, {standing.domain, observation.domain})
        return None
    # Where several tell of a domain, one of the others may have told something else meanwhile.
    if not standing.is_shared and is_unchanged_observation(conn, endpoint_id, observation, now):
        latest.confirm_reading(conn, endpoint_id, observation.observed_at)
        return None
    latest.save_reading(conn, endpoint_id, observation)
    endpoints.set_endpoint_domain(conn, endpoint_id, observation.domain, now)
    ownership.close_interrupted_operations(conn, endpoint_id, observation.observed_at, now)
    ownership.confirm_operations(conn, endpoint_id, observation.observed_at)
    if standing.is_shared:
        ownership.close_abandoned_operations(conn, observation.domain, observation.observed_at, now)
    left = frozenset(() if standing.domain is None else (standing.domain,)) - {observation.domain}
    others = conflicts.domains_sharing_hardware(conn, observation)
    if not standing.is_shared and not others - left:
        sync.apply_observations(conn, [observation], now, left)
        return None
    dispute = sync.apply_if_consistent(conn, observation.domain, now, others)
    for domain in left:
        sync.withdraw_reading(conn, domain, now)
    return dispute


def record_unreadable(conn: sa.Connection, endpoint_id: str, reason: str, now: float) -> None:
    """Note that the endpoint could not be read, and take back what rested on its observations."""
    standing = endpoints.endpoint_state(conn, endpoint_id)
    if standing is None:
        return
    _mark_lost(conn, endpoint_id, reason, now, {standing.domain})


def _mark_lost(
    conn: sa.Connection, endpoint_id: str, reason: str, now: float, domains: Collection[str | None]
) -> None:
    latest.mark_unreadable(conn, endpoint_id, reason, now)
    for domain in sorted(one for one in domains if one is not None):
        sync.withdraw_reading(conn, domain, now)


def record_blocked(conn: sa.Connection, domain: str, blocked: Sequence[BlockedGpus], now: float) -> None:
    """Note what the newest plan of `domain` found in the way of wishes, and tell the tenants concerned."""
    if intent.replace_blocked_gpus(conn, domain, blocked, now):
        status.update_statuses(conn, domain, now)


def begin_operation(
    conn: sa.Connection, lease: Lease, operation: PartitionOperation, observed_at: float, now: float
) -> str:
    """Record an operation before the fabric is asked for it; returns the id that `finish_operation` takes.

    Raises LeaseLost when another replica reconciles the domain now, Contradicted when its controllers
    contradict one another, and Refused when the endpoint never answered, when the name of a partition already
    means another, or when a GPU is no longer wanted where the operation would put it: then the plan is out of
    date.
    """
    leases.require_lease(conn, lease, now)
    domain, dispute = conflicts.conflict_of_endpoint(conn, lease.endpoint_id)
    if domain is None:
        raise Refused("no operation can be planned for an endpoint that was never observed")
    if dispute is not None:
        raise ConflictingControllers(dispute)
    why = intent.pause_reason(conn, domain)
    if why is not None:
        raise Refused(f"domain {domain} is paused: {why}", nearest_fix="resume the domain")
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
    ownership.finish_operation_record(
        conn, int(operation_id), values.OperationState(state), code, message, now
    )


def _check_still_wanted(conn: sa.Connection, domain: str, operation: PartitionOperation) -> None:
    if not isinstance(operation, CreatePartition | AddGpus):
        return
    partitions = {
        partition.name: partition.logical_partition for partition in ownership.owned_partitions(conn, domain)
    }
    owner = partitions.get(operation.name)
    assignments = intent.gpu_assignments(conn, domain)
    if owner is None or is_tray_partition(owner):
        # The default partition and those of trays are for GPUs that nobody was given.
        given = {assignment.guid for assignment in assignments}
        wanted = intent.managed_gpus(conn, domain) - given - intent.drained_gpus(conn, domain)
    else:
        wanted = frozenset(
            assignment.guid for assignment in assignments if assignment.logical_partition == owner
        )
    if not wanted.issuperset(operation.guids):
        raise Refused(
            f"GPUs that {operation.name} would get are no longer wanted there", nearest_fix="plan again"
        )
