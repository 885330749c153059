"""Extension points of the reconciler: metrics, recording, read-only mode, concurrency limit.

`ReconcileHooks` has defaults that do what a reconciler without a service needs. `ReconcileMetrics`
receives facts (a pass ended, an operation was answered, a domain drifted); the service turns them into
metrics.

`ConcurrencySlots` bounds how many domains are worked on at once. A domain for which a caller waits goes
before those that are only due. A pass that takes longer than `MAX_SLOT_SECONDS` gives its slot up and
continues without one, so that a slow controller delays no other domain.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation.conflicts import ControllerConflict
from rackloom.carve.reconcile import records
from rackloom.core.partitions.domain import DomainObservation, PartitionOperation

# Metrics.


class OperationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one operation; `state` is done, refused or unknown (no answer came)."""

    kind: str
    partition_name: str
    state: str
    message: str
    """The words of the controller: for operators."""
    code: str | None = None
    """Its name for why it refused."""


class ReconcileMetrics(Protocol):
    """Times are in seconds."""

    def passed(self, endpoint_id: str, seconds: float) -> None:
        """A pass over an endpoint ended."""
        ...

    def observed(self, endpoint_id: str, observation: DomainObservation) -> None:
        """An endpoint was read."""
        ...

    def unreachable(self, endpoint_id: str, reason: str) -> None:
        """An endpoint could not be read, or an answer of it did not come."""
        ...

    def drifted(self, domain: str, operations: int) -> None:
        """A domain was found to differ from an intent that it was once seen to meet."""
        ...

    def refused(self, domain: str) -> None:
        """A plan was refused, by the check or because its facts no longer hold."""
        ...

    def operated(
        self, endpoint_id: str, operation: PartitionOperation, outcome: OperationOutcome, seconds: float
    ) -> None:
        """An operation was asked for, and answered or not."""
        ...

    def applied(self, domain: str, seconds: float) -> None:
        """All operations of a plan were asked for."""
        ...


class NoMetrics:
    """Counts nothing."""

    def passed(self, endpoint_id: str, seconds: float) -> None:
        """Nothing."""

    def observed(self, endpoint_id: str, observation: DomainObservation) -> None:
        """Nothing."""

    def unreachable(self, endpoint_id: str, reason: str) -> None:
        """Nothing."""

    def drifted(self, domain: str, operations: int) -> None:
        """Nothing."""

    def refused(self, domain: str) -> None:
        """Nothing."""

    def operated(
        self, endpoint_id: str, operation: PartitionOperation, outcome: OperationOutcome, seconds: float
    ) -> None:
        """Nothing."""

    def applied(self, domain: str, seconds: float) -> None:
        """Nothing."""


# Bounded concurrency.


MAX_SLOT_SECONDS = 1.0
"""How long a place is kept: many times what a pass takes whose controller answers."""

SlotFuture = asyncio.Future[None]


class ConcurrencySlots:
    """Places for `count` domains, each known by a key that waits for one place at a time."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._urgent: OrderedDict[Hashable, SlotFuture] = OrderedDict()
        self._due: OrderedDict[Hashable, SlotFuture] = OrderedDict()

    @asynccontextmanager
    async def taken(self, key: Hashable, *, urgent: bool) -> AsyncIterator[None]:
        """Wait for a place, and give it back at the end, or when it was kept for long enough."""
        await self._take(key, urgent)
        place = _TakenSlot(self)
        late = asyncio.get_running_loop().call_later(MAX_SLOT_SECONDS, place.leave)
        try:
            yield
        finally:
            late.cancel()
            place.leave()

    def hurry(self, key: Hashable) -> None:
        """Somebody waits for `key` now: if it is still without a place, it goes before those that are due."""
        turn = self._due.pop(key, None)
        if turn is not None:
            self._urgent[key] = turn

    def give(self) -> None:
        """A place is free."""
        while waiting := self._urgent or self._due:
            _, turn = waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _take(self, key: Hashable, urgent: bool) -> None:
        if self._free:
            self._free -= 1
            return
        turn: SlotFuture = asyncio.get_running_loop().create_future()
        (self._urgent if urgent else self._due)[key] = turn
        try:
            await turn
        except asyncio.CancelledError:
            # Whoever is cancelled with the place already in hand passes it on.
            if not turn.cancelled():
                self.give()
            raise


class _TakenSlot:
    """A place that is given back once, whoever does it first."""

    def __init__(self, slots: ConcurrencySlots) -> None:
        self._slots: ConcurrencySlots | None = slots

    def leave(self) -> None:
        """Give it back, if that was not done."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.give()


# The hooks.


RecordObservation = Callable[[sa.Connection, str, DomainObservation, float], ControllerConflict | None]
"""Of the endpoint's id, the observation and the time."""


class ReconcileHooks(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults do what a reconciler without hooks does."""

    record: RecordObservation = records.record_observation
    """Writes an observation into the records, in one transaction; returns the dispute its domain is in."""
    meter: ReconcileMetrics = NoMetrics()
    acts: bool = True
    """False: domains are read, and nothing is done to them."""
    slots: ConcurrencySlots | None = None
    """Bounds how many domains are worked on at once; None: no bound."""


NO_HOOKS = ReconcileHooks()
"""The reconciler by itself."""
