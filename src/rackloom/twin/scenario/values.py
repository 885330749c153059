"""A scenario as values: steps in order of time, each something that is done or something that must be seen.

Times are seconds since the site first answered. Racks count from 1, as people count them; so do GPUs of a
tray (the module id), and instances of a group.
"""

from typing import ClassVar, Literal

import msgspec

Layer = Literal["carve", "cluster", "doctor"]
Speed = Literal["real", "virtual"]
Controller = Literal["nmx-c", "nmx-m"]
Faults = Literal["seen", "unnoticed", "none"]
BOTH: frozenset[Speed] = frozenset({"real", "virtual"})
ONLY_VIRTUAL: frozenset[Speed] = frozenset({"virtual"})


class Step(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """What all steps have. `at`: not before this second; without it, as soon as the step before is over."""

    at: float | None = None
    layer: ClassVar[Layer] = "carve"
    speeds: ClassVar[frozenset[Speed]] = BOTH


class Action(Step, frozen=True, kw_only=True, tag_field="do"):
    """Something is done, or breaks."""

    breaks: ClassVar[bool] = True
    """False: somebody only asks for something, as on any other day."""


class Expectation(Step, frozen=True, kw_only=True, tag_field="expect"):
    """Something must be seen `within` so many seconds, and then stay so `for` so many more."""

    within: float
    stays: float = 0.0


class Heal(Action, frozen=True, kw_only=True, tag="heal"):
    """Whatever still is broken is repaired, on every layer."""


class End(Step, frozen=True, kw_only=True):
    """After the last step of every file: what was asked for has happened. No file writes it."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. `seen` names where such a one was reported, or what kind of fault it is."""

    name: str
    title: str
    seen: str
    faults: Faults = "seen"
    """`seen`: on a day on which nothing breaks, one expectation is not met. `unnoticed`: all are, since what
    breaks is borne or repaired before anybody has to see it. `none`: nothing breaks in it."""
    racks: int
    profile: str
    processes: int = 1
    """Replicas of the service on the same records; several only in virtual time."""
    candidates: int = 1
    """Replicas of Rackloom's controllers; of several the Lease says who leads."""
    controller: Controller = "nmx-c"
    """What the racks are behind: each an NMX-C, or all of them one NMX-M (only in virtual time)."""
    steps: tuple[Step, ...]

    @property
    def without_faults(self) -> "Scenario":
        """The same on a day on which nothing breaks, and so nothing is repaired."""
        kept = tuple(step for step in self.steps if not isinstance(step, Action) or not step.breaks)
        return msgspec.structs.replace(self, steps=kept)

    @property
    def layers(self) -> frozenset[Layer]:
        """The layers of a site that it needs."""
        return frozenset(step.layer for step in self.steps)

    @property
    def speeds(self) -> frozenset[Speed]:
        """The clocks by which every one of its steps can be played."""
        plain = self.processes == 1 and self.controller == "nmx-c"
        return frozenset.intersection(BOTH if plain else ONLY_VIRTUAL, *(step.speeds for step in self.steps))
