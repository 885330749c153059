"""Every fault that a scenario can plant is found by the doctor in a shipped one, or cannot be.

tests/app/test_playing.py plays the scenarios. It looks for each finding in the live snapshot, and checks that
nothing is left when all is healed.
"""

import itertools
import typing
from pathlib import Path

import msgspec
import pytest

from rackloom.lab.scenario import model
from rackloom.lab.scenario.reading import shipped_scenarios
from rackloom.lab.scenario.site_expectations import finding, no_finding

PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
ASKED = {
    "make-logical-partition",
    "make-vpc",
    "make-instances",
    "set-interfaces",
    "release-instances",
    "switch-standby-registered",
    "submit",
    "delete-object",
}
"""Actions of tenants, operators and users, which break nothing."""
HEALING = {
    "switch-answers",
    "switch-leader-registered",
    "switch-old-leader-yields",
    "leader-connected",
    "switch-tray-back",
    "tray-returned",
    "hand-lets-go",
    "heal",
    "node-back",
    "api-server-good",
    "controllers-single",
    "gpu-health healthy",
    "fabric-state completed",
}


def kind_of(step):
    return step.step_kind.name


def key_of(step):
    """The fault that a step plants: its kind, and the chosen variant."""
    return " ".join([kind_of(step), *(str(getattr(step, name)) for name in _ways(step.step_kind))])


def _ways(kind):
    """The fields of a kind that choose one of several effects, and the values of each field."""
    return {
        field.name: typing.get_args(field.type)
        for field in msgspec.structs.fields(kind.struct)
        if typing.get_origin(field.type) is typing.Literal
    }


def every_fault():
    """All faults that the language can plant."""
    for name, kind in model.ACTIONS.items():
        for chosen in itertools.product(*_ways(kind).values()):
            fault = " ".join([name, *chosen])
            if name not in ASKED | HEALING and fault not in HEALING:
                yield fault


def found_in(scenario):
    """The faults of a scenario that an expected finding follows before anything else breaks or heals."""
    planted = None
    for step in scenario.steps:
        if isinstance(step, model.Action) and kind_of(step) not in ASKED:
            planted = key_of(step)
        elif step.step_kind is finding and planted is not None:
            yield planted


def unseen():
    """The table of docs/doctor.md: faults that leave nothing to be found, and why."""
    section = PAGE.split("## What it cannot find")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {fault.strip(" `"): why.strip() for faults, why in rows for fault in faults.split("`, `")}


SCENARIOS = shipped_scenarios()
FAULTS = tuple(every_fault())
FOUND = {fault for scenario in SCENARIOS for fault in found_in(scenario)}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_or_cannot_be(fault):
    assert (fault in FOUND) != (fault in unseen()), "one of the two, and not both"
    assert unseen().get(fault, "found")


def test_the_page_tells_of_no_fault_that_there_is_not():
    assert unseen().keys() <= set(FAULTS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_the_doctor_finds_names_the_object_that_was_broken(scenario):
    for step in scenario.steps:
        if step.step_kind is finding:
            assert step.subject or step.instance or step.tray is not None or step.rack is not None, step


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nothing_is_left_to_be_found_in_the_end(scenario):
    """The whole snapshot is checked after the last action."""
    last = max(at for at, step in enumerate(scenario.steps) if isinstance(step, model.Action))
    after = [step for step in scenario.steps[last:] if step.step_kind is no_finding]
    assert [step.check for step in after] == [""]
