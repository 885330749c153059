"""While an NMX-M is away, lags behind or contradicts itself, its answers are no reading."""

import pytest
from tests.carve.fabric.nmxm_rig import run
from tests.lab.switches.nmxm_server import NmxmServer

from rackloom.carve.fabric.controller import FabricUnavailable
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.protocol import NmxmLogin
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
)
from rackloom.lab.switches.fabric import FabricPartition, SimulatedFabric
from rackloom.lab.switches.faults import NmxmFault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_kind", "fault", "message"),
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
    fabric: SimulatedFabric, request_kind: str, fault: NmxmFault, message: str
) -> None:
    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        server.faults.next(request_kind, fault)
        with pytest.raises(FabricUnavailable, match=message):
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


def test_a_list_that_lags_behind_the_gpus_makes_its_partitions_uncertain(fabric: SimulatedFabric) -> None:
    a, b, *_ = sorted(fabric.gpus)

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        await driver.observe()
        fabric.put(FabricPartition(id=9, name="nine", guids=(a, b)))
        server.faults.lag = 1
        # Both have left the default partition for one that the list does not have.
        assert (await driver.observe()).uncertain == set(fabric.gpus)
        server.faults.lag = 1
        with pytest.raises(FabricUnavailable, match="that the list denies"):
            await driver.execute(DeletePartition(partition_id=9, name="nine"))
        assert (await driver.observe()).uncertain == frozenset()
        assert {partition.id for partition in (await driver.observe()).partitions} == {
            9,
            DEFAULT_PARTITION_ID,
        }

    run(scenario, fabric)


def test_a_contradiction_about_other_gpus_stops_no_change(fabric: SimulatedFabric) -> None:
    a, b, c, d, *_ = sorted(fabric.gpus)

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        fabric.delete(DEFAULT_PARTITION_ID)
        fabric.put(FabricPartition(id=9, name="nine", guids=(a, b)))
        await driver.observe()
        server.faults.hidden_partitions = {9}
        assert (await driver.observe()).uncertain == {a, b}
        made = await driver.execute(CreatePartition(name="ten", logical_partition="lp", guids=(c,)))
        await driver.execute(AddGpus(partition_id=made, name="ten", guids=(d,)))
        with pytest.raises(FabricUnavailable, match="that the list denies"):
            await driver.execute(AddGpus(partition_id=made, name="ten", guids=(a,)))
        assert fabric.partitions[made].guids == (c, d)

    run(scenario, fabric)


def test_a_password_that_was_changed_is_read_again(fabric: SimulatedFabric) -> None:
    kept = ["old"]

    async def changing() -> NmxmLogin:
        return NmxmLogin("rw-user", kept[0])

    async def scenario(server: NmxmServer, driver: NmxmDriver) -> None:
        server.service.password = "old"
        await driver.observe()
        server.service.password = kept[0] = "new"
        with pytest.raises(FabricUnavailable, match="UNAUTHENTICATED"):
            await driver.observe()
        await driver.observe()

    run(scenario, fabric, login=changing)


def test_a_login_does_not_show_its_password() -> None:
    assert "secret" not in repr(NmxmLogin("name", "secret")) + str(NmxmLogin("name", "secret"))
