"""The fault injector of a random run: each kind of fault has been seen on real racks.

`FAULT_WEIGHTS` lists every kind with its relative frequency. Faults strike random racks at
exponentially distributed intervals; each ends by itself, and several may overlap. `heal` waits for the
last one, repairs networks and GPU health, and then lets one interval pass.

The kinds cover the network (unreachable, dark, slow, lost replies, late, duplicated and swallowed
requests, lost and duplicated notifications), the controller (restart, refusals, replies without a
header, incomplete lists, a new domain UUID), the hardware (sick GPUs, trays pulled, returned or
swapped), other writers, the clock, and the service itself (killed now, or at one of its next crash
points).

`CONFLICT_FAULT_WEIGHTS` adds a second controller that contradicts a rack's own. These runs leave the
true controller readable, because a conflicting controller that is read alone cannot be recognised.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from rackloom.core.partitions.domain import GpuHealth
from rackloom.lab.switches.fabric import FabricGpu, FabricPartition
from rackloom.lab.virtual import racks
from rackloom.lab.virtual.network import MUTATIONS, CallFate
from rackloom.lab.virtual.process import ServiceProcess
from rackloom.lab.virtual.racks import ConflictingController, SimRack, SimSite
from rackloom.lab.virtual.service import SimulatedService

TraceLine = Callable[[str], None]


class FaultInjector:
    """The source of all trouble of one run."""

    def __init__(
        self,
        world: SimSite,
        plane: SimulatedService,
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

    async def happen(self, until: float, pause: float) -> None:
        """Faults until then, `pause` seconds apart on average over the whole site."""
        while self.plane.tell_now() < until:
            await asyncio.sleep(self.rng.expovariate(1 / pause))
            kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
            self.strike(kind, self.rng.choice(self.world.racks))

    def strike(self, kind: str, rack: SimRack) -> None:
        """One fault, now, on one rack."""
        self.counts[kind] += 1
        self._trace(f"fault {rack.name} {kind}")
        fault: Callable[[SimRack], Coroutine[Any, Any, None]] = getattr(self, f"_{kind.replace('-', '_')}")
        task = asyncio.create_task(fault(rack))
        self._running.append(task)
        task.add_done_callback(self._running.remove)

    async def heal(self) -> None:
        """Everything is repaired, and by-hand partitions are removed by the hand that made them."""
        while self._running:
            await asyncio.gather(*self._running)
        for rack in self.world.racks:
            rack.network.heal()
            rack.faults.clear()
            # One that was pulled while it was sick came back as it went.
            for guid in sorted(rack.fabric.gpus):
                self._set_health(rack, guid, GpuHealth.HEALTHY)
        # What was lost before this moment is met within an interval.
        await asyncio.sleep(self.plane.interval)

    async def _for_a_while(self, mean: float) -> None:
        await asyncio.sleep(min(self.rng.expovariate(1 / mean), 5 * mean))

    async def _unreachable(self, rack: SimRack) -> None:
        rack.network.down = True
        rack.switch.break_streams()
        await self._for_a_while(40)
        rack.network.down = False

    async def _restart(self, rack: SimRack) -> None:
        rack.network.down = True
        rack.switch.break_streams()
        await asyncio.sleep(self.rng.uniform(1, 8))
        rack.network.down = False

    async def _dark(self, rack: SimRack) -> None:
        rack.network.dark = True
        await self._for_a_while(30)
        rack.network.dark = False

    async def _slow(self, rack: SimRack) -> None:
        rack.network.slow = self.rng.uniform(0.2, 4.0)
        await self._for_a_while(60)
        rack.network.slow = 0.0

    async def _reply_lost(self, rack: SimRack) -> None:
        rack.network.next_mutations.append(CallFate(back=None))

    async def _applied_late(self, rack: SimRack) -> None:
        # The driver's deadline is 10 s: it has given up by then.
        rack.network.next_mutations.append(CallFate(there=self.rng.uniform(10.5, 25)))

    async def _applied_twice(self, rack: SimRack) -> None:
        rack.network.next_mutations.append(CallFate(copies=2))

    async def _accepted_only(self, rack: SimRack) -> None:
        rack.network.next_mutations.append(CallFate(copies=0))

    async def _refused(self, rack: SimRack) -> None:
        rpc = self.rng.choice([*sorted(MUTATIONS), "GetGpuInfoList", "GetPartitionInfoList", "Hello"])
        rack.faults.refuse_next(rpc, "NOT_READY")

    async def _no_header(self, rack: SimRack) -> None:
        rack.faults.omit_header_of_next(self.rng.choice([*sorted(MUTATIONS), "GetPartitionInfoList"]))

    async def _list_omits(self, rack: SimRack) -> None:
        rack.faults.hide_partition(self.rng.choice([*sorted(rack.fabric.partitions), 1]), 1)

    async def _notices_lost(self, rack: SimRack) -> None:
        rack.network.notice_loss = 0.8
        await self._for_a_while(120)
        rack.network.notice_loss = 0.0

    async def _notices_twice(self, rack: SimRack) -> None:
        rack.network.notice_copies = 2
        await self._for_a_while(60)
        rack.network.notice_copies = 1

    async def _by_hand(self, rack: SimRack) -> None:
        """Somebody makes a partition on the switch, of GPUs wherever they are."""
        guids = sorted(rack.fabric.gpus)
        chosen = tuple(sorted(self.rng.sample(guids, min(self.rng.randint(1, 3), len(guids)))))
        number = next(free for free in range(1, 1000) if free not in rack.fabric.partitions)
        rack.disturb()
        rack.fabric.put(FabricPartition(id=number, name=f"by-hand-{number}", guids=chosen))
        await self._for_a_while(90)
        if number in rack.fabric.partitions:
            rack.disturb()
            rack.fabric.delete(number)

    async def _sick_gpu(self, rack: SimRack) -> None:
        guid = self.rng.choice(sorted(rack.fabric.gpus))
        bad = self.rng.choice((GpuHealth.DEGRADED, GpuHealth.NO_NVLINK, GpuHealth.DEGRADED_BANDWIDTH))
        self._set_health(rack, guid, bad)
        await self._for_a_while(90)
        self._set_health(rack, guid, GpuHealth.HEALTHY)

    def _set_health(self, rack: SimRack, guid: int, health: GpuHealth) -> None:
        gpu = rack.fabric.gpus.get(guid)
        if gpu is not None and gpu.health is not health:
            rack.disturb()
            rack.fabric.set_health(guid, health)

    async def _tray_away(self, rack: SimRack) -> None:
        gpus = self._pull(rack)
        await self._for_a_while(40)
        rack.disturb()
        rack.fabric.insert_gpus(gpus)

    async def _tray_swapped(self, rack: SimRack) -> None:
        gpus = self._pull(rack)
        await self._for_a_while(20)
        rack.disturb()
        rack.fabric.insert_gpus(
            msgspec.structs.replace(gpu, guid=self.rng.getrandbits(63) | 1 << 63) for gpu in gpus
        )

    def _pull(self, rack: SimRack) -> list[FabricGpu]:
        hosts = sorted({gpu.host_id for gpu in rack.fabric.gpus.values()})
        if not hosts:
            return []
        host = self.rng.choice(hosts)
        gpus = [gpu for gpu in rack.fabric.gpus.values() if gpu.host_id == host]
        rack.disturb()
        rack.fabric.remove_gpus([gpu.guid for gpu in gpus])
        return gpus

    async def _new_domain_uuid(self, rack: SimRack) -> None:
        rack.disturb()
        rack.network.down = True
        rack.switch.break_streams()
        await asyncio.sleep(self.rng.uniform(1, 8))
        rack.fabric.domain = self.plane.ids()
        rack.network.down = False

    async def _second_lies(self, rack: SimRack) -> None:
        """A second controller says that it is this domain, and shows less of it."""
        await self._lie(rack, lambda: racks.controller_without_tray(rack, self.rng))

    async def _listed_twice(self, rack: SimRack) -> None:
        """A second controller lists this hardware, and says that it is a new domain, or that of any rack."""
        others = [one.fabric.domain for one in self.world.racks if one is not rack]
        domain = self.rng.choice([self.plane.ids(), *others])
        await self._lie(rack, lambda: racks.controller_of_other_domain(rack, domain, self.rng))

    async def _lie(self, rack: SimRack, tell: Callable[[], ConflictingController]) -> None:
        if self.plane.liar_of(rack) is not None:
            return
        told = tell()
        await self.plane.register(told)
        await self._for_a_while(120)
        await self.plane.remove(told)

    async def _clock_jump(self, _: SimRack) -> None:
        self.plane.skew += self.rng.choice((-1, 1)) * self.rng.choice((0.5, 30.0, 600.0))

    async def _kill(self, _: SimRack) -> None:
        if life := self._any_life():
            life.kill()

    async def _kill_soon(self, _: SimRack) -> None:
        if life := self._any_life():
            life.fuse = life.points + self.rng.randint(1, 12)

    def _any_life(self) -> ServiceProcess | None:
        living = self.plane.living
        return self.rng.choice(living) if living else None


FAULT_WEIGHTS = {
    "unreachable": 4,
    "restart": 3,
    "dark": 3,
    "slow": 4,
    "reply-lost": 5,
    "applied-late": 4,
    "applied-twice": 4,
    "accepted-only": 3,
    "refused": 4,
    "no-header": 2,
    "notices-lost": 3,
    "notices-twice": 2,
    "by-hand": 4,
    "sick-gpu": 4,
    "tray-away": 3,
    "tray-swapped": 3,
    "list-omits": 4,
    "new-domain-uuid": 1,
    "clock-jump": 3,
    "kill": 2,
    "kill-soon": 4,
}
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
"""A second controller that lies, and faults that leave the true one readable: alone, a liar is believed."""
