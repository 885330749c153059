"""A database of an older version, with something in every table, loses nothing when it is upgraded."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy.ext.asyncio import create_async_engine

from rackloom.carve.store import schema
from rackloom.carve.store.database import DATABASE, Store
from rackloom.carve.store.schema import metadata
from rackloom.errors import Refused

OLD = ["0019"]
Rows = dict[str, list[dict[str, Any]]]
FACTS = json.dumps({"partitions": [{"id": 7, "name": "theirs", "guid_based": True, "members": [9]}]})
"""The reading of a controller, with a partition that is not in the records."""


def _as_of(conn: sa.Connection, revision: str) -> Rows:
    """Make the tables of `revision` with a row in each. Returns all rows. The database adds some itself."""
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    config.attributes["connection"] = conn
    command.upgrade(config, revision)
    known = sa.MetaData()
    known.reflect(conn)
    tables = [table for table in known.sorted_tables if table.name != "alembic_version"]
    for table in tables:
        conn.execute(sa.insert(table), _row(table))
    return {table.name: _all(conn, table.name) for table in tables}


def _row(table: sa.Table) -> dict[str, Any]:
    """Every column filled: text with the same in all tables, so that rows that refer to others find them."""
    values: dict[str, Any] = {}
    for column in table.columns:
        kind = column.type
        if column.name == "facts":
            values[column.name] = FACTS
        elif isinstance(kind, sa.JSON):
            values[column.name] = {"kept": [1, "two"]}
        elif isinstance(kind, sa.Boolean):
            values[column.name] = True
        elif isinstance(kind, sa.Integer):
            values[column.name] = 1
        elif isinstance(kind, sa.Float | sa.Numeric):
            values[column.name] = 1.5
        else:
            values[column.name] = "one"
    return values


def _all(conn: sa.Connection, table: str) -> list[dict[str, Any]]:
    reflected = sa.Table(table, sa.MetaData(), autoload_with=conn, resolve_fks=False)
    return [dict(row) for row in conn.execute(sa.select(reflected)).mappings()]


def _check(conn: sa.Connection, before: Rows) -> list[Any]:
    counted = {
        "sqlite": "SELECT stat FROM sqlite_stat1 WHERE idx = 'ix_vpc_tenant_id_created_id'",
        "postgresql": "SELECT reltuples FROM pg_class WHERE relname = 'vpc'",
    }
    # The tables and the new indexes were counted after the upgrade.
    assert conn.exec_driver_sql(counted[conn.dialect.name]).scalar_one() in ("10000 1 1 1", 1.0)
    for table, rows in before.items():
        found = _all(conn, table)
        for row in rows:
            assert any(row.items() <= after.items() for after in found), (table, row, found)
    return compare_metadata(MigrationContext.configure(conn, opts={"compare_type": True}), metadata)


@pytest.mark.slow
@pytest.mark.parametrize("revision", OLD)
def test_on_sqlite(tmp_path: Path, revision: str) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / DATABASE}")
    with engine.begin() as conn:
        before = _as_of(conn, revision)
    engine.dispose()

    async def run() -> list[Any]:
        store = Store.open(tmp_path)
        try:
            assert await store.read(lambda conn: conn.exec_driver_sql("PRAGMA foreign_key_check").all()) == []
            return await store.read(_check, before)
        finally:
            await store.close()

    assert asyncio.run(run()) == []


@pytest.mark.parametrize("revision", ["0012", "9999"])
def test_tables_of_a_version_that_is_not_known_are_refused_and_stay(tmp_path: Path, revision: str) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / DATABASE}")
    with engine.begin() as conn:
        _as_of(conn, "0019")
        conn.execute(sa.text("UPDATE alembic_version SET version_num = :v"), {"v": revision})
        before = _all(conn, "tenant")
    with pytest.raises(Refused, match=f"another version.*{revision}"):
        Store.open(tmp_path)
    with engine.begin() as conn:
        assert _all(conn, "tenant") == before
    engine.dispose()


@pytest.mark.slow
@pytest.mark.parametrize("revision", OLD)
def test_on_postgresql(postgres_server: Any, revision: str) -> None:
    name = f"upgrade_{revision}"
    postgres_server.execute(f"CREATE DATABASE {name}")
    url = postgres_server.url(name)

    async def run() -> list[Any]:
        engine = create_async_engine(sa.make_url(url).set(drivername="postgresql+asyncpg"))
        async with engine.begin() as conn:
            before = await conn.run_sync(_as_of, revision)
        await engine.dispose()
        store = await Store.connect(url)
        try:
            return await store.read(_check, before)
        finally:
            await store.close()

    try:
        assert asyncio.run(run()) == []
    finally:
        postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")
