"""A scenario as a value: steps in order of time, each an action or an expectation.

A step is one asynchronous function. Its name (with hyphens) is its word in files, its keyword parameters
are its keys, their annotations are the checks, its docstring is its documentation, and its body carries
it out on a `Stage`. `@action` and `@expectation` make a `StepKind` of it: once, at import, they derive
the struct into which a `[[step]]` table is read. `layer` is the part of a site that the step needs,
`speeds` whether it can be played in real time, in virtual time, or in both, and `needs` the controllers
that it needs.

An action is done once. `breaks` is false for an event of an ordinary day, so that `without_faults` can
replay the same scenario without anything breaking. At least one expectation must then fail, unless the file
declares that nothing breaks. An expectation is checked again and again until it holds, for at most
`within` seconds, and must then hold for `stays` seconds.

Times are seconds since the site first answered. Racks, trays, GPUs and NICs have the names of
`topology.part_names`. Instances of a group count from 1. A step that does not come about raises `NotObserved`
with the observation.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, cast, get_args

import msgspec

from rackloom.lab.scenario.parameters import Check, Number, Seconds
from rackloom.lab.scenario.played import Speed

Layer = Literal["carve", "cluster", "doctor"]
Controller = Literal["nmx-c", "nmx-m"]
FaultVisibility = Literal["seen", "none"]
Need = Literal["", "nmx-c", "election", "single process"]
BOTH_SPEEDS: frozenset[Speed] = frozenset({"real", "virtual"})
ONLY_VIRTUAL: frozenset[Speed] = frozenset({"virtual"})


class NotObserved(Exception):
    """A step did not come about. The text has the observation."""


def require(holds: object, observed: str) -> str:
    """Return `observed`. Raises `NotObserved` with it unless `holds` is true."""
    if not holds:
        raise NotObserved(observed)
    return observed


class Step(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """The base of all steps. `at`: not before this second, or as soon as the step before is over."""

    at: Number | None = None
    step_kind: ClassVar["StepKind"]

    async def run(self, stage: Any) -> str:
        """Do it, or check it once. Returns the observation. Raises `NotObserved`."""
        return await self.step_kind.run(
            stage, **{name: getattr(self, name) for name in self.step_kind.parameters}
        )


class Action(Step, frozen=True, kw_only=True, tag_field="do"):
    """Something is done, or breaks."""


class Expectation(Step, frozen=True, kw_only=True, tag_field="expect"):
    """A state that must be observed within `within` seconds, and must then last for `stays` seconds."""

    within: Seconds
    stays: Seconds = 0.0


StepFunction = Callable[..., Awaitable[str]]
ACTIONS: dict[str, "StepKind"] = {}
EXPECTATIONS: dict[str, "StepKind"] = {}
"""All kinds of steps, by their words in files."""


class StepKind:
    """A kind of step: the function that carries it out, and the facts of its signature and decorator."""

    def __init__(
        self, run: StepFunction, base: type[Step], layer: Layer, speeds: frozenset[Speed], needs: Need
    ) -> None:
        self.run = run
        self.name = run.__name__.strip("_").replace("_", "-")
        self.doc = inspect.getdoc(run) or ""
        self.layer = layer
        self.speeds = speeds
        self.needs = needs
        self.breaks = False
        parameters = [*inspect.signature(run).parameters.values()][1:]
        self.parameters = [parameter.name for parameter in parameters]
        fields: list[Any] = [
            (parameter.name, parameter.annotation)
            if parameter.default is parameter.empty
            else (parameter.name, parameter.annotation, parameter.default)
            for parameter in parameters
        ]
        self.struct = msgspec.defstruct(
            run.__name__,
            fields,
            bases=(base,),
            module=run.__module__,
            namespace={"step_kind": self},
            tag=self.name,
            frozen=True,
            kw_only=True,
        )
        self.checks: Mapping[str, tuple[str, tuple[Check, ...]]] = {
            field.name: (field.encode_name, tuple(_checks_of(field.type)))
            for field in msgspec.structs.fields(self.struct)
        }
        """By field: its key in files, and the checks that its annotation carries."""

    def __call__(self, **values: Any) -> Step:
        """A step of this kind."""
        return cast(Step, self.struct(**values))


def _checks_of(annotation: Any) -> Iterator[Check]:
    yield from getattr(annotation, "__metadata__", ())
    for inner in get_args(annotation):
        if hasattr(inner, "__metadata__"):
            yield from _checks_of(inner)


def action(
    *,
    layer: Layer = "carve",
    breaks: bool = True,
    speeds: frozenset[Speed] = BOTH_SPEEDS,
    needs: Need = "",
) -> Callable[[StepFunction], StepKind]:
    """Make an action of a function. `breaks` is false for a request or change of an ordinary day."""

    def decorate(run: StepFunction) -> StepKind:
        kind = StepKind(run, Action, layer, speeds, needs)
        kind.breaks = breaks
        ACTIONS[kind.name] = kind
        return kind

    return decorate


def expectation(
    *, layer: Layer = "carve", speeds: frozenset[Speed] = BOTH_SPEEDS, needs: Need = ""
) -> Callable[[StepFunction], StepKind]:
    """Make an expectation of a function, which checks once and changes nothing."""

    def decorate(run: StepFunction) -> StepKind:
        kind = StepKind(run, Expectation, layer, speeds, needs)
        EXPECTATIONS[kind.name] = kind
        return kind

    return decorate


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. `seen` names a report of such an incident, or the kind of fault."""

    name: str
    title: str
    seen: str
    faults: FaultVisibility = "seen"
    """`seen`: on a day on which nothing breaks, one expectation is not met. `none`: nothing breaks in it."""
    racks: int
    profile: str
    processes: int = 1
    """Replicas of the service on the same records. More than one only in virtual time."""
    candidates: int = 1
    """Replicas of Rackloom's controllers. If there are several, the Lease names the leader."""
    controller: Controller = "nmx-c"
    """The controller of the racks: an NMX-C for each, or one NMX-M for all (only in virtual time)."""
    steps: tuple[Step, ...]

    @property
    def without_faults(self) -> "Scenario":
        """The same on a day on which nothing breaks, and so nothing is repaired."""
        return msgspec.structs.replace(
            self, steps=tuple(step for step in self.steps if not step.step_kind.breaks)
        )

    @property
    def layers(self) -> frozenset[Layer]:
        """The layers of a site that it needs."""
        return frozenset(step.step_kind.layer for step in self.steps)

    @property
    def speeds(self) -> frozenset[Speed]:
        """The clocks by which every one of its steps can be played."""
        plain = self.processes == 1 and self.controller == "nmx-c"
        return frozenset.intersection(
            BOTH_SPEEDS if plain else ONLY_VIRTUAL, *(step.step_kind.speeds for step in self.steps)
        )
