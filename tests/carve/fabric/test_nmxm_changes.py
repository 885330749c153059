"""Changes through an NMX-M: confirmed, refused, unknown, or withheld because another change was under way."""

import asyncio

import pytest
from tests.carve.fabric.nmxm_rig import DEFAULT, create, run
from tests.lab.switches.nmxm_server import NmxmServer

from rackloom.carve.fabric.controller import FabricRefused, FabricUnavailable
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.core.partitions.domain import AddGpus, CreatePartition, DeletePartition, RemoveGpus
from rackloom.lab.switches.fabric import FabricPartition, FabricSnapshot, SimulatedFabric
from rackloom.lab.switches.faults import NmxmFault


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
        assert [partition.members for partition in (await driver.observe()).partitions] == [{a}]

    run(scenario, fabric)


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
        assert [partition.name for partition in (await driver.observe()).partitions] == ["rl-a"]
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
        assert [operation["Status"] for operation in server.service.operations.all()][-2] == "cancelled"
        server.service.operations.resume()
        assert await driver.execute(create(a)) == 1
        assert list(fabric.partitions) == [1]

    run(scenario, fabric)


def test_nothing_is_asked_for_while_a_change_is_under_way(fabric: SimulatedFabric) -> None:
    """A PUT that is carried out late replaces all members: it would remove those added since."""
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
        # Same number, name and members, but NMX-M has given it another id.
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
