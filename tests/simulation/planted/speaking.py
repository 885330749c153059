"""Bugs between the service and its switch controllers: requests, and the meaning of answers."""

from typing import Any

import pytest
from tests.simulation.carving.run import LoadPlan as SimPlan
from tests.simulation.planted.plans import CALM, Bug, only

from rackloom.carve.fabric.nmxc import driver
from rackloom.core.partitions.domain import AddGpus, CreatePartition, DeletePartition


def return_code_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driver, "require_success", lambda rpc, reply: reply.server_header)


def update_drops_members(patch: pytest.MonkeyPatch) -> None:
    execute = driver.NmxcDriver.execute

    async def full_list(self: Any, operation: Any) -> int:
        if not isinstance(operation, AddGpus):
            return await execute(self, operation)
        await execute(self, DeletePartition(partition_id=operation.partition_id, name=operation.name))
        made = CreatePartition(name=operation.name, logical_partition="", guids=operation.guids)
        return await execute(self, made)

    patch.setattr(driver.NmxcDriver, "execute", full_list)


def partial_list_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(driver, "contradicted_gpus", lambda *_: frozenset())


BUGS: dict[Bug, SimPlan] = {
    return_code_ignored: only("refused", "kill", pause=4),
    update_drops_members: CALM,
    partial_list_believed: only("list-omits", "reply-lost", pause=1.5, think=3),
}
