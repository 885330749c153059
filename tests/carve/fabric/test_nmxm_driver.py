"""The NMX-M driver against a simulated server over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.session import Login
from rackloom.carve.fabric.ports import FabricDriver, FabricRefused, FabricUnavailable
from rackloom.carve.plan.values import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    GpuHealth,
    Limits,
    Observation,
    RemoveGpus,
)
from rackloom.twin.fabric import FabricGpu, FabricPartition, FabricSnapshot, SimulatedFabric
from rackloom.twin.nmxc_server import NmxcServer
from rackloom.twin.nmxm_faults import NmxmFault
from rackloom.twin.nmxm_server import NmxmServer

DEFAULT = DeletePartition(partition_id=DEFAULT_PARTITION_ID, name="Default Partition")
Scenario = Callable[[NmxmServer, NmxmDriver], Awaitable[None]]


class Time:
    """A clock that only sleeping moves, so that deadlines cost no time."""

    def __init__(self) -> None:
        self.now = 12.5

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0.005)


async def login() -> Login:
    return Login("rw-user", "simulated")


@asynccontextmanager
async def rig(
    *fabrics: SimulatedFabric, seconds: float = 0.0, **options: Any
) -> AsyncIterator[tuple[NmxmServer, NmxmDriver]]:
    time = Time()
    async with NmxmServer(fabrics, seconds=seconds) as server:
        options = {"login": login, "chassis_serials": ["CHASSIS-A"]} | options
        driver = NmxmDriver(server.url, clock=time, sleep=time.sleep, **options)
        try:
            async with asyncio.timeout(30):
                yield server, driver
        finally:
            await driver.close()


def run(scenario: Scenario, *fabrics: SimulatedFabric, **options: Any) -> None:
    async def opened() -> None:
        async with rig(*fabrics, **options) as (server, driver):
            await scenario(server, driver)

    asyncio.run(opened())


def create(*guids: int, name: str = "rl-a") -> CreatePartition:
    return CreatePartition(name=name, logical_partition="a", guids=guids)


def same_but_for_what_nmx_m_does_not_tell(seen: Observation) -> Observation:
    partitions = tuple(msgspec.structs.replace(one, multicast_groups=0) for one in seen.partitions)
    return msgspec.structs.replace(seen, partitions=partitions, limits=Limits(), observed_at=0.0)


def test_it_is_a_fabric_driver(fabric: SimulatedFabric) -> None:
    async def scenario(_: NmxmServer, driver: NmxmDriver) -> None:
        typed: FabricDriver = driver
        assert (await typed.observe()).observed_at == 12.5

    run(scenario, fabric)


def test_both_drivers_see_the_same_domain(fabric: SimulatedFabric) -> None:
    a, b, c, d, *_ = sorted(fabric.gpus)
    fabric.put(FabricPartition(id=7, name="seven", guids=(a, b)))
    fabric.put(FabricPartition(id=8, name="seats", guids=(c,), guid_based=False))
    fabric.set_health(d, GpuHealth.DEGRADED_BANDWIDTH)

    async def scenario(_: NmxmServer, driver: NmxmDriver) -> None:
        async with NmxcServer(fabric) as other:
            nmxc = NmxcDriver(other.url, clock=lambda: 0.0)
            theirs = await nmxc.observe()
            await nmxc.close()
        ours = await driver.observe()
        assert same_but_for_what_nmx_m_does_not_tell(ours) == same_but_for_what_nmx_m_does_not_tell(theirs)

    run(scenario, fabric)


def test_a_partition_lives(fabric: SimulatedFabric) -> None:
    a, b, c, *_ = sorted(fabric.gpus)

    async def scenario(_: NmxmServer, driver: NmxmDriver) -> None:
        async def members() -> dict[int, frozenset[int]]:
            return {one.id: one.members for one in (await driver.observe()).partitions}

        await driver.observe()
        assert await driver.execute(DEFAULT) == DEFAULT_PARTITION_ID
        assert await driver.execute(create(a)) == 1
        assert await members() == {1: {a}}
        assert await driver.execute(AddGpus(partition_id=1, name="rl-a", guids=(b, c))) == 1
        assert await members() == {1: {a, b, c}}
        assert await driver.execute(RemoveGpus(partition_id=1, name="rl-a", guids=(a,))) == 1
        assert await members() == {1: {b, c}}
        assert await driver.execute(DeletePartition(partition_id=1, name="rl-a")) == 1
        assert await members() == {}

    run(scenario, fabric, seconds=0.02)


@pytest.mark.parametrize(
    ("request_kind", "fault", "told"),
    [
        ("GET chassis", NmxmFault(status=401), "Hello: UNAUTHENTICATED"),
        ("GET chassis", NmxmFault(status=503), "Hello: UNAVAILABLE"),
        ("GET gpus", NmxmFault(status=500), "GetGpus: INTERNAL"),
        ("GET partitions", NmxmFault(status=404), "GetPartitions: NOT_FOUND"),
        ("GET compute-nodes", NmxmFault(garbage=True), "GetComputeNodes: not an answer of NMX-M"),
        ("GET gpus", NmxmFault(drop_reply=True), "GetGpus: UNAVAILABLE"),
    ],
)
def test_half_a_reading_is_none(
    fabric: SimulatedFabric, request_kind: str, fault: NmxmFault, told: str
) -> None:
    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        server.faults.next(request_kind, fault)
        with pytest.raises(FabricUnavailable, match=told):
            await driver.observe()
        await driver.observe()

    run(scenario, fabric)


def test_an_nmxm_that_is_away_is_unavailable_and_comes_back(fabric: SimulatedFabric) -> None:
    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await server.go_away()
        with pytest.raises(FabricUnavailable, match="Hello: UNAVAILABLE"):
            await driver.observe()
        await server.come_back()
        await driver.observe()

    run(scenario, fabric)


def test_a_list_that_is_shorter_than_its_count_is_no_reading(fabric: SimulatedFabric) -> None:
    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        server.faults.hidden_gpus = {min(fabric.gpus)}
        with pytest.raises(FabricUnavailable, match="7 listed, 8 counted"):
            await driver.observe()

    run(scenario, fabric)


def test_a_list_that_lags_behind_the_gpus_is_no_reading(fabric: SimulatedFabric) -> None:
    a, b, *_ = sorted(fabric.gpus)

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        fabric.put(FabricPartition(id=9, name="nine", guids=(a, b)))
        server.faults.lag = 1
        with pytest.raises(FabricUnavailable, match="which the list denies"):
            await driver.observe()
        assert {one.id for one in (await driver.observe()).partitions} == {9, DEFAULT_PARTITION_ID}

    run(scenario, fabric)


def test_a_change_is_confirmed_once_the_lists_show_it(fabric: SimulatedFabric) -> None:
    a, *_ = sorted(fabric.gpus)

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)

        def lag(_: FabricSnapshot) -> None:
            server.faults.lag = 3

        fabric.on_change(lag)
        assert await driver.execute(create(a)) == 1
        assert server.faults.lag == 0
        assert [one.members for one in (await driver.observe()).partitions] == [{a}]

    run(scenario, fabric)


def test_a_password_that_was_changed_is_read_again(fabric: SimulatedFabric) -> None:
    kept = ["old"]

    async def changing() -> Login:
        return Login("rw-user", kept[0])

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        server.service.password = "old"
        await driver.observe()
        server.service.password = kept[0] = "new"
        with pytest.raises(FabricUnavailable, match="UNAUTHENTICATED"):
            await driver.observe()
        await driver.observe()

    run(scenario, fabric, login=changing)


def test_a_login_does_not_show_its_password() -> None:
    assert "secret" not in repr(Login("name", "secret")) + str(Login("name", "secret"))


def test_what_nmxm_refuses_was_not_done(fabric: SimulatedFabric) -> None:
    a, b, *_ = sorted(fabric.gpus)

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)
        await driver.execute(create(a))
        before = fabric.snapshot()
        grow = AddGpus(partition_id=1, name="rl-a", guids=(b,))
        for request, fault, code in (
            ("PUT partitions", NmxmFault(status=409), "CONFLICT"),
            ("PUT partitions", NmxmFault(status=400), "INVALID_ARGUMENT"),
            ("PUT partitions", NmxmFault(fails="RESOURCE_EXHAUSTED"), "RESOURCE_EXHAUSTED"),
        ):
            server.faults.next(request, fault)
            with pytest.raises(FabricRefused) as refusal:
                await driver.execute(grow)
            assert refusal.value.code == code
            assert fabric.snapshot() == before
        await driver.execute(grow)

    run(scenario, fabric)


def test_an_answer_that_is_lost_leaves_the_outcome_unknown(fabric: SimulatedFabric) -> None:
    a, *_ = sorted(fabric.gpus)

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)
        server.faults.next("POST partitions", NmxmFault(drop_reply=True))
        with pytest.raises(FabricUnavailable, match="CreatePartition: UNAVAILABLE"):
            await driver.execute(create(a))
        while not fabric.partitions:
            await asyncio.sleep(0.01)
        assert [one.name for one in (await driver.observe()).partitions] == ["rl-a"]
        with pytest.raises(FabricRefused) as refusal:
            await driver.execute(create(a))
        assert refusal.value.code == "NAME_IN_USE"

    run(scenario, fabric)


def test_an_operation_that_takes_too_long_is_cancelled_and_unknown(fabric: SimulatedFabric) -> None:
    a, *_ = sorted(fabric.gpus)

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)
        server.faults.next("POST partitions", NmxmFault(stalls=True))
        with pytest.raises(FabricUnavailable, match="not done in 10 s"):
            await driver.execute(create(a))
        assert [one["Status"] for one in server.service.operations.all()][-2] == "cancelled"
        server.service.operations.resume()
        assert await driver.execute(create(a)) == 1
        assert list(fabric.partitions) == [1]

    run(scenario, fabric)


def test_nothing_is_asked_for_while_a_change_is_under_way(fabric: SimulatedFabric) -> None:
    """A PUT that is carried out late replaces all members: it would take out who joined meanwhile."""
    a, b, c, *_ = sorted(fabric.gpus)

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)
        await driver.execute(create(a))
        server.faults.next("PUT partitions", NmxmFault(stalls=True))
        server.faults.next("DELETE operations", NmxmFault(status=409))
        with pytest.raises(FabricUnavailable, match="not done"):
            await driver.execute(AddGpus(partition_id=1, name="rl-a", guids=(b,)))
        await driver.observe()
        for operation in (AddGpus(partition_id=1, name="rl-a", guids=(c,)), create(c, name="rl-c")):
            with pytest.raises(FabricRefused) as refusal:
                await driver.execute(operation)
            assert refusal.value.code == "BUSY" or isinstance(operation, CreatePartition)
        server.service.operations.resume()
        while len(fabric.partitions[1].guids) < 2:
            await asyncio.sleep(0.01)
        await driver.observe()
        await driver.execute(AddGpus(partition_id=1, name="rl-a", guids=(c,)))
        assert set(fabric.partitions[1].guids) == {a, b, c}

    run(scenario, fabric)


def test_a_partition_that_another_hand_changed_is_not_overwritten(fabric: SimulatedFabric) -> None:
    a, b, c, d, *_ = sorted(fabric.gpus)

    async def scenario(_: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)
        await driver.execute(create(a, b))
        fabric.add(1, (c,))
        for operation in (
            AddGpus(partition_id=1, name="rl-a", guids=(d,)),
            RemoveGpus(partition_id=1, name="rl-a", guids=(a,)),
            DeletePartition(partition_id=1, name="rl-a"),
        ):
            with pytest.raises(FabricRefused) as refusal:
                await driver.execute(operation)
            assert refusal.value.code == "CHANGED"
        assert set(fabric.partitions[1].guids) == {a, b, c}
        await driver.observe()
        await driver.execute(RemoveGpus(partition_id=1, name="rl-a", guids=(a,)))
        assert set(fabric.partitions[1].guids) == {b, c}

    run(scenario, fabric)


def test_a_partition_that_was_made_again_is_another(fabric: SimulatedFabric) -> None:
    a, *_ = sorted(fabric.gpus)

    async def scenario(_: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)
        await driver.execute(create(a))
        fabric.delete(1)
        fabric.create("in between", (a,))
        fabric.delete(1)
        fabric.create("rl-a", (a,))
        # Same number, name and members; NMX-M has given it another id.
        with pytest.raises(FabricRefused) as refusal:
            await driver.execute(DeletePartition(partition_id=1, name="rl-a"))
        assert refusal.value.code == "CHANGED"

    run(scenario, fabric)


def test_gpus_that_are_taken_or_gone_are_not_asked_for(fabric: SimulatedFabric) -> None:
    a, b, c, *_ = sorted(fabric.gpus)

    async def scenario(_: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)
        fabric.put(FabricPartition(id=5, name="others", guids=(a,)))
        fabric.remove_gpus((b,))
        for guid, code in ((a, "CHANGED"), (b, "NOT_FOUND")):
            with pytest.raises(FabricRefused) as refusal:
                await driver.execute(create(guid, c))
            assert refusal.value.code == code
        with pytest.raises(FabricRefused) as refusal:
            await driver.execute(AddGpus(partition_id=7, name="rl-a", guids=(c,)))
        assert refusal.value.code == "NOT_FOUND"

    run(scenario, fabric)


def test_members_whose_tray_is_away_stay_members(fabric: SimulatedFabric) -> None:
    a, b, *rest = sorted(fabric.gpus)
    away = tuple(rest[-4:])

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        await driver.execute(DEFAULT)
        await driver.execute(create(a, *away))
        fabric.remove_gpus(away)
        (seen,) = (await driver.observe()).partitions
        assert seen.members == {a, *away}
        await driver.execute(AddGpus(partition_id=1, name="rl-a", guids=(b,)))
        assert set(fabric.partitions[1].guids) == {a, b, *away}
        time = Time()
        restarted = NmxmDriver(server.url, login, clock=time, sleep=time.sleep, chassis_serials=["CHASSIS-A"])
        (unnamed,) = (await restarted.observe()).partitions
        assert {a, b} < unnamed.members
        assert len(unnamed.members) == 6
        assert unnamed.members.isdisjoint(away)
        await restarted.execute(RemoveGpus(partition_id=1, name="rl-a", guids=(b,)))
        assert set(fabric.partitions[1].guids) == {a, *away}
        one_away = min(unnamed.members - {a, b})
        await restarted.execute(RemoveGpus(partition_id=1, name="rl-a", guids=(one_away,)))
        assert len(fabric.partitions[1].guids) == 4
        await restarted.close()

    run(scenario, fabric)


def test_a_location_based_partition_is_read_and_not_changed(fabric: SimulatedFabric) -> None:
    a, b, *_ = sorted(fabric.gpus)
    fabric.put(FabricPartition(id=8, name="seats", guids=(a, b), guid_based=False))

    async def scenario(_: NmxmServer, driver: NmxmDriver) -> None:
        seats = next(one for one in (await driver.observe()).partitions if one.id == 8)
        assert (seats.members, seats.guid_based) == ({a, b}, False)
        with pytest.raises(FabricRefused) as refusal:
            await driver.execute(RemoveGpus(partition_id=8, name="seats", guids=(a,)))
        assert refusal.value.code == "CONFLICT"

    run(scenario, fabric)


def other_fabric() -> SimulatedFabric:
    domain = "00000000-0000-4000-8000-00000000d002"
    gpus = (
        FabricGpu(
            guid=0xEB00 + module,
            chassis_serial="CHASSIS-B",
            chassis_id=0,
            slot=0,
            host_id=1,
            tray_index=0,
            module_id=module,
        )
        for module in (1, 2, 3, 4)
    )
    return SimulatedFabric(domain, gpus)


def test_one_nmxm_may_have_several_domains(fabric: SimulatedFabric) -> None:
    other = other_fabric()

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        time = Time()
        named = NmxmDriver(server.url, login, clock=time, sleep=time.sleep, domain=other.domain)
        mine, theirs = await driver.observe(), await named.observe()
        assert (mine.domain, theirs.domain) == (fabric.domain, other.domain)
        assert {gpu.guid for gpu in theirs.gpus} == set(other.gpus)
        assert [one.members for one in mine.partitions] == [set(fabric.gpus)]
        await named.execute(DEFAULT)
        assert other.partitions == {}
        assert list(fabric.partitions) == [DEFAULT_PARTITION_ID]
        # What is under way in one domain holds up no other.
        server.faults.next("POST partitions", NmxmFault(stalls=True))
        server.faults.next("DELETE operations", NmxmFault(status=409))
        with pytest.raises(FabricUnavailable):
            await named.execute(create(min(other.gpus), name="rl-b"))
        assert await driver.execute(DEFAULT) == DEFAULT_PARTITION_ID
        unclear = NmxmDriver(server.url, login, clock=time, chassis_serials=["CHASSIS-A", "CHASSIS-B"])
        with pytest.raises(FabricUnavailable, match="not of one domain"):
            await unclear.observe()
        await named.close()
        await unclear.close()

    run(scenario, fabric, other)


def test_another_domain_at_the_address_is_not_touched(fabric: SimulatedFabric) -> None:
    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        fabric.domain = "00000000-0000-4000-8000-00000000d00f"
        with pytest.raises(FabricUnavailable, match="it was 00000000-0000-4000-8000-00000000d001"):
            await driver.execute(DEFAULT)

    run(scenario, fabric)


def test_there_is_no_subscription(fabric: SimulatedFabric) -> None:
    async def scenario(_: NmxmServer, driver: NmxmDriver) -> None:
        heard = driver.notifications()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(heard)
        await heard.aclose()

    run(scenario, fabric)
