"""Status writer: updates instances, interfaces and drains from the latest observation.

`update_statuses` runs after every change of intent and after every observation of a domain:

1. Load the instances on machines of the domain, with their GPUs and interfaces, in a fixed number of
   queries.
2. Load the facts: valid observations, owned partitions, blockers, open operations, tenants, policy.
3. Apply the status rules of `core.partitions.status_rules` to each drain, interface and instance.
4. Write the differences in a few statements, with status history and tenant events.
5. Remove deleted logical partitions that the fabric no longer has.

A status never claims more than the newest observation supports. When an observation is lost, or
contradicts itself about a GPU of it, a Ready instance becomes Unknown. Interfaces have no Unknown in the
REST contract, so they become Pending with the reason. An instance that is terminating disappears only
when every GPU was observed outside the site's partitions.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from rackloom.carve.observation import latest
from rackloom.carve.partitions import intent, ownership
from rackloom.carve.partitions.intent import default_partition_policy, managed_gpus
from rackloom.carve.store import journal
from rackloom.carve.store.journal import EventKind, EventNote
from rackloom.carve.store.schema import instance, machine, machine_gpu, nvlink_interface
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import logical_partitions
from rackloom.core.partitions.domain import GpuHealth
from rackloom.core.partitions.status_rules import (
    DesiredGpu,
    DomainFacts,
    holders,
    is_unknown,
    why_not_isolated,
    why_not_joined,
    why_not_released,
)

# Loading instances, GPUs, interfaces and facts.


class HoldingQueries(msgspec.Struct, frozen=True):
    """The queries about machines that a condition chooses. Built once: every pass runs them."""

    instances: sa.Select[Any]
    gpus: sa.Select[Any]
    interfaces: sa.Select[Any]


def _holding_queries(here: sa.ColumnElement[bool]) -> HoldingQueries:
    on_machine = instance.c.machine_id == machine.c.id
    host_columns = (
        machine.c.status.label("host_status"),
        machine.c.rack.label("host_rack"),
        machine.c.slot.label("host_slot"),
        intent.drain_reason_column(machine.c.id).label("drain"),
    )
    gpus = sa.select(machine_gpu.c.machine_id, machine_gpu.c.module_id, machine_gpu.c.guid)
    interfaces = sa.select(nvlink_interface).join(instance, instance.c.id == nvlink_interface.c.instance_id)
    return HoldingQueries(
        instances=sa.select(instance, *host_columns)
        .join(machine, on_machine)
        .where(here)
        .order_by(instance.c.created, instance.c.id),
        gpus=gpus.join(machine, machine.c.id == machine_gpu.c.machine_id)
        .join(instance, on_machine)
        .where(here),
        interfaces=interfaces.join(machine, on_machine)
        .where(here)
        .order_by(nvlink_interface.c.device_instance),
    )


_QUERIES_IN_DOMAIN = _holding_queries(machine.c.domain == sa.bindparam("domain"))
_QUERIES_WITHOUT_DOMAIN = _holding_queries(machine.c.domain.is_(None))


class HeldInstance(msgspec.Struct, frozen=True):
    """An instance with the GPUs of its machine (module id -> GUID) and its interfaces."""

    instance: sa.Row[Any]
    """With the status and place of its machine as `host_status`, `host_rack` and `host_slot`."""
    gpus: dict[int, int | None]
    interfaces: Sequence[sa.Row[Any]]
    drain: str | None
    """The reason why the tray is drained, or None if it is not."""

    def guid(self, device_instance: int) -> int | None:
        """Fabric GUID of a GPU, or None until observed."""
        return self.gpus.get(device_instance + 1)


def load_held_instances(conn: sa.Connection, domain: str | None) -> list[HeldInstance]:
    """The instances on machines of `domain` (None: of no known domain)."""
    queries = _QUERIES_WITHOUT_DOMAIN if domain is None else _QUERIES_IN_DOMAIN
    here = {} if domain is None else {"domain": domain}
    instances = conn.execute(queries.instances, here).all()
    if not instances:
        return []
    gpus: defaultdict[str, dict[int, int | None]] = defaultdict(dict)
    for machine_id, module_id, guid in conn.execute(queries.gpus, here):
        gpus[machine_id][module_id] = None if guid is None else int(guid)
    interfaces: defaultdict[str, list[sa.Row[Any]]] = defaultdict(list)
    for row in conn.execute(queries.interfaces, here):
        interfaces[row.instance_id].append(row)
    return [HeldInstance(row, gpus[row.machine_id], interfaces[row.id], row.drain) for row in instances]


def load_domain_facts(conn: sa.Connection, domain: str | None, held: Sequence[HeldInstance]) -> DomainFacts:
    """The facts about `domain`, from the records and from every valid reading."""
    known = latest.latest_of_domain(conn, domain)
    owned = () if domain is None else ownership.owned_partitions(conn, domain)
    recorded = DomainFacts(
        observation=None,
        doubt=known.doubt,
        owned={partition.name: partition.logical_partition for partition in owned},
        blocked=intent.blocker_reasons(conn, domain),
        lost=frozenset() if domain is None else ownership.omitted_partitions(conn, domain),
        tenant_of={
            guid: holding.instance.tenant_id
            for holding in held
            for guid in holding.gpus.values()
            if guid is not None
        },
        managed=managed_gpus(conn, domain),
        default_partition=default_partition_policy(conn, domain),
    )
    if not known.shown:
        return recorded
    # One set of facts for each valid reading: a claim must hold in all of them, because after a failover
    # the controller that no longer leads may have executed a change.
    newest, *others = (
        replace(
            recorded,
            observation=reading,
            holders=holders(reading),
            joining=ownership.gpus_maybe_joining(conn, reading.domain, reading.observed_at),
            present=frozenset(gpu.guid for gpu in reading.gpus),
            uncertain=reading.uncertain,
            no_nvlink=frozenset(gpu.guid for gpu in reading.gpus if gpu.health is GpuHealth.NO_NVLINK),
        )
        for reading in known.shown
    )
    return replace(newest, others=tuple(others))


# Collected changes, written in a few statements.


_UPDATE_INTERFACES = (
    sa.update(nvlink_interface)
    .where(nvlink_interface.c.id == sa.bindparam("of"))
    .values(status=sa.bindparam("to"), reason=sa.bindparam("because"), updated=sa.bindparam("at"))
)
_UPDATE_INSTANCES = (
    sa.update(instance)
    .where(instance.c.id == sa.bindparam("of"))
    .values(status=sa.bindparam("to"), updated=sa.bindparam("at"))
)


class StatusChanges:
    """Changes of the statuses of instances and their interfaces. `past`: the newest history entry of each."""

    def __init__(self, past: Mapping[str, journal.NewestStatus], now: float) -> None:
        self._past = past
        self._now = now
        self._interfaces: list[dict[str, object]] = []
        self._instances: list[dict[str, object]] = []
        self._entries: list[journal.StatusEntry] = []
        self._detached: list[str] = []
        self._released: list[str] = []
        self._notes: defaultdict[str, list[EventNote]] = defaultdict(list)
        """The events of each tenant, in order."""

    def interface(self, tenant_id: str, interface_id: str, status: str, reason: str | None) -> None:
        """An interface has another status, or the same for another reason."""
        self._interfaces.append({"of": interface_id, "to": status, "because": reason, "at": self._now})
        self._notes[tenant_id].append(EventNote(EventKind.INTERFACE, interface_id, status, reason))

    def interface_detached(self, tenant_id: str, interface_id: str) -> None:
        """The GPU of an interface was observed outside its partition."""
        self._detached.append(interface_id)
        self._notes[tenant_id].append(EventNote(EventKind.INTERFACE, interface_id, journal.EVENT_DELETED))

    def instance_status(self, instance_id: str, status: str) -> None:
        """An instance has another status."""
        self._instances.append({"of": instance_id, "to": status, "at": self._now})

    def instance_reason(self, tenant_id: str, instance_id: str, status: str, message: str) -> None:
        """An instance has `status` because of `message`, which may be recorded already."""
        entry = journal.StatusEntry(instance_id, status, message)
        if journal.is_status_change(entry, self._past.get(instance_id)):
            self._entries.append(entry)
            self._notes[tenant_id].append(EventNote(EventKind.INSTANCE, instance_id, status, message))

    def instance_released(self, tenant_id: str, instance_id: str) -> None:
        """Every GPU of a terminating instance was observed outside the partitions of the site."""
        self._released.append(instance_id)
        self._notes[tenant_id].append(EventNote(EventKind.INSTANCE, instance_id, journal.EVENT_DELETED))

    def write(self, conn: sa.Connection) -> None:
        """Write all changes, with histories and events."""
        if self._interfaces:
            conn.execute(_UPDATE_INTERFACES, self._interfaces)
        if self._instances:
            conn.execute(_UPDATE_INSTANCES, self._instances)
        journal.write_status_entries(conn, self._entries, self._past, self._now)
        _delete_by_id(conn, nvlink_interface, nvlink_interface.c.id, self._detached)
        _delete_by_id(conn, nvlink_interface, nvlink_interface.c.instance_id, self._released)
        _delete_by_id(conn, instance, instance.c.id, self._released)
        if self._released:
            journal.delete_histories(conn, self._released)
        for tenant_id, notes in self._notes.items():
            journal.publish_events(conn, tenant_id, notes, self._now)


def _delete_by_id(conn: sa.Connection, table: sa.Table, key: sa.Column[Any], ids: Collection[str]) -> None:
    if ids:
        conn.execute(sa.delete(table).where(key.in_(ids)))


# Applying the status rules.


READY_MESSAGE = "Instance is ready: every GPU is where it was asked to be, and nowhere else"


def update_statuses(conn: sa.Connection, domain: str | None, now: float) -> None:
    """Update the statuses of all instances on machines of `domain` (None: of no known domain)."""
    held = load_held_instances(conn, domain)
    draining = intent.unfinished_drains(conn, domain)
    if held or draining:
        facts = load_domain_facts(conn, domain, held)
        intent.update_drains(conn, draining, facts, now)
        changes = StatusChanges(journal.newest_statuses(conn, [holding.instance.id for holding in held]), now)
        for holding in held:
            _update_instance(holding, facts, changes)
        changes.write(conn)
    logical_partitions.remove_emptied_partitions(conn, now)


def _update_instance(holding: HeldInstance, facts: DomainFacts, changes: StatusChanges) -> None:
    if holding.instance.status == Status.TERMINATING:
        _update_terminating(holding, facts, changes)
        return
    tenant_id, drain = holding.instance.tenant_id, holding.drain
    reasons: list[str] = []
    staying = [row for row in holding.interfaces if row.status != Status.DELETING]
    for row in staying:
        gpu = _desired_gpu(holding, row.device_instance, row.logical_partition_id, row.intent_at)
        reason = why_not_joined(gpu, facts) if drain is None else _drain_message(drain)
        status = Status.PENDING if reason else Status.READY
        if (row.status, row.reason) != (status, reason):
            changes.interface(tenant_id, row.id, status, reason)
        reasons += _gpu_reason(row.device_instance, reason)
    rejoining = {(row.device_instance, row.logical_partition_id) for row in staying}
    for row in holding.interfaces:
        if row.status != Status.DELETING:
            continue
        reason = why_not_released(
            holding.guid(row.device_instance), row.logical_partition_id, row.intent_at, facts
        )
        # A GPU that was detached and attached again never leaves, so its old interface would stay for ever.
        if reason is None or (row.device_instance, row.logical_partition_id) in rejoining:
            changes.interface_detached(tenant_id, row.id)
            continue
        _record_leaving_reason(holding, row, reason, changes)
        reasons += _gpu_reason(row.device_instance, reason)
    wanted = {row.device_instance for row in staying}
    for module_id in holding.gpus:
        # A GPU without an interface must be in no partition of another tenant.
        if module_id - 1 not in wanted:
            gpu = _desired_gpu(holding, module_id - 1, None, holding.instance.intent_at)
            reasons += _gpu_reason(module_id - 1, why_not_isolated(gpu, facts))
    if holding.instance.host_status != Status.READY:
        reasons.append(f"the host is {holding.instance.host_status}")
    if drain is not None:
        reasons.insert(0, _drain_message(drain))
    _write_instance_status(holding, reasons, facts, changes)


def _record_leaving_reason(
    holding: HeldInstance, row: sa.Row[Any], reason: str | None, changes: StatusChanges
) -> None:
    if reason is not None and row.reason != reason:
        changes.interface(holding.instance.tenant_id, row.id, Status.DELETING, reason)


def _write_instance_status(
    holding: HeldInstance, reasons: list[str], facts: DomainFacts, changes: StatusChanges
) -> None:
    row, unknown = holding.instance, is_unknown(holding.gpus.values(), facts)
    # Unknown only if Ready was claimed before. An instance that was never Ready is still on its way there.
    if holding.drain is not None:
        status = Status.REPAIRING
    elif not reasons:
        status = Status.READY
    elif row.status in (Status.PENDING, Status.PROVISIONING):
        status = Status.PENDING if unknown else Status.PROVISIONING
    elif unknown and row.status in (Status.READY, Status.UNKNOWN):
        status = Status.UNKNOWN
    else:
        status = Status.CONFIGURING
    message = "; ".join(dict.fromkeys(reasons)) or READY_MESSAGE
    if status != row.status:
        changes.instance_status(row.id, status)
    if reasons or status != row.status:
        changes.instance_reason(row.tenant_id, row.id, status, message)


def _update_terminating(holding: HeldInstance, facts: DomainFacts, changes: StatusChanges) -> None:
    row = holding.instance
    stuck = {
        module_id - 1: why_not_released(guid, None, row.intent_at, facts)
        for module_id, guid in holding.gpus.items()
    }
    reasons = [text for device, why in stuck.items() for text in _gpu_reason(device, why)]
    if reasons:
        for interface in holding.interfaces:
            _record_leaving_reason(holding, interface, stuck.get(interface.device_instance), changes)
        message = "; ".join(dict.fromkeys(reasons))
        changes.instance_reason(row.tenant_id, row.id, Status.TERMINATING, message)
    else:
        changes.instance_released(row.tenant_id, row.id)


def _drain_message(reason: str) -> str:
    return f"the tray is drained by the operator: {reason}"


def _gpu_reason(device_instance: int, reason: str | None) -> list[str]:
    # A tenant reads this. The rack of its machine is the provider's affair.
    return [] if reason is None else [f"gpu-{device_instance}: {reason}"]


def _desired_gpu(
    holding: HeldInstance, device_instance: int, logical_partition: str | None, intent_at: float
) -> DesiredGpu:
    return DesiredGpu(
        device_instance=device_instance,
        guid=holding.guid(device_instance),
        logical_partition=logical_partition,
        intent_at=intent_at,
        tenant=holding.instance.tenant_id,
    )
