"""Bugs of the kind that has been reported of real control planes, planted one at a time, must be found.

A simulation that finds nothing is worth what it can find. Each bug is a small change of production code; the
same seeds pass without it.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.api import interfaces as rest_interfaces
from rackloom.carve.fabric.nmxc import driver, session
from rackloom.carve.plan import additions, planner, removals, trays
from rackloom.carve.plan.values import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DefaultPartition,
    DeletePartition,
    Limits,
    OwnedPartition,
    Plan,
)
from rackloom.carve.reconcile import domain, domain_loop, loop
from rackloom.carve.site import (
    disputes,
    drains,
    endpoints,
    fabric_book,
    holdings,
    instances,
    intents,
    interfaces,
    knowledge,
    learn,
    logical_partitions,
    ownership,
    pauses,
    settle,
    tables,
    taking_over,
)
from rackloom.carve.site.store import Store
from rackloom.twin.simfaults import KINDS, LIES
from rackloom.twin.simrun import Plan as SimPlan
from rackloom.twin.simrun import simulate

Bug = Callable[[pytest.MonkeyPatch], None]

CALM = SimPlan(pause=None, seconds=400, think=12)
BUSY = SimPlan(pause=None, seconds=300, think=3, patience=4.0)
PROMPT = SimPlan(pause=None, seconds=300, think=12, patience=8.0)


def only(*kinds: str, pause: float = 15, think: float = 12) -> SimPlan:
    return SimPlan(seconds=400, think=think, pause=pause, kinds={kind: KINDS[kind] for kind in kinds})


def return_code_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(session, "require_success", lambda rpc, reply: reply.server_header)


def stale_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fabric_book, "record_unknown", lambda *_: None)


def removal_reported_but_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settle, "why_not_released", lambda *_, **__: None)


def update_drops_members(patch: pytest.MonkeyPatch) -> None:
    execute = driver.NmxcDriver.execute

    async def full_list(self: Any, operation: Any) -> int:
        if not isinstance(operation, AddGpus):
            return await execute(self, operation)
        await execute(self, DeletePartition(partition_id=operation.partition_id, name=operation.name))
        made = CreatePartition(name=operation.name, logical_partition="", guids=operation.guids)
        return await execute(self, made)

    patch.setattr(driver.NmxcDriver, "execute", full_list)


def one_domain_is_skipped(patch: pytest.MonkeyPatch) -> None:
    run = domain.DomainPass.run
    first: list[str] = []

    async def early(self: Any) -> bool:
        first.append(self.endpoint.url)
        return await run(self) if self.endpoint.url == min(first) else True

    patch.setattr(domain.DomainPass, "run", early)


def additions_before_removals(patch: pytest.MonkeyPatch) -> None:
    plan_removals = planner.plan_removals

    def hasty(intent: Any, wishes: Any, layout: Any, blockers: Any) -> Any:
        return [] if wishes.partition_of else plan_removals(intent, wishes, layout, blockers)

    def joining(wishes: Any, layout: Any, blocked: Any) -> Any:
        wanted: dict[str, list[int]] = {}
        for guid, partition in sorted(wishes.partition_of.items()):
            home = layout.home.get(partition)
            if home is None or guid not in home.partition.members:
                wanted.setdefault(partition, []).append(guid)
        return sorted((name, tuple(guids)) for name, guids in wanted.items())

    patch.setattr(planner, "plan_removals", hasty)
    patch.setattr(additions, "_joining", joining)
    patch.setattr(domain, "check", lambda *_: None)


def owned_by_number_in_any_domain(patch: pytest.MonkeyPatch) -> None:
    read_layout = planner.read_layout

    def by_number(intent: Any, observation: Any, wishes: Any) -> Any:
        # The first partition of the one domain is number 1, and so is the first of any other.
        owned = tuple(
            OwnedPartition(name=one.name, logical_partition="elsewhere", partition_id=one.id)
            for one in observation.partitions
            if one.id == 1
        )
        return read_layout(msgspec.structs.replace(intent, owned=intent.owned + owned), observation, wishes)

    patch.setattr(planner, "read_layout", by_number)
    patch.setattr(domain, "check", lambda *_: None)


def released_machine_leaves_its_gpus(patch: pytest.MonkeyPatch) -> None:
    managed = holdings.managed

    def with_instances_only(conn: sa.Connection, of: str | None) -> frozenset[int]:
        held = (
            sa.select(tables.machine_gpu.c.guid)
            .join(tables.instance, tables.instance.c.machine_id == tables.machine_gpu.c.machine_id)
            .where(tables.instance.c.status != "Terminating", tables.machine_gpu.c.guid.is_not(None))
        )
        return managed(conn, of) & {int(guid) for guid in conn.execute(held).scalars()}

    patch.setattr(holdings, "managed", with_instances_only)
    patch.setattr(settle, "why_not_released", lambda *_, **__: None)


def ready_in_somebody_elses_partition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settle, "why_not_isolated", lambda *_: None)


def unknown_partitions_deleted(patch: pytest.MonkeyPatch) -> None:
    make_plan = planner.make_plan

    def thorough(intent: Any, observation: Any, *rest: Any) -> Plan:
        plan = make_plan(intent, observation, *rest)
        ours = {one.name for one in intent.owned}
        strange = [
            DeletePartition(partition_id=one.id, name=one.name)
            for one in observation.partitions
            if one.name not in ours and one.id != DEFAULT_PARTITION_ID
        ]
        return msgspec.structs.replace(plan, operations=tuple(strange)) if strange else plan

    patch.setattr(domain, "make_plan", thorough)
    patch.setattr(domain, "check", lambda *_: None)


def deleted_logical_partition_leaves_a_partition(patch: pytest.MonkeyPatch) -> None:
    delete = logical_partitions.delete

    def forgetful(conn: sa.Connection, tenant: str, partition: str, now: float) -> Any:
        changed = delete(conn, tenant, partition, now)
        table = tables.owned_partition
        conn.execute(sa.delete(table).where(table.c.logical_partition_id == partition))
        return changed

    patch.setattr(logical_partitions, "delete", forgetful)


def empty_list_ignored(patch: pytest.MonkeyPatch) -> None:
    update = instances.update

    def lenient(*args: Any, wishes: Any, **fields: Any) -> Any:
        return update(*args, wishes=wishes or None, **fields)

    patch.setattr(instances, "update", lenient)


def status_from_an_old_observation(patch: pytest.MonkeyPatch) -> None:
    for name in ("why_not_joined", "why_not_isolated"):
        judge = getattr(settle, name)

        def timeless(gpu: Any, facts: Any, judge: Any = judge) -> Any:
            return judge(msgspec.structs.replace(gpu, intent_at=0.0), facts)

        patch.setattr(settle, name, timeless)


def retried_write_is_made_twice(patch: pytest.MonkeyPatch) -> None:
    run, number = Store.run, count(1)

    async def impatient(self: Store, fn: Any, *args: Any, **kwargs: Any) -> Any:
        result = await run(self, fn, *args, **kwargs)
        if getattr(fn, "__name__", "") in ("_create", "make") and next(number) % 3 == 0:
            again = {**kwargs}
            result = await run(self, fn, *args, **again)
        return result

    patch.setattr(Store, "run", impatient)
    patch.setattr(logical_partitions, "_check_name", lambda *_: None)


def wrong_tenant_in_a_partition(patch: pytest.MonkeyPatch) -> None:
    assignments = intents.assignments

    def mixed(conn: sa.Connection, of: str) -> Any:
        found = assignments(conn, of)
        return tuple(
            msgspec.structs.replace(one, logical_partition=found[0].logical_partition, tenant=found[0].tenant)
            for one in found
        )

    patch.setattr(intents, "assignments", mixed)


def one_name_for_two(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(additions, "partition_name", lambda logical_partition: "rl-shared")


def wake_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop.Reconciler, "wake", lambda *_: None)


def wake_cleared_after_the_pass(patch: pytest.MonkeyPatch) -> None:
    pass_ = domain_loop.DomainLoop._pass

    async def deaf(self: Any) -> bool:
        settled = await pass_(self)
        self.woken.clear()
        return settled

    patch.setattr(domain_loop.DomainLoop, "_pass", deaf)
    wait = domain_loop.DomainLoop._wait

    async def sleepy(self: Any, seconds: float) -> None:
        await asyncio.sleep(0.5)  # "let things calm down first"
        self.woken.clear()
        await wait(self, max(seconds, 60.0))

    patch.setattr(domain_loop.DomainLoop, "_wait", sleepy)


def partial_list_believed(patch: pytest.MonkeyPatch) -> None:
    read = driver.read_partitions
    patch.setattr(driver, "read_partitions", lambda infos, gpus: read(infos, ()))


def ownership_recorded_after_the_fact(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership, "claim", lambda *_: None)
    finish = fabric_book.finish_operation

    def late(conn: sa.Connection, operation_id: str, state: str, *rest: Any) -> None:
        finish(conn, operation_id, state, *rest)
        row = conn.execute(
            sa.select(tables.operation).where(tables.operation.c.id == int(operation_id))
        ).one()
        known = {one.name for one in ownership.of_domain(conn, row.domain)}
        if state == "done" and row.kind == "create-partition" and row.partition_name not in known:
            owned = {
                "domain": row.domain,
                "name": row.partition_name,
                "operation_id": row.id,
                "created": row.started,
            }
            partition = row.detail["logical_partition"]
            conn.execute(sa.insert(tables.owned_partition).values(**owned, logical_partition_id=partition))

    patch.setattr(fabric_book, "finish_operation", late)
    patch.setattr(fabric_book, "_check_still_wanted", lambda *_: None)


def gpus_of_strangers_touched(patch: pytest.MonkeyPatch) -> None:
    def all_of_it(default: Any, *_: Any) -> Any:
        return DeletePartition(partition_id=default.id, name=default.name)

    patch.setattr(removals, "_of_default", all_of_it)
    patch.setattr(domain, "check", lambda *_: None)


def anybodys_logical_partition_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(interfaces, "_check_partitions", lambda *_: None)


def everybodys_interfaces_listed(patch: pytest.MonkeyPatch) -> None:
    def all_of_them(conn: sa.Connection, org: str, query: Any) -> Any:
        return rest_interfaces._page(conn, rest_interfaces._tenant(conn, org), interfaces.listing(), query)

    patch.setattr(rest_interfaces, "_list_all", all_of_them)


def unknown_for_ever(patch: pytest.MonkeyPatch) -> None:
    put = knowledge._put

    def sticky(conn: sa.Connection, endpoint_id: str, **values: Any) -> None:
        if values.get("unknown_since", 0) is None:
            values = {key: value for key, value in values.items() if not key.startswith("unknown")}
        put(conn, endpoint_id, **values)

    patch.setattr(knowledge, "_put", sticky)


def swapped_tray_not_noticed(patch: pytest.MonkeyPatch) -> None:
    write = learn._write

    def first_sight_only(conn: sa.Connection, changed: Any, known: Any) -> None:
        new = {at: gpu for at, gpu in changed.items() if known.get(at, (None, 0))[0] is None}
        if new:
            write(conn, new, known)

    patch.setattr(learn, "_write", first_sight_only)


def one_slow_domain_holds_up_the_others(patch: pytest.MonkeyPatch) -> None:
    run = domain.DomainPass.run
    gates: dict[Any, asyncio.Lock] = {}

    async def in_turn(self: Any) -> bool:
        async with gates.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            return await run(self)

    patch.setattr(domain.DomainPass, "run", in_turn)


def name_forgotten_when_a_list_omits_it(patch: pytest.MonkeyPatch) -> None:
    def hasty(_conn: Any, row: Any, observed_at: float, _now: float) -> bool:
        return bool(row.seen_at is not None and row.seen_at < observed_at)

    patch.setattr(ownership, "_is_gone", hasty)


def interfaces_of_a_released_instance_stay_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(interfaces, "detach_all", lambda *_: None)
    patch.setattr(settle, "_note_leaving", lambda *_: None)


def free_gpus_of_all_trays_together(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trays, "tray_of", lambda _: "tray-all")
    patch.setattr(domain, "check", lambda *_: None)


def ownership_lost_with_the_domain_uuid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ownership, "follow", lambda *_: None)


def pause_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pauses, "reason", lambda *_: None)


def limit_of_the_domain_ignored(patch: pytest.MonkeyPatch) -> None:
    make_plan = planner.make_plan

    def boundless(intent: Any, observation: Any, *rest: Any) -> Plan:
        roomy = msgspec.structs.replace(observation, limits=Limits())
        plan = make_plan(intent, roomy, *rest)
        return msgspec.structs.replace(plan, observation=observation)

    patch.setattr(domain, "make_plan", boundless)
    patch.setattr(domain, "check", lambda *_: None)


def ended_drain_not_announced(patch: pytest.MonkeyPatch) -> None:
    machine, gpu, drain = tables.machine, tables.machine_gpu, tables.drain
    ever = (
        sa.select(gpu.c.guid)
        .join(machine, machine.c.id == gpu.c.machine_id)
        .join(drain, drain.c.machine_id == machine.c.id)
        .where(machine.c.domain == sa.bindparam("domain"), gpu.c.guid.is_not(None))
    )
    patch.setattr(drains, "_GPUS", ever)


def newest_of_two_controllers_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(disputes, "judge", lambda *_: None)


def contradiction_told_and_not_minded(patch: pytest.MonkeyPatch) -> None:
    compare = taking_over.compare
    patch.setattr(taking_over, "compare", lambda *told: compare(*told) and None)
    patch.setattr(disputes, "of_endpoint", lambda conn, one: (endpoints.domain_of(conn, one), None))


LYING = SimPlan(seconds=400, think=12, pause=30, kinds=LIES)
CRAMPED = SimPlan(pause=None, seconds=400, think=6, max_partitions=1)
WATCHFUL = SimPlan(pause=None, seconds=400, think=6, operator=8)
DARK = SimPlan(pause=None, seconds=300, think=12, patience=2.0, dark_rack=True)

BUGS: dict[Bug, SimPlan] = {
    return_code_ignored: only("refused", "kill", pause=4),
    stale_synced: only("unreachable", "dark"),
    removal_reported_but_not_seen: only("refused", "reply-lost", "slow", pause=6),
    update_drops_members: CALM,
    one_domain_is_skipped: CALM,
    additions_before_removals: CALM,
    owned_by_number_in_any_domain: only("by-hand"),
    released_machine_leaves_its_gpus: CALM,
    ready_in_somebody_elses_partition: only("by-hand"),
    unknown_partitions_deleted: only("by-hand"),
    deleted_logical_partition_leaves_a_partition: only("slow", "dark", pause=8, think=3),
    empty_list_ignored: CALM,
    status_from_an_old_observation: CALM,
    retried_write_is_made_twice: CALM,
    wrong_tenant_in_a_partition: CALM,
    one_name_for_two: CALM,
    wake_lost: PROMPT,
    wake_cleared_after_the_pass: BUSY,
    partial_list_believed: only("list-omits", "reply-lost", pause=1.5, think=3),
    ownership_recorded_after_the_fact: only("reply-lost", "kill-soon", pause=8),
    gpus_of_strangers_touched: CALM,
    anybodys_logical_partition_accepted: CALM,
    everybodys_interfaces_listed: CALM,
    unknown_for_ever: only("unreachable", "restart"),
    swapped_tray_not_noticed: only("tray-swapped"),
    one_slow_domain_holds_up_the_others: DARK,
    name_forgotten_when_a_list_omits_it: only("list-omits", "tray-away", pause=5),
    interfaces_of_a_released_instance_stay_ready: only("unreachable", "dark", pause=8, think=4),
    free_gpus_of_all_trays_together: msgspec.structs.replace(CALM, free_gpus=DefaultPartition.TRAY),
    ownership_lost_with_the_domain_uuid: only("new-domain-uuid", pause=60),
    pause_ignored: WATCHFUL,
    limit_of_the_domain_ignored: CRAMPED,
    ended_drain_not_announced: CALM,
    newest_of_two_controllers_believed: LYING,
    contradiction_told_and_not_minded: LYING,
}

SEEDS = 8


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_it_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert any(simulate(seed, BUGS[bug]).broken for seed in range(SEEDS)), f"{SEEDS} seeds pass with it"


@pytest.mark.parametrize("plan", {id(plan): plan for plan in BUGS.values()}.values())
def test_without_it_the_same_runs_pass(plan: SimPlan) -> None:
    assert simulate(0, plan).broken is None
