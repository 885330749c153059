"""What a cluster of the twin stands on: racks, a clock, and luck."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rackloom.topology.rack import RackProfile, Site
from rackloom.twin.switches.fabric import SimulatedFabric


class Racks(Protocol):
    """Whose trays are the nodes."""

    @property
    def site(self) -> Site:
        """Its domains and trays."""

    @property
    def profile(self) -> RackProfile:
        """What each rack is."""

    @property
    def seed(self) -> str:
        """All names of nodes and GPUs are drawn from it."""

    @property
    def fabrics(self) -> Sequence[SimulatedFabric]:
        """One for each domain, in their order."""


class Chance(msgspec.Struct, frozen=True):
    """What differs from one run of a cluster to the next."""

    wall: Callable[[], float]
    """Seconds since the epoch."""
    rng: random.Random


def true_chance() -> Chance:
    """The machine's clock, and luck."""
    return Chance(time.time, random.Random())  # noqa: S311 (jitter)


class ControllersClock:
    """What the machine of Rackloom's controllers believes: `skew` seconds more than the time."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self.skew = 0.0
        self._wall = wall

    def __call__(self) -> float:
        """Seconds since the epoch."""
        return self._wall() + self.skew
