"""One pass over one NVLink domain: observe, plan, check, execute, observe again.

A pass takes no input. It reads the fabric and the records afresh, acts, and records what it saw. The
process can be killed between any two lines and the pass run again: an operation is recorded before the
controller is called, and the state of a partition is taken only from an observation.

Each round of `DomainPass.run`:

1. Observe and record. An unreadable controller makes the domain unknown and ends the pass.
2. Stop in read-only mode, or when this controller is a standby, which lists no GPUs while another does.
3. Plan from intent and observation. Equal inputs give the plan of the last round.
4. Record what blocks the plan, unless removals come first; what blocks additions is known only after
   them.
5. Execute the operations in order. Each is recorded under the lease, then requested, then its answer is
   recorded. A refusal does not stop the others; an operation without an answer does, because its
   outcome is unknown until the next observation.

A pass has at most `MAX_ROUNDS` rounds. A refused operation is left to the next pass. `DomainTurns`
serializes the work of endpoints that report one domain: a plan made from an observation is void once
another endpoint acted there. After a change the other controllers of the domain are read as well.

`DomainPass.apply` executes an operator's plan after a new observation, if the plan still holds.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress

import structlog
from msgspec.structs import replace

from rackloom.carve.fabric.controller import FabricDriver, FabricRefused, FabricUnavailable
from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import latest
from rackloom.carve.observation.conflicts import ConflictingControllers, ControllerConflict
from rackloom.carve.reconcile import records
from rackloom.carve.reconcile.hooks import NO_HOOKS, OperationOutcome, ReconcileHooks
from rackloom.carve.reconcile.leases import LeaseGuard, LeaseLost
from rackloom.carve.store.database import Store
from rackloom.core.partitions.domain import (
    BlockedGpus,
    DeletePartition,
    DomainIntent,
    DomainObservation,
    PartitionOperation,
    PartitionPlan,
    RemoveGpus,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.errors import Refused

# One actor at a time in a domain.


class DomainTurns:
    """Who of this process may act in which domain."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._acted: Counter[str] = Counter()

    def before_looking(self) -> Counter[str]:
        """How often each domain was acted in; for `act`, taken before the domain is looked at."""
        return self._acted.copy()

    @asynccontextmanager
    async def act(self, domain: str, before: Counter[str]) -> AsyncIterator[bool]:
        """Wait for the domain; gives whether nobody acted in it since `before`."""
        async with self._locks[domain]:
            try:
                yield before[domain] == self._acted[domain]
            finally:
                self._acted[domain] += 1


# The pass.


log = structlog.get_logger(__name__)

MAX_ROUNDS = 8
"""Default partition away, removals, additions and the confirming look are four; the rest is slack for
intent that changes meanwhile. More would hide a plan that never converges."""

LEASE_ENDED_REASON = "the lease ran out before the controller was asked"


class StandbyController(Refused):
    """The endpoint lists no GPU while another one of its domain speaks for it."""

    def __init__(self, domain: str) -> None:
        super().__init__(
            f"no switch controller that can be asked here lists the GPUs of domain {domain}",
            nearest_fix="wait until one that does can be read, and plan again",
        )


def _wake_nobody(_domains: frozenset[str]) -> None:
    """There is no other endpoint."""


class DomainPass:
    """Passes over one controller endpoint, under `hold`. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        endpoint: endpoints.Endpoint,
        hold: LeaseGuard,
        driver: FabricDriver,
        store: Store,
        clock: Callable[[], float],
        turns: DomainTurns,
        hooks: ReconcileHooks = NO_HOOKS,
        wake: Callable[[frozenset[str]], None] = _wake_nobody,
    ) -> None:
        """`wake` starts passes over all other endpoints of a domain."""
        self.endpoint = endpoint
        self.hold = hold
        self.driver = driver
        self.store = store
        self.clock = clock
        self.turns = turns
        self.hooks = hooks
        self.wake = wake
        self.meter = hooks.meter
        self.domain = endpoint.domain
        self._met: tuple[str, int] | None = None
        """Domain and intent that were last seen to agree; operations for the same intent mean drift."""
        self._told: tuple[str, tuple[BlockedGpus, ...]] | None = None
        """Domain and what stood in the way there, as it was last recorded by this process."""
        self._disputed: str | None = None
        """Domain whose dispute this process has told the other endpoints of."""
        self._done: tuple[PartitionOperation, ...] = ()
        """What was done last, until nothing is left to do; the other endpoints were told of it."""
        self._planned: tuple[DomainIntent, PartitionPlan] | None = None
        """Equal inputs give equal plans: a domain at rest is planned once."""

    async def run(self) -> bool:
        """Work until nothing is left to do; False when the fabric could not be asked or refused."""
        began = self.clock()
        try:
            return await self._rounds()
        finally:
            self.meter.passed(self.endpoint.id, self.clock() - began)

    async def apply(self, plan: PartitionPlan) -> tuple[OperationOutcome, ...]:
        """Look, and carry out `plan` if it still holds; every operation once, until one is not answered.

        Raises Refused when it no longer holds or when controllers contradict one another. Raises Standby and
        FabricUnavailable only where nothing was asked for: it is for another endpoint to do, or this one
        cannot be read.
        """
        before = self.turns.before_looking()
        observation = await self._look()
        if not await self._leads(observation):
            raise StandbyController(observation.domain)
        check_plan(plan, await self.store.read(records.load_intent, observation.domain), observation)
        async with self.turns.act(observation.domain, before) as is_current:
            if not is_current:
                raise Refused("the domain was worked on meanwhile", nearest_fix="plan again")
            outcomes = await self._execute(plan)
        if all(outcome.state != "unknown" for outcome in outcomes):
            with suppress(ConflictingControllers, FabricUnavailable):
                await self._look()
        return outcomes

    async def _look(self) -> DomainObservation:
        """Observe, and record it where that is not possible."""
        try:
            return await self._observe()
        except FabricUnavailable as trouble:
            await self._record_unknown(str(trouble))
            raise

    async def _rounds(self) -> bool:
        refused: dict[PartitionOperation, str] = {}
        for _ in range(MAX_ROUNDS):
            try:
                settled = await self._round(refused)
                if settled is not None:
                    return settled
            except LeaseLost as lost:
                log.info("domain.lease-lost", endpoint=self.endpoint.id, reason=lost.reason)
                return False
            except ConflictingControllers as contradicted:
                self._hear(contradicted.dispute)
                return False
            except Refused as stale:
                # The intent changed between reading and acting: the next round plans from the new one.
                self.meter.refused(self.domain or "")
                log.info("plan.refused", endpoint=self.endpoint.id, reason=stale.reason)
            except FabricUnavailable:
                return False
        log.warning("domain.unsettled", endpoint=self.endpoint.id, rounds=MAX_ROUNDS)
        return False

    async def _round(self, refused: dict[PartitionOperation, str]) -> bool | None:
        """One look, and what follows from it; whether the pass ends settled, None when it goes on.

        What the controller refuses in this pass is added to `refused`, and left to the next pass. What is
        blocked waits for somebody else, so it is looked at again when that is told, or at the next interval.
        """
        before = self.turns.before_looking()
        observation = await self._look()
        if not self.hooks.acts or not await self._leads(observation):
            return True
        plan = await self._plan(observation, refused)
        await self._tell_blocked(plan)
        if not plan.operations:
            self._done = ()
            return not refused
        async with self.turns.act(observation.domain, before) as is_current:
            outcomes = await self._execute(plan) if is_current else ()
        for operation, outcome in zip(plan.operations, outcomes, strict=False):
            if outcome.state == "refused":
                # By its name: tenants read what stands in their way, and the words may hold addresses.
                refused[operation] = outcome.code or ""
        return False if any(one.state == "unknown" for one in outcomes) else None

    async def _leads(self, observation: DomainObservation) -> bool:
        """Whether the reading is of a controller that counts: no plan is made from what a standby lists."""
        if observation.gpus:
            return True
        known = (await self.store.read(latest.latest_of_domain, observation.domain)).observation
        return known is not None and not known.gpus

    async def _tell_blocked(self, plan: PartitionPlan) -> None:
        told = (plan.observation.domain, plan.blocked)
        # What stands in the way of additions is only known once nothing is left to be removed.
        removes = any(isinstance(operation, RemoveGpus | DeletePartition) for operation in plan.operations)
        if removes or told == self._told:
            return
        await self.store.run(records.record_blocked, *told, self.clock())
        self._told = told
        for one in plan.blocked:
            log.info("plan.blocked", domain=told[0], gpus=len(one.guids), reason=one.reason, fix=one.fix)

    async def _observe(self) -> DomainObservation:
        observation = await self.driver.observe()
        self.domain = observation.domain
        dispute = await self.store.run(self.hooks.record, self.endpoint.id, observation, self.clock())
        self.meter.observed(self.endpoint.id, observation)
        if dispute is not None:
            raise ConflictingControllers(dispute)
        self._disputed = None
        return observation

    def _show_others(self, plan: PartitionPlan, outcomes: Collection[OperationOutcome]) -> None:
        """Let the other controllers of the domain be read: a change counts once all have shown it.

        What was refused, not answered, or accepted and not done is asked for in their passes too: by that
        two would wake one another without end.
        """
        asked = zip(plan.operations, outcomes, strict=False)
        done = tuple(operation for operation, outcome in asked if outcome.state == "done")
        if done and done != self._done:
            self.wake(frozenset({plan.observation.domain}))
            self._done = done

    def _hear(self, dispute: ControllerConflict) -> None:
        """Let the other controllers of the domain be read, once: one of them may have looked too long ago."""
        if self._disputed == dispute.domain:
            return
        log.warning("domain.contradicted", domain=dispute.domain, reason=dispute.reason)
        self._disputed = dispute.domain
        self.wake(dispute.domains)

    async def _plan(
        self, observation: DomainObservation, refused: Mapping[PartitionOperation, str]
    ) -> PartitionPlan:
        intent = await self.store.read(records.load_intent, observation.domain)
        plan = None if refused else self._planned_before(intent, observation)
        if plan is None:
            plan = make_plan(intent, observation, refused)
            check_plan(plan, intent, observation)
            self._planned = None if refused else (intent, plan)
        self._note_drift(plan)
        return plan

    def _planned_before(self, intent: DomainIntent, observation: DomainObservation) -> PartitionPlan | None:
        if self._planned is None:
            return None
        known, plan = self._planned
        shown = replace(observation, observed_at=plan.observation.observed_at)
        if (known, plan.observation) != (intent, shown):
            return None
        return replace(plan, observation=observation)

    def _note_drift(self, plan: PartitionPlan) -> None:
        now = (plan.observation.domain, plan.intent_revision)
        if plan.operations and self._met == now:
            self.meter.drifted(plan.observation.domain, len(plan.operations))
        self._met = None if plan.operations or plan.blocked else now

    async def _execute(self, plan: PartitionPlan) -> tuple[OperationOutcome, ...]:
        """Carry out every operation. A refusal does not stop the others; one without an answer does."""
        began = self.clock()
        outcomes: list[OperationOutcome] = []
        try:
            for operation in plan.operations:
                outcomes.append(await self._carry_out(operation, plan))
                if outcomes[-1].state == "unknown":
                    await self._record_unknown(outcomes[-1].message)
                    break
        finally:
            self._show_others(plan, outcomes)
        self.meter.applied(plan.observation.domain, self.clock() - began)
        return tuple(outcomes)

    async def _carry_out(self, operation: PartitionOperation, plan: PartitionPlan) -> OperationOutcome:
        operation_id = await self.store.run(
            records.begin_operation,
            self.hold.lease,
            operation,
            plan.observation.observed_at,
            self.clock(),
        )
        if self.hold.has_ended():
            # Between the record and this line the process may have been stopped for any time.
            await self._finish(operation_id, "refused", None, LEASE_ENDED_REASON)
            raise LeaseLost(LEASE_ENDED_REASON)
        began = self.clock()
        state, code, message = await self._ask(operation)
        await self._finish(operation_id, state, code, message)
        outcome = OperationOutcome(
            kind=str(operation.__struct_config__.tag),
            partition_name=operation.name,
            state=state,
            message=message or "",
            code=code,
        )
        self.meter.operated(self.endpoint.id, operation, outcome, self.clock() - began)
        return outcome

    async def _ask(self, operation: PartitionOperation) -> tuple[str, str | None, str | None]:
        """State, code and message of the answer."""
        try:
            await self.driver.execute(operation)
        except FabricRefused as refusal:
            return "refused", refusal.code, str(refusal)
        except FabricUnavailable as trouble:
            return "unknown", None, str(trouble)
        return "done", None, None

    async def _finish(self, operation_id: str, state: str, code: str | None, message: str | None) -> None:
        log.info(
            "operation", id=operation_id, endpoint=self.endpoint.id, state=state, code=code, message=message
        )
        await self.store.run(records.finish_operation, operation_id, state, code, message, self.clock())

    async def _record_unknown(self, reason: str) -> None:
        self.meter.unreachable(self.endpoint.id, reason)
        log.warning("domain.unknown", endpoint=self.endpoint.id, reason=reason)
        await self.store.run(records.record_unreadable, self.endpoint.id, reason, self.clock())
