"""A simulated NMX-M on a real socket and a driver to it. Time passes only during a sleep."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.lab.switches.nmxm_server import NmxmServer

from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.protocol import NmxmLogin
from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID, CreatePartition, DeletePartition
from rackloom.lab.switches.fabric import SimulatedFabric

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


async def login() -> NmxmLogin:
    return NmxmLogin("rw-user", "simulated")


@asynccontextmanager
async def rig(
    *fabrics: SimulatedFabric, seconds: float = 0.0, **options: Any
) -> AsyncIterator[tuple[NmxmServer, NmxmDriver]]:
    time = Time()
    async with NmxmServer(fabrics, seconds=seconds) as server:
        options = {"login": login, "chassis_serials": ["CHASSIS-A"]} | options
        driver = NmxmDriver(server.url, clock=time, sleep=time.sleep, **options)
        try:
            async with asyncio.timeout(120):
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
