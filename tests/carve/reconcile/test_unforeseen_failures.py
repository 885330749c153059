"""A reading that ends with an unforeseen exception is recorded as lost, like any other."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from tests.carve.reconcile.damaged_answers import Site

from rackloom.carve.observation import latest
from rackloom.carve.reconcile.domain_pass import ReconcileHooks, ReconcileMetrics
from rackloom.carve.reconcile.loop import EndpointLoop
from rackloom.carve.reconcile.records import record_observation
from rackloom.carve.store import schema
from rackloom.errors import Retry
from rackloom.lab.virtual.event_loop import run_simulation

Scenario = Callable[[Site], Coroutine[Any, Any, None]]


class Counting(ReconcileMetrics):
    def __init__(self) -> None:
        self.lost: list[str] = []

    def unreachable(self, endpoint_id: str, reason: str) -> None:
        self.lost.append(reason)


def play(tmp_path: Path, scenario: Scenario) -> list[Any]:
    """Run `scenario` on a site with one instance, which is Ready. Returns the log."""

    async def opened() -> None:
        site = Site("nmx-m", tmp_path)
        await site.open()
        await site.new_instance()
        await site.mended(1)
        await scenario(site)

    with structlog.testing.capture_logs() as logged:
        run_simulation(1, opened)
    return logged


def failing(error: BaseException) -> Callable[..., Any]:
    async def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [RecursionError("too deep"), MemoryError(), AttributeError("None"), KeyError(1)]
)
def test_an_unforeseen_exception_is_an_unreadable_controller(tmp_path: Path, error: Exception) -> None:
    async def scenario(site: Site) -> None:
        counted = site.work.metrics = Counting()
        working, site.driver.observe = site.driver.observe, failing(error)  # type: ignore[method-assign]
        for _ in range(3):
            await asyncio.sleep(1.0)
            began = site.clock()
            assert await site.work.run() is False
            assert await site.ready() == {}
            known = await site.store.read(latest.latest_of_domain, site.fabric.domain)
            assert known.unknown_since is not None
            assert known.unknown_since <= began + 1.0
            assert known.cause is not None
            assert type(error).__name__ in known.cause
            assert type(error).__name__ not in known.doubt, "tenants read no text of a controller"
        assert len(counted.lost) == 3
        site.driver.observe = working  # type: ignore[method-assign]
        await site.mended(1)
        site.driver.observe = failing(error)  # type: ignore[method-assign]
        await site.work.run()

    logged = [entry for entry in play(tmp_path, scenario) if entry["event"] == "domain.pass-failed"]
    assert [entry["exc_info"] for entry in logged] == [error, error], (
        "once, and once more after a good reading"
    )


@pytest.mark.parametrize("ending", [asyncio.CancelledError(), KeyboardInterrupt()])
def test_the_end_of_the_process_is_no_reading(tmp_path: Path, ending: BaseException) -> None:
    async def scenario(site: Site) -> None:
        site.driver.observe = failing(ending)  # type: ignore[method-assign]
        with pytest.raises(type(ending)):
            await site.work.run()
        assert len(await site.ready()) == 1

    play(tmp_path, scenario)


def test_a_reading_that_cannot_be_recorded_is_lost(tmp_path: Path) -> None:
    def refusing(conn: sa.Connection, endpoint_id: str, reading: Any, now: float) -> Any:
        record_observation(conn, endpoint_id, reading, now)
        raise OverflowError("Python int too large to convert to SQLite INTEGER")

    async def scenario(site: Site) -> None:
        site.work.hooks = ReconcileHooks(record=refusing)
        assert await site.work.run() is False
        assert await site.ready() == {}

    play(tmp_path, scenario)


def test_a_database_that_fails_is_no_lost_controller(tmp_path: Path) -> None:
    def unavailable(*_: Any) -> Any:
        raise Retry("no room", after=1.0)

    async def scenario(site: Site) -> None:
        site.work.hooks = ReconcileHooks(record=unavailable)
        with pytest.raises(Retry):
            await site.work.run()
        assert len(await site.ready()) == 1

    play(tmp_path, scenario)


def test_an_operation_that_ends_so_has_an_unknown_outcome(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        await site.new_instance()
        working, site.driver.execute = site.driver.execute, failing(KeyError("answer"))  # type: ignore[method-assign]
        assert await site.work.run() is False
        newest = sa.select(schema.operation).order_by(schema.operation.c.id.desc())
        row = await site.store.read(lambda conn: conn.execute(newest).first())
        assert (row.state, row.message) == ("unknown", "unforeseen: KeyError: 'answer'")
        site.driver.execute = working  # type: ignore[method-assign]
        await site.mended(2)

    play(tmp_path, scenario)


def test_notifications_that_fail_end_no_pass(tmp_path: Path) -> None:
    opened = 0

    async def notifications() -> AsyncIterator[None]:
        nonlocal opened
        opened += 1
        raise AttributeError("None")
        yield

    async def scenario(site: Site) -> None:
        site.driver.notifications = notifications  # type: ignore[method-assign]
        loop = EndpointLoop(site.work, interval=60.0)
        running = asyncio.create_task(loop.run())
        site.driver.observe = failing(RecursionError())  # type: ignore[method-assign]
        await asyncio.sleep(200.0)
        assert not running.done()
        assert await site.ready() == {}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    logged = play(tmp_path, scenario)
    assert opened == 4
    assert sum(entry["event"] == "domain.loop-failed" for entry in logged) == opened
