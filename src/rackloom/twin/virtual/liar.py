"""A second controller that contradicts that of a simulated rack: nobody can tell which of the two is wrong.

It has a fabric of its own, so whatever is asked of it changes nothing that is true. Nothing may be asked of
it, nor of the true one once it was heard.
"""

import random
from collections.abc import Collection
from typing import Any

from rackloom.twin.switches.fabric import FabricGpu, SimulatedFabric
from rackloom.twin.switches.faults import Faults
from rackloom.twin.switches.nmxc_service import NmxcService
from rackloom.twin.virtual.wire import SimSwitch
from rackloom.twin.virtual.world import MUTATIONS, SimNetwork, SimRack


class Liar:
    """A controller that shows GPUs of `rack` and says it is `domain`; `asked`: the changes asked of it."""

    def __init__(self, rack: SimRack, domain: str, gpus: Collection[FabricGpu], rng: random.Random) -> None:
        self.rack = rack
        self.domain = domain
        self.url = f"{rack.url}-second"
        self.serial = f"{min(rack.serials)}-second"
        self.asked: list[str] = []
        fabric = SimulatedFabric(domain, gpus, rack.fabric.limits)
        self.switch = SimSwitch(NmxcService(fabric, Faults()), SimNetwork(rng), self._executed)

    def concerns(self, rack: SimRack) -> bool:
        """Whether what it shows cannot be true beside what `rack` shows."""
        return rack is self.rack or rack.fabric.domain == self.domain

    def _executed(self, rpc: str, _request: Any, _reply: Any, _expected: bool) -> None:
        if rpc in MUTATIONS:
            self.asked.append(rpc)


def of_less(rack: SimRack, rng: random.Random) -> Liar:
    """One that says it is the rack's domain, and shows it without one of its trays."""
    gpus = list(rack.fabric.gpus.values())
    away = rng.choice(sorted({gpu.host_id for gpu in gpus}))
    return Liar(rack, rack.fabric.domain, [gpu for gpu in gpus if gpu.host_id != away], rng)


def of_the_same(rack: SimRack, domain: str, rng: random.Random) -> Liar:
    """One that says it is another `domain`, and lists the rack's hardware."""
    return Liar(rack, domain, list(rack.fabric.gpus.values()), rng)
