"""A permanent refusal holds up only the changes that need it, and these are reported as blocked."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable
from rackloom.carve.inventory import endpoints
from rackloom.carve.partitions import intent
from rackloom.carve.reconcile import records
from rackloom.carve.reconcile.domain_pass import MAX_ROUNDS, DomainPass, DomainTurns, LeaseGuard
from rackloom.carve.store import schema
from rackloom.carve.store.journal import OperatorOrder
from rackloom.core.partitions.domain import (
    AddGpus,
    BlockedGpus,
    CreatePartition,
    DefaultPartitionPolicy,
    DeletePartition,
    DomainIntent,
    DomainLimits,
    DomainObservation,
    GpuAssignment,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    OwnedPartition,
    PartitionHealth,
    PartitionOperation,
    RemoveGpus,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan

GUIDS = range(1, 9)


def observed(limit: int | None = None, **members: tuple[int, ...]) -> DomainObservation:
    return DomainObservation(
        domain="d",
        gpus=tuple(
            ObservedGpu(
                guid=guid,
                chassis_serial="C",
                slot=guid // 4,
                tray_index=0,
                module_id=guid,
                health=GpuHealth.HEALTHY,
            )
            for guid in GUIDS
        ),
        partitions=tuple(
            ObservedPartition(
                id=number,
                name=name,
                members=frozenset(guids),
                health=PartitionHealth.HEALTHY,
                guid_based=True,
                multicast_groups=0,
            )
            for number, (name, guids) in enumerate(members.items(), 1)
        ),
        limits=DomainLimits(max_partitions=limit),
        observed_at=0.0,
    )


def intended(*owned: str, **wanted: tuple[int, ...]) -> DomainIntent:
    return DomainIntent(
        domain="d",
        assignments=tuple(
            GpuAssignment(guid=guid, logical_partition=lp, tenant=f"tenant of {lp}")
            for lp, guids in wanted.items()
            for guid in guids
        ),
        owned=tuple(OwnedPartition(name=f"p-{lp}", logical_partition=lp, partition_id=1) for lp in owned),
        managed=frozenset(GUIDS),
        default_partition=DefaultPartitionPolicy.NONE,
        revision=1,
    )


def after_refusal(intent: DomainIntent, observation: DomainObservation) -> tuple[PartitionOperation, Any]:
    """The one operation that comes first, and the plan that is made once that was refused."""
    (first,) = make_plan(intent, observation).operations
    plan = make_plan(intent, observation, {first: "GENERIC_ERROR"})
    check_plan(plan, intent, observation)
    return first, plan


def test_additions_that_need_nothing_of_a_refused_removal_go_on() -> None:
    intent = intended("old", old=(), new=(3, 4))
    first, plan = after_refusal(intent, observed(**{"p-old": (1, 2)}))
    assert first == DeletePartition(partition_id=1, name="p-old")
    (made,) = plan.operations
    assert isinstance(made, CreatePartition)
    assert (made.logical_partition, made.guids) == ("new", (3, 4))
    (blocked,) = plan.blocked
    assert blocked.guids == (1, 2)
    assert "refused delete-partition on partition 1: GENERIC_ERROR" in blocked.reason


def test_a_gpu_that_may_not_leave_joins_nothing() -> None:
    intent = intended("old", old=(2,), new=(1, 3))
    first, plan = after_refusal(intent, observed(**{"p-old": (1, 2)}))
    assert first == RemoveGpus(partition_id=1, name="p-old", guids=(1,))
    (made,) = plan.operations
    assert isinstance(made, CreatePartition)
    assert made.guids == (3,)


def test_nobody_joins_the_partition_that_a_gpu_may_not_leave() -> None:
    intent = intended("old", old=(2, 5))
    _, plan = after_refusal(intent, observed(**{"p-old": (1, 2)}))
    assert plan.operations == ()
    assert {guid for blocker in plan.blocked for guid in blocker.guids} == {1, 5}


def test_a_partition_that_may_not_be_deleted_still_counts() -> None:
    intent = intended("old", old=(), new=(3,))
    _, plan = after_refusal(intent, observed(1, **{"p-old": (1, 2)}))
    assert plan.operations == ()
    assert any("1 partitions of at most 1" in blocker.reason for blocker in plan.blocked)


def test_a_refused_addition_holds_up_no_other() -> None:
    intent = intended(a=(1,), b=(2,))
    first, other = make_plan(intent, observed()).operations
    assert make_plan(intent, observed(), {first: "no"}).operations == (other,)


class Switch:
    """A controller that may refuse every removal of one partition, as a driver shows it."""

    def __init__(self, site: Any, domain: str) -> None:
        self.site, self.domain = site, domain
        self.refuses = ""
        self.asked: list[PartitionOperation] = []
        self.after: Callable[[], Awaitable[None]] | None = None
        """Another action that happens while it carries out an operation."""
        self.woken: list[frozenset[str]] = []
        """For which domains the others were woken."""

    async def observe(self) -> DomainObservation:
        seen: DomainObservation = self.site.observation(self.domain, at=self.site.tick())
        return seen

    async def execute(self, operation: PartitionOperation) -> int:
        self.asked.append(operation)
        standing = self.site.partitions[self.domain]
        if operation.name == self.refuses:
            raise FabricRefused("GENERIC_ERROR", "not today, says ipv4:10.20.30.40:9370")
        if isinstance(operation, DeletePartition):
            del standing[operation.name]
        elif isinstance(operation, RemoveGpus):
            standing[operation.name] -= frozenset(operation.guids)
        elif isinstance(operation, AddGpus):
            standing[operation.name] |= frozenset(operation.guids)
        else:
            standing[operation.name] = frozenset(operation.guids)
        if self.after is not None:
            await self.after()
        return 1

    async def notifications(self) -> Any:
        await asyncio.Event().wait()
        yield

    async def close(self) -> None:
        return


@pytest.fixture
def switch(small_site: Any) -> Switch:
    small_site.observe_all()
    return Switch(small_site, next(iter(small_site.endpoint)))


def run_pass(site: Any, switch: Switch) -> bool:
    async def one_pass() -> bool:
        found = await site.store.read(endpoints.all_endpoints)
        endpoint = next(candidate for candidate in found if candidate.domain == switch.domain)
        hold = LeaseGuard(lease, float("inf"))
        wake = switch.woken.append
        work = DomainPass(endpoint, hold, switch, site.store, site.tick, DomainTurns(), wake=wake)
        return await work.run()

    lease = site.lease(switch.domain)
    settled: bool = site.runner.run(one_pass())
    return settled


def test_a_refused_removal_is_told_and_tried_again(small_site: Any, switch: Switch) -> None:
    domain = switch.domain
    small_site.finish(small_site.begin_create(domain, "nobody's", "old", frozenset()))
    small_site.partitions[domain] = {"old": frozenset({small_site.guid(domain, 0, 0)})}
    switch.refuses = "old"
    assert run_pass(small_site, switch) is False, "a refusal is tried again soon"
    assert [type(operation) for operation in switch.asked] == [DeletePartition]
    blocked = small_site.read(intent.blocked_gpus_of_domain, domain)
    # By number, and by the name of the refusal: a tenant reads this. The words are in the audit.
    reason = "the switch controller refused delete-partition on partition 1: GENERIC_ERROR"
    assert [(row.guid, row.reason) for row in blocked] == [(str(small_site.guid(domain, 0, 0)), reason)]
    messages = small_site.read(
        lambda conn: conn.execute(sa.select(schema.operation.c.message)).scalars().all()
    )
    assert messages[-1] == "not today, says ipv4:10.20.30.40:9370"
    # Two that are refused the same would else wake one another without end.
    assert switch.woken == []
    switch.refuses = ""
    assert run_pass(small_site, switch) is True
    assert small_site.read(intent.blocked_gpus_of_domain, domain) == []
    assert switch.woken == [frozenset({domain})]


def test_an_unanswered_operation_wakes_the_others_once_it_is_seen_done(
    small_site: Any, switch: Switch
) -> None:
    domain = switch.domain
    small_site.finish(small_site.begin_create(domain, "nobody's", "old", frozenset()))
    standing = {"old": frozenset({small_site.guid(domain, 0, 0)})}
    small_site.partitions[domain] = dict(standing)

    async def lose_unexecuted() -> None:
        small_site.partitions[domain] = dict(standing)
        raise FabricUnavailable("no answer")

    async def lose() -> None:
        raise FabricUnavailable("no answer")

    switch.after = lose_unexecuted
    assert run_pass(small_site, switch) is False
    assert switch.woken == []
    (row,) = small_site.read(intent.blocked_gpus_of_domain, domain)
    assert row.reason.startswith("the outcome of delete-partition on partition 1 is unknown")
    switch.after = lose
    assert run_pass(small_site, switch) is True
    assert switch.woken == [frozenset({domain})]
    assert small_site.read(intent.blocked_gpus_of_domain, domain) == []


def test_what_is_accepted_and_never_done_wakes_the_others_once(small_site: Any, switch: Switch) -> None:
    domain = switch.domain
    small_site.finish(small_site.begin_create(domain, "nobody's", "old", frozenset()))
    standing = {"old": frozenset({small_site.guid(domain, 0, 0)})}
    small_site.partitions[domain] = dict(standing)

    async def undo() -> None:
        small_site.partitions[domain] = dict(standing)

    switch.after = undo
    assert run_pass(small_site, switch) is False
    assert len(switch.asked) == MAX_ROUNDS
    assert switch.woken == [frozenset({domain})]


def test_what_was_done_before_the_plan_broke_off_is_looked_at_through_the_others(
    small_site: Any, switch: Switch
) -> None:
    domain = switch.domain
    for number in range(2):
        small_site.finish(small_site.begin_create(domain, "nobody's", f"old-{number}", frozenset()))
        small_site.partitions[domain][f"old-{number}"] = frozenset({small_site.guid(domain, number, 0)})

    async def pause() -> None:
        await small_site.store.run(
            intent.pause_domain, domain, OperatorOrder("an operator", "test", small_site.tick())
        )

    switch.after = pause
    run_pass(small_site, switch)
    assert len(switch.asked) == 1
    assert switch.woken == [frozenset({domain})]


def test_what_is_blocked_is_no_failure_and_is_told(small_site: Any, switch: Switch) -> None:
    domain = switch.domain
    guid = small_site.guid(domain, 0, 0)
    reason = BlockedGpus(guids=(guid,), reason="somebody has it", fix="ask them")
    small_site.run(records.record_blocked, domain, [reason], 5.0)
    small_site.run(records.record_blocked, domain, [reason], 6.0)
    (row,) = small_site.read(intent.blocked_gpus_of_domain, domain)
    assert (row.reason, row.fix, row.since) == ("somebody has it", "ask them", 5.0)
    assert run_pass(small_site, switch) is True
    assert small_site.read(intent.blocked_gpus_of_domain, domain) == []
