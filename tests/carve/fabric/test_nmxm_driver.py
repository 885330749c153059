"""The NMX-M driver against a simulated server over a real socket: readings and the life of a partition."""

import asyncio

import msgspec
import pytest
from tests.carve.fabric.nmxm_rig import DEFAULT, Time, create, login, run
from tests.lab.switches.nmxm_server import NmxmServer

from rackloom.carve.fabric.controller import FabricDriver, FabricRefused, FabricUnavailable
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    DeletePartition,
    DomainLimits,
    DomainObservation,
    GpuHealth,
    RemoveGpus,
)
from rackloom.lab.switches.fabric import FabricGpu, FabricPartition, SimulatedFabric
from rackloom.lab.switches.faults import NmxmFault
from rackloom.lab.switches.servers import NmxcServer


def same_but_for_what_nmx_m_does_not_tell(seen: DomainObservation) -> DomainObservation:
    partitions = tuple(
        msgspec.structs.replace(partition, multicast_groups=0) for partition in seen.partitions
    )
    return msgspec.structs.replace(seen, partitions=partitions, limits=DomainLimits(), observed_at=0.0)


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
            return {partition.id: partition.members for partition in (await driver.observe()).partitions}

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
        seats = next(partition for partition in (await driver.observe()).partitions if partition.id == 8)
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
        assert [partition.members for partition in mine.partitions] == [set(fabric.gpus)]
        await named.execute(DEFAULT)
        assert other.partitions == {}
        assert list(fabric.partitions) == [DEFAULT_PARTITION_ID]
        # A change that is under way in one domain holds up no other.
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
