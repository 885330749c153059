"""The promises of every store, on SQLite and on PostgreSQL alike."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from rackloom.carve.store import audit, journal
from rackloom.carve.store.audit import REST, AuditRecord, EntryFilter
from rackloom.carve.store.audit_trail import AuditTrail
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import domain_revision, metadata, tenant
from rackloom.carve.tenancy import entitlements
from rackloom.errors import Refused

Opening = Callable[[], Any]


@pytest.fixture(params=["sqlite", "postgresql"])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opening]:
    """Opens a store on the same records each time."""
    if request.param == "sqlite":

        async def home() -> Store:
            return Store.open(tmp_path)

        yield home
    else:
        url = request.getfixturevalue("postgres_url")
        yield lambda: Store.connect(url)


@asynccontextmanager
async def opened(opening: Opening) -> AsyncIterator[Store]:
    store = await opening()
    try:
        yield store
    finally:
        await store.close()


def in_store(opening: Opening, work: Callable[[Store], Any]) -> Any:
    async def main() -> Any:
        async with opened(opening) as store:
            return await work(store)

    return asyncio.run(main())


@pytest.mark.slow
def test_migrations_make_exactly_the_tables(opening: Opening) -> None:
    def differences(conn: sa.Connection) -> object:
        return compare_metadata(MigrationContext.configure(conn, opts={"compare_type": True}), metadata)

    assert in_store(opening, lambda store: store.read(differences)) == []


def test_what_was_written_is_there_when_opened_again(opening: Opening) -> None:
    in_store(opening, lambda store: store.run(journal.increment_revisions, ["d"]))
    assert in_store(opening, lambda store: store.read(journal.current_revision, "d")) == 1


def test_a_failed_write_leaves_nothing(opening: Opening) -> None:
    def half_done(conn: sa.Connection) -> None:
        journal.increment_revisions(conn, ["d"])
        raise Refused("changed my mind")

    async def attempt(store: Store) -> int:
        with pytest.raises(Refused):
            await store.run(half_done)
        return await store.read(journal.current_revision, "d")

    assert in_store(opening, attempt) == 0


def test_reading_cannot_write(opening: Opening) -> None:
    async def attempt(store: Store) -> None:
        with pytest.raises(sa.exc.DBAPIError, match=r"read-?only"):
            await store.read(journal.increment_revisions, ["d"])
        await store.run(journal.increment_revisions, ["d"])

    in_store(opening, attempt)


def test_a_survey_sees_what_was_written_and_cannot_write(opening: Opening) -> None:
    async def look(store: Store) -> int:
        await store.run(journal.increment_revisions, ["d"])
        with pytest.raises(sa.exc.DBAPIError, match=r"read-?only"):
            await store.survey(lambda conn: journal.increment_revisions(conn, ["d"]))
        return await store.survey(lambda conn: journal.current_revision(conn, "d"))

    assert in_store(opening, look) == 1


def test_nobody_waits_for_a_survey(opening: Opening) -> None:
    async def look(store: Store) -> tuple[int, int]:
        others_are_done = threading.Event()

        def slow(conn: sa.Connection) -> int:
            found = journal.current_revision(conn, "d")
            assert others_are_done.wait(60.0), "the others waited for it"
            return found

        surveying = asyncio.create_task(store.survey(slow))
        await store.run(journal.increment_revisions, ["d"])
        after = await store.read(journal.current_revision, "d")
        others_are_done.set()
        return await surveying, after

    before, after = in_store(opening, look)
    assert before <= after == 1


def test_a_store_is_closed_when_its_last_survey_has_ended(opening: Opening) -> None:
    began, may_end = threading.Event(), threading.Event()

    def slow(conn: sa.Connection) -> int:
        began.set()
        assert may_end.wait(60.0)
        return journal.current_revision(conn, "d")

    async def main() -> int:
        store = await opening()
        surveying = asyncio.create_task(store.survey(slow))
        await asyncio.to_thread(began.wait, 60.0)
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        may_end.set()
        await closing
        return await surveying

    assert asyncio.run(main()) == 0


def test_a_reader_sees_one_state_throughout(opening: Opening) -> None:
    def twice(conn: sa.Connection) -> tuple[int, int]:
        return journal.current_revision(conn, "d"), journal.current_revision(conn, "d")

    async def race(store: Store) -> None:
        reads = [store.read(twice) for _ in range(20)]
        writes = [store.run(journal.increment_revisions, ["d"]) for _ in range(20)]
        found = await asyncio.gather(*reads, *writes)
        assert all(first == second for first, second in found[:20])

    in_store(opening, race)


def test_a_rule_that_was_checked_still_holds_when_it_is_acted_on(opening: Opening) -> None:
    def at_most_one(conn: sa.Connection, name: str) -> bool:
        if conn.execute(sa.select(sa.func.count()).select_from(domain_revision)).scalar_one():
            return False
        journal.increment_revisions(conn, [name])
        return True

    async def race(store: Store) -> list[bool]:
        return await asyncio.gather(*(store.run(at_most_one, f"d{number}") for number in range(16)))

    assert sum(in_store(opening, race)) == 1


def test_no_count_is_lost_among_many_writers(opening: Opening) -> None:
    async def race(store: Store) -> int:
        await asyncio.gather(*(store.run(journal.increment_revisions, ["d"]) for _ in range(40)))
        return await store.read(journal.current_revision, "d")

    assert in_store(opening, race) == 40


def test_a_transaction_that_has_begun_outlives_its_caller(opening: Opening) -> None:
    async def abandon(store: Store) -> int:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work(conn: sa.Connection) -> None:
            loop.call_soon_threadsafe(begun.set)
            journal.increment_revisions(conn, ["d"])

        caller = asyncio.create_task(store.run(work))
        await begun.wait()
        caller.cancel()
        await asyncio.wait([caller])
        # The next writer comes after it, on whichever database.
        await store.run(journal.increment_revisions, ["other"])
        return await store.read(journal.current_revision, "d")

    assert in_store(opening, abandon) == 1


def test_keys_are_enforced(opening: Opening) -> None:
    def orphan(conn: sa.Connection) -> None:
        row = {"chassis_serial": "x", "endpoint_id": "none such"}
        conn.execute(sa.insert(metadata.tables["endpoint_chassis"]).values(**row))

    async def attempt(store: Store) -> None:
        with pytest.raises(sa.exc.IntegrityError):
            await store.run(orphan)

    in_store(opening, attempt)


def test_every_letter_of_a_name_comes_back(opening: Opening) -> None:
    name = "naïve \N{GREEK SMALL LETTER OMEGA} \U0001f5c4 'quoted' \\ %s"

    async def write_and_read(store: Store) -> list[str]:
        await store.run(entitlements.ensure_tenant, name, 1.5, lambda: "id")
        return await store.read(lambda conn: list(conn.execute(sa.select(tenant.c.org)).scalars()))

    assert in_store(opening, write_and_read) == [name]


# The audit log.


def _trail() -> AuditTrail:
    entry = AuditRecord(channel=REST, subject="who", org="acme", tenant_org="acme", operation="create-tenant")
    return AuditTrail(entry, clock=lambda: 5.0, arrived=4.0)


async def _make_tenant(store: Store, *, fails: bool = False) -> None:
    def work(conn: sa.Connection) -> None:
        conn.execute(
            sa.insert(tenant).values(
                id="t", org="acme", targeted_instance_creation=False, created=1.0, updated=1.0
            )
        )
        if fails:
            raise Refused("not now")

    await store.recorded_by(_trail().record).run(work)


def _everything(conn: sa.Connection) -> tuple[int, list[str]]:
    tenants = conn.execute(sa.select(sa.func.count()).select_from(tenant)).scalar_one()
    page = audit.page_of_entries(conn, EntryFilter(tenant_org="acme"), start=0, size=10)
    return tenants, [row.operation for row in page.entries]


def test_a_change_and_its_entry_are_there_together_or_not_at_all(opening: Opening) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(Refused):
            await _make_tenant(store, fails=True)
        assert await store.read(_everything) == (0, [])
        await _make_tenant(store)
        assert await store.read(_everything) == (1, ["create-tenant"])

    in_store(opening, scenario)


def test_what_cannot_be_entered_is_not_done(opening: Opening) -> None:
    async def scenario(store: Store) -> None:
        await store.run(lambda conn: conn.execute(sa.text("ALTER TABLE audit_entry RENAME TO elsewhere")))
        # The driver of SQLite raises its own error.
        with pytest.raises((sa.exc.DBAPIError, sqlite3.OperationalError)):
            await _make_tenant(store)
        await store.run(lambda conn: conn.execute(sa.text("ALTER TABLE elsewhere RENAME TO audit_entry")))
        assert await store.read(_everything) == (0, [])

    in_store(opening, scenario)


def test_entries_of_a_time_span_are_found_though_clocks_differ(opening: Opening) -> None:
    async def scenario(store: Store) -> None:
        # Two replicas: the clock of the second is 20 s behind.
        times = [1000.0, 1200.0, 1180.0, 1220.0, 1200.5, 2000.0]
        entries = [AuditRecord(channel=REST, operation=str(time), created=time) for time in times]
        await store.run(audit.append_entries, entries)
        for since, until in ((1190.0, 1210.0), (1180.0, 1220.0), (1000.0, None), (None, 1200.0)):
            span = EntryFilter(since=since, until=until)
            page = await store.read(
                lambda conn, span=span: audit.page_of_entries(conn, span, start=0, size=10)
            )
            found = sorted(row.created for row in page.entries)
            assert found == sorted(time for time in times if (since or 0) <= time < (until or 9999))

    in_store(opening, scenario)


def test_entries_are_read_exported_and_removed(opening: Opening) -> None:
    async def scenario(store: Store) -> None:
        entries = [
            AuditRecord(channel=REST, operation=f"o{number}", tenant_org="acme", created=100.0 * number)
            for number in range(6)
        ]
        await store.run(audit.append_entries, entries)
        span = EntryFilter(since=100.0, until=400.0)
        page = await store.read(lambda conn: audit.page_of_entries(conn, span, start=1, size=5))
        assert ([row.operation for row in page.entries], page.total) == (["o2", "o1"], 3)
        first, *_, last = await store.read(audit.entries_after, 0, None, None, 100)
        assert (first.operation, last.operation) == ("o0", "o5")
        expired = await store.read(audit.expired_up_to, 300.0, 550.0, 4)
        assert expired == first.id + 2
        assert await store.run(audit.remove_oldest, expired, 2) == 2
        assert await store.run(audit.remove_oldest, expired, 2) == 1
        kept = await store.read(audit.kept_entries)
        assert (kept.oldest, kept.oldest_created, kept.removed) == (first.id + 3, 300.0, 3)
        assert (kept.removed_up_to, kept.removed_until) == (expired, 200.0)

    in_store(opening, scenario)
