"""The true fabrics of a scenario: who sits where, what a hand does to them, and whether promises are kept.

Nothing here asks the service what it thinks: fabrics are read as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from rackloom.twin.scenario.stage import NotSeen, Switch
from rackloom.twin.switches.fabric import FabricGpu, FabricPartition, FabricSnapshot, SimulatedFabric
from rackloom.twin.virtual.world import machine_of


class Ground:
    """Every fabric, watched from now on. `holder` tells which tenant was last given a machine."""

    def __init__(self, switches: Sequence[Switch], holder: Mapping[str, str]) -> None:
        self.switches = switches
        self.judged = 0
        """Changes of fabrics that were judged."""
        self.broken: list[str] = []
        """Promises that were not kept, in words."""
        self.by_hand: dict[str, tuple[SimulatedFabric, FabricPartition]] = {}
        """Partitions that somebody made on a switch, as they made them."""
        self._holder = holder
        self._hand = False
        self._machines = [_machines(one.fabric) for one in switches]
        self._before = {id(one.fabric): one.fabric.snapshot() for one in switches}
        for switch in switches:
            switch.fabric.on_change(partial(self._judge, switch.fabric))

    def rack(self, number: int) -> Switch:
        """The switch of a rack, the first being 1."""
        return self.switches[number - 1]

    def machine(self, rack: int, tray: int) -> str:
        """The machine that was in a tray of a rack at the start, both counted from 1."""
        return self._machines[rack - 1][tray - 1]

    def seat(self, machine: str) -> tuple[Switch, tuple[FabricGpu, ...]]:
        """The switch of a machine and the GPUs that are in it now, by module id."""
        for switch in self.switches:
            found = [
                gpu
                for gpu in switch.fabric.gpus.values()
                if machine_of(gpu.chassis_serial, gpu.slot) == machine
            ]
            if found:
                return switch, tuple(sorted(found, key=lambda gpu: gpu.module_id))
        raise NotSeen(f"no fabric shows a GPU of machine {machine}")

    @contextmanager
    def hand(self) -> Iterator[None]:
        """What is changed meanwhile is not the service's doing."""
        self._hand = True
        try:
            yield
        finally:
            self._hand = False

    def _judge(self, fabric: SimulatedFabric, after: FabricSnapshot) -> None:
        """Compare a change with what may never happen."""
        before, self._before[id(fabric)] = self._before[id(fabric)], after
        self.judged += 1
        self._one_partition_each(after)
        if not self._hand:
            self._tenants_apart(before, after)
            self._hands_off(before, after)

    def _one_partition_each(self, after: FabricSnapshot) -> None:
        seen: set[int] = set()
        for partition in after.partitions:
            if twice := seen & set(partition.guids):
                self.broken.append(
                    f"S1: {len(twice)} GPUs of {partition.name!r} are in another partition too"
                )
            seen |= set(partition.guids)

    def _tenants_apart(self, before: FabricSnapshot, after: FabricSnapshot) -> None:
        machines = {gpu.guid: machine_of(gpu.chassis_serial, gpu.slot) for gpu in after.gpus}
        for partition in set(after.partitions) - set(before.partitions):
            seats = {machines[guid] for guid in partition.guids if guid in machines}
            tenants = {self._holder[seat] for seat in seats if seat in self._holder}
            if len(tenants) > 1:
                self.broken.append(f"S2: {partition.name!r} holds GPUs of {', '.join(sorted(tenants))}")

    def _hands_off(self, before: FabricSnapshot, after: FabricSnapshot) -> None:
        names = self.by_hand.keys()
        for one in set(before.partitions) - set(after.partitions):
            if one.name in names:
                self.broken.append(f"S4: the service changed {one.name!r}, which somebody made by hand")


def _machines(fabric: SimulatedFabric) -> list[str]:
    """The machines of a rack, by tray."""
    seats = {(gpu.tray_index, gpu.chassis_serial, gpu.slot) for gpu in fabric.gpus.values()}
    return [machine_of(serial, slot) for _, serial, slot in sorted(seats)]
