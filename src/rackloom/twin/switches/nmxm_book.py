"""Partitions and asynchronous operations as a simulated NMX-M keeps them."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rackloom.twin.switches.fabric import FabricPartition, FabricRefusal, FabricSnapshot, SimulatedFabric
from rackloom.twin.switches.nmxm_answers import CREATED, Json, digest, partition
from rackloom.twin.switches.nmxm_faults import NmxmFault


class PartitionBook:
    """The partitions of several fabrics with their entity ids: one that is made again has another id."""

    def __init__(self, fabrics: Iterable[SimulatedFabric]) -> None:
        self._fabrics = tuple(fabrics)
        self._entities: dict[tuple[str, int, str], str] = {}
        self._made = 0
        self._shown = self.now()
        self._before = self._shown
        for fabric in self._fabrics:
            fabric.on_change(self._changed)

    def now(self) -> list[Json]:
        """All partitions as they are."""
        standing = {(fabric.domain, one.id, one.name): (fabric, one) for fabric, one in self._every()}
        for gone in self._entities.keys() - standing.keys():
            del self._entities[gone]
        for key in [key for key in standing if key not in self._entities]:
            self._made += 1
            self._entities[key] = digest(f"partition {self._made}")
        return [partition(fabric, one, self._entities[key]) for key, (fabric, one) in standing.items()]

    def before(self) -> list[Json]:
        """All partitions as they were before the newest change."""
        return self._before

    def find(self, entity: str) -> tuple[SimulatedFabric, FabricPartition] | None:
        """The partition of this id."""
        for fabric, one in self._every():
            if self._entities.get((fabric.domain, one.id, one.name)) == entity:
                return fabric, one
        return None

    def _every(self) -> Iterator[tuple[SimulatedFabric, FabricPartition]]:
        for fabric in self._fabrics:
            for one in fabric.snapshot().partitions:
                yield fabric, one

    def _changed(self, _: FabricSnapshot) -> None:
        self._before, self._shown = self._shown, self.now()


class OperationBook:
    """Changes that were accepted. Each takes `seconds`, half of them before it is done."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._known: dict[str, Json] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resumed = asyncio.Event()

    def begin(self, request: Json, change: Callable[[], int], fault: NmxmFault) -> str:
        """Accept `change`, and carry it out in the background."""
        entity = digest(f"operation {len(self._known)}")
        self._known[entity] = {
            "ID": entity,
            "Status": "pending",
            "Percentage": 0.0,
            "CurrentStep": "",
            "Request": request | {"Cancellable": True},
            "CreatedAt": CREATED,
            "UpdatedAt": CREATED,
        }
        self._tasks[entity] = asyncio.create_task(self._run(entity, change, fault))
        return entity

    def all(self) -> list[Json]:
        """Every operation."""
        return list(self._known.values())

    def find(self, entity: str) -> Json | None:
        """The operation of this id."""
        return self._known.get(entity)

    def cancel(self, entity: str) -> bool:
        """Cancel an operation that has not ended; False where it has."""
        if self._known[entity]["Status"] not in ("pending", "in-progress"):
            return False
        self._tasks[entity].cancel()
        self._end(entity, "cancelled")
        return True

    def resume(self) -> None:
        """Let the operations that are stalled now go on, late as they are."""
        self._resumed.set()
        self._resumed = asyncio.Event()

    async def close(self) -> None:
        """End what is under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, entity: str, change: Callable[[], int], fault: NmxmFault) -> None:
        await asyncio.sleep(self.seconds / 2)
        self._known[entity]["Status"] = "in-progress"
        if fault.stalls:
            await self._resumed.wait()
        if fault.fails:
            self._end(entity, "failed", fault.fails)
            return
        try:
            number = change()
        except FabricRefusal as refusal:
            self._end(entity, "failed", refusal.code)
            return
        await asyncio.sleep(self.seconds / 2)
        self._end(entity, "completed", data={"PartitionID": number})

    def _end(self, entity: str, status: str, error: str = "", data: Any = None) -> None:
        result = {"Data": data, "Error": error, "Details": f"simulated: {error}" if error else ""}
        self._known[entity] |= {"Status": status, "Percentage": 100.0, "Result": result}
