"""The inputs of a plan: GPU assignments, drains, pauses, managed GPUs, default policy, blockers.

`gpu_assignments` says which logical partition each GPU shall join: interfaces that are not being
detached, of instances that are not terminating, on machines that are not drained. `managed_gpus` are
the GPUs on the site's machines; all other GPUs of a domain are left alone.

A drain moves the GPUs of a tray out of all partitions, so that the tray can be serviced. It is the only
way to move a running instance's GPUs without a request of the tenant. The instance keeps its machine
and its interfaces, and joins again when the drain ends. A drain is complete when an observation shows
every GPU outside the partitions of the site.

A paused domain is observed as always, but no operation begins in it until it is resumed. When its
chassis report another domain uuid, the pause is copied there.

`replace_blocked_gpus` records what the newest plan of a domain could not do, GPU by GPU, with the
reason and the fix. A blocker that remains keeps the time when it was first seen.
"""

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.journal import OperatorOrder, Step
from rackloom.carve.store.prepared import (
    PreparedStatement,
    delete_and_count,
    delete_rows,
    find_row,
    has_row,
    insert_row,
    update_rows,
)
from rackloom.carve.store.schema import (
    blocked_gpu,
    domain_pause,
    drain,
    endpoint,
    instance,
    machine,
    machine_gpu,
    nvlink_interface,
    site,
)
from rackloom.carve.store.values import Changed, Status, conflict, not_found
from rackloom.core.partitions.domain import BlockedGpus, DefaultPartitionPolicy, GpuAssignment
from rackloom.core.partitions.status_rules import DomainFacts, why_not_drained

# Drains.


DRAINED_MESSAGE = "every GPU was seen outside the partitions of the site"

_UNFINISHED_DRAINS = (
    sa.select(drain, machine_gpu.c.guid)
    .join(machine, machine.c.id == drain.c.machine_id)
    .join(machine_gpu, machine_gpu.c.machine_id == machine.c.id, isouter=True)
    .where(drain.c.ended.is_(None), drain.c.drained.is_(None))
    .order_by(drain.c.id)
)
_UNFINISHED_IN_DOMAIN = _UNFINISHED_DRAINS.where(machine.c.domain == sa.bindparam("domain"))
_UNFINISHED_WITHOUT_DOMAIN = _UNFINISHED_DRAINS.where(machine.c.domain.is_(None))


_DRAINED_GPUS = PreparedStatement(
    sa.select(machine_gpu.c.guid)
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .join(drain, sa.and_(drain.c.machine_id == machine.c.id, drain.c.ended.is_(None)))
    .where(machine.c.domain == sa.bindparam("domain"), machine_gpu.c.guid.is_not(None))
)


def active_drains(conn: sa.Connection, machine_ids: Collection[str]) -> dict[str, sa.Row[Any]]:
    """The drains that have not ended, by machine."""
    found = sa.select(drain).where(drain.c.machine_id.in_(machine_ids), drain.c.ended.is_(None))
    return {row.machine_id: row for row in conn.execute(found)}


def drain_reason_column(machine_id: sa.Column[str]) -> sa.ScalarSelect[str]:
    """Why a machine is drained, for a query over machines; NULL when it is not."""
    mine = sa.select(drain.c.reason).where(drain.c.machine_id == machine_id, drain.c.ended.is_(None))
    return mine.limit(1).scalar_subquery()


def drained_gpus(conn: sa.Connection, domain: str) -> frozenset[int]:
    """Fabric GUIDs in `domain` that shall be in no partition."""
    return frozenset(_DRAINED_GPUS.records(conn, _guid_of, {"domain": domain}))


def unfinished_drains(conn: sa.Connection, domain: str | None) -> dict[sa.Row[Any], list[int | None]]:
    """The drains in `domain` that are not yet complete, with the GUIDs of their GPUs."""
    if domain is None:
        rows = conn.execute(_UNFINISHED_WITHOUT_DOMAIN)
    else:
        rows = conn.execute(_UNFINISHED_IN_DOMAIN, {"domain": domain})
    found: dict[str, tuple[sa.Row[Any], list[int | None]]] = {}
    for row in rows:
        found.setdefault(row.id, (row, []))[1].append(None if row.guid is None else int(row.guid))
    return dict(found.values())


def update_drains(
    conn: sa.Connection, open_drains: dict[sa.Row[Any], list[int | None]], facts: DomainFacts, now: float
) -> None:
    """Record for each drain what the newest observation supports."""
    for row, guids in open_drains.items():
        reasons = [why_not_drained(guid, row.started, facts) for guid in guids]
        waiting = list(dict.fromkeys(reason for reason in reasons if reason))
        outcome = {"message": "; ".join(waiting)} if waiting else {"message": DRAINED_MESSAGE, "drained": now}
        if outcome != {"message": row.message}:
            update_rows(conn, drain, {"id": row.id}, **outcome)


# Assignments.


_ASSIGNMENTS = PreparedStatement(
    sa.select(machine_gpu.c.guid, nvlink_interface.c.logical_partition_id, instance.c.tenant_id)
    .select_from(nvlink_interface)
    .join(instance, instance.c.id == nvlink_interface.c.instance_id)
    .join(machine, machine.c.id == instance.c.machine_id)
    .join(
        machine_gpu,
        sa.and_(
            machine_gpu.c.machine_id == machine.c.id,
            machine_gpu.c.module_id == nvlink_interface.c.device_instance + 1,
        ),
    )
    .where(
        machine.c.domain == sa.bindparam("domain"),
        machine_gpu.c.guid.is_not(None),
        nvlink_interface.c.status != Status.DELETING,
        instance.c.status != Status.TERMINATING,
        machine.c.id.not_in(sa.select(drain.c.machine_id).where(drain.c.ended.is_(None))),
    )
    .order_by(machine_gpu.c.guid)
)
"""Built once: every pass over a domain runs it."""


def gpu_assignments(conn: sa.Connection, domain: str) -> tuple[GpuAssignment, ...]:
    """The GPUs that shall join a partition: of interfaces and instances that stay, on trays not drained."""
    return tuple(_ASSIGNMENTS.records(conn, _assignment_of, {"domain": domain}))


def _assignment_of(row: Sequence[str]) -> GpuAssignment:
    guid, partition, tenant = row
    return GpuAssignment(guid=int(guid), logical_partition=partition, tenant=tenant)


# Managed GPUs and the default partition policy.


_MANAGED_GPUS = PreparedStatement(
    sa.select(machine_gpu.c.guid)
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(machine.c.domain == sa.bindparam("domain"), machine_gpu.c.guid.is_not(None))
)
_DEFAULT_PARTITION_POLICY = PreparedStatement(
    sa.select(site.c.default_partition)
    .join(machine, machine.c.site_id == site.c.id)
    .where(machine.c.domain == sa.bindparam("domain"))
    .limit(1)
)


def managed_gpus(conn: sa.Connection, domain: str | None) -> frozenset[int]:
    """Fabric GUIDs of the GPUs on the site's machines in this domain."""
    return frozenset(_MANAGED_GPUS.records(conn, _guid_of, {"domain": domain}))


def _guid_of(row: Sequence[str]) -> int:
    return int(row[0])


def default_partition_policy(conn: sa.Connection, domain: str | None) -> DefaultPartitionPolicy:
    """What the site does with the factory default partition; it stays where the site has no machine."""
    row = _DEFAULT_PARTITION_POLICY.one_or_none(conn, {"domain": domain})
    return DefaultPartitionPolicy.KEEP if row is None else DefaultPartitionPolicy(row.default_partition)


def default_partition_policies(conn: sa.Connection) -> dict[str, DefaultPartitionPolicy]:
    """As `default_partition_policy`, for every domain that the site has machines in."""
    policies = sa.select(machine.c.domain, site.c.default_partition)
    policies = policies.join(site, site.c.id == machine.c.site_id)
    rows = conn.execute(policies.where(machine.c.domain.is_not(None)).distinct())
    return {domain: DefaultPartitionPolicy(policy) for domain, policy in rows}


# Blockers of the newest plan.


_BLOCKED_IN_DOMAIN = sa.select(blocked_gpu).where(blocked_gpu.c.domain == sa.bindparam("domain"))
_BLOCKED_IN_DOMAIN = _BLOCKED_IN_DOMAIN.order_by(blocked_gpu.c.guid, blocked_gpu.c.reason)
"""Built once: every pass runs it."""


def replace_blocked_gpus(
    conn: sa.Connection, domain: str, blocked: Sequence[BlockedGpus], now: float
) -> bool:
    """Record the blockers of `domain`; False if nothing changed. One that stays keeps its time."""
    wanted = {(str(guid), blocker.reason): blocker.fix for blocker in blocked for guid in blocker.guids}
    known = {(row.guid, row.reason): row.fix for row in blocked_gpus_of_domain(conn, domain)}
    if known == wanted:
        return False
    for guid, reason in known.keys() - wanted.keys():
        delete_rows(conn, blocked_gpu, domain=domain, guid=guid, reason=reason)
    new = [
        {"domain": domain, "guid": guid, "reason": reason, "fix": fix, "since": now}
        for (guid, reason), fix in sorted(wanted.items())
        if (guid, reason) not in known
    ]
    if new:
        conn.execute(sa.insert(blocked_gpu), new)
    return True


def blocked_gpus_of_domain(conn: sa.Connection, domain: str) -> Sequence[sa.Row[Any]]:
    """The blockers of `domain`: rows of domain, guid, reason, fix and since, by GPU and reason."""
    return conn.execute(_BLOCKED_IN_DOMAIN, {"domain": domain}).all()


def blocked_gpus_of_domains(conn: sa.Connection, domains: Collection[str]) -> dict[str, list[sa.Row[Any]]]:
    """As `blocked_gpus_of_domain` for each of `domains`, in one query."""
    blockers: dict[str, list[sa.Row[Any]]] = {domain: [] for domain in domains}
    found = sa.select(blocked_gpu).where(blocked_gpu.c.domain.in_(blockers))
    for row in conn.execute(found.order_by(blocked_gpu.c.guid, blocked_gpu.c.reason)):
        blockers[row.domain].append(row)
    return blockers


def blocker_reasons(conn: sa.Connection, domain: str | None) -> dict[int, str]:
    """Fabric GUID -> the reasons of all its blockers, in one sentence."""
    if domain is None:
        return {}
    reasons: dict[int, list[str]] = {}
    for row in blocked_gpus_of_domain(conn, domain):
        reasons.setdefault(int(row.guid), []).append(row.reason)
    return {guid: "; ".join(texts) for guid, texts in reasons.items()}


def delete_blocked_gpus(conn: sa.Connection, domain: str) -> None:
    """Delete the blockers of `domain`, whose chassis report another domain uuid now."""
    delete_rows(conn, blocked_gpu, domain=domain)


# Paused domains.


def pause_reason(conn: sa.Connection, domain: str) -> str | None:
    """Why `domain` is paused, or None if it is not."""
    row = find_row(conn, domain_pause, domain=domain)
    return None if row is None else row.reason


def pause_domain(conn: sa.Connection, domain: str, order: OperatorOrder) -> Changed[None]:
    """Begin no operation in `domain` from now on; a second pause keeps the first reason."""
    _check_domain_known(conn, domain)
    if pause_reason(conn, domain) is not None:
        return Changed(None, frozenset())
    row = {"domain": domain, "reason": order.reason, "asked_by": order.by, "created": order.now}
    insert_row(conn, domain_pause, **row)
    journal.record_operator_step(conn, Step.PAUSE, domain, domain, order)
    return Changed(None, journal.increment_revisions(conn, [domain]))


def resume_domain(conn: sa.Connection, domain: str, order: OperatorOrder) -> Changed[None]:
    """Begin operations in `domain` again."""
    _check_domain_known(conn, domain)
    if not delete_and_count(conn, domain_pause, domain=domain):
        raise conflict("NVLink Domain is not paused")
    journal.record_operator_step(conn, Step.RESUME, domain, domain, order)
    return Changed(None, journal.increment_revisions(conn, [domain]))


def copy_pause(conn: sa.Connection, domain: str, successor: str) -> None:
    """Pause `successor` too when `domain` is paused: its chassis report this domain uuid now."""
    row = find_row(conn, domain_pause, domain=domain)
    if row is not None and pause_reason(conn, successor) is None:
        insert_row(conn, domain_pause, **{**row._mapping, "domain": successor})


def _check_domain_known(conn: sa.Connection, domain: str) -> None:
    if not has_row(conn, endpoint, domain=domain) and not has_row(conn, machine, domain=domain):
        raise not_found("Could not find NVLink Domain with specified ID")
