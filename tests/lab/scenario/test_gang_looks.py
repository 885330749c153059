"""A gang's step reports each difference, and separates recorded plans from those that were taken back."""

from pathlib import Path

import pytest
from tests.lab.scenario.texts import END, HEAD

from rackloom.app.twin.scenarios import play_scenario
from rackloom.errors import Refused
from rackloom.lab.scenario.files import find_scenario
from rackloom.lab.scenario.reading import parse_scenario, read_scenario

GANG = '[[step]]\nexpect = "gang"\nname = "train"\nwithin = 60\n'


def up_to_bound():
    """The steps of a shipped file up to the gang that runs, as text."""
    text = find_scenario(Path("gang-competes")).read_text()
    return text.split('[[step]]\nexpect = "condition"')[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        ("seats = 17", "18 seats and 0 spares of train"),
        ("seats = 18\nrunning = 17", "18 seats and 0 spares of train, 18 running"),
        ("seats = 18\nmoved = 1", "18 seats and 0 spares of train, 18 running; 0 moved; 1 plans"),
        ("seats = 18\nplans = 2", "18 seats and 0 spares of train, 18 running; 0 moved; 1 plans"),
    ],
)
def test_what_is_not_so_of_a_gang_is_not_observed(wrong, seen):
    scenario = parse_scenario(f"{up_to_bound()}{GANG.replace('60', '1')}{wrong}\n", "x", "x.toml")
    played = play_scenario(scenario, speed="virtual", home=None, report=lambda _: None)
    assert not played.ok
    assert played.lines[-1].seen.startswith(seen)
    assert played.observed == played.expected - 1


def test_a_gang_that_is_not_there():
    played = play_scenario(
        parse_scenario(f"{HEAD}{GANG.replace('60', '1')}seats = 1\n", "x", "x"),
        speed="virtual",
        home=None,
        report=lambda _: None,
    )
    assert (played.ok, played.lines[-1].seen) == (False, "there is no GangPlan train")


def test_a_file_in_which_something_breaks_does_not_say_that_nothing_does():
    with pytest.raises(Refused, match='something breaks, and faults = "none" is said'):
        parse_scenario(f'{HEAD}faults = "none"\n[[step]]\ndo = "switch-stops"\n{END}', "x", "x.toml")


def test_a_day_without_faults_keeps_what_is_asked_and_what_is_expected():
    calm = read_scenario(find_scenario(Path("node-lost"))).without_faults
    kinds = [step.step_kind.name for step in calm.steps]
    assert "node-lost" not in kinds
    assert "node-back" not in kinds
    assert {"make-instances", "submit", "node"} <= set(kinds)
