"""The reconciler: every domain of the site, or this process's share of them where there are replicas.

Domains run beside each other, so that one that is slow or gone delays no other.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog

from rackloom.carve.fabric.ports import FabricDriver, FabricUnavailable
from rackloom.carve.plan.values import Plan
from rackloom.carve.reconcile.domain import DomainPass, Standby
from rackloom.carve.reconcile.domain_loop import DomainLoop
from rackloom.carve.reconcile.hooks import NONE, Hooks
from rackloom.carve.reconcile.leases import ANSWER_SECONDS, LEASE_SECONDS, RENEW_SECONDS, Hold
from rackloom.carve.reconcile.meter import Outcome
from rackloom.carve.reconcile.turns import Turns
from rackloom.carve.reconcile.workers import Workers
from rackloom.carve.site import fabric_book, leases, sharing
from rackloom.carve.site.store import Store
from rackloom.errors import Refused, Retry, Unknown

log = structlog.get_logger(__name__)

ALONE = "alone"
"""The name of a reconciler whose records no other process can reach."""


class Reconciler:
    """All domains of the site. `driver_for` opens a driver for an endpoint; `interval` is in seconds.

    `holder` names this process among replicas, and must be unlike every name that was ever used.
    """

    def __init__(
        self,
        store: Store,
        driver_for: Callable[[fabric_book.Endpoint], FabricDriver],
        clock: Callable[[], float],
        interval: float = 60.0,
        holder: str = ALONE,
        hooks: Hooks = NONE,
    ) -> None:
        if store.is_shared and holder == ALONE:
            raise ValueError("each replica on a shared database needs a name of its own")
        self.store = store
        self.driver_for = driver_for
        self.clock = clock
        self.interval = interval
        self.holder = holder
        self.hooks = hooks
        self.started = asyncio.Event()
        self._lease_seconds = LEASE_SECONDS if store.is_shared else math.inf
        self._turns = Turns()
        self._workers = Workers(self._loop_for)
        self._endpoints_changed = asyncio.Event()

    @property
    def loops(self) -> list[DomainLoop]:
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

    async def apply(self, plan: Plan) -> tuple[Outcome, ...]:
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
                except Standby as standby:
                    trouble = standby
                except FabricUnavailable as silent:
                    # That one which answers is a standby says more than that another does not.
                    trouble = trouble if isinstance(trouble, Standby) else silent
        raise trouble

    async def first_passes(self) -> None:
        """Return when every endpoint that is ours has been asked once, whatever it answered."""
        await self.started.wait()
        for loop in self.loops:
            await loop.first_pass.wait()

    async def run(self) -> None:
        """Reconcile until cancelled, then release the connections and the leases."""
        if not self.store.is_shared:
            await self.store.run(sharing.start_alone)
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
                await self.store.run(leases.release, self.holder, given_up)
            self.started.set()
        except (Retry, Unknown, OSError) as trouble:
            # Nothing is worked on beyond its deadline, whatever went wrong here.
            log.warning("leases.not-renewed", holder=self.holder, reason=str(trouble) or repr(trouble))
        except Exception:
            log.exception("leases.not-renewed", holder=self.holder)

    async def _share(self) -> tuple[sharing.Held, ...]:
        now = self.clock()
        if not self.store.is_shared:
            standing = await self.store.read(sharing.held_alone, self.holder, now)
            if standing is not None:
                return standing
        return await self.store.run(sharing.take_share, self.holder, now, now + self._lease_seconds)

    async def _leave(self) -> None:
        try:
            await self.store.run(sharing.leave, self.holder)
        except Exception:
            log.exception("leases.not-released", holder=self.holder)

    def _loop_for(self, held: sharing.Held, hold: Hold) -> DomainLoop:
        driver = self.driver_for(held.endpoint)
        wake = partial(self._wake_others, held.endpoint.id)
        work = DomainPass(held.endpoint, hold, driver, self.store, self.clock, self._turns, self.hooks, wake)
        return DomainLoop(work, self.interval)

    def _wake_others(self, endpoint_id: str, domains: frozenset[str]) -> None:
        for loop in self.loops:
            if loop.work.domain in domains and loop.work.endpoint.id != endpoint_id:
                loop.wake()
