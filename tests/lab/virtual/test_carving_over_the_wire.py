"""Observe, plan, check, execute, observe, on a simulated controller that misbehaves."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    CreatePartition,
    DefaultPartitionPolicy,
    DomainIntent,
    DomainObservation,
    GpuAssignment,
    OwnedPartition,
    PartitionPlan,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.lab.switches.fabric import (
    FabricPartition,
    FabricSnapshot,
    SeededNames,
    SimulatedFabric,
    fabrics_of,
)
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.lab.switches.servers import NmxcServer
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

RPCS = (
    "CreatePartition",
    "DeletePartition",
    "AddGpusToPartition",
    "RemoveGpusFromPartition",
    "GetGpuInfoList",
)
CODES = ("RESOURCE_EXHAUSTED", "GENERIC_ERROR", "NOT_READY", "TIMEOUT")
HARMS: tuple[Callable[[NmxcFaults, str, str], None], ...] = (
    lambda faults, rpc, code: faults.refuse_next(rpc, code),
    lambda faults, rpc, _: faults.drop_reply_of_next(rpc),
    lambda faults, rpc, _: faults.omit_header_of_next(rpc),
    lambda faults, rpc, _: faults.hide_partition(DEFAULT_PARTITION_ID, 1),
)


def rack() -> SimulatedFabric:
    (fabric,) = fabrics_of(build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("wire")), "wire")
    return fabric


class Loop:
    """A reconciler with its records in memory: its intent, and the names that it has requested."""

    def __init__(self, fabric: SimulatedFabric, driver: NmxcDriver) -> None:
        self.fabric = fabric
        self.driver = driver
        self.intent = DomainIntent(
            domain=fabric.domain,
            assignments=(),
            owned=(),
            managed=frozenset(fabric.gpus),
            default_partition=DefaultPartitionPolicy.NONE,
            revision=1,
        )
        self.violations: list[FabricPartition] = []
        self.members = {partition.id: frozenset(partition.guids) for partition in fabric.partitions.values()}
        fabric.on_change(self._judge)

    def want(self, wanted: dict[int, str]) -> None:
        """GPU -> logical partition, each of a separate tenant."""
        assignments = tuple(
            GpuAssignment(guid=guid, logical_partition=name, tenant=f"tenant-{name}")
            for guid, name in wanted.items()
        )
        self.intent = msgspec.structs.replace(
            self.intent, assignments=assignments, revision=self.intent.revision + 1
        )

    async def converge(self, rounds: int = 40) -> PartitionPlan:
        """Work until a plan from a reading without contradiction is empty."""
        for _ in range(rounds):
            try:
                plan = self._plan(await self.driver.observe())
                if not (plan.operations or plan.observation.uncertain):
                    return plan
                for operation in plan.operations:
                    if isinstance(operation, CreatePartition):
                        self._record(operation)
                    await self.driver.execute(operation)
            except (FabricRefused, FabricUnavailable):
                continue
        raise AssertionError("no end")

    def _plan(self, observation: DomainObservation) -> PartitionPlan:
        plan = make_plan(self.intent, observation)
        check_plan(plan, self.intent, observation)
        return plan

    def _record(self, operation: CreatePartition) -> None:
        names = {owned.name for owned in self.intent.owned}
        if operation.name not in names:
            mine = OwnedPartition(
                name=operation.name, logical_partition=operation.logical_partition, partition_id=None
            )
            self.intent = msgspec.structs.replace(self.intent, owned=(*self.intent.owned, mine))

    def _judge(self, snapshot: FabricSnapshot) -> None:
        """Called by the fabric at every change: a GPU that joins our partition meets only its own tenant."""
        logical = {assignment.guid: assignment.logical_partition for assignment in self.intent.assignments}
        owner = {owned.name: owned.logical_partition for owned in self.intent.owned}
        for partition in snapshot.partitions:
            gained = set(partition.guids) - self.members.get(partition.id, frozenset())
            if (
                partition.name in owner
                and gained
                and {logical.get(g) for g in partition.guids} != {owner[partition.name]}
            ):
                self.violations.append(partition)
        self.members = {partition.id: frozenset(partition.guids) for partition in snapshot.partitions}

    def seen(self) -> dict[int, str]:
        """GPU -> logical partition in the fabric."""
        owner = {owned.name: owned.logical_partition for owned in self.intent.owned}
        return {
            guid: owner.get(partition.name, partition.name)
            for partition in self.fabric.partitions.values()
            for guid in partition.guids
        }


def carve(scenario: Callable[[Loop, NmxcServer], Awaitable[None]]) -> None:
    async def run() -> None:
        fabric = rack()
        async with NmxcServer(fabric) as server:
            driver = NmxcDriver(server.url, clock=lambda: 0.0)
            try:
                async with asyncio.timeout(30):
                    loop = Loop(fabric, driver)
                    await scenario(loop, server)
                    assert not loop.violations
            finally:
                await driver.close()

    asyncio.run(run())


def test_a_rack_is_carved_moved_and_given_back() -> None:
    async def scenario(loop: Loop, _: NmxcServer) -> None:
        guids = sorted(loop.fabric.gpus)
        for wanted in (
            {guid: "a" if number < 36 else "b" for number, guid in enumerate(guids)},
            {guid: "a" if number % 2 else "b" for number, guid in enumerate(guids)},
            {guid: f"tenant-{number}" for number, guid in enumerate(guids)},
            {},
        ):
            loop.want(wanted)
            plan = await loop.converge()
            assert plan.blocked == ()
            assert loop.seen() == wanted
        assert loop.fabric.partitions == {}

    carve(scenario)


def test_with_keep_everything_ends_where_the_factory_had_it() -> None:
    async def scenario(loop: Loop, _: NmxcServer) -> None:
        loop.intent = msgspec.structs.replace(loop.intent, default_partition=DefaultPartitionPolicy.KEEP)
        first = loop.fabric.snapshot()
        a, b, *_ = sorted(loop.fabric.gpus)
        loop.want({a: "a", b: "b"})
        await loop.converge()
        assert (loop.seen()[a], loop.seen()[b]) == ("a", "b")
        loop.want({})
        await loop.converge()
        assert loop.fabric.snapshot() == first

    carve(scenario)


def test_a_foreign_partition_survives_everything_and_is_reported() -> None:
    async def scenario(loop: Loop, _: NmxcServer) -> None:
        a, b, *_ = sorted(loop.fabric.gpus)
        foreign = FabricPartition(id=77, name="maintenance", guids=(a,))
        loop.fabric.put(foreign)
        loop.want({a: "a", b: "a"})
        plan = await loop.converge()
        assert [blocked.guids for blocked in plan.blocked] == [(a,)]
        loop.want({})
        await loop.converge()
        assert loop.fabric.partitions == {77: foreign}

    carve(scenario)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from(RPCS), st.sampled_from(HARMS), st.sampled_from(CODES)), max_size=8),
    st.lists(
        st.lists(st.sampled_from(("a", "b", "c", "")), min_size=12, max_size=12), min_size=1, max_size=3
    ),
)
@settings(max_examples=25)
def test_whatever_goes_wrong_on_the_way_the_end_is_the_same(
    harms: list[tuple[str, Callable[[NmxcFaults, str, str], None], str]], layouts: list[list[str]]
) -> None:
    async def scenario(loop: Loop, server: NmxcServer) -> None:
        guids = sorted(loop.fabric.gpus)
        for rpc, harm, code in harms:
            harm(server.faults, rpc, code)
        for layout in layouts:
            wanted = {guid: name for guid, name in zip(guids, layout, strict=False) if name}
            loop.want(wanted)
            await loop.converge()
            assert loop.seen() == wanted

    carve(scenario)
