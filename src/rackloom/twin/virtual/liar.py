"""A second controller that says it is the domain of a simulated rack, and shows it without one of its trays.

It has a fabric of its own, so whatever is asked of it changes nothing that is true. Nothing may be asked of
it: nobody can tell which of the two is wrong.
"""

import random
from typing import Any

from rackloom.twin.switches.fabric import FabricGpu, SimulatedFabric
from rackloom.twin.switches.faults import Faults
from rackloom.twin.switches.nmxc_service import NmxcService
from rackloom.twin.virtual.wire import SimSwitch
from rackloom.twin.virtual.world import MUTATIONS, SimNetwork, SimRack


class Liar:
    """The second controller of `rack`. `asked` are the changes that were asked of it."""

    def __init__(self, rack: SimRack, rng: random.Random) -> None:
        self.rack = rack
        self.url = f"{rack.url}-second"
        self.serial = f"{min(rack.serials)}-second"
        self.asked: list[str] = []
        gpus = _without_a_tray(list(rack.fabric.gpus.values()), rng)
        fabric = SimulatedFabric(rack.fabric.domain, gpus, rack.fabric.limits)
        self.switch = SimSwitch(NmxcService(fabric, Faults()), SimNetwork(rng), self._executed)

    def _executed(self, rpc: str, _request: Any, _reply: Any, _expected: bool) -> None:
        if rpc in MUTATIONS:
            self.asked.append(rpc)


def _without_a_tray(gpus: list[FabricGpu], rng: random.Random) -> list[FabricGpu]:
    away = rng.choice(sorted({gpu.host_id for gpu in gpus}))
    return [gpu for gpu in gpus if gpu.host_id != away]
