"""The site service of a random run: its readings and requests are recorded, and its disk may fail.

`RecordingDriver` notes when each reading of a controller began and ended. The invariants use these
notes to decide which statuses are supported by an observation.

`RecordsDisk` makes transactions fail at their end, as a full disk and I/O errors do: SQLite undoes them,
and the process gets `StoreUnavailable`.
"""

import asyncio
import random
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from tests.simulation.carving.racks import ConflictingController, JudgedRack, JudgedSite

from rackloom.carve.fabric.controller import REREAD_SECONDS, FabricDriver, FabricUnavailable
from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.carve.store.database import DatabaseBackend, Store
from rackloom.carve.store.failures import StoreUnavailable
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.schema import operation
from rackloom.core.partitions.domain import DomainObservation, PartitionOperation
from rackloom.lab.virtual.network import SimController
from rackloom.lab.virtual.process import Process, T
from rackloom.lab.virtual.service import ChangeFeed, CrashingBackend, SimulatedService

WRITE_DELAY = 1e-3
"""Seconds: a reading that has just ended may not be in the records yet."""


class ReadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt to read a domain ended."""

    observation: DomainObservation | None
    """None: it failed. The state is unknown unless the attempt is repeated at once."""
    begun: float
    ended: float
    life: Process
    """The process that made the attempt."""

    def was_written_down(self, now: float) -> bool:
        """Whether its process had the time to write it down, and the records took it."""
        until = now if self.life.ended_at is None else min(now, self.life.ended_at)
        # A reading that failed is repeated before it is written down.
        delay = WRITE_DELAY if self.observation is not None else WRITE_DELAY + REREAD_SECONDS
        failed = [at for at in self.life.failed_writes if at >= self.ended]
        if failed and self.life.running_seconds(self.ended, failed[0]) <= delay:
            return False
        return self.life.running_seconds(self.ended, until) > delay


class ChangeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A change that a process began to request of a controller, and the reading that it rests on."""

    read: ReadOutcome
    requested_at: float


class RecordingDriver:
    """The driver, with its readings recorded for the invariants."""

    def __init__(
        self,
        driver: FabricDriver,
        world: JudgedSite,
        outcomes: list[ReadOutcome],
        life: Process,
        requested: Callable[["ChangeRequest"], None],
    ) -> None:
        self._driver = driver
        self._world = world
        self._outcomes = outcomes
        self._life = life
        self._requested = requested
        self._newest: ReadOutcome | None = None
        """The newest complete reading of this driver, from which changes are planned."""

    async def observe(self) -> DomainObservation:
        """Read, and note the outcome."""
        begun = _now()
        try:
            observation = await self._driver.observe()
        except FabricUnavailable:
            self._note(None, begun)
            raise
        self._note(observation, begun)
        return observation

    async def execute(self, operation: PartitionOperation) -> int:
        """Carry out, and note the purpose of a new partition, and the reading on which the change rests."""
        self._world.asked(operation)
        if self._newest is not None:
            self._requested(ChangeRequest(read=self._newest, requested_at=_now()))
        return await self._driver.execute(operation)

    def notifications(self) -> AsyncIterator[None]:
        """As they come."""
        return self._driver.notifications()

    async def close(self) -> None:
        """Close."""
        await self._driver.close()

    def _note(self, observation: DomainObservation | None, begun: float) -> None:
        outcome = ReadOutcome(observation=observation, begun=begun, ended=_now(), life=self._life)
        self._outcomes.append(outcome)
        if observation is not None:
            self._newest = outcome


class JudgedService(SimulatedService):
    """The service, its readings and requests, and controllers that contradict others."""

    world: JudgedSite

    def __init__(
        self,
        world: JudgedSite,
        apps: Sequence[Any],
        records: DatabaseBackend,
        rng: random.Random,
        interval: float,
    ) -> None:
        super().__init__(world, apps, records, rng, interval)
        self.outcomes: dict[str, list[ReadOutcome]] = {rack.url: [] for rack in world.racks}
        self.requests: dict[str, list[ChangeRequest]] = defaultdict(list)
        """By URL: changes that were requested of a controller, oldest first."""
        self.on_request: Callable[[str], None] = lambda url: None
        """Called with the URL of the controller when a change is requested."""
        self.conflicting: dict[str, ConflictingController] = {}
        """By URL: controllers that are registered beside the one of a rack, and contradict it."""
        self.disk = RecordsDisk()
        self.longest_silence = 2 * interval + 120.0
        """Seconds. A claim that rests on an older reading is a claim about the past: two timers, and the
        longest that a pass over a slow controller takes."""

    @property
    def points(self) -> int:
        """Crash points that were passed so far."""
        return sum(life.points for life in self.started)

    def outcomes_of(self, rack: JudgedRack) -> list[ReadOutcome]:
        """Every attempt to read a rack, oldest first."""
        return self.outcomes[rack.url]

    async def register(self, controller: ConflictingController) -> None:
        """An operator adds a controller."""
        self.conflicting[controller.url] = controller
        self.outcomes[controller.url] = []
        await self._records_change(
            endpoints.register_endpoint, controller.url, [controller.serial], self.wall(), self.ids
        )

    async def remove(self, controller: ConflictingController) -> None:
        """An operator takes it away again."""
        order = OperatorOrder("an operator", "it contradicts", self.wall())
        await self._records_change(endpoints.delete_chassis_endpoint, controller.serial, order)
        del self.conflicting[controller.url]

    async def _records_change(self, change: Callable[..., object], *arguments: object) -> None:
        await Store(self._records).run(change, *arguments)

    def conflict_of(self, rack: JudgedRack) -> ConflictingController | None:
        """The controller that contradicts that of `rack` now."""
        return next((second for second in self.conflicting.values() if second.concerns(rack)), None)

    def _backend(self, life: Process, rng: random.Random) -> DatabaseBackend:
        return SpoiledBackend(self._records, life, rng, self.disk, self._feed)

    def _driver(self, life: Process, clock: Callable[[], float], endpoint: Endpoint) -> RecordingDriver:
        url = endpoint.url

        def requested(change: ChangeRequest) -> None:
            self.requests[url].append(change)
            self.on_request(url)

        driver = super()._driver(life, clock, endpoint)
        return RecordingDriver(driver, self.world, self.outcomes.setdefault(url, []), life, requested)

    def _switch_at(self, url: str) -> SimController:
        controller = self.conflicting.get(url)
        return super()._switch_at(url) if controller is None else controller.switch


def _now() -> float:
    return asyncio.get_running_loop().time()


# The disk of the records.


class RecordsDisk:
    """The disk of the records, and its faults."""

    def __init__(self) -> None:
        self.is_full = False
        """Every write fails, and reads do not."""
        self.failing = 0
        """So many of the next transactions fail with an I/O error."""
        self.failures = 0
        """Transactions that failed so far."""

    def spoil(self, work: Callable[[sa.Connection], T], *, write: bool) -> Callable[[sa.Connection], T]:
        """`work`, or `work` that fails at its end, when all its statements were executed."""
        if self.failing:
            self.failing -= 1
            return self._failing(work, "disk I/O error", sqlite3.SQLITE_IOERR)
        if self.is_full and write:
            return self._failing(work, "database or disk is full", sqlite3.SQLITE_FULL)
        return work

    def _failing(
        self, work: Callable[[sa.Connection], T], text: str, code: int
    ) -> Callable[[sa.Connection], T]:
        def fail(conn: sa.Connection) -> T:
            work(conn)
            self.failures += 1
            error = sqlite3.OperationalError(text)
            error.sqlite_errorcode = code
            raise error

        return fail


class SpoiledBackend(CrashingBackend):
    """The records as one process reaches them, on a disk that may fail.

    The process may also be stopped once it has recorded its next operation.
    """

    def __init__(
        self,
        records: DatabaseBackend,
        life: Process,
        rng: random.Random,
        disk: RecordsDisk,
        feed: ChangeFeed | None,
    ) -> None:
        super().__init__(records, life, rng, feed)
        self._disk = disk

    async def _commit(self, work: Callable[[sa.Connection], T], *, write: bool, org: str) -> T:
        waits_for_record = write and self._life.stops_after_record
        before = await self._newest_operation() if waits_for_record else None
        try:
            result = await super()._commit(self._disk.spoil(work, write=write), write=write, org=org)
        except StoreUnavailable:
            if write:
                self._life.failed_writes.append(_now())
            raise
        if waits_for_record and await self._newest_operation() != before:
            self._life.stops_after_record = False
            self._life.stopper()
            # It stops here, and not only when it waits for the controller.
            await asyncio.sleep(0)
        return result

    async def _newest_operation(self) -> int | None:
        newest = sa.select(sa.func.max(operation.c.id))
        return await self._records.transact(lambda conn: conn.execute(newest).scalar_one(), write=False)
