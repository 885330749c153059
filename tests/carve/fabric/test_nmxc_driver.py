"""The driver against a simulated controller over a real socket."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.carve.fabric.conftest import small_fabric
from tests.waiting import until_so

from rackloom.carve.fabric.controller import FabricDriver, FabricRefused, FabricUnavailable
from rackloom.carve.fabric.nmxc.driver import NmxcDriver, NmxcSession
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    DomainLimits,
    GpuHealth,
    RemoveGpus,
)
from rackloom.lab.switches.fabric import FabricPartition, FabricRefusal, SimulatedFabric
from rackloom.lab.switches.faults import NmxcFault
from rackloom.lab.switches.servers import NmxcServer

DEFAULT = DeletePartition(partition_id=DEFAULT_PARTITION_ID, name="Default Partition")


def create(*guids: int, name: str = "rl-a") -> CreatePartition:
    return CreatePartition(name=name, logical_partition="a", guids=guids)


def test_it_is_a_fabric_driver(rig: Any) -> None:
    async def scenario() -> None:
        async with rig() as (_, driver):
            typed: FabricDriver = driver
            assert (await typed.observe()).observed_at == 12.5

    asyncio.run(scenario())


def test_a_domain_at_its_first_boot(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        async with rig() as (_, driver):
            seen = await driver.observe()
        assert seen.domain == fabric.domain
        assert {gpu.guid for gpu in seen.gpus} == set(fabric.gpus)
        places = {(gpu.chassis_serial, gpu.slot, gpu.module_id) for gpu in seen.gpus}
        assert places == {("CHASSIS-A", slot, module) for slot in (0, 1) for module in (1, 2, 3, 4)}
        (only,) = seen.partitions
        assert (only.id, only.name) == (DEFAULT_PARTITION_ID, "Default Partition")
        assert only.members == set(fabric.gpus)
        assert seen.limits == DomainLimits(
            max_partitions=72,
            max_multicast_groups=1024,
            free_multicast_groups=0,
            max_compute_nodes=18,
            max_gpus_per_compute_node=4,
        )

    asyncio.run(scenario())


def test_lists_that_say_the_same_are_not_read_into_values_again(
    fabric: SimulatedFabric, rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rackloom.carve.fabric.nmxc import driver as module

    read, each = module.read_gpus, [0]

    def counting(infos: Any) -> Any:
        each[-1] += 1
        return read(infos)

    monkeypatch.setattr(module, "read_gpus", counting)

    async def scenario() -> None:
        async with rig() as (server, driver):
            first = await driver.observe()
            each.append(0)
            server.faults.omit_header_of_next("GetGpuInfoList")
            with pytest.raises(FabricUnavailable):
                await driver.observe()  # kept values are no answer
            assert (await driver.observe()) == first
            each.append(0)
            fabric.set_health(min(fabric.gpus), GpuHealth.NO_NVLINK)
            assert (await driver.observe()) != first
        assert each == [1, 0, 1]  # a reading that fails, and one that repeats, read nothing into values

    asyncio.run(scenario())


CHANGES: dict[str, Callable[[SimulatedFabric, int], object]] = {
    "unchanged": lambda fabric, guid: None,
    "unwell": lambda fabric, guid: fabric.set_health(guid, GpuHealth.NO_NVLINK),
    "well": lambda fabric, guid: fabric.set_health(guid, GpuHealth.HEALTHY),
    "out": lambda fabric, guid: fabric.remove(fabric.partition_of(guid), [guid]),
    "made": lambda fabric, guid: fabric.create(f"rl-{guid}", (guid,)),
    "renamed": lambda fabric, guid: fabric.rename(f"00000000-0000-4000-8000-{guid % 9 + 1:012}"),
    "reset": lambda fabric, guid: fabric.factory_reset(),
    "gone": lambda fabric, guid: fabric.remove_gpus([guid]),
}


@pytest.mark.slow
@settings(max_examples=10)
@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 7)), max_size=8))
def test_a_driver_that_read_before_sees_what_a_new_one_sees(steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        fabric = small_fabric()
        known = sorted(fabric.gpus)
        async with NmxcServer(fabric) as server:
            kept = NmxcDriver(server.url, clock=lambda: 1.0)
            await kept.observe()
            for step, gpu in steps:
                # A GPU that was taken out of the rack changes no more.
                with suppress(FabricRefusal, KeyError):
                    CHANGES[step](fabric, known[gpu])
                fresh = NmxcDriver(server.url, clock=lambda: 1.0)
                assert await kept.observe() == await fresh.observe()
                await fresh.close()
            await kept.close()

    asyncio.run(scenario())


def test_every_operation_does_what_it_says(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        a, b, c, *_ = sorted(fabric.gpus)
        async with rig() as (_, driver):
            assert await driver.execute(DEFAULT) == DEFAULT_PARTITION_ID
            made = await driver.execute(create(a, b))
            assert await driver.execute(AddGpus(partition_id=made, name="rl-a", guids=(c,))) == made
            assert await driver.execute(RemoveGpus(partition_id=made, name="rl-a", guids=(a,))) == made
            (partition,) = (await driver.observe()).partitions
            assert (partition.id, partition.name, partition.members) == (made, "rl-a", {b, c})
            assert (partition.guid_based, partition.multicast_groups) == (True, 16)

    asyncio.run(scenario())


def test_without_free_multicast_groups_a_partition_is_made_without_any(
    fabric: SimulatedFabric, rig: Any
) -> None:
    async def scenario() -> None:
        guid = min(fabric.gpus)
        async with rig() as (_, driver):
            fabric.remove(DEFAULT_PARTITION_ID, [guid])
            made = await driver.execute(create(guid))
            assert fabric.partitions[made].multicast_groups == 0

    asyncio.run(scenario())


def test_a_full_domain_refuses_with_and_without_multicast_groups(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        fabric.delete(DEFAULT_PARTITION_ID)
        fabric.limits = msgspec.structs.replace(fabric.limits, max_partitions=0)
        async with rig() as (_, driver):
            with pytest.raises(FabricRefused) as refusal:
                await driver.execute(create(min(fabric.gpus)))
        assert refusal.value.code == "RESOURCE_EXHAUSTED"

    asyncio.run(scenario())


def test_the_controllers_own_refusals_have_its_names(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        a, b, *_ = sorted(fabric.gpus)
        async with rig() as (_, driver):
            await _refused(driver, create(a), "RESOURCE_IN_USE")
            await driver.execute(DEFAULT)
            made = await driver.execute(create(a))
            await _refused(driver, create(b), "PARTITION_NAME_IN_USE")
            await _refused(driver, create(b, 5, name="other"), "RESOURCE_BAD")
            await _refused(driver, create(b, name="Default Partition"), "BADPARAM")
            await _refused(driver, DEFAULT, "PARTITION_ID_NOT_IN_USE")
            await _refused(
                driver, RemoveGpus(partition_id=made, name="rl-a", guids=(b,)), "RESOURCE_NOT_IN_USE"
            )
            # The id means another partition by now: nothing may happen to it.
            await _refused(
                driver, DeletePartition(partition_id=made, name="rl-b"), "PARTITION_ID_NAME_MISMATCH"
            )
            assert [partition.name for partition in (await driver.observe()).partitions] == ["rl-a"]

    asyncio.run(scenario())


async def _refused(driver: NmxcDriver, operation: Any, code: str) -> None:
    with pytest.raises(FabricRefused) as refusal:
        await driver.execute(operation)
    assert refusal.value.code == code


def test_each_return_code_is_refusal_or_doubt_and_in_a_reading_always_doubt(rig: Any) -> None:
    from rackloom.carve.fabric.nmxc.nmx_c_pb2 import StReturnCode

    codes = [name.removeprefix("NMX_ST_") for name in StReturnCode.keys()]  # noqa: SIM118 (no mapping)

    async def scenario() -> None:
        async with rig() as (server, driver):
            for code in sorted(set(codes) - {"SUCCESS", "UNDEFINED", "TIMEOUT"}):
                server.faults.refuse_next("DeletePartition", code)
                await _refused(driver, DEFAULT, code)
                server.faults.refuse_next("GetPartitionInfoList", code)
                with pytest.raises(FabricUnavailable, match=code):
                    await driver.observe()
            for code in ("UNDEFINED", "TIMEOUT"):
                server.faults.refuse_next("DeletePartition", code)
                with pytest.raises(FabricUnavailable, match=code):
                    await driver.execute(DEFAULT)
            assert (await driver.observe()).partitions

    asyncio.run(scenario())


@pytest.mark.parametrize("rpc", ["Hello", "GetDomainProperties", "GetGpuInfoList", "GetPartitionInfoList"])
def test_a_reading_with_any_part_missing_is_none(rig: Any, rpc: str) -> None:
    async def scenario() -> None:
        async with rig() as (server, driver):
            for harm in (server.faults.drop_reply_of_next, server.faults.omit_header_of_next):
                harm(rpc)
                with pytest.raises(FabricUnavailable, match=rpc):
                    await driver.observe()
            assert (await driver.observe()).partitions

    asyncio.run(scenario())


def test_limits_that_a_controller_does_not_report_are_unknown(rig: Any) -> None:
    async def scenario() -> None:
        async with rig() as (server, driver):
            server.faults.refuse_next("GetDomainProperties", "NOT_SUPPORTED")
            limits = (await driver.observe()).limits
            assert limits == DomainLimits(free_multicast_groups=0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "harm",
    [
        lambda faults: faults.refuse_next("GetDomainStateInfo", "NOT_SUPPORTED"),
        lambda faults: faults.refuse_next("GetDomainStateInfo", "UNDEFINED"),
        lambda faults: faults.drop_reply_of_next("GetDomainStateInfo"),
        lambda faults: faults.omit_header_of_next("GetDomainStateInfo"),
    ],
)
def test_multicast_groups_are_read_from_the_state_of_the_domain(
    fabric: SimulatedFabric, rig: Any, harm: Any
) -> None:
    async def scenario() -> None:
        async with rig() as (server, driver):
            full = await driver.observe()
            await driver.execute(DEFAULT)
            await driver.execute(CreatePartition(name="p", logical_partition="l", guids=(min(fabric.gpus),)))
            first = await driver.observe()
            await driver.execute(CreatePartition(name="q", logical_partition="l", guids=(max(fabric.gpus),)))
            harm(server.faults)
            unreported = await driver.observe()
            second = await driver.observe()
            harm(server.faults)
            unchanged = await driver.observe()
        assert (full.limits.free_multicast_groups, full.used_multicast_groups) == (0, 1024)
        assert (first.limits.free_multicast_groups, first.used_multicast_groups) == (1008, 16)
        assert unreported.partitions == second.partitions, "the reading is complete without them"
        assert (unreported.limits.free_multicast_groups, unreported.used_multicast_groups) == (None, None)
        assert [second.used_multicast_groups, unchanged.used_multicast_groups] == [32, 32], "not read again"

    asyncio.run(scenario())


def test_a_lost_reply_leaves_the_outcome_open(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        async with rig() as (server, driver):
            server.faults.drop_reply_of_next("DeletePartition")
            with pytest.raises(FabricUnavailable, match="reply was lost"):
                await driver.execute(DEFAULT)
            assert not fabric.partitions, "it was done all the same"

    asyncio.run(scenario())


def test_a_slow_controller_is_not_waited_for_forever(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NmxcSession.call_in, "__kwdefaults__", {"seconds": 0.05})

    async def scenario() -> None:
        async with rig() as (server, driver):
            server.faults.next("GetGpuInfoList", NmxcFault(delay=0.3))
            with pytest.raises(FabricUnavailable, match="DEADLINE_EXCEEDED"):
                await driver.observe()

    asyncio.run(scenario())


def test_the_gpus_of_a_partition_left_out_of_the_list_are_uncertain(
    fabric: SimulatedFabric, rig: Any
) -> None:
    a, b, *others = sorted(fabric.gpus)
    fabric.put(FabricPartition(id=5, name="five", guids=(a, b)))

    async def scenario() -> None:
        async with rig() as (server, driver):
            server.faults.hide_partition(DEFAULT_PARTITION_ID, lists=2)
            for _ in range(2):
                assert (await driver.observe()).uncertain == set(others)
            seen = await driver.observe()
            assert [partition.members for partition in seen.partitions] == [{a, b}, set(others)]
            assert seen.uncertain == frozenset()

    asyncio.run(scenario())


def test_a_change_between_the_lists_makes_both_partitions_uncertain_and_no_other(
    fabric: SimulatedFabric, rig: Any
) -> None:
    a, b, c, d, *_ = sorted(fabric.gpus)
    for number, guids in ((5, (a, b)), (6, (c, d))):
        fabric.put(FabricPartition(id=number, name=f"p{number}", guids=guids))

    async def scenario() -> None:
        async with rig() as (server, driver):
            move = FabricPartition(id=6, name="p6", guids=(b, c, d))
            server.faults.next("GetGpuInfoList", NmxcFault(afterwards=lambda: fabric.put(move)))
            assert (await driver.observe()).uncertain == {a, b, c, d}
            assert (await driver.observe()).uncertain == frozenset()

    asyncio.run(scenario())


def test_members_of_a_location_based_partition_are_the_gpus_found_there(
    fabric: SimulatedFabric, rig: Any
) -> None:
    async def scenario() -> None:
        a, b, c, *_ = sorted(fabric.gpus)
        fabric.put(FabricPartition(id=5, name="by-seat", guids=(a, b, c), guid_based=False))
        fabric.remove_gpus([c])
        async with rig() as (_, driver):
            seen = {partition.name: partition for partition in (await driver.observe()).partitions}
        assert (seen["by-seat"].members, seen["by-seat"].guid_based) == ({a, b}, False)

    asyncio.run(scenario())


def test_health_is_read(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        guid = max(fabric.gpus)
        async with rig() as (_, driver):
            fabric.set_health(guid, GpuHealth.NO_NVLINK)
            ill = [gpu.guid for gpu in (await driver.observe()).gpus if gpu.health is GpuHealth.NO_NVLINK]
        assert ill == [guid]

    asyncio.run(scenario())


@pytest.mark.parametrize("domain", ["00000000-0000-0000-0000-000000000000", "", "rack 7"])
def test_a_controller_that_names_no_domain_is_none(fabric: SimulatedFabric, rig: Any, domain: str) -> None:
    fabric.domain = domain

    async def scenario() -> None:
        async with rig() as (_, driver):
            with pytest.raises(FabricUnavailable, match="names no domain"):
                await driver.observe()

    asyncio.run(scenario())


def test_nothing_is_done_to_another_domain_that_took_over_the_address(
    fabric: SimulatedFabric, rig: Any
) -> None:
    async def scenario() -> None:
        async with rig() as (_, driver):
            await driver.observe()
            fabric.domain = "00000000-0000-4000-8000-00000000d002"
            with pytest.raises(FabricUnavailable, match="is now domain"):
                await driver.execute(DEFAULT)
            assert fabric.partitions
            await driver.observe()
            await driver.execute(DEFAULT)

    asyncio.run(scenario())


def test_a_controller_that_is_away_is_unavailable_and_then_back(fabric: SimulatedFabric, rig: Any) -> None:
    async def scenario() -> None:
        async with rig() as (server, driver):
            before = await driver.observe()
            await server.go_away()
            with pytest.raises(FabricUnavailable, match="UNAVAILABLE"):
                await driver.observe()
            with pytest.raises(FabricUnavailable, match="UNAVAILABLE"):
                await driver.execute(DEFAULT)
            assert fabric.partitions
            await server.come_back()
            assert (await _observed(driver)).facts == before.facts

    asyncio.run(scenario())


async def _observed(driver: NmxcDriver) -> Any:
    """The first good observation, because the channel needs a moment to try again."""
    while True:
        try:
            return await driver.observe()
        except FabricUnavailable:
            await asyncio.sleep(0.02)


def test_drivers_do_not_wait_for_one_another(fabric: SimulatedFabric) -> None:
    async def scenario() -> None:
        async with NmxcServer(fabric) as server:
            drivers = [NmxcDriver(server.url, clock=lambda: 0.0) for _ in range(3)]
            server.faults.next("Hello", NmxcFault(delay=3600.0))
            done: list[int] = []

            async def look(number: int) -> None:
                await drivers[number].observe()
                done.append(number)

            first = asyncio.create_task(look(0))
            await until_so(lambda: not server.faults.untaken(), "the first waits for its answer")
            await asyncio.gather(look(1), look(2))
            assert sorted(done) == [1, 2]
            first.cancel()
            for driver in drivers:
                await driver.close()

    asyncio.run(scenario())
