"""The tasks of the endpoints that are ours: one for each, begun and ended as the share changes."""

import asyncio
from collections.abc import Callable, Collection, Mapping

import msgspec
import structlog

from rackloom.carve.reconcile.domain_loop import DomainLoop
from rackloom.carve.reconcile.leases import RENEW_SECONDS, Hold
from rackloom.carve.site.sharing import Held
from rackloom.errors import Refused

log = structlog.get_logger(__name__)


class Worker(msgspec.Struct, frozen=True):
    """An endpoint that is worked on."""

    held: Held
    hold: Hold
    loop: DomainLoop
    task: "asyncio.Task[None]"

    def is_for(self, held: Held | None) -> bool:
        """Whether this is still the work that `held` asks for."""
        return (
            held is not None
            and not self.task.done()
            and (self.held.lease, self.held.endpoint.url) == (held.lease, held.endpoint.url)
        )


class Workers:
    """All workers of this process, by endpoint. `loop_for` makes the loop that works under a hold."""

    def __init__(self, loop_for: Callable[[Held, Hold], DomainLoop]) -> None:
        self._loop_for = loop_for
        self._workers: dict[str, Worker] = {}

    @property
    def loops(self) -> list[DomainLoop]:
        """The loops that run now."""
        return [worker.loop for worker in self._workers.values() if not worker.task.done()]

    async def follow(
        self, tasks: asyncio.TaskGroup, share: Mapping[str, Held], deadline: float
    ) -> Collection[str]:
        """Work on `share` until `deadline` and on nothing else; returns the endpoints that were given up."""
        ended = {key for key, worker in self._workers.items() if not worker.is_for(share.get(key))}
        for key in self._workers.keys() - ended:
            self._workers[key].hold.extend(deadline)
        gone = await self._end(ended)
        for key in sorted(share.keys() - self._workers.keys()):
            self._begin(tasks, share[key], deadline)
        return gone - share.keys()

    def _begin(self, tasks: asyncio.TaskGroup, held: Held, deadline: float) -> None:
        hold = Hold(held.lease, deadline)
        try:
            loop = self._loop_for(held, hold)
        except Refused as refusal:
            # No driver takes this URL; the other endpoints are not to suffer for it.
            log.warning("endpoint.refused", endpoint=held.endpoint.id, reason=str(refusal))
            return
        task = tasks.create_task(loop.run())
        hold.guard(task)
        self._workers[held.endpoint.id] = Worker(held, hold, loop, task)

    async def _end(self, keys: Collection[str]) -> set[str]:
        """Cancel, and return those that ended; one that lingers is kept, so that its lease is too."""
        tasks = {self._workers[key].task for key in keys}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=RENEW_SECONDS)
        gone = {key for key in keys if self._workers[key].task.done()}
        for key in gone:
            del self._workers[key]
        return gone
