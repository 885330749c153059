"""The promises about fabrics (S1, S2, S4), and the watch that checks them at every change.

`shared_gpus`, `mixed_tenants` and `changed_foreign` state the promises on snapshots. Random runs use
them with the ledger (`ServiceInvariants`). `FabricInvariants` uses them for scenarios, in which only the
holder of each machine is known. Each yields a text for every violation, without the promise's name.

S1 binds the switch itself. S2 and S4 bind the service, so a change by another writer breaks neither: a
fault makes such a change inside `foreign_change`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from rackloom.lab.switches.fabric import FabricPartition, FabricSnapshot, SimulatedFabric, machine_id_of

_IS_FOREIGN: ContextVar[bool] = ContextVar("is_foreign_change", default=False)


@contextmanager
def foreign_change() -> Iterator[None]:
    """Changes of fabrics inside this context are those of a writer other than the service."""
    # Listeners of a fabric are called by the code that changes it, so they see this context.
    token = _IS_FOREIGN.set(True)
    try:
        yield
    finally:
        _IS_FOREIGN.reset(token)


def shared_gpus(after: FabricSnapshot) -> Iterator[str]:
    """S1: no GPU is in two partitions."""
    held: set[int] = set()
    for partition in after.partitions:
        if twice := held & set(partition.guids):
            yield f"{len(twice)} GPUs of {partition.name!r} are in another partition too"
        held |= set(partition.guids)


def mixed_tenants(partition: FabricPartition, tenants: Collection[str]) -> Iterator[str]:
    """S2: no partition holds GPUs of two tenants."""
    if len(tenants) > 1:
        yield f"{partition.name!r} holds GPUs of {', '.join(sorted(tenants))}"


def changed_foreign(
    before: FabricSnapshot, after: FabricSnapshot, is_foreign: Callable[[FabricPartition], bool]
) -> Iterator[str]:
    """S4: the service changes no partition that another writer made."""
    for partition in set(before.partitions) - set(after.partitions):
        if is_foreign(partition):
            yield f"the service changed {partition.name!r}, which somebody made by hand"


class FabricInvariants:
    """Watches fabrics from now on. `holder` maps each machine to the tenant that got it last."""

    def __init__(self, fabrics: Iterable[SimulatedFabric], holder: Mapping[str, str]) -> None:
        self.checks = 0
        """Changes of fabrics that were checked."""
        self.broken: list[str] = []
        """Violations, each with the name of its promise."""
        self.foreign: dict[str, tuple[Any, FabricPartition]] = {}
        """Partitions that another writer made, as it made them, with the switch."""
        self._holder = holder
        self._before: dict[int, FabricSnapshot] = {}
        for fabric in fabrics:
            self._before[id(fabric)] = fabric.snapshot()
            fabric.on_change(partial(self._check, fabric))

    def _check(self, fabric: SimulatedFabric, after: FabricSnapshot) -> None:
        before, self._before[id(fabric)] = self._before[id(fabric)], after
        self.checks += 1
        self.broken += [f"S1: {text}" for text in shared_gpus(after)]
        if _IS_FOREIGN.get():
            return
        machines = {gpu.guid: machine_id_of(gpu.chassis_serial, gpu.slot) for gpu in after.gpus}
        for changed in set(after.partitions) - set(before.partitions):
            held = {machines[guid] for guid in changed.guids if guid in machines}
            tenants = {self._holder[machine] for machine in held if machine in self._holder}
            self.broken += [f"S2: {text}" for text in mixed_tenants(changed, tenants)]
        is_foreign = changed_foreign(before, after, lambda known: known.name in self.foreign)
        self.broken += [f"S4: {text}" for text in is_foreign]
