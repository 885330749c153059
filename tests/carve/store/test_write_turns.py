"""Writes take turns by organisation, on either database. On PostgreSQL those that wait share a commit."""

import asyncio
import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from tests.carve.conftest import PROFILE, TOPOLOGY
from tests.carve.store.test_store_postgres import end_connections

from rackloom.carve.inventory.endpoints import register_endpoint
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store import postgres
from rackloom.carve.store.database import Store
from rackloom.carve.store.group_commit import CommitGroup, TransactionQueue
from rackloom.carve.store.journal import events_after, newest_event_number
from rackloom.carve.store.schema import replica, site
from rackloom.carve.tenancy import entitlements, logical_partitions
from rackloom.errors import Refused


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def _put(conn: sa.Connection, name: str) -> str:
    conn.execute(sa.insert(replica).values(holder=name, until=0.0))
    return name


def _put_and_fail(conn: sa.Connection, name: str) -> str:
    _put(conn, name)
    raise Refused(name)


def _put_twice(conn: sa.Connection, name: str) -> str:
    _put(conn, name)
    return _put(conn, name)


def _put_and_hide_an_error(conn: sa.Connection, name: str) -> str:
    try:
        _put_twice(conn, name)
    except IntegrityError:
        return name
    raise AssertionError("the key is unique")


def _names(conn: sa.Connection) -> set[str]:
    return set(conn.execute(sa.select(replica.c.holder)).scalars())


def _transaction(conn: sa.Connection) -> int:
    """A write, and the number of the transaction that it shares."""
    _put(conn, f"t{conn.execute(sa.select(sa.func.count()).select_from(replica)).scalar_one()}")
    number: int = conn.exec_driver_sql("SELECT txid_current()").scalar_one()
    return number


def test_a_quiet_organisation_is_served_before_the_backlog_of_a_busy_one(tmp_path: Path) -> None:
    async def story() -> list[str]:
        store, order = Store.open(tmp_path), []
        busy, quiet = store.on_behalf_of("busy"), store.on_behalf_of("quiet")

        async def write(to: Store, org: str) -> None:
            await to.run(lambda conn: conn.execute(sa.select(1)).scalar_one())
            order.append(org)

        everybody_waits = threading.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(store.run(lambda _: everybody_waits.wait(60)))
            for _ in range(32):
                tasks.create_task(write(busy, "busy"))
            tasks.create_task(write(quiet, "quiet"))
            await _settled()
            everybody_waits.set()
        await store.close()
        return order

    assert asyncio.run(story()).index("quiet") <= 1


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a group takes on this machine, others may join it."""
    monkeypatch.setattr(postgres, "GROUP_SECONDS", math.inf)


@pytest.mark.usefixtures("patient")
def test_what_waits_on_postgresql_shares_commits(postgres_url: str) -> None:
    async def main() -> Counter[int]:
        store = await Store.connect(postgres_url)
        numbers = await asyncio.gather(*(store.run(_transaction) for _ in range(20)))
        await store.close()
        return Counter(numbers)

    assert len(asyncio.run(main())) <= 2


@pytest.mark.usefixtures("patient")
def test_on_postgresql_a_group_has_one_write_of_each_organisation(postgres_url: str) -> None:
    async def main() -> list[int]:
        store = await Store.connect(postgres_url)
        orgs = ["busy"] * 9 + ["quiet"] * 3
        asked = [asyncio.create_task(store.on_behalf_of(org).run(_transaction)) for org in orgs]
        numbers = await asyncio.gather(*asked)
        await store.close()
        return list(numbers)

    numbers = asyncio.run(main())
    busy, quiet = numbers[:9], numbers[9:]
    # The backlog of the one does not come first.
    assert max(quiet) < sorted(busy)[4]
    assert len(set(quiet)) == 3


@pytest.mark.parametrize("fails", [_put_and_fail, _put_twice, _put_and_hide_an_error])
def test_on_postgresql_a_write_that_fails_takes_no_other_with_it(postgres_url: str, fails: Any) -> None:
    async def main() -> tuple[list[Any], set[str]]:
        store = await Store.connect(postgres_url)
        asked = (store.run(fails if number % 3 == 1 else _put, f"{number:02}") for number in range(12))
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        kept = await store.read(_names)
        await store.close()
        return outcomes, kept

    outcomes, kept = asyncio.run(main())
    good = {f"{number:02}" for number in range(12) if number % 3 != 1}
    assert kept == {outcome for outcome in outcomes if isinstance(outcome, str)} == good


def test_a_group_that_took_long_takes_nobody_more() -> None:
    waiting, seconds = TransactionQueue(), [0.0]

    def work(_: sa.Connection) -> None:
        seconds[0] += 1.0

    asked = [waiting.add(work, write=True, org="") for _ in range(10)]
    sizes = []
    while group := CommitGroup.begin(
        waiting, lambda conn, job: (job.work(conn), None), write=True, longest=2.5, clock=lambda: seconds[0]
    ):
        began = seconds[0]
        with sa.create_engine("sqlite://").connect() as conn:
            group.work(conn)
        group.resolve()
        sizes.append(int(seconds[0] - began))
    assert sizes == [3, 3, 3, 1]
    assert all(job.done() for job in asked)


def test_on_postgresql_a_write_that_hides_an_error_is_not_acknowledged(postgres_url: str) -> None:
    """PostgreSQL answers the commit of such a transaction with a rollback, which is no error."""

    async def main() -> None:
        store = await Store.connect(postgres_url)
        with pytest.raises(sa.exc.DBAPIError, match="aborted"):
            await store.run(_put_and_hide_an_error, "alone")
        await store.close()

    asyncio.run(main())


def test_a_group_whose_connection_is_lost_in_the_middle_runs_again_whole(
    postgres_server: Any, postgres_url: str
) -> None:
    runs: list[None] = []

    def cut_off(conn: sa.Connection, name: str) -> str:
        runs.append(None)
        if len(runs) == 1:
            end_connections(postgres_server, postgres_url)
        return _put(conn, name)

    async def main() -> tuple[list[str], set[str]]:
        store = await Store.connect(postgres_url)
        asked = (store.run(cut_off if number == 5 else _put, f"{number:02}") for number in range(10))
        outcomes = await asyncio.gather(*asked)
        kept = await store.read(_names)
        await store.close()
        return list(outcomes), kept

    outcomes, kept = asyncio.run(main())
    assert outcomes == sorted(kept) == [f"{number:02}" for number in range(10)]
    assert len(runs) == 2


def test_on_postgresql_who_is_cancelled_takes_nobody_along(postgres_url: str) -> None:
    async def main() -> tuple[set[str], set[str]]:
        store = await Store.connect(postgres_url)
        asking = {
            f"{number:02}": asyncio.create_task(store.run(_put, f"{number:02}")) for number in range(40)
        }
        await _settled()
        for number, task in enumerate(asking.values()):
            if number % 3 == 0:
                task.cancel()
        outcomes = await asyncio.gather(*asking.values(), return_exceptions=True)
        await store.run(_put, "and it goes on")
        kept = await store.read(_names)
        await store.close()
        return {outcome for outcome in outcomes if isinstance(outcome, str)}, kept

    acknowledged, kept = asyncio.run(main())
    assert acknowledged == {f"{number:02}" for number in range(40) if number % 3}
    assert acknowledged | {"and it goes on"} <= kept


def test_a_quota_holds_for_sixteen_writers_of_two_replicas(postgres_url: str) -> None:
    quota, attempts = 7, 32
    new = (f"00000000-0000-4000-8000-{number:012x}" for number in range(10**9))

    def ids() -> str:
        return next(new)

    def create(conn: sa.Connection, tenant: str, name: str) -> str:
        where = conn.execute(sa.select(site.c.id)).scalar_one()
        wanted = logical_partitions.NewLogicalPartition(where, name)
        return logical_partitions.create_logical_partition(conn, tenant, wanted, 2.0, ids)

    def prepare(conn: sa.Connection) -> str:
        urls = {domain.uuid: f"http://switch/{domain.uuid}" for domain in TOPOLOGY.domains}
        seed_embedded_site(conn, TOPOLOGY, PROFILE, urls, now=1.0, ids=ids)
        tenant: str = entitlements.get_tenant(conn, "demo").id
        entitlements.set_quotas(conn, tenant, {entitlements.QuotaKind.LOGICAL_PARTITIONS: quota}, 1.0)
        return tenant

    async def main() -> tuple[int, list[int]]:
        stores = [await Store.connect(postgres_url) for _ in range(2)]
        tenant = await stores[0].run(prepare)
        first = await stores[0].read(newest_event_number, tenant)
        asked = [
            stores[number % 2].on_behalf_of(f"org{number % 3}").run(create, tenant, f"p{number}")
            for number in range(attempts)
        ]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(outcome, str | Refused) for outcome in outcomes), outcomes
        events = await stores[1].read(events_after, tenant, first, 1000)
        for store in stores:
            await store.close()
        created = sum(isinstance(outcome, str) for outcome in outcomes)
        return created, [event.number - first for event in events]

    created, numbers = asyncio.run(main())
    assert created == quota
    # Two for each creation, without a gap.
    assert numbers == list(range(1, 2 * quota + 1))


def test_a_lease_is_renewed_before_the_backlog_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The site's own work takes turns too: a replica loses its domains if its renewal waits."""

    def nobody(_: object) -> Any:
        raise AssertionError("no endpoint is registered")

    async def story() -> list[str]:
        store, order = Store.open(tmp_path), []
        await store.run(register_endpoint, "http://switch", ["CHASSIS"], 1.0, lambda: "endpoint")
        reconciler, asked = Reconciler(store, nobody, lambda: 1.0), asyncio.Event()
        renewing = reconciler._lease_store.run

        async def run(*words: Any) -> Any:
            asked.set()
            return await renewing(*words)

        monkeypatch.setattr(reconciler._lease_store, "run", run)

        async def write(to: Store, who: str) -> None:
            await to.run(lambda conn: conn.execute(sa.select(1)).scalar_one())
            order.append(who)

        async def renew() -> None:
            assert len(await reconciler._share()) == 1
            order.append("lease")

        everybody_waits = threading.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(store.run(lambda _: everybody_waits.wait(60)))
            for _ in range(16):
                tasks.create_task(write(store.on_behalf_of("busy"), "busy"))
                tasks.create_task(write(store, "site"))
            tasks.create_task(renew())
            await asked.wait()
            await _settled()
            everybody_waits.set()
        await store.close()
        return order

    assert asyncio.run(story()).index("lease") <= 3
