"""The reconciler process: one loop for each endpoint of this replica's share.

`Reconciler.run` renews the share of endpoints every `RENEW_SECONDS`. `EndpointWorkers` starts a loop
for each new endpoint and ends the loops of those that left the share. The lease of an endpoint is
released only when its loop has ended. Without a shared database there is one replica, and its leases
never end.

`EndpointLoop` runs passes over one endpoint. A change of intent, a notification of the fabric, the loss
of the notifications or a timer starts a pass. A failed pass is retried with exponential backoff up to the
interval. The first
rest differs by endpoint, so that loops that began together do not all wake together. A defect in one
pass is logged and ends neither the loop nor any other domain.

`Reconciler.wake` starts passes over given domains. Where requests are traced, it keeps the place of the one
that calls, and every pass is linked to these places until one converges. `Reconciler.apply` executes an
operator's plan through the first endpoint of its domain that leads.

`ConcurrencySlots` bounds how many domains are worked on at once. A domain for which a caller waits goes
before those that are only due, but one of `MAX_AWAITED_IN_A_ROW + 1` slots goes to the latter. Organisations
that wait take turns, as in `FairQueue`: none waits for all domains of another. A pass that takes longer
than `MAX_SLOT_SECONDS` gives its slot up and continues without one, so that a slow controller delays no
other domain.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from zlib import crc32

import msgspec
import structlog

from rackloom.carve.fabric.controller import FabricDriver, FabricUnavailable
from rackloom.carve.inventory import endpoints
from rackloom.carve.reconcile import leases
from rackloom.carve.reconcile.domain_pass import (
    NO_HOOKS,
    DomainPass,
    DomainTurns,
    LeaseGuard,
    OperationOutcome,
    ReconcileHooks,
    StandbyController,
    loop_seconds,
)
from rackloom.carve.reconcile.leases import ANSWER_SECONDS, LEASE_SECONDS, RENEW_SECONDS, HeldEndpoint
from rackloom.carve.store.database import Store
from rackloom.core.fair_queueing import FairQueue
from rackloom.core.partitions.domain import PartitionPlan
from rackloom.core.partitions.status_rules import DEFAULT_INTERVAL, valid_seconds
from rackloom.errors import Refused, Retry, Unknown
from rackloom.runtime.traces import MAX_CAUSES, NO_TRACES, SpanSide, Traces

# Bounded concurrency.


MAX_SLOT_SECONDS = 1.0
"""The longest time that a pass keeps its slot: many times a pass with a responsive controller."""


MAX_AWAITED_IN_A_ROW = 4
"""The number of awaited domains that go before one that is only due: those are never starved."""


class ConcurrencySlots:
    """`count` slots. Each domain that waits is known by a key, and waits for one slot at a time."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._turns: dict[Hashable, asyncio.Future[None]] = {}
        self._awaited: FairQueue[asyncio.Future[None]] = FairQueue()
        """By organisation. A turn that several wait for is there once for each."""
        self._due: OrderedDict[Hashable, asyncio.Future[None]] = OrderedDict()
        self._awaited_in_a_row = 0

    @asynccontextmanager
    async def acquire(self, key: Hashable, *, orgs: Collection[str] = ()) -> AsyncIterator[None]:
        """Wait for a slot. It is released at the end, or after `MAX_SLOT_SECONDS` if that is earlier.

        `orgs` are the organisations that wait for `key`. Without any it is only due.
        """
        await self._wait(key, orgs)
        # The timer and the end of the pass share this list, so that the slot is released exactly once.
        held = [self]

        def release() -> None:
            if held:
                held.pop().release()

        timer = asyncio.get_running_loop().call_later(MAX_SLOT_SECONDS, release)
        try:
            yield
        finally:
            timer.cancel()
            release()

    def prioritize(self, key: Hashable, org: str) -> None:
        """`org` waits for `key` now: if it has no slot yet, it goes before those that are only due."""
        # Without a turn the domain has a slot already, or does not wait.
        turn = self._turns.get(key)
        if turn is not None:
            self._due.pop(key, None)
            self._awaited.add(org, turn)

    def release(self) -> None:
        """Pass a free slot to the next that waits."""
        while self._due or self._awaited.flows:
            # After some awaited domains in a row, one goes that is only due.
            if self._due and (not self._awaited.flows or self._awaited_in_a_row >= MAX_AWAITED_IN_A_ROW):
                self._awaited_in_a_row = 0
                _, turn = self._due.popitem(last=False)
            else:
                org, turn = self._awaited.take()
                if not turn.done():
                    self._awaited.charge(org, 1.0)
                    self._awaited_in_a_row += 1
            # A turn that is done was served for another organisation, or its pass was cancelled.
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _wait(self, key: Hashable, orgs: Collection[str]) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[key] = turn
        if not orgs:
            self._due[key] = turn
        for org in orgs:
            self._awaited.add(org, turn)
        try:
            await turn
        except asyncio.CancelledError:
            # The slot may have been assigned in the same step as the cancellation: it must not be lost.
            if not turn.cancelled():
                self.release()
            raise
        finally:
            del self._turns[key]


# The loop of one endpoint.


log = structlog.get_logger(__name__)

FIRST_RETRY_SECONDS = 0.5
"""The pause after the first failed pass. It doubles with each further one, up to the interval."""


@dataclass(eq=False)
class EndpointLoop:
    """The passes over one endpoint, one after another."""

    work: DomainPass
    interval: float
    slots: ConcurrencySlots | None = None
    traces: Traces = NO_TRACES

    def __post_init__(self) -> None:
        """Wait for the first wake-up."""
        self.woken = asyncio.Event()
        self.first_pass = asyncio.Event()
        self._awaited_by: set[str] = set()
        """The organisations that wait for the next pass. Empty is the name of the site itself."""
        self._causes: dict[str, None] = {}
        """The places of the traced requests that no pass has carried out yet, oldest first."""

    def wake(self, org: str = "", cause: str | None = None) -> None:
        """Start a pass for `org` now, before domains that are only due. `cause` is the place of its trace."""
        self.woken.set()
        if cause is not None and len(self._causes) < MAX_CAUSES:
            self._causes[cause] = None
        if org not in self._awaited_by:
            self._awaited_by.add(org)
            if self.slots is not None:
                self.slots.prioritize(self, org)

    async def run(self) -> None:
        """Run until cancelled, then release the connection."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                await self._work()
        except* Exception:
            # `follow` sees that the loop ended and starts it again. No other domain is affected.
            log.exception("domain.loop-failed", endpoint=self.work.endpoint.id)
        finally:
            self.first_pass.set()
            await self.work.driver.close()

    async def _work(self) -> None:
        retry, rest = FIRST_RETRY_SECONDS, self._first_rest()
        while True:
            slot: AbstractAsyncContextManager[None] = nullcontext()
            if self.slots is not None:
                slot = self.slots.acquire(self, orgs=self._awaited_by)
            async with slot:
                # Cleared before the pass, not after it: a change during the pass has to start another one.
                self.woken.clear()
                self._awaited_by.clear()
                converged = await self._pass()
            self.first_pass.set()
            if converged:
                await self._wait(rest)
                retry, rest = FIRST_RETRY_SECONDS, self.interval
            else:
                await self._wait(min(retry, self.interval))
                retry = min(2 * retry, self.interval)

    def _first_rest(self) -> float:
        """A share of the interval that differs by endpoint, so that not all loops wake at the same time."""
        return self.interval * crc32(self.work.endpoint.id.encode()) / 2**32

    async def _pass(self) -> bool:
        causes, endpoint = tuple(self._causes), {"rackloom.endpoint": self.work.endpoint.id}
        converged = False
        with self.traces.span("reconcile", SpanSide.CONSUMER, causes=causes, attributes=endpoint) as span:
            try:
                converged = await self.work.run()
            except (Retry, Unknown):
                # The store has logged it. Readers see that no reading is recorded.
                pass
            except Exception:
                # A defect in one domain's pass must not end the loop, nor that of any other domain.
                log.exception("domain.pass-failed", endpoint=self.work.endpoint.id)
            span.note({"rackloom.converged": converged})
        # Causes that arrived during the pass stay: only the next pass surely carries them out.
        if converged:
            for cause in causes:
                del self._causes[cause]
        return converged

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.woken.wait()
        except TimeoutError:
            return

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self.work.driver.notifications():
                    self.woken.set()
                return
            except Exception:
                # Only a wake-up is lost. A loop that ended here would cancel a pass, and with it the record
                # that the controller is unreadable.
                log.exception("domain.loop-failed", endpoint=self.work.endpoint.id)
                self.woken.set()
                await asyncio.sleep(self.interval)


# The loops of this replica's share.


class EndpointWorker(msgspec.Struct, frozen=True):
    """The running loop of one endpoint, and the lease that it runs under."""

    held: HeldEndpoint
    guard: LeaseGuard
    loop: EndpointLoop
    task: "asyncio.Task[None]"


class EndpointWorkers:
    """All workers of this process, by endpoint. `loop_for` makes the loop of an endpoint."""

    def __init__(
        self, loop_for: Callable[[HeldEndpoint, LeaseGuard], EndpointLoop], elapsed: Callable[[], float]
    ) -> None:
        self._loop_for = loop_for
        self._elapsed = elapsed
        self._workers: dict[str, EndpointWorker] = {}

    @property
    def loops(self) -> list[EndpointLoop]:
        """The loops that run now."""
        return [worker.loop for worker in self._workers.values() if not worker.task.done()]

    async def follow(
        self, tasks: asyncio.TaskGroup, share: Mapping[str, HeldEndpoint], deadline: float
    ) -> Collection[str]:
        """Run the loops of `share` until `deadline`, and no others. Return the endpoints that left it."""
        ended = set()
        for key, worker in self._workers.items():
            # A loop goes on only under the same lease and URL. After a new lease, another replica may have
            # acted in between, so the loop begins again.
            held, now = worker.held, share.get(key)
            same = now is not None and (held.lease, held.endpoint.url) == (now.lease, now.endpoint.url)
            if same and not worker.task.done():
                worker.guard.extend(deadline)
            else:
                ended.add(key)
        gone = await self._end(ended)
        # A loop that lingers is still among the workers, so no second one begins beside it.
        for key in sorted(share.keys() - self._workers.keys()):
            self._begin(tasks, share[key], deadline)
        return gone - share.keys()

    def _begin(self, tasks: asyncio.TaskGroup, held: HeldEndpoint, deadline: float) -> None:
        guard = LeaseGuard(held.lease, deadline, self._elapsed)
        try:
            loop = self._loop_for(held, guard)
        except Refused as refusal:
            # No driver accepts this URL. The other endpoints go on.
            log.warning("endpoint.refused", endpoint=held.endpoint.id, reason=str(refusal))
            return
        task = tasks.create_task(loop.run())
        guard.protect(task)
        self._workers[held.endpoint.id] = EndpointWorker(held, guard, loop, task)

    async def _end(self, keys: Collection[str]) -> set[str]:
        """Cancel, and return those that ended. One that lingers is kept, and its lease with it."""
        tasks = {self._workers[key].task for key in keys}
        for task in tasks:
            task.cancel()
        # All at once, so that one slow driver costs this time once, however many endpoints end.
        if tasks:
            await asyncio.wait(tasks, timeout=RENEW_SECONDS)
        gone = {key for key in keys if self._workers[key].task.done()}
        for key in gone:
            del self._workers[key]
        return gone


# The reconciler.


LEASE_FLOW = "\0leases"
"""Takes its turn among the organisations that write: no organisation can have this name."""
SOLE_REPLICA = "alone"
"""The holder name of a reconciler with a database that no other process can use."""


class Reconciler:
    """All domains of the site. `driver_for` opens a driver for an endpoint. `interval` is in seconds.

    `holder` names this process among the replicas, and must be unique for all time.
    """

    def __init__(
        self,
        store: Store,
        driver_for: Callable[[endpoints.Endpoint], FabricDriver],
        clock: Callable[[], float],
        interval: float = DEFAULT_INTERVAL,
        holder: str = SOLE_REPLICA,
        hooks: ReconcileHooks = NO_HOOKS,
        slots: ConcurrencySlots | None = None,
        elapsed: Callable[[], float] = loop_seconds,
    ) -> None:
        """`slots` bounds the domains that are worked on at once (None: no bound). `elapsed` times leases."""
        if store.is_shared and holder == SOLE_REPLICA:
            raise ValueError("each replica on a shared database needs a unique name")
        self.store = store
        self.driver_for = driver_for
        self.clock = clock
        self.interval = interval
        self.holder = holder
        self.hooks = hooks
        self.slots = slots
        self.started = asyncio.Event()
        self._lease_seconds = LEASE_SECONDS if store.is_shared else math.inf
        self._turns = DomainTurns()
        self._elapsed = elapsed
        self._workers = EndpointWorkers(self._loop_for, elapsed)
        self._endpoints_changed = asyncio.Event()
        # A separate flow among the writes that wait: a renewal waits for one write of each other flow.
        self._lease_store = store.on_behalf_of(LEASE_FLOW)

    @property
    def loops(self) -> list[EndpointLoop]:
        """The loops that run here now."""
        return self._workers.loops

    def wake(self, domains: frozenset[str], org: str = "") -> None:
        """Start a pass over these domains now, and over endpoints without a known domain.

        `org` is the organisation that waits for it, or empty for the site itself.
        """
        if not domains:
            # The changed object has no domain yet: it may be an endpoint.
            self.endpoints_changed()
        cause = self.hooks.traces.current()
        for loop in self.loops:
            if loop.work.domain is None or loop.work.domain in domains:
                loop.wake(org, cause)

    def endpoints_changed(self) -> None:
        """Read the list of endpoints now. Otherwise a change is noticed within `RENEW_SECONDS`."""
        self._endpoints_changed.set()

    async def apply(self, plan: PartitionPlan) -> tuple[OperationOutcome, ...]:
        """Carry out an operator's plan in its domain, through the first of its endpoints that leads.

        Raises Refused when it no longer holds, FabricUnavailable when no endpoint can be read.
        """
        error: Refused | FabricUnavailable = Refused(
            f"domain {plan.observation.domain} is not reconciled by this process",
            nearest_fix="register its endpoint, or ask the replica that has it",
        )
        for loop in self.loops:
            if loop.work.domain == plan.observation.domain:
                try:
                    return await loop.work.apply(plan)
                except StandbyController as standby:
                    error = standby
                except FabricUnavailable as unreadable:
                    # An answer from a standby is more specific than no answer.
                    error = error if isinstance(error, StandbyController) else unreadable
        raise error

    async def first_passes(self) -> None:
        """Return when every endpoint of the share has been read once, or could not be."""
        await self.started.wait()
        for loop in self.loops:
            await loop.first_pass.wait()

    async def run(self) -> None:
        """Reconcile until cancelled, then release the connections and the leases."""
        if not self.store.is_shared:
            await self.store.run(leases.start_as_sole_replica)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_changes())
                while True:
                    self._endpoints_changed.clear()
                    await self._follow_share(tasks)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(RENEW_SECONDS):
                            await self._endpoints_changed.wait()
        finally:
            # The loops have ended with their task group: another replica may begin at once.
            if self.store.is_shared:
                try:
                    await self._lease_store.run(leases.leave_replicas, self.holder)
                except (Retry, Unknown) as error:
                    log.warning("leases.not-released", holder=self.holder, reason=error.reason)
                except Exception:
                    log.exception("leases.not-released", holder=self.holder)

    async def _follow_changes(self) -> None:
        """Wake the domains that other processes changed, or all of them if changes may have been missed."""
        async for change in self.store.changes():
            # None stands for lost notifications: any domain may have changed.
            domain, _, cause = (change or "").partition(" ")
            for loop in self.loops:
                if change is None:
                    loop.woken.set()
                elif domain == loop.work.domain:
                    loop.wake(cause=cause or None)

    async def _follow_share(self, tasks: asyncio.TaskGroup) -> None:
        # Counted from before the request: the lease cannot run out in the database before the work ends.
        deadline = self._elapsed() + self._lease_seconds
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                share = await self._share()
            held = {endpoint.endpoint.id: endpoint for endpoint in share}
            # Released only now that their loops have ended: no other replica may start before.
            if ended := await self._workers.follow(tasks, held, deadline):
                await self._lease_store.run(leases.release_leases, self.holder, ended)
            self.started.set()
        except (Retry, Unknown, OSError) as error:
            # The guards end all work at its deadline, so a failed renewal needs no action here.
            log.warning("leases.not-renewed", holder=self.holder, reason=str(error) or repr(error))
        except Exception:
            log.exception("leases.not-renewed", holder=self.holder)

    async def _share(self) -> tuple[HeldEndpoint, ...]:
        now = self.clock()
        # A process alone has leases without end, so it mostly reads them and writes nothing.
        if not self.store.is_shared:
            share = await self._lease_store.read(leases.share_of_sole_replica, self.holder, now)
            if share is not None:
                return share
        return await self._lease_store.run(leases.take_share, self.holder, now, now + self._lease_seconds)

    def _loop_for(self, held: HeldEndpoint, guard: LeaseGuard) -> EndpointLoop:
        driver = self.driver_for(held.endpoint)

        def wake_others(domains: frozenset[str]) -> None:
            for loop in self.loops:
                if loop.work.domain in domains and loop.work.endpoint.id != held.endpoint.id:
                    loop.wake()

        work = DomainPass(
            held.endpoint,
            guard,
            driver,
            self.store,
            self.clock,
            self._turns,
            self.hooks,
            wake_others,
            valid_seconds(self.interval),
        )
        return EndpointLoop(work, self.interval, self.slots, self.hooks.traces)
