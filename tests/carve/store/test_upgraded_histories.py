"""Histories of older versions tell tenants no address of a controller once they are upgraded."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.ext.asyncio import create_async_engine

from rackloom.carve.observation import latest
from rackloom.carve.store import schema
from rackloom.carve.store.database import DATABASE, Store

SINCE = "unknown since 2026-01-02T03:04:05.000Z: "
LEFT = "the GPU is in no partition yet"
REFUSED = "the switch controller refused add-gpus on partition 7: "
TEXTS = {
    f"GPU 0: {SINCE}Hello: UNAVAILABLE: failed to connect to ipv4:10.1.2.3:9370; errno 111; GPU 1: {LEFT}": (
        f"GPU 0: {SINCE}{latest.UNREADABLE_REASON}; GPU 1: {LEFT}"
    ),
    f"GPU 2: {SINCE}switch controllers https://10.1.2.3:9370 and https://switch-b:9370 contradict"
    " one another: only https://switch-b:9370 lists 4 GPUs; partition 3 differs; the host is Unknown": (
        f"GPU 2: {SINCE}{latest.CONFLICT_REASON}; the host is Unknown"
    ),
    f"GPU 3: {LEFT}: {REFUSED}CreatePartition at https://10.1.2.3:9370: RESOURCE_IN_USE": (
        f"GPU 3: {LEFT}: {REFUSED}RESOURCE_IN_USE"
    ),
    f"{REFUSED}BADPARAM": f"{REFUSED}BADPARAM",
    f"{SINCE}{latest.CONFLICT_REASON}": f"{SINCE}{latest.CONFLICT_REASON}",
    "Instance is ready": "Instance is ready",
    f"GPU 1: {SINCE}lost; GPU 2: 10.1.2.3 secret; the host is 10.1.2.3; GPU 3: {SINCE}10.1.2.3": (
        f"GPU 1: {SINCE}{latest.UNREADABLE_REASON}; GPU 3: {SINCE}{latest.UNREADABLE_REASON}"
    ),
    f"GPU 1: {SINCE}lost; the host is Unknown; 10.1.2.3; GPU 2: the GPU is still in partition 10.1.2.3": (
        f"GPU 1: {SINCE}{latest.UNREADABLE_REASON}; the host is Unknown"
    ),
    f"GPU 1: {LEFT}: {REFUSED}at SWITCHB: RESOURCE_EXHAUSTED: http://x; {REFUSED}10.1.2.3; GPU 2: x": (
        f"GPU 1: {LEFT}: {REFUSED}RESOURCE_EXHAUSTED; {REFUSED}"
    ),
    f"GPU 0: {LEFT}; GPU 1: the GPU is still in partition rl-a and 4: {REFUSED}BADPARAM; GPU 2: {LEFT}": (
        f"GPU 0: {LEFT}; GPU 1: the GPU is still in partition rl-a and 4: {REFUSED}BADPARAM; GPU 2: {LEFT}"
    ),
    f"the tray is drained by the operator: m1 is unknown since yesterday: a; b; b; GPU 1: {LEFT}": (
        f"the tray is drained by the operator: m1 is unknown since yesterday: a; b; b; GPU 1: {LEFT}"
    ),
}
MANY = 2500
"""More than are rewritten at once."""


def _to(conn: sa.Connection, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    config.attributes["connection"] = conn
    command.upgrade(config, revision)


def _old(conn: sa.Connection) -> None:
    """A database of the version before, with one object for each text, and with many."""
    _to(conn, "0008")
    made = {"targeted_instance_creation": False, "created": 1.0, "updated": 1.0}
    conn.execute(sa.insert(schema.tenant), [{**made, "id": name, "org": name} for name in ("t0", "t1")])
    many = (f"GPU {number}: {SINCE}10.1.2.3:{number} is not there" for number in range(MANY))
    texts = list(enumerate([*TEXTS, *many]))
    rows = [
        {"object_id": f"{number}", "status": "Unknown", "message": text, "created": 1.0}
        for number, text in texts
    ]
    conn.execute(sa.insert(schema.status_history), [{**row, "updated": 1.0} for row in rows])
    about = [{"tenant_id": f"t{number % 2}", "number": number, "kind": "Instance"} for number, _ in texts]
    events = [{**row, **fields} for row, fields in zip(rows, about, strict=True)]
    conn.execute(sa.insert(schema.tenant_event), events)


def _events(conn: sa.Connection) -> list[tuple[str, str]]:
    past = sa.select(schema.status_history.c.message).order_by(schema.status_history.c.id)
    events = sa.select(schema.tenant_event.c.message).order_by(schema.tenant_event.c.number)
    both = (conn.execute(past).scalars().all(), conn.execute(events).scalars().all())
    return list(zip(*both, strict=True))


@pytest.fixture
def old_home(tmp_path: Path) -> Path:
    engine = sa.create_engine(f"sqlite:///{tmp_path / DATABASE}")
    with engine.begin() as conn:
        _old(conn)
    engine.dispose()
    return tmp_path


def _check(events: list[tuple[str, str]]) -> None:
    assert events[: len(TEXTS)] == [(text, text) for text in TEXTS.values()]
    rest = [f"GPU {number}: {SINCE}{latest.UNREADABLE_REASON}" for number in range(MANY)]
    assert events[len(TEXTS) :] == [(text, text) for text in rest]


def test_what_controllers_said_is_gone_and_all_else_stays(old_home: Path) -> None:
    async def run() -> list[tuple[str, str]]:
        store = Store.open(old_home)
        try:
            return await store.read(_events)
        finally:
            await store.close()

    _check(asyncio.run(run()))


def test_it_is_so_on_postgresql(postgres_server: Any) -> None:
    name = "upgraded_histories"
    postgres_server.execute(f"CREATE DATABASE {name}")
    url = sa.make_url(postgres_server.url(name)).set(drivername="postgresql+asyncpg")

    async def run() -> list[tuple[str, str]]:
        engine = create_async_engine(url)
        try:
            async with engine.begin() as conn:
                await conn.run_sync(_old)
                await conn.run_sync(_to, "head")
                return await conn.run_sync(_events)
        finally:
            await engine.dispose()

    try:
        _check(asyncio.run(run()))
    finally:
        postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_texts_are_read_and_written_in_pages_and_not_one_by_one(old_home: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{old_home / DATABASE}")
    asked: list[str] = []
    with engine.begin() as conn:
        sa.event.listen(conn, "before_cursor_execute", lambda *arguments: asked.append(arguments[2]))
        _to(conn, "0009")
    engine.dispose()
    pages = MANY // 1000 + 1
    for table in ("status_history", "tenant_event"):
        assert len([statement for statement in asked if statement.startswith(f"UPDATE {table} ")]) == pages
