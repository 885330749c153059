"""One pass over one NVLink domain: observe, plan, check, execute, observe again.

A pass takes no input. It reads the fabric and the records afresh, acts, and records its observation. The
process can be killed between any two lines and the pass run again: an operation is recorded before the
controller is called, and the state of a partition is taken only from an observation.

Each round of `DomainPass.run`:

1. Observe and record. A reading that fails at once, or contradicts itself, is repeated twice before
   anything is concluded (`fabric.controller.read_again_in_doubt`). A controller that stays unreadable makes
   the domain unknown and ends the pass. Any exception of the driver or the record makes it unreadable.
2. Stop in read-only mode, or when this controller is a standby, which lists no GPUs while another does.
3. Plan from intent and observation. Equal inputs give the plan of the last round.
4. Record the blockers of the plan, unless removals come first: the blockers of additions are known only
   after them.
5. Execute the operations in order. Each is recorded under the lease, then requested, then its answer is
   recorded. A refusal does not stop the others. An operation without a valid answer does, because its
   outcome is unknown until the next round observes again.

An unknown outcome concerns the GPUs of the operation, and no others: the readings of the controller still
hold, and only these GPUs are blocked until a reading shows that the operation was carried out. A pass has
at most `MAX_ROUNDS` rounds. A refused operation, and one whose outcome stays unknown, is left to the next
pass. `DomainTurns` serializes the work of endpoints that report one domain: a plan made from an observation
is void once another endpoint acted there. After a change the domain's other controllers are read, too.

`LeaseGuard` cancels the task that works under a lease when its deadline passes. A replica that is cut off
from the database therefore stops before another one begins. The deadline is on a clock that counts while
the machine is suspended (`elapsed`). The event loop's does not, so its timers ring late after a resume:
until then no operation begins, because each checks `has_ended` before.

`DomainPass.apply` executes an operator's plan after a new observation, if the plan still holds.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa
import structlog
from msgspec.structs import replace

from rackloom.carve.fabric.controller import (
    DriverFailed,
    FabricDriver,
    FabricRefused,
    FabricUnavailable,
    read_again_in_doubt,
)
from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import latest
from rackloom.carve.observation.conflicts import ConflictingControllers, ControllerConflict
from rackloom.carve.reconcile import records
from rackloom.carve.reconcile.records import Lease, LeaseLost
from rackloom.carve.store.database import Store
from rackloom.core.partitions.domain import (
    BlockedGpus,
    DeletePartition,
    DomainIntent,
    DomainObservation,
    PartitionOperation,
    PartitionPlan,
    RemoveGpus,
    is_carried_out,
)
from rackloom.core.partitions.planner import FailedOperations, make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS
from rackloom.errors import Refused, Retry, Unknown
from rackloom.runtime.traces import NO_TRACES, SpanSide, Traces

# Optional parts of a service: metrics, traces, recording, read-only mode.


class OperationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one operation. `state` is done, refused or unknown (no answer came)."""

    kind: str
    partition_name: str
    state: str
    message: str
    """The answer of the controller, for operators."""
    code: str | None = None
    """The controller's code for the refusal."""


class ReconcileMetrics:
    """Counters of the passes, with times in seconds. This base class counts nothing."""

    def passed(self, endpoint_id: str, seconds: float) -> None:
        """A pass over an endpoint ended."""

    def observed(self, endpoint_id: str, observation: DomainObservation) -> None:
        """An endpoint was read."""

    def unreachable(self, endpoint_id: str, reason: str) -> None:
        """An endpoint could not be read."""

    def drifted(self, domain: str, operations: int) -> None:
        """A domain that met its intent before differs from it now, though the intent is the same."""

    def refused(self, domain: str) -> None:
        """A plan was refused, by the check or because its facts no longer hold."""

    def operated(
        self, endpoint_id: str, operation: PartitionOperation, outcome: OperationOutcome, seconds: float
    ) -> None:
        """An operation was requested, and answered or not."""

    def applied(self, domain: str, seconds: float) -> None:
        """All operations of a plan were requested."""


RecordObservation = Callable[[sa.Connection, str, DomainObservation, float], ControllerConflict | None]
"""Takes the endpoint's id, the observation and the time. Returns the conflict of the domain."""


class ReconcileHooks(msgspec.Struct, frozen=True, kw_only=True):
    """Optional parts of the passes. The defaults are those of a reconciler without a service."""

    record: RecordObservation = records.record_observation
    """Records an observation, in one transaction."""
    metrics: ReconcileMetrics = ReconcileMetrics()
    traces: Traces = NO_TRACES
    read_only: bool = False
    """Domains are observed, and no operation is requested."""


NO_HOOKS = ReconcileHooks()


# The deadline of the work under a lease.


def loop_seconds() -> float:
    """The running event loop's clock, which stands still while the machine is suspended."""
    return asyncio.get_running_loop().time()


class LeaseGuard:
    """A lease, and the task that works under it, which is cancelled at the deadline of the lease.

    Invariant: the deadline is counted from before the renewal was sent, on a clock that is never set. So the
    work ends before the lease can run out in the database.
    """

    def __init__(self, lease: Lease, deadline: float, elapsed: Callable[[], float] = loop_seconds) -> None:
        """`deadline` is in seconds of the clock `elapsed`, and infinite for a lease without end."""
        self.lease = lease
        self._deadline = deadline
        self._elapsed = elapsed
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def protect(self, task: "asyncio.Task[None]") -> None:
        """Cancel `task` at the deadline."""
        self._task = task
        # A timer that outlived its task would keep the whole loop in memory until the deadline.
        task.add_done_callback(lambda _: self._stop_timer())
        self.extend(self._deadline)

    def extend(self, deadline: float) -> None:
        """Move the deadline."""
        self._stop_timer()
        self._deadline = deadline
        # A deadline that has passed cancels the task in the next turn of the event loop.
        if self._task is not None and deadline < math.inf:
            self._timer = asyncio.get_running_loop().call_later(
                max(deadline - self._elapsed(), 0.0), self._task.cancel
            )

    def has_ended(self) -> bool:
        """Whether the deadline has passed, though the timer of a process that just resumed has not fired."""
        return self._elapsed() >= self._deadline

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# One endpoint at a time acts in a domain.


class DomainTurns:
    """Serializes the operations of all endpoints of this process, domain by domain.

    Invariant: a plan is executed only if no other endpoint has acted in the domain since the observation
    that it was made from.
    """

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._actions = 0
        """Counts the actions in all domains."""
        self._last_action: dict[str, int] = {}
        """The number of the last action in each domain."""

    def before_observing(self) -> int:
        """The number of actions so far. Take it before an observation, and pass it to `act` afterwards."""
        return self._actions

    @asynccontextmanager
    async def act(self, domain: str, before: int) -> AsyncIterator[bool]:
        """Wait for the domain. Yields True if no other endpoint has acted in it since `before`."""
        async with self._locks[domain]:
            try:
                yield self._last_action.get(domain, 0) <= before
            finally:
                self._actions += 1
                self._last_action[domain] = self._actions


# The pass.


log = structlog.get_logger(__name__)

MAX_ROUNDS = 8
"""Removing the default partition, removals, additions and the confirming observation are four rounds. The
rest is for intent that changes during the pass. More would hide a plan that never converges."""

LEASE_ENDED_REASON = "the lease ran out before the controller was asked"


class StandbyController(Refused):
    """The endpoint lists no GPU, while another endpoint lists those of its domain."""

    def __init__(self, domain: str) -> None:
        super().__init__(
            f"no switch controller that can be asked here lists the GPUs of domain {domain}",
            nearest_fix="wait until one that does can be read, and plan again",
        )


@dataclass(eq=False)
class DomainPass:
    """Passes over one controller endpoint, under a lease. `clock` gives seconds since the epoch."""

    endpoint: endpoints.Endpoint
    guard: LeaseGuard
    driver: FabricDriver
    store: Store
    clock: Callable[[], float]
    turns: DomainTurns
    hooks: ReconcileHooks = NO_HOOKS
    wake: Callable[[frozenset[str]], None] = lambda _domains: None
    """Starts passes over all other endpoints of the given domains."""
    valid_seconds: float = DEFAULT_VALID_SECONDS
    """The age at which a reading is outdated."""

    def __post_init__(self) -> None:
        """Know nothing of earlier passes."""
        self.metrics = self.hooks.metrics
        self.domain = self.endpoint.domain
        self._met_intent: tuple[str, int] | None = None
        """Domain and intent revision that an observation met last. A plan with operations for the same
        revision means drift: another program changed the fabric."""
        self._recorded_blockers: tuple[str, tuple[BlockedGpus, ...]] | None = None
        """Domain and blockers that this process recorded last."""
        self._failed_before: Collection[PartitionOperation] = ()
        """Operations that the controller refused or did not answer in the last pass."""
        self._announced_conflict: str | None = None
        """Domain of the conflict for which this process has woken the other endpoints."""
        self._announced_changes: tuple[PartitionOperation, ...] = ()
        """Operations that the other endpoints were woken for, until a plan has none."""
        self._logged_failure = ""
        """The unforeseen failure that was logged with its traceback since the last good reading."""
        self._last_plan: tuple[DomainIntent, PartitionPlan] | None = None
        """Equal inputs give equal plans, so a domain at rest is planned once."""

    async def run(self) -> bool:
        """Work until nothing is left to do. Return False if the controller did not answer, or refused."""
        began = self.clock()
        failed: dict[PartitionOperation, str | None] = {}
        try:
            for _ in range(MAX_ROUNDS):
                try:
                    converged = await self._run_round(failed)
                except LeaseLost as lost:
                    log.info("domain.lease-lost", endpoint=self.endpoint.id, reason=lost.reason)
                    return False
                except ConflictingControllers as contradiction:
                    # Have the other controllers of the domain read, once: the reading of one may only be too
                    # old.
                    conflict = contradiction.conflict
                    if self._announced_conflict != conflict.domain:
                        log.warning("domain.contradicted", domain=conflict.domain, reason=conflict.reason)
                        self._announced_conflict = conflict.domain
                        self.wake(conflict.domains)
                    return False
                except Refused as stale:
                    # The intent changed between reading and acting: the next round plans from the new one.
                    self.metrics.refused(self.domain or "")
                    log.info("plan.refused", endpoint=self.endpoint.id, reason=stale.reason)
                    continue
                except FabricUnavailable:
                    return False
                if converged is not None:
                    return converged
            log.warning("domain.unsettled", endpoint=self.endpoint.id, rounds=MAX_ROUNDS)
            return False
        finally:
            self._failed_before = failed
            self.metrics.passed(self.endpoint.id, self.clock() - began)

    async def apply(self, plan: PartitionPlan) -> tuple[OperationOutcome, ...]:
        """Observe, and execute `plan` if it still holds, each operation once, until one is not answered.

        Raises Refused when it no longer holds or when controllers contradict one another. Raises
        StandbyController and FabricUnavailable only if nothing was requested: then another endpoint must
        do it, or this one cannot be read.
        """
        before = self.turns.before_observing()
        observation = await self._observe_or_record_loss()
        if not await self._leads(observation):
            raise StandbyController(observation.domain)
        check_plan(plan, await self.store.read(records.load_intent, observation.domain), observation)
        async with self.turns.act(observation.domain, before) as is_current:
            if not is_current:
                raise Refused("the domain was worked on meanwhile", nearest_fix="plan again")
            outcomes = await self._execute(plan)
        # Return the answers even if the last reading fails: the operator's operations were requested.
        with suppress(ConflictingControllers, FabricUnavailable):
            await self._observe_or_record_loss()
        return outcomes

    async def _run_round(self, failed: dict[PartitionOperation, str | None]) -> bool | None:
        """One observation, and the operations that follow from it.

        Returns whether the pass ends with nothing left to do, None when it goes on. Operations that the
        controller refuses or does not answer are added to `failed`, and left to the next pass. An operation
        with an unknown outcome is taken out when the observation shows that it was carried out.
        """
        before = self.turns.before_observing()
        observation = await self._observe_or_record_loss()
        if self.hooks.read_only or not await self._leads(observation):
            return True
        # An operation without an answer was carried out after all: what other controllers showed is old now.
        unknown = [operation for operation, code in failed.items() if code is None]
        settled = [operation for operation in unknown if is_carried_out(operation, observation)]
        for operation in settled:
            del failed[operation]
        if settled:
            self.wake(frozenset({observation.domain}))
        plan = await self._plan(observation, failed)
        await self._record_blockers(plan)
        if not plan.operations:
            self._announced_changes = ()
            return not (failed or observation.uncertain)
        # Another endpoint acted in the domain since the observation: the plan is void, and the next round
        # observes again.
        async with self.turns.act(observation.domain, before) as is_current:
            outcomes = await self._execute(plan) if is_current else ()
        for operation, outcome in zip(plan.operations, outcomes, strict=False):
            # The code only: it becomes a blocker that tenants read, and a message may hold addresses.
            if outcome.state == "refused":
                failed[operation] = outcome.code or ""
            elif outcome.state == "unknown":
                failed[operation] = None
        return None

    async def _observe_or_record_loss(self) -> DomainObservation:
        began = self.clock()
        try:
            with self.hooks.traces.span("observe", SpanSide.CLIENT) as span:
                observation = await read_again_in_doubt(self.driver)
                span.note(
                    {
                        "rackloom.domain": observation.domain,
                        "rackloom.gpus": len(observation.gpus),
                        "rackloom.partitions": len(observation.partitions),
                        "rackloom.uncertain": len(observation.uncertain),
                    }
                )
            try:
                conflict = await self.store.run(
                    self.hooks.record, self.endpoint.id, observation, self.clock()
                )
            except (Retry, Refused, Unknown, OSError):
                raise
            except Exception as error:
                # The records cannot hold this reading, and nothing of it is recorded: it counts as none.
                raise DriverFailed(error) from error
        except FabricUnavailable as failure:
            self._log_unforeseen(failure)
            reason = str(failure)
            self.metrics.unreachable(self.endpoint.id, reason)
            log.warning("domain.unknown", endpoint=self.endpoint.id, reason=reason)
            await self.store.run(
                records.record_unreadable, self.endpoint.id, reason, self.clock(), began, self.valid_seconds
            )
            raise
        self.domain, self._logged_failure = observation.domain, ""
        self.metrics.observed(self.endpoint.id, observation)
        if conflict is not None:
            raise ConflictingControllers(conflict)
        self._announced_conflict = None
        return observation

    async def _leads(self, observation: DomainObservation) -> bool:
        """Whether plans may be made from this reading: not from that of a standby, which lists no GPU."""
        if observation.gpus:
            return True
        known = (await self.store.read(latest.latest_of_domain, observation.domain)).observation
        return known is not None and not known.gpus

    async def _plan(self, observation: DomainObservation, failed: FailedOperations) -> PartitionPlan:
        intent = await self.store.read(records.load_intent, observation.domain)
        plan: PartitionPlan | None = None
        # Inputs that are the same but for the time give the same plan.
        if not failed and self._last_plan is not None:
            last_intent, last_plan = self._last_plan
            same_time = replace(observation, observed_at=last_plan.observation.observed_at)
            if (last_intent, last_plan.observation) == (intent, same_time):
                plan = replace(last_plan, observation=observation)
        if plan is None:
            plan = make_plan(intent, observation, failed)
            # The check makes no choice of the planner again: it judges the plan by the intent alone.
            check_plan(plan, intent, observation)
            self._last_plan = None if failed else (intent, plan)
        # Work for an intent that was met before is drift: another program changed the fabric.
        now = (observation.domain, plan.intent_revision)
        if plan.operations and self._met_intent == now:
            self.metrics.drifted(observation.domain, len(plan.operations))
        self._met_intent = None if plan.operations or plan.blocked else now
        return plan

    async def _record_blockers(self, plan: PartitionPlan) -> None:
        blockers = (plan.observation.domain, plan.blocked)
        # Removals come before additions, in separate rounds: a GPU must be seen outside its old partition
        # before it joins another. The blockers of the additions are known only when no removal is left.
        removes = any(isinstance(operation, RemoveGpus | DeletePartition) for operation in plan.operations)
        # An operation that failed in the last pass and is requested again stays blocked until its new answer.
        # Otherwise a tenant would see two reasons in turn, pass after pass.
        again = any(operation in self._failed_before for operation in plan.operations)
        if removes or again or blockers == self._recorded_blockers:
            return
        await self.store.run(records.record_blocked, *blockers, self.clock())
        self._recorded_blockers = blockers
        for blocked in plan.blocked:
            log.info(
                "plan.blocked",
                domain=plan.observation.domain,
                gpus=len(blocked.guids),
                reason=blocked.reason,
                fix=blocked.fix,
            )

    async def _execute(self, plan: PartitionPlan) -> tuple[OperationOutcome, ...]:
        """Execute the operations in order, until the outcome of one is unknown.

        A refusal does not stop the others. An unknown outcome does: it decides whether the rest of the plan
        is still right, and only the next observation shows it.
        """
        began = self.clock()
        outcomes: list[OperationOutcome] = []
        try:
            for operation in plan.operations:
                outcomes.append(await self._execute_operation(operation, plan))
                if outcomes[-1].state == "unknown":
                    break
        finally:
            # Have the other controllers of the domain read: a status must hold in every valid reading. Only
            # executed operations count, and each set of them once. Otherwise two controllers that refuse, or
            # accept without effect, would wake each other without end.
            results = zip(plan.operations, outcomes, strict=False)
            done = tuple(operation for operation, outcome in results if outcome.state == "done")
            if done and done != self._announced_changes:
                self.wake(frozenset({plan.observation.domain}))
                self._announced_changes = done
        self.metrics.applied(plan.observation.domain, self.clock() - began)
        return tuple(outcomes)

    async def _execute_operation(
        self, operation: PartitionOperation, plan: PartitionPlan
    ) -> OperationOutcome:
        # 1. Record, fenced by the lease. From here on the record shows that it may have been requested.
        operation_id = await self.store.run(
            records.begin_operation, self.guard.lease, operation, plan.observation.observed_at, self.clock()
        )
        # 2. The process may have been stopped for any time since that commit. A request after the deadline
        # could overlap with the work of the next holder, and controllers know no epochs.
        if self.guard.has_ended():
            await self._finish(operation_id, "refused", None, LEASE_ENDED_REASON)
            raise LeaseLost(LEASE_ENDED_REASON)
        # 3. Request. 4. Record the answer. A crash between them leaves the operation pending, and the next
        # observation decides its outcome.
        began = self.clock()
        state, code, message = await self._request(operation)
        await self._finish(operation_id, state, code, message)
        outcome = OperationOutcome(
            kind=str(operation.__struct_config__.tag),
            partition_name=operation.name,
            state=state,
            message=message or "",
            code=code,
        )
        self.metrics.operated(self.endpoint.id, operation, outcome, self.clock() - began)
        return outcome

    async def _request(self, operation: PartitionOperation) -> tuple[str, str | None, str | None]:
        """State, code and message of the answer."""
        kind = str(operation.__struct_config__.tag)
        about = {"rackloom.domain": self.domain or "", "rackloom.operation": kind}
        with self.hooks.traces.span(f"execute {kind}", SpanSide.CLIENT, attributes=about) as span:
            try:
                await self.driver.execute(operation)
            except FabricRefused as refusal:
                span.fail(refusal.code)
                return "refused", refusal.code, str(refusal)
            except Exception as error:
                # An error that the driver did not foresee: the request may have been sent.
                span.fail("unknown")
                lost = error if isinstance(error, FabricUnavailable) else DriverFailed(error)
                self._log_unforeseen(lost)
                return "unknown", None, str(lost)
            return "done", None, None

    async def _finish(self, operation_id: str, state: str, code: str | None, message: str | None) -> None:
        log.info(
            "operation", id=operation_id, endpoint=self.endpoint.id, state=state, code=code, message=message
        )
        await self.store.run(records.finish_operation, operation_id, state, code, message, self.clock())

    def _log_unforeseen(self, failure: FabricUnavailable) -> None:
        """Log the traceback of an unforeseen exception once, and not in every pass that meets it again."""
        if isinstance(failure, DriverFailed) and self._logged_failure != str(failure):
            self._logged_failure = str(failure)
            log.error("domain.pass-failed", endpoint=self.endpoint.id, exc_info=failure.__cause__)
