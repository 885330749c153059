"""The background job of the audit log, on a store on disk: refused requests, and old entries."""

import asyncio
import threading

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.app.site import audit_log
from rackloom.app.site.audit_log import AuditKeeper
from rackloom.carve.store.audit import REST, AuditRecord, append_entries, kept_entries
from rackloom.carve.store.audit_trail import LEFT_OUT, RequestAudit
from rackloom.carve.store.database import Store
from rackloom.carve.store.failures import StoreFault, StoreUnavailable
from rackloom.carve.store.schema import audit_entry
from rackloom.core.refusal_log import MAX_GROUPS

DAY = 86400.0


def entry(operation, **fields):
    return AuditRecord(channel=REST, subject="who", org="acme", operation=operation, **fields)


def run(tmp_path, scenario, **settings):
    async def play():
        store = Store.open(tmp_path)
        audit, clock = RequestAudit(), [0.0]
        given = {"keep_seconds": 10 * DAY, "keep_entries": 1000} | settings
        keeper = AuditKeeper(audit=audit, store=store, clock=lambda: clock[0], **given)
        try:
            await scenario(store, audit, keeper, clock)
        finally:
            await store.close()

    asyncio.run(play())


def all_entries(conn):
    return conn.execute(sa.select(audit_entry).order_by(audit_entry.c.id)).all()


def test_a_flood_of_refusals_is_entered_in_few_entries(tmp_path):
    async def scenario(store, audit, keeper, clock):
        for number in range(500):
            audit.refuse(entry(f"operation {number % (MAX_GROUPS + 9)}", status=409), float(number))
        clock[0] = 500.0
        await keeper.write_refusals()
        rows = await store.read(all_entries)
        assert len(rows) == MAX_GROUPS + 1
        assert sum(row.requests for row in rows) == 500
        (left_out,) = [row for row in rows if row.operation == "left-out"]
        assert (left_out.message, left_out.org, left_out.subject) == (LEFT_OUT, "acme", "")
        assert left_out.first < left_out.last < left_out.created == 500.0

    run(tmp_path, scenario)


def test_refusals_wait_while_the_store_takes_no_writes(tmp_path, monkeypatch):
    async def scenario(store, audit, keeper, clock):
        audit.refuse(entry("create-vpc", status=503), 1.0)

        async def full(*_args, **_kwargs):
            raise StoreUnavailable(StoreFault.FULL, "no room")

        with monkeypatch.context() as patch:
            patch.setattr(store._backend, "transact", full)
            await keeper._attempt(keeper.write_refusals())
        await keeper.write_refusals()
        (row,) = await store.read(all_entries)
        assert (row.status, row.requests, row.first, row.created) == (503, 1, 1.0, 0.0)

    run(tmp_path, scenario)


def test_what_is_left_at_the_end_is_written(tmp_path):
    async def scenario(store, audit, keeper, clock):
        working = asyncio.create_task(keeper.run())
        audit.refuse(entry("create-vpc", status=409), 0.0)
        while not await store.read(all_entries):
            await asyncio.sleep(0)
        audit.refuse(entry("create-vpc", status=409), 1.0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert len(await store.read(all_entries)) == 2

    run(tmp_path, scenario)


def test_a_stop_during_the_transaction_enters_nothing_twice(tmp_path):
    """The transaction of the stopped job is committed all the same."""

    async def scenario(store, audit, keeper, clock):
        is_writing, may_commit = threading.Event(), threading.Event()

        def clock_of_transactions():
            if threading.current_thread() is not threading.main_thread():
                is_writing.set()
                may_commit.wait(10)
            return clock[0]

        keeper = msgspec.structs.replace(keeper, clock=clock_of_transactions)
        audit.refuse(entry("create-vpc", status=409), 0.0)
        working = asyncio.create_task(keeper.run())
        await asyncio.to_thread(is_writing.wait, 10)
        audit.refuse(entry("create-vpc", status=409), 0.0)
        working.cancel()
        await asyncio.sleep(0)
        may_commit.set()
        (stopped,) = await asyncio.gather(working, return_exceptions=True)
        assert isinstance(stopped, asyncio.CancelledError)
        assert [row.requests for row in await store.read(all_entries)] == [1, 1]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("settings", "kept"), [({"keep_seconds": 3.5 * DAY}, 4), ({"keep_entries": 2}, 2), ({}, 10)]
)
def test_old_and_surplus_entries_go_in_small_batches(tmp_path, monkeypatch, settings, kept):
    monkeypatch.setattr(audit_log, "BATCH", 3)
    monkeypatch.setattr(audit_log, "PAUSE_SECONDS", 0.0)

    async def scenario(store, _audit, keeper, clock):
        await store.run(append_entries, [entry("create-vpc", created=day * DAY) for day in range(10)])
        clock[0] = 9 * DAY
        await keeper.remove_old()
        rows = await store.read(all_entries)
        assert [row.created for row in rows] == [day * DAY for day in range(10 - kept, 10)]
        log = await store.read(kept_entries)
        assert (log.removed, log.oldest) == (10 - kept, rows[0].id)
        assert log.removed_until == (None if kept == 10 else (9 - kept) * DAY)
        await keeper.remove_old()
        assert await store.read(kept_entries) == log

    run(tmp_path, scenario, **settings)


@pytest.mark.parametrize(("now", "newest"), [(500 * DAY, 9 * DAY), (9 * DAY, -400 * DAY)])
def test_no_clock_alone_removes_the_log(tmp_path, now, newest):
    """A clock that is far ahead, or a very old time on the newest entry."""

    async def scenario(store, _audit, keeper, clock):
        times = [*(day * DAY for day in range(9)), newest]
        await store.run(append_entries, [entry("create-vpc", created=time) for time in times])
        clock[0] = now
        await keeper.remove_old()
        assert len(await store.read(all_entries)) == len(times)

    run(tmp_path, scenario, keep_seconds=100 * DAY)


def test_an_id_is_never_used_twice(tmp_path):
    async def scenario(store, _audit, keeper, clock):
        await store.run(append_entries, [entry("create-vpc")])
        clock[0] = 100 * DAY
        await keeper.remove_old()
        await store.run(append_entries, [entry("create-vpc", created=clock[0])])
        (row,) = await store.read(all_entries)
        assert row.id == 2

    run(tmp_path, scenario)
