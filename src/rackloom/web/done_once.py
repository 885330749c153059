"""Orders that are carried out once, however often they are sent.

A double click, a reload or an impatient browser sends a form again. Each order has an id. The first request
with an id carries it out. Later ones wait for the same outcome. An order that was refused changed nothing
and is forgotten, so that it may be sent again. Outcomes are kept for as long as their forms are accepted, the
newest `MOST_OF_VIEWER` of each viewer.

Each process has a separate memory. Beyond it, the objects of an order protect it: a plan that was carried
out no longer holds, a name is taken, and a release that is repeated changes nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

MOST_OF_VIEWER = 32


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an order that changed something."""

    done: tuple[str, ...]
    """The steps that were done, one sentence each."""
    problem: str = ""
    """The error that ended the order early. Empty if it completed."""


Name = tuple[str, str]
"""The organisation and subject that gave an order."""


class OrdersDone:
    """The orders of one process. `clock` gives seconds, and an outcome is kept for `seconds`."""

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._orders: dict[tuple[Name, str], tuple[float, asyncio.Task[Outcome]]] = {}
        """Orders in the order in which they came."""

    async def once(self, viewer: Name, id_: str, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """The outcome of an order. `work` carries it out unless an earlier request did or does."""
        self._forget_old(viewer)
        key = viewer, id_
        if key not in self._orders:

            async def run() -> Outcome:
                return await work()

            task = asyncio.create_task(run())
            self._orders[key] = self._clock(), task
            task.add_done_callback(lambda ended: self._forget_failed(key, ended))
        # A browser that goes away does not interrupt an order half way.
        return await asyncio.shield(self._orders[key][1])

    def find(self, viewer: Name, id_: str) -> Outcome | None:
        """The outcome of an order, or None if it is unknown or not over."""
        _, task = self._orders.get((viewer, id_), (0.0, None))
        return task.result() if task is not None and task.done() and not _failed(task) else None

    def _forget_failed(self, key: tuple[Name, str], ended: asyncio.Task[Outcome]) -> None:
        if _failed(ended):
            del self._orders[key]

    def _forget_old(self, viewer: Name) -> None:
        since = self._clock() - self._seconds
        ended = [(key, begun) for key, (begun, task) in self._orders.items() if task.done()]
        own = [key for key, _ in ended if key[0] == viewer]
        old = [key for key, begun in ended if begun < since]
        for key in {*own[: max(0, len(own) - MOST_OF_VIEWER + 1)], *old}:
            del self._orders[key]


def _failed(ended: asyncio.Task[Outcome]) -> bool:
    return ended.cancelled() or ended.exception() is not None
