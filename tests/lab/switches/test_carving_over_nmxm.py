"""Observe, plan, check, execute, observe, on a simulated NMX-M that misbehaves: no member is ever lost."""

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.switches.nmxm_server import NmxmServer

from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.protocol import NmxmLogin
from rackloom.core.partitions.domain import (
    CreatePartition,
    DefaultPartitionPolicy,
    DomainIntent,
    GpuAssignment,
    OwnedPartition,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.lab.switches.fabric import FabricGpu, FabricSnapshot, SimulatedFabric
from rackloom.lab.switches.faults import NmxmFault

DOMAIN = "00000000-0000-4000-8000-00000000d001"
GUIDS = tuple(0xDB48_8CB1_7978_4800 + number for number in range(8))
MANY_ROUNDS = 60
REQUESTS = (
    "POST partitions",
    "PUT partitions",
    "DELETE partitions",
    "GET partitions",
    "GET gpus",
    "GET operations",
    "DELETE operations",
)
HARMS = (
    NmxmFault(status=409),
    NmxmFault(status=500),
    NmxmFault(drop_reply=True),
    NmxmFault(fails="GENERIC_ERROR"),
    NmxmFault(stalls=True),
    NmxmFault(garbage=True),
)
Harm = tuple[str, NmxmFault]


class Time:
    """A clock that moves only during sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0.001)


async def login() -> NmxmLogin:
    return NmxmLogin("rw-user", "simulated")


def rack() -> SimulatedFabric:
    """Two trays of four GPUs."""
    return SimulatedFabric(
        DOMAIN,
        (
            FabricGpu(
                guid=guid,
                chassis_serial="C",
                chassis_id=0,
                slot=number // 4,
                host_id=number // 4 + 1,
                tray_index=number // 4,
                module_id=number % 4 + 1,
            )
            for number, guid in enumerate(GUIDS)
        ),
    )


class Loop:
    """A reconciler with its records in memory, and a judge of every change of the fabric."""

    def __init__(self, fabric: SimulatedFabric, driver: NmxmDriver, policy: DefaultPartitionPolicy) -> None:
        self.fabric = fabric
        self.driver = driver
        self.intent = DomainIntent(
            domain=DOMAIN,
            assignments=(),
            owned=(),
            managed=frozenset(GUIDS),
            default_partition=policy,
            revision=1,
        )
        self.violations: list[str] = []
        self._wanted_since: dict[int, str] = {}
        self._members = {partition.name: set(partition.guids) for partition in fabric.partitions.values()}
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

    async def converge(self, resume: Callable[[], None]) -> None:
        """Work until a plan is empty. Stalled operations go on now and then, in the middle of other work."""
        for number in range(MANY_ROUNDS):
            if number % 5 == 4:
                resume()
            try:
                observation = await self.driver.observe()
                plan = make_plan(self.intent, observation)
                check_plan(plan, self.intent, observation)
                if not plan.operations:
                    assert plan.blocked == ()
                    return
                for operation in plan.operations:
                    if isinstance(operation, CreatePartition):
                        self._record(operation)
                    await self.driver.execute(operation)
            except (FabricRefused, FabricUnavailable):
                await asyncio.sleep(0.002)
        raise AssertionError("no end")

    def seen(self) -> dict[int, str]:
        """GPU -> name of its partition."""
        return {
            guid: partition.name for partition in self.fabric.partitions.values() for guid in partition.guids
        }

    def _record(self, operation: CreatePartition) -> None:
        if operation.name not in {owned.name for owned in self.intent.owned}:
            mine = OwnedPartition(
                name=operation.name, logical_partition=operation.logical_partition, partition_id=None
            )
            self.intent = msgspec.structs.replace(self.intent, owned=(*self.intent.owned, mine))

    def _judge(self, snapshot: FabricSnapshot) -> None:
        """A GPU joins only GPUs of its logical partition. It stays if it is wanted in its partition."""
        logical = {assignment.guid: assignment.logical_partition for assignment in self.intent.assignments}
        owner = {owned.name: owned.logical_partition for owned in self.intent.owned}
        now = {partition.name: set(partition.guids) for partition in snapshot.partitions}
        for name, members in now.items():
            gained = members - self._members.get(name, set())
            if gained and {logical.get(guid) for guid in members} != {logical.get(min(gained))}:
                self.violations.append(f"{name} gained {gained} and holds {members}")
        for name, members in self._members.items():
            for guid in members - now.get(name, set()):
                if name in owner and logical.get(guid) == owner[name]:
                    self.violations.append(f"{name} lost {guid:#x}")
        self._members = now


def carve(
    policy: DefaultPartitionPolicy,
    harms: list[Harm],
    layouts: list[dict[int, str]],
    on_change: Callable[[Loop], None],
) -> None:
    async def run() -> None:
        fabric = rack()
        async with NmxmServer([fabric]) as server:
            time = Time()
            driver = NmxmDriver(
                server.url,
                login,
                clock=time,
                sleep=time.sleep,
                domain=DOMAIN,
                operation_seconds=3.0,
            )
            try:
                async with asyncio.timeout(120):
                    loop = Loop(fabric, driver, policy)
                    for request, fault in harms:
                        server.faults.next(request, fault)
                    for wanted in layouts:
                        loop.want(wanted)
                        await loop.converge(server.service.operations.resume)
                        on_change(loop)
                    assert not loop.violations
            finally:
                await driver.close()

    asyncio.run(run())


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from(REQUESTS), st.sampled_from(HARMS)), max_size=8),
    st.lists(st.lists(st.sampled_from(("a", "b", "c", "")), min_size=8, max_size=8), min_size=1, max_size=3),
    st.sampled_from((DefaultPartitionPolicy.NONE, DefaultPartitionPolicy.TRAY)),
)
@settings(max_examples=20)
def test_whatever_goes_wrong_on_the_way_the_end_is_the_same(
    harms: list[Harm], layouts: list[list[str]], policy: DefaultPartitionPolicy
) -> None:
    asked = [{guid: name for guid, name in zip(GUIDS, layout, strict=True) if name} for layout in layouts]

    def judge(loop: Loop) -> None:
        wanted = {
            assignment.guid: f"rl-{assignment.logical_partition}" for assignment in loop.intent.assignments
        }
        if policy is DefaultPartitionPolicy.TRAY:
            trays = {guid: f"rl-tray-C-{number // 4}" for number, guid in enumerate(GUIDS)}
            wanted = trays | wanted
        assert loop.seen() == wanted

    carve(policy, harms, asked, judge)
