"""The database counts the objects of tenants on every insert and delete, on SQLite and on PostgreSQL."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import (
    instance,
    logical_partition,
    machine,
    nvlink_interface,
    provider,
    site,
    tenant,
    vpc,
)
from rackloom.carve.tenancy.entitlements import QuotaKind, count_objects

TENANTS = ("first", "second")
TIMES = {"created": 1.0, "updated": 1.0}
NAMED = {**TIMES, "site_id": "site", "status": "Ready"}
COUNTED = {
    QuotaKind.LOGICAL_PARTITIONS: logical_partition,
    QuotaKind.VPCS: vpc,
    QuotaKind.INSTANCES: instance,
    QuotaKind.INTERFACES: nvlink_interface,
}
numbers = itertools.count()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    if request.param == "sqlite":

        async def home() -> Store:
            return Store.open(tmp_path)

        yield home
    else:
        url = request.getfixturevalue("postgres_url")
        yield lambda: Store.connect(url)


def furnish(conn: sa.Connection) -> None:
    """A site and tenants without anything."""
    conn.execute(sa.insert(provider).values(id="provider", org="provider", **TIMES))
    conn.execute(
        sa.insert(site).values(
            id="site", provider_id="provider", name="site", status="Registered", capabilities={},
            default_partition="delete", **TIMES,
        )
    )  # fmt: skip
    for org in TENANTS:
        conn.execute(sa.insert(tenant).values(id=org, org=org, targeted_instance_creation=True, **TIMES))


def give(conn: sa.Connection, owner: str, trays: int) -> None:
    """A logical partition, a VPC, and instances with two interfaces each."""
    made = f"{owner}-{next(numbers)}"
    mine = {**NAMED, "tenant_id": owner, "name": made}
    conn.execute(sa.insert(logical_partition).values(id=made, **mine))
    conn.execute(sa.insert(vpc).values(id=made, extra={}, **mine))
    for slot in range(trays):
        tray = f"{made}-{slot}"
        place = {"chassis_serial": tray, "slot": slot, "tray_index": slot, "rack": "rack"}
        conn.execute(sa.insert(machine).values(id=tray, **NAMED, **place))
        running = {**mine, "name": tray, "vpc_id": made, "machine_id": tray}
        conn.execute(sa.insert(instance).values(id=tray, placement="", intent_at=1.0, extra={}, **running))
        rows = [
            {
                "id": f"{tray}-{device}", "instance_id": tray, "logical_partition_id": made,
                "device_instance": device, "status": "Ready", "intent_at": 1.0, **TIMES,
            }
            for device in range(2)
        ]  # fmt: skip
        conn.execute(sa.insert(nvlink_interface), rows)


def take(conn: sa.Connection, owner: str) -> None:
    """Everything that a tenant has."""
    theirs = sa.select(instance.c.id).where(instance.c.tenant_id == owner)
    conn.execute(sa.delete(nvlink_interface).where(nvlink_interface.c.instance_id.in_(theirs)))
    for table in (instance, vpc, logical_partition):
        conn.execute(sa.delete(table).where(table.c.tenant_id == owner))


def totals(conn: sa.Connection) -> dict[tuple[str, str], int]:
    return {(org, kind): count_objects(conn, org, kind) for org in TENANTS for kind in COUNTED}


def counted(conn: sa.Connection) -> dict[tuple[str, str], int]:
    """The same by counting the rows."""
    found = {}
    for org, (kind, table) in itertools.product(TENANTS, COUNTED.items()):
        rows = sa.select(sa.func.count()).select_from(table)
        if table is nvlink_interface:
            rows = rows.join(instance, instance.c.id == table.c.instance_id)
        owner = instance.c.tenant_id if table is nvlink_interface else table.c.tenant_id
        found[org, kind] = conn.execute(rows.where(owner == org)).scalar_one()
    return found


def test_rows_are_counted_as_they_come_and_go(opening: Callable[[], Any]) -> None:
    async def main() -> None:
        store = await opening()
        try:
            await store.run(furnish)
            for change, owner in ((give, "first"), (give, "second"), (give, "first")):
                await store.run(change, owner, 2)
                assert await store.read(totals) == await store.read(counted)
            with pytest.raises(ZeroDivisionError):
                await store.run(lambda conn: (give(conn, "first", 1), 1 // 0))
            assert await store.read(totals) == await store.read(counted)
            assert (await store.read(totals))["first", QuotaKind.INTERFACES] == 8
            await store.run(take, "first")
            assert await store.read(totals) == await store.read(counted)
            assert sum((await store.read(totals)).values()) == 8
        finally:
            await store.close()

    asyncio.run(main())
