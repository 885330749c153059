"""Faults of racks as context managers: entering one breaks something, leaving it repairs exactly that.

Each is made of the functions of the catalogue (`rackloom.lab.faults`).
"""

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from tests.simulation.carving.racks import ConflictingController
from tests.simulation.carving.service import JudgedService

from rackloom.core.partitions.domain import GpuHealth
from rackloom.lab.faults import (
    SwitchControl,
    another_writer,
    delete_partition,
    pull_tray,
    put_partition,
    return_tray,
    set_health,
)
from rackloom.lab.switches.fabric import FabricPartition, SimulatedFabric
from rackloom.lab.switches.faults import NmxcFault
from rackloom.lab.virtual.network import SimNetwork
from rackloom.lab.virtual.racks import SimRack


@asynccontextmanager
async def network_fault(rack: SimRack, **fields: Any) -> AsyncIterator[None]:
    """Set fields of a controller's network (`SimNetwork`)."""
    network = rack.network
    for name, value in fields.items():
        setattr(network, name, value)
    yield
    # Back to the healthy value, not to the previous one, which an overlapping fault may have set.
    for name in fields:
        setattr(network, name, getattr(SimNetwork, name))


def write_between_lists(switch: SwitchControl, write: Callable[[SimulatedFabric], None]) -> None:
    """Somebody else changes partitions after the next list of GPUs, before that of partitions is read."""

    def act() -> None:
        with another_writer(switch) as fabric:
            write(fabric)

    switch.faults.next("GetGpuInfoList", NmxcFault(afterwards=act))


@asynccontextmanager
async def partition_between_lists(rack: SimRack, guids: Collection[int]) -> AsyncIterator[None]:
    """Somebody makes a partition between the two lists of a reading, and deletes it later."""
    made: list[FabricPartition] = []
    is_over = False

    def act() -> None:
        if not is_over:
            made.append(put_partition(rack, guids))

    rack.faults.next("GetGpuInfoList", NmxcFault(afterwards=act))
    yield
    is_over = True
    for partition in made:
        delete_partition(rack, partition)


@asynccontextmanager
async def conflicting_controller(
    plane: JudgedService, controller: ConflictingController
) -> AsyncIterator[None]:
    """An operator registers a second controller that contradicts the rack's own, and removes it later."""
    await plane.register(controller)
    yield
    await plane.remove(controller)


@asynccontextmanager
async def foreign_partition(rack: SimRack, guids: Collection[int]) -> AsyncIterator[None]:
    """Somebody makes a partition on the switch, and deletes it later."""
    made = put_partition(rack, guids)
    yield
    delete_partition(rack, made)


@asynccontextmanager
async def unhealthy_gpu(rack: SimRack, guid: int, health: GpuHealth) -> AsyncIterator[None]:
    """A GPU degrades and recovers."""
    set_health(rack, guid, health)
    yield
    set_health(rack, guid, GpuHealth.HEALTHY)


@asynccontextmanager
async def tray_pulled(
    rack: SimRack, host_id: int | None, new_guid: Callable[[], int] | None = None
) -> AsyncIterator[None]:
    """A tray is pulled and returned. With `new_guid`, another one takes its slot."""
    gpus = [gpu for gpu in rack.fabric.gpus.values() if gpu.host_id == host_id]
    pull_tray(rack, gpus)
    yield
    return_tray(rack, gpus, new_guid)
