"""The reconciler process: one loop for each endpoint of this replica's share.

`Reconciler.run` renews the share of endpoints every `RENEW_SECONDS`. `EndpointWorkers` starts a loop
for each new endpoint and ends the loops of those that left the share. The lease of an endpoint is
released only when its loop has ended. Without a shared database there is one replica, whose leases
never end.

`EndpointLoop` runs passes over one endpoint. A change of intent, a notification of the fabric or a
timer starts a pass. A failed pass is retried with exponential backoff up to the interval. The first
rest differs by endpoint, so that loops that began together do not all wake together. A defect in one
pass is logged and ends neither the loop nor any other domain.

`Reconciler.wake` starts passes over given domains. `Reconciler.apply` executes an operator's plan
through the first endpoint of its domain that leads.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from zlib import crc32

import msgspec
import structlog

from rackloom.carve.fabric.controller import FabricDriver, FabricUnavailable
from rackloom.carve.inventory import endpoints
from rackloom.carve.reconcile import leases
from rackloom.carve.reconcile.domain_pass import DomainPass, DomainTurns, StandbyController
from rackloom.carve.reconcile.hooks import NO_HOOKS, OperationOutcome, ReconcileHooks
from rackloom.carve.reconcile.leases import (
    ANSWER_SECONDS,
    LEASE_SECONDS,
    RENEW_SECONDS,
    HeldEndpoint,
    LeaseGuard,
)
from rackloom.carve.store.database import Store
from rackloom.core.partitions.domain import PartitionPlan
from rackloom.errors import Refused, Retry, Unknown

# The loop of one endpoint.


log = structlog.get_logger(__name__)

FIRST_RETRY_SECONDS = 0.5
"""Seconds until a failed pass is tried again; doubled each time up to the interval."""


class EndpointLoop:
    """The passes over one endpoint, one after another."""

    def __init__(self, work: DomainPass, interval: float) -> None:
        self.work = work
        self.interval = interval
        self.woken = asyncio.Event()
        self.first_pass = asyncio.Event()
        self._is_awaited = False
        """Whether somebody waits for what the next pass does."""

    def wake(self) -> None:
        """Start a pass now, before those that nobody waits for."""
        self._is_awaited = True
        self.woken.set()
        slots = self.work.hooks.slots
        if slots is not None:
            slots.hurry(self)

    async def run(self) -> None:
        """Run until cancelled, then release the connection."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                await self._work()
        except* Exception:
            # Whoever started this sees that it ended, and starts it again; no other domain is concerned.
            log.exception("domain.loop-failed", endpoint=self.work.endpoint.id)
        finally:
            self.first_pass.set()
            await self.work.driver.close()

    async def _work(self) -> None:
        retry, rest = FIRST_RETRY_SECONDS, self._first_rest()
        while True:
            async with self._place():
                self.woken.clear()
                self._is_awaited = False
                settled = await self._pass()
            self.first_pass.set()
            retry = FIRST_RETRY_SECONDS if settled else min(2 * retry, self.interval)
            await self._wait(rest if settled else retry)
            rest = self.interval if settled else rest

    def _first_rest(self) -> float:
        """Shorter by another share for each endpoint: loops begun together do not all wake together."""
        return self.interval * crc32(self.work.endpoint.id.encode()) / 2**32

    def _place(self) -> AbstractAsyncContextManager[None]:
        slots = self.work.hooks.slots
        return nullcontext() if slots is None else slots.taken(self, urgent=self._is_awaited)

    async def _pass(self) -> bool:
        try:
            return await self.work.run()
        except Exception:
            # A defect in one domain's pass must not end the loop, nor that of any other domain.
            log.exception("domain.pass-failed", endpoint=self.work.endpoint.id)
            return False

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.woken.wait()
        except TimeoutError:
            return

    async def _listen(self) -> None:
        async for _ in self.work.driver.notifications():
            self.woken.set()


# The loops of this replica's share.


class EndpointWorker(msgspec.Struct, frozen=True):
    """An endpoint that is worked on."""

    held: HeldEndpoint
    hold: LeaseGuard
    loop: EndpointLoop
    task: "asyncio.Task[None]"

    def is_for(self, held: HeldEndpoint | None) -> bool:
        """Whether this is still the work that `held` asks for."""
        return (
            held is not None
            and not self.task.done()
            and (self.held.lease, self.held.endpoint.url) == (held.lease, held.endpoint.url)
        )


class EndpointWorkers:
    """All workers of this process, by endpoint. `loop_for` makes the loop that works under a hold."""

    def __init__(self, loop_for: Callable[[HeldEndpoint, LeaseGuard], EndpointLoop]) -> None:
        self._loop_for = loop_for
        self._workers: dict[str, EndpointWorker] = {}

    @property
    def loops(self) -> list[EndpointLoop]:
        """The loops that run now."""
        return [worker.loop for worker in self._workers.values() if not worker.task.done()]

    async def follow(
        self, tasks: asyncio.TaskGroup, share: Mapping[str, HeldEndpoint], deadline: float
    ) -> Collection[str]:
        """Work on `share` until `deadline` and on nothing else; returns the endpoints that were given up."""
        ended = {key for key, worker in self._workers.items() if not worker.is_for(share.get(key))}
        for key in self._workers.keys() - ended:
            self._workers[key].hold.extend(deadline)
        gone = await self._end(ended)
        for key in sorted(share.keys() - self._workers.keys()):
            self._begin(tasks, share[key], deadline)
        return gone - share.keys()

    def _begin(self, tasks: asyncio.TaskGroup, held: HeldEndpoint, deadline: float) -> None:
        hold = LeaseGuard(held.lease, deadline)
        try:
            loop = self._loop_for(held, hold)
        except Refused as refusal:
            # No driver takes this URL; the other endpoints are not to suffer for it.
            log.warning("endpoint.refused", endpoint=held.endpoint.id, reason=str(refusal))
            return
        task = tasks.create_task(loop.run())
        hold.guard(task)
        self._workers[held.endpoint.id] = EndpointWorker(held, hold, loop, task)

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


# The reconciler.


log = structlog.get_logger(__name__)

SOLE_REPLICA = "alone"
"""The name of a reconciler whose records no other process can reach."""


class Reconciler:
    """All domains of the site. `driver_for` opens a driver for an endpoint; `interval` is in seconds.

    `holder` names this process among replicas, and must be unlike every name that was ever used.
    """

    def __init__(
        self,
        store: Store,
        driver_for: Callable[[endpoints.Endpoint], FabricDriver],
        clock: Callable[[], float],
        interval: float = 60.0,
        holder: str = SOLE_REPLICA,
        hooks: ReconcileHooks = NO_HOOKS,
    ) -> None:
        if store.is_shared and holder == SOLE_REPLICA:
            raise ValueError("each replica on a shared database needs a name of its own")
        self.store = store
        self.driver_for = driver_for
        self.clock = clock
        self.interval = interval
        self.holder = holder
        self.hooks = hooks
        self.started = asyncio.Event()
        self._lease_seconds = LEASE_SECONDS if store.is_shared else math.inf
        self._turns = DomainTurns()
        self._workers = EndpointWorkers(self._loop_for)
        self._endpoints_changed = asyncio.Event()

    @property
    def loops(self) -> list[EndpointLoop]:
        """The loops that run here now."""
        return self._workers.loops

    def wake(self, domains: frozenset[str]) -> None:
        """Start a pass over these domains now, and over endpoints whose domain is not known yet."""
        if not domains:
            # What changed has no domain yet: it may be an endpoint.
            self.endpoints_changed()
        for loop in self.loops:
            if loop.work.domain is None or loop.work.domain in domains:
                loop.wake()

    def endpoints_changed(self) -> None:
        """Look now which endpoints there are; otherwise that is noticed within `RENEW_SECONDS`."""
        self._endpoints_changed.set()

    async def apply(self, plan: PartitionPlan) -> tuple[OperationOutcome, ...]:
        """Carry out an operator's plan in its domain, through the first of its endpoints that leads.

        Raises Refused when it no longer holds, FabricUnavailable when no endpoint can be read.
        """
        trouble: Refused | FabricUnavailable = Refused(
            f"domain {plan.observation.domain} is not reconciled by this process",
            nearest_fix="register its endpoint, or ask the replica that has it",
        )
        for loop in self.loops:
            if loop.work.domain == plan.observation.domain:
                try:
                    return await loop.work.apply(plan)
                except StandbyController as standby:
                    trouble = standby
                except FabricUnavailable as silent:
                    # That one which answers is a standby says more than that another does not.
                    trouble = trouble if isinstance(trouble, StandbyController) else silent
        raise trouble

    async def first_passes(self) -> None:
        """Return when every endpoint that is ours has been asked once, whatever it answered."""
        await self.started.wait()
        for loop in self.loops:
            await loop.first_pass.wait()

    async def run(self) -> None:
        """Reconcile until cancelled, then release the connections and the leases."""
        if not self.store.is_shared:
            await self.store.run(leases.start_as_sole_replica)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._hear())
                while True:
                    self._endpoints_changed.clear()
                    await self._follow_share(tasks)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(RENEW_SECONDS):
                            await self._endpoints_changed.wait()
        finally:
            if self.store.is_shared:
                await self._leave()

    async def _hear(self) -> None:
        """Wake for what other processes changed; after a time of deafness, everything."""
        async for domain in self.store.changes():
            for loop in self.loops:
                if domain is None:
                    loop.woken.set()
                elif domain == loop.work.domain:
                    loop.wake()

    async def _follow_share(self, tasks: asyncio.TaskGroup) -> None:
        deadline = asyncio.get_running_loop().time() + self._lease_seconds
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                share = await self._share()
            held = {one.endpoint.id: one for one in share}
            if given_up := await self._workers.follow(tasks, held, deadline):
                await self.store.run(leases.release_leases, self.holder, given_up)
            self.started.set()
        except (Retry, Unknown, OSError) as trouble:
            # Nothing is worked on beyond its deadline, whatever went wrong here.
            log.warning("leases.not-renewed", holder=self.holder, reason=str(trouble) or repr(trouble))
        except Exception:
            log.exception("leases.not-renewed", holder=self.holder)

    async def _share(self) -> tuple[leases.HeldEndpoint, ...]:
        now = self.clock()
        if not self.store.is_shared:
            standing = await self.store.read(leases.share_of_sole_replica, self.holder, now)
            if standing is not None:
                return standing
        return await self.store.run(leases.take_share, self.holder, now, now + self._lease_seconds)

    async def _leave(self) -> None:
        try:
            await self.store.run(leases.leave_replicas, self.holder)
        except Exception:
            log.exception("leases.not-released", holder=self.holder)

    def _loop_for(self, held: leases.HeldEndpoint, hold: LeaseGuard) -> EndpointLoop:
        driver = self.driver_for(held.endpoint)
        wake = partial(self._wake_others, held.endpoint.id)
        work = DomainPass(held.endpoint, hold, driver, self.store, self.clock, self._turns, self.hooks, wake)
        return EndpointLoop(work, self.interval)

    def _wake_others(self, endpoint_id: str, domains: frozenset[str]) -> None:
        for loop in self.loops:
            if loop.work.domain in domains and loop.work.endpoint.id != endpoint_id:
                loop.wake()
