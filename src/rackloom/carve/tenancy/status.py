"""Status writer: updates instances, interfaces and drains to what the latest observation supports.

`update_statuses` runs after every change of intent and after every observation of a domain:

1. Load the instances on machines of the domain, with their GPUs and interfaces, in a fixed number of
   queries.
2. Load the facts: valid observations, owned partitions, blockers, open operations, tenants, policy.
3. Apply the status rules of `core.partitions.status_rules` to each drain, interface and instance.
4. Write the differences in a few statements, with status history and tenant events.
5. Remove deleted logical partitions of which the fabric holds nothing any more.

A status never claims more than the newest observation supports. When an observation is lost, a Ready
instance becomes Unknown. Interfaces have no Unknown in the REST contract, so they become Pending with
the reason. An instance that is terminating disappears only when every GPU was observed outside the
site's partitions.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from rackloom.core.partitions.domain import DomainObservation, GpuHealth
from rackloom.core.partitions.status_rules import (
    DesiredGpu,
    DomainFacts,
    holders,
    why_not_isolated,
    why_not_joined,
    why_not_released,
)

# Loading instances, GPUs, interfaces and facts.


class HoldingQueries(msgspec.Struct, frozen=True):
    """What is asked about the machines that a condition chooses. Built once: every pass asks."""

    instances: sa.Select[Any]
    gpus: sa.Select[Any]
    interfaces: sa.Select[Any]


def _holding_queries(here: sa.ColumnElement[bool]) -> HoldingQueries:
    on_machine = instance.c.machine_id == machine.c.id
    told = (machine.c.status.label("host_status"), intent.drain_reason_column(machine.c.id).label("drain"))
    gpus = sa.select(machine_gpu.c.machine_id, machine_gpu.c.module_id, machine_gpu.c.guid)
    interfaces = sa.select(nvlink_interface).join(instance, instance.c.id == nvlink_interface.c.instance_id)
    return HoldingQueries(
        instances=sa.select(instance, *told)
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
    """With the status of its machine as `host_status`."""
    gpus: dict[int, int | None]
    interfaces: Sequence[sa.Row[Any]]
    drain: str | None
    """Why the tray is drained; None when it is not."""

    def guid(self, device_instance: int) -> int | None:
        """Fabric GUID of a GPU; None until observed."""
        return self.gpus.get(device_instance + 1)


def load_held_instances(conn: sa.Connection, domain: str | None) -> list[HeldInstance]:
    """Everything that is held on machines of `domain` (None: of no known domain)."""
    asked, here = (
        (_QUERIES_WITHOUT_DOMAIN, {}) if domain is None else (_QUERIES_IN_DOMAIN, {"domain": domain})
    )
    instances = conn.execute(asked.instances, here).all()
    if not instances:
        return []
    gpus = _gpus_by_machine(conn.execute(asked.gpus, here))
    interfaces = _interfaces_by_instance(conn.execute(asked.interfaces, here))
    return [
        HeldInstance(row, gpus.get(row.machine_id, {}), interfaces.get(row.id, []), row.drain)
        for row in instances
    ]


def _gpus_by_machine(rows: Iterable[Sequence[Any]]) -> dict[str, dict[int, int | None]]:
    found: defaultdict[str, dict[int, int | None]] = defaultdict(dict)
    for machine_id, module_id, guid in rows:
        found[machine_id][module_id] = None if guid is None else int(guid)
    return found


def _interfaces_by_instance(rows: Iterable[sa.Row[Any]]) -> dict[str, list[sa.Row[Any]]]:
    found: defaultdict[str, list[sa.Row[Any]]] = defaultdict(list)
    for row in rows:
        found[row.instance_id].append(row)
    return found


def load_domain_facts(conn: sa.Connection, domain: str | None, held: Sequence[HeldInstance]) -> DomainFacts:
    """What the records and the observations that stand say of `domain`."""
    known = latest.latest_of_domain(conn, domain)
    owned = () if domain is None else ownership.owned_partitions(conn, domain)
    recorded = DomainFacts(
        observation=None,
        doubt=known.doubt,
        owned={one.name: one.logical_partition for one in owned},
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
    newest, *others = (_facts_with_observation(conn, recorded, seen) for seen in known.shown)
    return replace(newest, others=tuple(others))


def _facts_with_observation(
    conn: sa.Connection, recorded: DomainFacts, seen: DomainObservation
) -> DomainFacts:
    return replace(
        recorded,
        observation=seen,
        holders=holders(seen),
        joining=ownership.gpus_maybe_joining(conn, seen.domain, seen.observed_at),
        present=frozenset(gpu.guid for gpu in seen.gpus),
        no_nvlink=frozenset(gpu.guid for gpu in seen.gpus if gpu.health is GpuHealth.NO_NVLINK),
    )


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

    def __init__(self, past: Mapping[str, sa.Row[Any]], now: float) -> None:
        self._past = past
        self._now = now
        self._interfaces: list[dict[str, object]] = []
        self._instances: list[dict[str, object]] = []
        self._entries: list[journal.StatusEntry] = []
        self._left: list[str] = []
        self._gone: list[str] = []
        self._news: defaultdict[str, list[EventNote]] = defaultdict(list)
        """What each tenant is to be told, in the order in which it was found."""

    def interface(self, tenant_id: str, interface_id: str, status: str, reason: str | None) -> None:
        """An interface has another status, or the same for another reason."""
        self._interfaces.append({"of": interface_id, "to": status, "because": reason, "at": self._now})
        self._news[tenant_id].append(EventNote(EventKind.INTERFACE, interface_id, status, reason))

    def interface_left(self, tenant_id: str, interface_id: str) -> None:
        """The GPU of an interface was seen to have left."""
        self._left.append(interface_id)
        self._news[tenant_id].append(EventNote(EventKind.INTERFACE, interface_id, journal.EVENT_DELETED))

    def instance_status(self, instance_id: str, status: str) -> None:
        """An instance has another status."""
        self._instances.append({"of": instance_id, "to": status, "at": self._now})

    def instance_says(self, tenant_id: str, instance_id: str, status: str, message: str) -> None:
        """An instance has `status` because of `message`, which may be known."""
        entry = journal.StatusEntry(instance_id, status, message)
        if journal.is_status_change(entry, self._past.get(instance_id)):
            self._entries.append(entry)
            self._news[tenant_id].append(EventNote(EventKind.INSTANCE, instance_id, status, message))

    def instance_gone(self, tenant_id: str, instance_id: str) -> None:
        """Every GPU of an instance that was released was seen to be free."""
        self._gone.append(instance_id)
        self._news[tenant_id].append(EventNote(EventKind.INSTANCE, instance_id, journal.EVENT_DELETED))

    def write(self, conn: sa.Connection) -> None:
        """Put everything into the records, and tell the tenants."""
        if self._interfaces:
            conn.execute(_UPDATE_INTERFACES, self._interfaces)
        if self._instances:
            conn.execute(_UPDATE_INSTANCES, self._instances)
        journal.write_status_entries(conn, self._entries, self._past, self._now)
        _delete_by_id(conn, nvlink_interface, nvlink_interface.c.id, self._left)
        _delete_by_id(conn, nvlink_interface, nvlink_interface.c.instance_id, self._gone)
        _delete_by_id(conn, instance, instance.c.id, self._gone)
        if self._gone:
            journal.delete_histories(conn, self._gone)
        for tenant_id, notes in self._news.items():
            journal.publish_events(conn, tenant_id, notes, self._now)


def _delete_by_id(conn: sa.Connection, table: sa.Table, key: sa.Column[Any], ids: Collection[str]) -> None:
    if ids:
        conn.execute(sa.delete(table).where(key.in_(ids)))


# Applying the status rules.


READY_MESSAGE = "Instance is ready: every GPU is where it was asked to be, and nowhere else"


def update_statuses(conn: sa.Connection, domain: str | None, now: float) -> None:
    """Bring the statuses of everything on machines of `domain` up to date (None: domain not yet told)."""
    found = load_held_instances(conn, domain)
    draining = intent.unfinished_drains(conn, domain)
    if found or draining:
        facts = load_domain_facts(conn, domain, found)
        intent.update_drains(conn, draining, facts, now)
        changes = StatusChanges(
            journal.newest_statuses(conn, [holding.instance.id for holding in found]), now
        )
        for holding in found:
            _update_instance(holding, facts, changes)
        changes.write(conn)
    logical_partitions.remove_emptied_partitions(conn, now)


def _update_instance(holding: HeldInstance, facts: DomainFacts, changes: StatusChanges) -> None:
    if holding.instance.status == Status.TERMINATING:
        _update_terminating(holding, facts, changes)
        return
    troubles: list[str] = []
    wanted: set[int] = set()
    for row in holding.interfaces:
        if row.status != Status.DELETING:
            wanted.add(row.device_instance)
            troubles += _update_interface(holding, row, facts, changes)
    for row in holding.interfaces:
        if row.status == Status.DELETING:
            replaced = row.device_instance in wanted
            troubles += _update_leaving_interface(holding, row, facts, changes, replaced=replaced)
    for module_id, guid in holding.gpus.items():
        if module_id - 1 not in wanted:
            troubles += _gpu_reason(
                module_id - 1, why_not_isolated(_desired_gpu(holding, module_id - 1, guid), facts)
            )
    if holding.instance.host_status != Status.READY:
        troubles.append(f"the host is {holding.instance.host_status}")
    if holding.drain is not None:
        troubles.insert(0, _drain_message(holding.drain))
    _write_instance_status(holding, troubles, facts, changes)


def _update_interface(
    holding: HeldInstance, row: sa.Row[Any], facts: DomainFacts, changes: StatusChanges
) -> list[str]:
    gpu = DesiredGpu(
        device_instance=row.device_instance,
        guid=holding.guid(row.device_instance),
        logical_partition=row.logical_partition_id,
        intent_at=row.intent_at,
        tenant=holding.instance.tenant_id,
    )
    reason = why_not_joined(gpu, facts) if holding.drain is None else _drain_message(holding.drain)
    status = Status.PENDING if reason else Status.READY
    if (row.status, row.reason) != (status, reason):
        changes.interface(holding.instance.tenant_id, row.id, status, reason)
    return _gpu_reason(row.device_instance, reason)


def _update_leaving_interface(
    holding: HeldInstance, row: sa.Row[Any], facts: DomainFacts, changes: StatusChanges, *, replaced: bool
) -> list[str]:
    guid = holding.guid(row.device_instance)
    reason = why_not_released(guid, row.logical_partition_id, row.intent_at, facts)
    if reason is None or (replaced and _rejoins_same_partition(holding, row)):
        changes.interface_left(holding.instance.tenant_id, row.id)
        return []
    _record_leaving_reason(holding, row, reason, changes)
    return _gpu_reason(row.device_instance, reason)


def _record_leaving_reason(
    holding: HeldInstance, row: sa.Row[Any], reason: str | None, changes: StatusChanges
) -> None:
    if reason is not None and row.reason != reason:
        changes.interface(holding.instance.tenant_id, row.id, Status.DELETING, reason)


def _rejoins_same_partition(holding: HeldInstance, leaving: sa.Row[Any]) -> bool:
    key = (leaving.device_instance, leaving.logical_partition_id)
    return any(
        (row.device_instance, row.logical_partition_id) == key and row.status != Status.DELETING
        for row in holding.interfaces
    )


def _write_instance_status(
    holding: HeldInstance, troubles: list[str], facts: DomainFacts, changes: StatusChanges
) -> None:
    row = holding.instance
    drained = holding.drain is not None
    status = Status.REPAIRING if drained else _instance_status(row.status, bool(troubles), facts)
    message = "; ".join(dict.fromkeys(troubles)) or READY_MESSAGE
    if status != row.status:
        changes.instance_status(row.id, status)
    if troubles or status != row.status:
        changes.instance_says(row.tenant_id, row.id, status, message)


def _instance_status(current: str, troubled: bool, facts: DomainFacts) -> str:
    if not troubled:
        return Status.READY
    if current in (Status.PENDING, Status.PROVISIONING):
        return Status.PENDING if facts.observation is None else Status.PROVISIONING
    if facts.observation is None and current in (Status.READY, Status.UNKNOWN):
        return Status.UNKNOWN
    return Status.CONFIGURING


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
        changes.instance_says(row.tenant_id, row.id, Status.TERMINATING, message)
    else:
        changes.instance_gone(row.tenant_id, row.id)


def _drain_message(reason: str) -> str:
    return f"the tray is drained by the operator: {reason}"


def _gpu_reason(device_instance: int, reason: str | None) -> list[str]:
    return [] if reason is None else [f"GPU {device_instance}: {reason}"]


def _desired_gpu(holding: HeldInstance, device_instance: int, guid: int | None) -> DesiredGpu:
    return DesiredGpu(
        device_instance=device_instance,
        guid=guid,
        logical_partition=None,
        intent_at=holding.instance.intent_at,
        tenant=holding.instance.tenant_id,
    )
