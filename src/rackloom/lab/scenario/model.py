"""A scenario as a value: steps in order of time, each an action or an expectation.

A step type is an immutable struct. Its tag is its name in files, its fields are its keys, and its
docstring is its documentation. `layer` says which part of a site the step needs, and `speeds` whether
it can be played in real time, in virtual time, or in both.

An action is done once. `breaks` is false for what happens on an ordinary day, so that `without_faults`
can replay the same scenario without anything breaking; at least one expectation must then fail, unless
the file says that nobody notices or that nothing breaks. An expectation is observed again and again
until it holds, for at most `within` seconds, and must then hold for `stays` seconds.

Times are seconds since the site first answered. Racks, trays, GPUs of a tray (module ids) and instances
of a group count from 1. A step that does not come about raises `NotObserved` with what was observed
instead.
"""

from typing import ClassVar, Literal

import msgspec

Layer = Literal["carve", "cluster", "doctor"]
Speed = Literal["real", "virtual"]
Controller = Literal["nmx-c", "nmx-m"]
FaultVisibility = Literal["seen", "unnoticed", "none"]
BOTH_SPEEDS: frozenset[Speed] = frozenset({"real", "virtual"})
ONLY_VIRTUAL: frozenset[Speed] = frozenset({"virtual"})


class Step(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """What all steps have. `at`: not before this second; without it, as soon as the step before is over."""

    at: float | None = None
    layer: ClassVar[Layer] = "carve"
    speeds: ClassVar[frozenset[Speed]] = BOTH_SPEEDS


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
    faults: FaultVisibility = "seen"
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
        return frozenset.intersection(
            BOTH_SPEEDS if plain else ONLY_VIRTUAL, *(step.speeds for step in self.steps)
        )


# What tenants do, through REST.


class TenantAction(Action, frozen=True, kw_only=True):
    """Somebody asks REST for something."""

    breaks: ClassVar[bool] = False


class NmxcAction(Action, frozen=True, kw_only=True):
    """Something that can only happen to an NMX-C."""


class ClusterAction(Action, frozen=True, kw_only=True):
    """Something is done to the cluster, or breaks in it."""

    layer: ClassVar[Layer] = "cluster"


class ClusterExpectation(Expectation, frozen=True, kw_only=True):
    """Something must be seen of the cluster."""

    layer: ClassVar[Layer] = "cluster"


class TrayAction(ClusterAction, frozen=True, kw_only=True):
    """Something happens to one tray."""

    tray: int
    rack: int = 1


class UserAction(ClusterAction, frozen=True, kw_only=True):
    """A user asks the API server for something."""

    breaks: ClassVar[bool] = False


class SoleAction(ClusterAction, frozen=True, kw_only=True):
    """Something happens to Rackloom's controllers where they are one process, and none is elected."""


class LeaderAction(ClusterAction, frozen=True, kw_only=True):
    """Something happens to the replica of Rackloom's controllers that was elected."""


class NotObserved(Exception):
    """A step did not come about; the text says what was seen instead."""
