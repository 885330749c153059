"""Objects of a tenant in bulk: `fill` writes rows of every table that a tenant's lists read."""

import uuid
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from rackloom.carve.store import schema
from rackloom.carve.store.database import Store
from rackloom.carve.store.migrate import analyze

BATCH = 1_000
STATUSES = ("Ready", "Pending", "Deleting", "Error")


async def fill(store: Store, org: str, number: int) -> None:
    """Make a tenant `org` with `number` objects of each kind, all at the only site."""
    site_id, type_id = await store.run(_begin, org)
    tenant_id = object_id(org, "tenant", 0)
    for start in range(0, number, BATCH):
        rows: dict[sa.Table, list[dict[str, Any]]] = {}
        for index in range(start, min(start + BATCH, number)):
            for table, row in _rows(org, index, tenant_id, site_id, type_id):
                rows.setdefault(table, []).append(row)
        await store.run(_insert, rows)
    await store.run(analyze)


def _begin(conn: sa.Connection, org: str) -> tuple[str, str]:
    row = {"id": object_id(org, "tenant", 0), "org": org, "targeted_instance_creation": False}
    conn.execute(sa.insert(schema.tenant).values(**row, created=1.0, updated=1.0))
    site_id = conn.execute(sa.select(schema.site.c.id)).scalar_one()
    return site_id, conn.execute(sa.select(schema.instance_type.c.id)).scalar_one()


def _insert(conn: sa.Connection, rows: dict[sa.Table, list[dict[str, Any]]]) -> None:
    for table, batch in rows.items():
        conn.execute(sa.insert(table), batch)


def object_id(org: str, kind: str, index: int) -> str:
    """The id of an object of `fill`."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{org}/{kind}/{index}"))


def _rows(
    org: str, index: int, tenant_id: str, site_id: str, type_id: str
) -> Iterator[tuple[sa.Table, dict[str, Any]]]:
    def new(kind: str) -> dict[str, Any]:
        moment = 1000.0 + index % 1000
        return {"id": object_id(org, kind, index), "created": moment, "updated": moment + index % 7}

    status, name = STATUSES[index % len(STATUSES)], f"object {index}"
    mine = {"tenant_id": tenant_id, "site_id": site_id}
    partition, vpc, instance, machine = (new(kind) for kind in ("partition", "vpc", "instance", "machine"))
    machine["id"] = f"{org}-{index}"
    allocation, reservation = new("allocation"), new("reservation")
    tray = {"chassis_serial": f"{org}-{index // 18}", "slot": index % 18, "tray_index": index % 18}
    tray |= {"rack": org, "site_id": site_id, "instance_type_id": type_id, "status": "Ready", "domain": None}
    yield schema.machine, {**machine, **tray}
    yield schema.logical_partition, {**partition, **mine, "name": name, "status": status}
    ours = {"logical_partition_id": partition["id"]}
    yield schema.vpc, {**vpc, **mine, **ours, "name": name, "status": status, "extra": {}}
    placed = {"vpc_id": vpc["id"], "machine_id": machine["id"], "instance_type_id": type_id}
    placed |= {"placement": "", "intent_at": 1.0, "extra": {}}
    yield schema.instance, {**instance, **mine, **placed, "name": name, "status": status}
    joined = {"instance_id": instance["id"], "device_instance": 0, "status": status, "intent_at": 1.0}
    yield schema.nvlink_interface, {**new("interface"), **ours, **joined}
    yield schema.allocation, {**allocation, **mine, "name": name, "status": status}
    given = {"allocation_id": allocation["id"], "instance_type_id": type_id, "value": 1}
    yield schema.allocation_constraint, {**new("constraint"), **given}
    kept = {"instance_type_id": type_id, "reason": "", "asked_by": "", "until": 2000.0}
    yield schema.tray_reservation, {**reservation, **mine, **kept}
    for thing in (partition, vpc, instance, allocation):
        history = {"object_id": thing["id"], "status": status, "message": "", "created": 1.0, "updated": 1.0}
        yield schema.status_history, history
    texts = ("roles", "source", "request_id", "path", "object_name", "code", "message", "reason")
    entry = {"created": partition["created"], "requests": 1, "channel": "rest", "subject": org, "org": org}
    entry |= {"by_operator": False, "operation": "create-vpc", "method": "POST", "status": 201, "fields": []}
    entry |= {"object_kind": "vpc", "object_id": vpc["id"], "tenant_org": org, **dict.fromkeys(texts, "")}
    yield schema.audit_entry, entry
