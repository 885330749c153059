"""Writes into the records what the newest observation of a domain supports saying, and no more.

Called after every change of intent and every observation. Statuses that rested on an observation which no
longer counts are taken back: the REST states have Unknown for instances; interfaces, which have not, turn
Pending with the reason.
"""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import drains, history, holdings, logical_partitions
from rackloom.carve.site.changes import Changes
from rackloom.carve.site.holdings import Holding
from rackloom.carve.site.values import Status
from rackloom.carve.site.verdicts import (
    DomainFacts,
    GpuWish,
    why_not_isolated,
    why_not_joined,
    why_not_released,
)

READY = "Instance is ready: every GPU is where it was asked to be, and nowhere else"


def settle(conn: sa.Connection, domain: str | None, now: float) -> None:
    """Bring the statuses of everything on machines of `domain` up to date (None: domain not yet told)."""
    found = holdings.load(conn, domain)
    draining = drains.unfinished(conn, domain)
    if found or draining:
        facts = holdings.facts(conn, domain, found)
        drains.settle(conn, draining, facts, now)
        changes = Changes(history.newest(conn, [holding.instance.id for holding in found]), now)
        for holding in found:
            _settle_one(holding, facts, changes)
        changes.write(conn)
    logical_partitions.remove_emptied(conn, now)


def _settle_one(holding: Holding, facts: DomainFacts, changes: Changes) -> None:
    if holding.instance.status == Status.TERMINATING:
        _settle_terminating(holding, facts, changes)
        return
    troubles: list[str] = []
    wished: set[int] = set()
    for row in holding.interfaces:
        if row.status != Status.DELETING:
            wished.add(row.device_instance)
            troubles += _settle_interface(holding, row, facts, changes)
    for row in holding.interfaces:
        if row.status == Status.DELETING:
            replaced = row.device_instance in wished
            troubles += _settle_leaving(holding, row, facts, changes, replaced=replaced)
    for module_id, guid in holding.gpus.items():
        if module_id - 1 not in wished:
            troubles += _named(module_id - 1, why_not_isolated(_gpu(holding, module_id - 1, guid), facts))
    if holding.instance.host_status != Status.READY:
        troubles.append(f"the host is {holding.instance.host_status}")
    if holding.drain is not None:
        troubles.insert(0, _drained(holding.drain))
    _settle_instance(holding, troubles, facts, changes)


def _settle_interface(holding: Holding, row: sa.Row[Any], facts: DomainFacts, changes: Changes) -> list[str]:
    gpu = GpuWish(
        device_instance=row.device_instance,
        guid=holding.guid(row.device_instance),
        logical_partition=row.logical_partition_id,
        intent_at=row.intent_at,
        tenant=holding.instance.tenant_id,
    )
    reason = why_not_joined(gpu, facts) if holding.drain is None else _drained(holding.drain)
    status = Status.PENDING if reason else Status.READY
    if (row.status, row.reason) != (status, reason):
        changes.interface(holding.instance.tenant_id, row.id, status, reason)
    return _named(row.device_instance, reason)


def _settle_leaving(
    holding: Holding, row: sa.Row[Any], facts: DomainFacts, changes: Changes, *, replaced: bool
) -> list[str]:
    guid = holding.guid(row.device_instance)
    reason = why_not_released(guid, row.logical_partition_id, row.intent_at, facts)
    if reason is None or (replaced and _joins_again(holding, row)):
        changes.interface_left(holding.instance.tenant_id, row.id)
        return []
    _note_leaving(holding, row, reason, changes)
    return _named(row.device_instance, reason)


def _note_leaving(holding: Holding, row: sa.Row[Any], reason: str | None, changes: Changes) -> None:
    if reason is not None and row.reason != reason:
        changes.interface(holding.instance.tenant_id, row.id, Status.DELETING, reason)


def _joins_again(holding: Holding, leaving: sa.Row[Any]) -> bool:
    key = (leaving.device_instance, leaving.logical_partition_id)
    return any(
        (row.device_instance, row.logical_partition_id) == key and row.status != Status.DELETING
        for row in holding.interfaces
    )


def _settle_instance(holding: Holding, troubles: list[str], facts: DomainFacts, changes: Changes) -> None:
    row = holding.instance
    drained = holding.drain is not None
    status = Status.REPAIRING if drained else _instance_status(row.status, bool(troubles), facts)
    message = "; ".join(dict.fromkeys(troubles)) or READY
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


def _settle_terminating(holding: Holding, facts: DomainFacts, changes: Changes) -> None:
    row = holding.instance
    stuck = {
        module_id - 1: why_not_released(guid, None, row.intent_at, facts)
        for module_id, guid in holding.gpus.items()
    }
    reasons = [text for device, why in stuck.items() for text in _named(device, why)]
    if reasons:
        for interface in holding.interfaces:
            _note_leaving(holding, interface, stuck.get(interface.device_instance), changes)
        message = "; ".join(dict.fromkeys(reasons))
        changes.instance_says(row.tenant_id, row.id, Status.TERMINATING, message)
    else:
        changes.instance_gone(row.tenant_id, row.id)


def _drained(reason: str) -> str:
    return f"the tray is drained by the operator: {reason}"


def _named(device_instance: int, reason: str | None) -> list[str]:
    return [] if reason is None else [f"GPU {device_instance}: {reason}"]


def _gpu(holding: Holding, device_instance: int, guid: int | None) -> GpuWish:
    return GpuWish(
        device_instance=device_instance,
        guid=guid,
        logical_partition=None,
        intent_at=holding.instance.intent_at,
        tenant=holding.instance.tenant_id,
    )
