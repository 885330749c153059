"""What only PostgreSQL can do to a store: other replicas, lost connections, notifications."""

import asyncio
import functools
import threading
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.store import journal, postgres
from rackloom.carve.store.database import Store
from rackloom.carve.store.migrate import migrate_to_head
from rackloom.carve.store.schema import domain_revision, metadata, operator_step
from rackloom.errors import Refused, Retry, Unknown

END_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = '{}' AND pid <> pg_backend_pid() AND application_name = 'rackloom'"
)
PATIENCE = 30.0
POOL = 15
"""Connections that SQLAlchemy's pool opens at most."""


def end_connections(server: Any, url: str) -> None:
    name = sa.make_url(url).database
    # `execute` has a loop of its own, which a running one does not allow in its thread.
    worker = threading.Thread(target=server.execute, args=(END_OTHERS.format(name),))
    worker.start()
    worker.join()


def test_replicas_that_start_together_migrate_once(postgres_server: Any) -> None:
    async def both() -> list[int]:
        stores = await asyncio.gather(*(Store.connect(postgres_server.url("fresh")) for _ in range(3)))
        found = [await store.read(journal.current_revision, "d") for store in stores]
        for store in stores:
            await store.close()
        return found

    postgres_server.execute("CREATE DATABASE fresh")
    try:
        assert asyncio.run(both()) == [0, 0, 0]
    finally:
        postgres_server.execute("DROP DATABASE fresh WITH (FORCE)")


def test_a_migration_may_take_longer_than_any_other_statement(
    postgres_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large table is rewritten; the replica that waits for it waits as long."""
    monkeypatch.setattr(postgres, "COMMAND_SECONDS", 0.2)
    for session in (postgres._SESSION, postgres._SURVEY_SESSION):
        monkeypatch.setitem(session, "lock_timeout", "100")
    monkeypatch.setattr(postgres, "MAX_ATTEMPTS", 1)
    steps: list[str] = []

    def slow_migration(conn: sa.Connection) -> None:
        steps.append("begins")
        assert conn.exec_driver_sql("SHOW lock_timeout").scalar_one() == "100ms"
        conn.exec_driver_sql("SELECT pg_sleep(0.5)")
        migrate_to_head(conn)
        steps.append("ends")

    monkeypatch.setattr(postgres, "migrate_to_head", slow_migration)

    async def start() -> None:
        stores = await asyncio.gather(*(Store.connect(postgres_server.url("large")) for _ in range(2)))
        for store in stores:
            await store.close()

    postgres_server.execute("CREATE DATABASE large")
    try:
        asyncio.run(start())
    finally:
        postgres_server.execute("DROP DATABASE large WITH (FORCE)")
    assert steps == ["begins", "ends"] * 2


def test_a_rule_holds_across_replicas(postgres_url: str) -> None:
    def at_most_one(conn: sa.Connection, name: str) -> bool:
        if conn.execute(sa.select(sa.func.count()).select_from(domain_revision)).scalar_one():
            return False
        journal.increment_revisions(conn, [name])
        return True

    async def race() -> list[bool]:
        stores = [await Store.connect(postgres_url) for _ in range(3)]
        found = await asyncio.gather(
            *(store.run(at_most_one, f"d{number}") for number in range(8) for store in stores)
        )
        for store in stores:
            await store.close()
        return found

    assert sum(asyncio.run(race())) == 1


def test_a_rule_holds_against_who_writes_by_other_means(postgres_server: Any, postgres_url: str) -> None:
    runs: list[int] = []

    def grow(conn: sa.Connection) -> None:
        seen = journal.current_revision(conn, "d")
        runs.append(seen)
        if len(runs) == 1:
            name = sa.make_url(postgres_url).database
            other = threading.Thread(target=_write_elsewhere, args=(postgres_server, name))
            other.start()
            other.join()
        conn.execute(sa.update(domain_revision).values(revision=seen + 1))

    async def main() -> int:
        store = await Store.connect(postgres_url)
        await store.run(journal.increment_revisions, ["d"])
        await store.run(grow)
        found = await store.read(journal.current_revision, "d")
        await store.close()
        return found

    assert asyncio.run(main()) == 101
    assert runs == [1, 100]


def _write_elsewhere(server: Any, database: str) -> None:
    server.execute("UPDATE domain_revision SET revision = 100", database=database)


def test_lost_connections_are_replaced_without_anybody_noticing(
    postgres_server: Any, postgres_url: str
) -> None:
    async def main() -> int:
        store = await Store.connect(postgres_url)
        for _ in range(3):
            await store.run(journal.increment_revisions, ["d"])
            end_connections(postgres_server, postgres_url)
        found = await store.read(journal.current_revision, "d")
        await store.close()
        return found

    assert asyncio.run(main()) == 3


def test_a_connection_lost_in_the_middle_of_the_work_costs_another_run(
    postgres_server: Any, postgres_url: str
) -> None:
    runs: list[None] = []

    def work(conn: sa.Connection) -> None:
        journal.increment_revisions(conn, ["d"])
        runs.append(None)
        if len(runs) == 1:
            end_connections(postgres_server, postgres_url)
        journal.increment_revisions(conn, ["d"])

    async def main() -> int:
        store = await Store.connect(postgres_url)
        await store.run(work)
        found = await store.read(journal.current_revision, "d")
        await store.close()
        return found

    assert asyncio.run(main()) == 2
    assert len(runs) == 2


def test_a_commit_whose_answer_is_lost_is_unknown_and_not_repeated(
    postgres_server: Any, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[None] = []
    commit = postgres._commit

    def work(conn: sa.Connection) -> None:
        journal.increment_revisions(conn, ["d"])
        runs.append(None)

    def commit_on_lost_connection(conn: sa.Connection) -> None:
        end_connections(postgres_server, postgres_url)
        commit(conn)

    monkeypatch.setattr(postgres, "_commit", commit_on_lost_connection)

    async def main() -> None:
        store = await Store.connect(postgres_url)
        with pytest.raises(Unknown, match="during a commit"):
            await store.run(work)
        await store.close()

    asyncio.run(main())
    assert len(runs) == 1


@pytest.mark.slow
def test_a_server_out_of_reach_is_worth_another_try(tmp_path: Any) -> None:
    with pytest.raises(Retry, match="cannot be reached"):
        asyncio.run(Store.connect(f"postgresql://nobody@/none?host={tmp_path}"))


@pytest.mark.parametrize("url", ["sqlite:///site.db", "mysql://u:secret@h/d", "no url: secret"])
def test_a_url_of_something_else_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(Refused, match="use postgresql://") as refusal:
        asyncio.run(Store.connect(url))
    assert "secret" not in str(refusal.value)


def test_a_change_is_heard_when_it_is_committed_and_only_then(postgres_url: str) -> None:
    def undone(conn: sa.Connection) -> None:
        journal.increment_revisions(conn, ["undone"])
        raise Refused("no")

    async def main() -> list[str | None]:
        here, there = await Store.connect(postgres_url), await Store.connect(postgres_url)
        async with asyncio.timeout(PATIENCE), aclosing(here.changes()) as changes:
            heard = [await anext(changes)]
            with pytest.raises(Refused):
                await there.run(undone)
            await there.run(journal.increment_revisions, ["b", "a"])
            await here.run(journal.increment_revisions, ["c"])
            heard += [await anext(changes) for _ in range(3)]
        await here.close()
        await there.close()
        return heard

    assert asyncio.run(main()) == [None, "a", "b", "c"]


def test_a_listener_that_was_cut_off_is_told_that_it_may_have_missed_something(
    postgres_server: Any, postgres_url: str
) -> None:
    async def main() -> list[str | None]:
        store = await Store.connect(postgres_url)
        async with asyncio.timeout(PATIENCE), aclosing(store.changes()) as changes:
            heard = [await anext(changes)]
            end_connections(postgres_server, postgres_url)
            heard.append(await anext(changes))
            await store.run(journal.increment_revisions, ["d"])
            heard.append(await anext(changes))
        await store.close()
        return heard

    assert asyncio.run(main()) == [None, None, "d"]


def test_ids_go_on_after_what_32_bits_can_number(postgres_url: str) -> None:
    def after(conn: sa.Connection) -> int:
        conn.exec_driver_sql("SELECT setval('operator_step_id_seq', 2147483647)")
        made = sa.insert(operator_step).values(step="s", subject="s", asked_by="a", reason="r", created=1.0)
        return int(conn.execute(made.returning(operator_step.c.id)).scalar_one())

    def narrow(conn: sa.Connection) -> list[str]:
        """The sequences of columns that number their rows by themselves, and end before 64 bits do."""
        sequences = "SELECT sequencename, data_type::text FROM pg_sequences WHERE schemaname = 'public'"
        numbering = {
            f"{table.name}_{column.name}_seq"
            for table in metadata.tables.values()
            if (column := table.autoincrement_column) is not None and column.autoincrement is True
        }
        return [
            name for name, kind in conn.exec_driver_sql(sequences) if name in numbering and kind != "bigint"
        ]

    async def main() -> tuple[int, list[str]]:
        store = await Store.connect(postgres_url)
        found = await store.run(after), await store.read(narrow)
        await store.close()
        return found

    assert asyncio.run(main()) == (2147483648, [])


def test_where_all_connections_are_in_use_nobody_fails_for_good(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "POOL_SECONDS", 0.1)

    async def main() -> None:
        store = await Store.connect(postgres_url)
        engine = postgres.engine_of(postgres_url)
        read = functools.partial(journal.current_revision, domain="d")
        async with aclosing(postgres.listen_for_intent_changes(engine)) as changes:
            async with AsyncExitStack() as taken:
                for _ in range(POOL):
                    await taken.enter_async_context(engine.connect())
                heard = asyncio.ensure_future(anext(changes))
                with pytest.raises(Retry, match="too much to do"):
                    await postgres.run_with_retries(engine, read, postgres.READ_OPTIONS)
                await asyncio.sleep(0.3)
                assert not heard.done()
            async with asyncio.timeout(PATIENCE):
                assert await heard is None
        assert await postgres.run_with_retries(engine, read, postgres.READ_OPTIONS) == 0
        await engine.dispose()
        await store.close()

    asyncio.run(main())


def test_which_traced_request_changed_a_domain_is_heard_after_the_change(postgres_url: str) -> None:
    cause = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"

    def change(conn: sa.Connection) -> None:
        journal.notify_cause(conn, journal.increment_revisions(conn, ["b", "a"]), cause)

    async def main() -> list[str | None]:
        here, there = await Store.connect(postgres_url), await Store.connect(postgres_url)
        async with asyncio.timeout(PATIENCE), aclosing(here.changes()) as changes:
            heard = [await anext(changes)]
            await there.run(change)
            heard += [await anext(changes) for _ in range(4)]
        await here.close()
        await there.close()
        return heard

    assert asyncio.run(main()) == [None, "a", "b", f"a {cause}", f"b {cause}"]
