"""A process needs no sign of life if no other process can reach its records."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.reconcile import loop
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store.database import SqliteBackend, Store

LOOKS = 5


class Counting:
    """Records that count how often they are read and written."""

    is_shared = False

    def __init__(self) -> None:
        self._backend = SqliteBackend.inline(None)
        self.reads = 0
        self.writes = 0
        self.changes = self._backend.changes
        self.close = self._backend.close
        self.survey = self._backend.survey

    async def transact(self, work: Callable[[sa.Connection], Any], *, write: bool, org: str = "") -> Any:
        self.writes += write
        self.reads += not write
        return await self._backend.transact(work, write=write, org=org)


def nobody(endpoint: Any) -> Any:
    raise AssertionError(f"there is no endpoint {endpoint}")


def test_a_process_alone_only_reads_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RENEW_SECONDS", 0.001)

    async def scenario() -> int:
        records = Counting()
        reconciler = Reconciler(Store(records), nobody, lambda: 1.0)
        running = asyncio.create_task(reconciler.run())
        await reconciler.started.wait()
        before, seen = records.writes, records.reads
        while records.reads < seen + LOOKS:
            await asyncio.sleep(0.001)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await records.close()
        return records.writes - before

    assert asyncio.run(scenario()) == 0
