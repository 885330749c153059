"""The injector of a random run: it strikes random racks with faults of the catalogue (`lab.faults`).

Faults strike at exponentially distributed intervals. Each ends after a time, and several may overlap.
`FAULT_WEIGHTS` gives the relative frequency of each kind. Beside the catalogue there are the clock, the
disk of the records, and the service itself: a process is killed, or stopped for longer than a lease, now
or at one of its next crash points. `FaultInjector.heal` waits for the last one, repairs networks and GPU
health, and then lets one interval pass.

`CONFLICT_FAULT_WEIGHTS` adds a second controller that contradicts a rack's own. These runs leave the
true controller readable, because a conflicting controller that is read alone cannot be recognised.
"""

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.simulation.carving.racks import (
    JudgedRack,
    JudgedSite,
    controller_of_other_domain,
    controller_without_tray,
)
from tests.simulation.carving.service import JudgedService
from tests.simulation.faults import (
    conflicting_controller,
    foreign_partition,
    network_fault,
    partition_between_lists,
    tray_pulled,
    unhealthy_gpu,
)

from rackloom.core.partitions.domain import GpuHealth
from rackloom.lab.faults import CALL_FATES, frozen, heal_fabric, set_domain, unreachable
from rackloom.lab.virtual.network import MUTATIONS, CallFate
from rackloom.lab.virtual.process import Process

STOP_SECONDS = (25.0, 60.0)
"""How long a process is stopped: longer than a lease, which is 20 s in these runs."""

CLOCK_LEAD = 40.0
"""Seconds, twice a lease."""

TraceLine = Callable[[str], None]
LastingFault = AbstractAsyncContextManager[None]


class FaultInjector:
    """Strikes random racks of one run. All draws come from `rng`."""

    def __init__(
        self,
        world: JudgedSite,
        plane: JudgedService,
        rng: random.Random,
        kinds: Mapping[str, int],
        trace: TraceLine,
    ) -> None:
        self.world = world
        self.plane = plane
        self.rng = rng
        self.kinds = kinds
        self.counts: Counter[str] = Counter()
        self._trace = trace
        self._running: list[asyncio.Task[None]] = []

    async def run(self, until: float, pause: float) -> None:
        """Strike until then, at intervals of `pause` seconds on average over the whole site."""
        while self.plane.now() < until:
            await asyncio.sleep(self.rng.expovariate(1 / pause))
            kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
            self.strike(kind, self.rng.choice(self.world.racks))

    def strike(self, kind: str, rack: JudgedRack) -> None:
        """Begin one fault on one rack."""
        self.counts[kind] += 1
        self._trace(f"fault {rack.name} {kind}")
        task = asyncio.create_task(self._last(kind, rack))
        self._running.append(task)
        task.add_done_callback(self._running.remove)

    async def _last(self, kind: str, rack: JudgedRack) -> None:
        _, begin, lasts = _KINDS[kind]
        fault = begin(self, rack)
        if fault is None:
            return
        async with fault:
            if isinstance(lasts, tuple):
                await asyncio.sleep(self.rng.uniform(*lasts))
            else:
                await asyncio.sleep(min(self.rng.expovariate(1 / lasts), 5 * lasts))

    async def heal(self) -> None:
        """Wait for the faults that last, and repair everything."""
        self.plane.disk.failing = 0
        for process in self.plane.living:
            # Disarm faults that have not struck yet.
            process.stop_fuse, process.stops_after_record = None, False
        while self._running:
            await asyncio.gather(*self._running)
        for rack in self.world.racks:
            rack.network.heal()
            rack.faults.clear()
            # A GPU that was pulled while it was unhealthy came back unhealthy.
            heal_fabric(rack)
        # A notification that was lost before this moment is made up for within an interval.
        await asyncio.sleep(self.plane.interval)

    def _foreign_partition(self, rack: JudgedRack) -> LastingFault:
        guids = sorted(rack.fabric.gpus)
        return foreign_partition(rack, self.rng.sample(guids, min(self.rng.randint(1, 3), len(guids))))

    def _partition_between_lists(self, rack: JudgedRack) -> LastingFault:
        guids = sorted(rack.fabric.gpus)
        return partition_between_lists(rack, self.rng.sample(guids, min(self.rng.randint(1, 3), len(guids))))

    def _unhealthy_gpu(self, rack: JudgedRack) -> LastingFault:
        guid = self.rng.choice(sorted(rack.fabric.gpus))
        health = self.rng.choice((GpuHealth.DEGRADED, GpuHealth.NO_NVLINK, GpuHealth.DEGRADED_BANDWIDTH))
        return unhealthy_gpu(rack, guid, health)

    def _host(self, rack: JudgedRack) -> int | None:
        hosts = sorted({gpu.host_id for gpu in rack.fabric.gpus.values()})
        return self.rng.choice(hosts) if hosts else None

    def _new_guid(self) -> int:
        return self.rng.getrandbits(63) | 1 << 63

    def _same_domain(self, rack: JudgedRack) -> LastingFault | None:
        if self.plane.conflict_of(rack) is not None:
            return None
        return conflicting_controller(self.plane, controller_without_tray(rack, self.rng))

    def _same_hardware(self, rack: JudgedRack) -> LastingFault | None:
        others = [other.fabric.domain for other in self.world.racks if other is not rack]
        domain = self.rng.choice([self.plane.ids(), *others])
        if self.plane.conflict_of(rack) is not None:
            return None
        return conflicting_controller(self.plane, controller_of_other_domain(rack, domain, self.rng))

    def _refuse(self, rack: JudgedRack) -> None:
        rpc = self.rng.choice([*sorted(MUTATIONS), "GetGpuInfoList", "GetPartitionInfoList", "Hello"])
        rack.faults.refuse_next(rpc, "NOT_READY")

    def _omit_header(self, rack: JudgedRack) -> None:
        rack.faults.omit_header_of_next(self.rng.choice([*sorted(MUTATIONS), "GetPartitionInfoList"]))

    def _omit_id(self, rack: JudgedRack) -> None:
        rack.faults.omit_id_of_next("CreatePartition", carried_out=self.rng.random() < 0.5)

    def _hide_partition(self, rack: JudgedRack) -> None:
        rack.faults.hide_partition(self.rng.choice([*sorted(rack.fabric.partitions), 1]), 1)

    def _set_clock(self, _: JudgedRack) -> None:
        self.plane.skew += self.rng.choice((-1, 1)) * self.rng.choice((0.5, 30.0, 600.0))

    @asynccontextmanager
    async def _clock_ahead(self, _: JudgedRack) -> AsyncIterator[None]:
        """The clock of one process is ahead: it takes the leases of the others too early."""
        replica = self.rng.choice(self.plane.replicas)
        replica.clock_lead = CLOCK_LEAD
        yield
        replica.clock_lead = 0.0

    @asynccontextmanager
    async def _full_disk(self, _: JudgedRack) -> AsyncIterator[None]:
        self.plane.disk.is_full = True
        yield
        self.plane.disk.is_full = False

    def _failing_disk(self, _: JudgedRack) -> None:
        self.plane.disk.failing += self.rng.randint(1, 4)

    def _kill(self, _: JudgedRack) -> None:
        if process := self._any_process():
            process.kill()

    def _kill_soon(self, _: JudgedRack) -> None:
        if process := self._any_process():
            process.fuse = process.points + self.rng.randint(1, 12)

    def _stop(self, _: JudgedRack) -> LastingFault | None:
        process = self._any_process()
        return None if process is None else _stopped(process)

    def _stop_soon(self, _: JudgedRack) -> None:
        if process := self._any_process():
            process.stopper = lambda: self._stop_now(process)
            process.stop_fuse = process.points + self.rng.randint(1, 12)

    def _stop_recorded(self, _: JudgedRack) -> None:
        if process := self._any_process():
            process.stopper = lambda: self._stop_now(process)
            process.stops_after_record = True

    def _stop_now(self, process: Process) -> None:
        process.stop()
        seconds = self.rng.uniform(*STOP_SECONDS)
        # Not as this process, which is stopped.
        task = asyncio.create_task(_resume_later(process, seconds), context=contextvars.Context())
        self._running.append(task)
        task.add_done_callback(self._running.remove)

    def _any_process(self) -> Process | None:
        living = self.plane.living
        return self.rng.choice(living) if living else None


@asynccontextmanager
async def _new_domain_uuid(rack: JudgedRack, domain: str) -> AsyncIterator[None]:
    """The controller restarts and comes back under another domain UUID."""
    rack.disturb()
    async with unreachable(rack):
        yield
        set_domain(rack, domain)


@asynccontextmanager
async def _stopped(process: Process) -> AsyncIterator[None]:
    process.stop()
    try:
        yield
    finally:
        process.resume()


async def _resume_later(process: Process, seconds: float) -> None:
    await asyncio.sleep(seconds)
    process.resume()


def _next_mutation(fate: str) -> "_Begin":
    """Decide the fate of the next change that is requested of a rack's controller."""
    return lambda run, rack: rack.network.next_mutations.append(CALL_FATES[fate])


def _apply_late(run: FaultInjector, rack: JudgedRack) -> None:
    # The driver's deadline is 10 s: it has given up by then.
    rack.network.next_mutations.append(CallFate(there=run.rng.uniform(10.5, 25)))


_Begin = Callable[[FaultInjector, JudgedRack], LastingFault | None]
_KINDS: Mapping[str, tuple[int, _Begin, float | tuple[float, float]]] = {
    "unreachable": (4, lambda run, rack: unreachable(rack), 40),
    "restart": (3, lambda run, rack: unreachable(rack), (1, 8)),
    "dark": (3, lambda run, rack: network_fault(rack, dark=True), 30),
    "slow": (4, lambda run, rack: network_fault(rack, slow=run.rng.uniform(0.2, 4.0)), 60),
    "reply-lost": (5, _next_mutation("reply-lost"), 0),
    "applied-late": (4, _apply_late, 0),
    "applied-twice": (4, _next_mutation("applied-twice"), 0),
    "accepted-only": (3, _next_mutation("accepted-only"), 0),
    "refused": (4, FaultInjector._refuse, 0),
    "no-header": (2, FaultInjector._omit_header, 0),
    "no-id": (2, FaultInjector._omit_id, 0),
    # A request may be executed so late, and no later (LATE_SECONDS).
    "frozen": (2, lambda run, rack: frozen(rack), (1, 25)),
    "notices-lost": (3, lambda run, rack: network_fault(rack, notice_loss=0.8), 120),
    "notices-twice": (2, lambda run, rack: network_fault(rack, notice_copies=2), 60),
    "by-hand": (4, FaultInjector._foreign_partition, 90),
    "between-lists": (3, FaultInjector._partition_between_lists, 60),
    "sick-gpu": (4, FaultInjector._unhealthy_gpu, 90),
    "tray-away": (3, lambda run, rack: tray_pulled(rack, run._host(rack)), 40),
    "tray-swapped": (3, lambda run, rack: tray_pulled(rack, run._host(rack), run._new_guid), 20),
    "list-omits": (4, FaultInjector._hide_partition, 0),
    "new-domain-uuid": (1, lambda run, rack: _new_domain_uuid(rack, run.plane.ids()), (1, 8)),
    "clock-jump": (3, FaultInjector._set_clock, 0),
    "kill": (2, FaultInjector._kill, 0),
    "kill-soon": (4, FaultInjector._kill_soon, 0),
    "stop": (2, FaultInjector._stop, STOP_SECONDS),
    "stop-soon": (4, FaultInjector._stop_soon, 0),
    "stop-recorded": (2, FaultInjector._stop_recorded, 0),
    "disk-full": (2, FaultInjector._full_disk, (2, 30)),
    "disk-error": (3, FaultInjector._failing_disk, 0),
    "clock-ahead": (0, FaultInjector._clock_ahead, (5, 15)),
    "second-lies": (0, FaultInjector._same_domain, 120),
    "listed-twice": (0, FaultInjector._same_hardware, 120),
}
"""By kind: how often it comes, relative to the others, how it begins, and how long it lasts in seconds.

The duration is the mean of an exponential distribution, or a range.
"""

FAULT_WEIGHTS = {kind: weight for kind, (weight, _, _) in _KINDS.items() if weight}
"""Kinds of fault and how often each comes, relative to the others."""

CONFLICT_FAULT_WEIGHTS = {
    "second-lies": 4,
    "listed-twice": 1,
    "by-hand": 3,
    "sick-gpu": 3,
    "tray-away": 2,
    "tray-swapped": 2,
    "notices-lost": 3,
    "notices-twice": 2,
    "kill": 1,
    "kill-soon": 2,
}
"""A conflicting controller, and faults that leave the true controller readable."""
