"""Each shipped scenario without its faults: one that still passes shows nothing of them."""

import os

import pytest

from rackloom.app.twin.scenarios import play_scenario
from rackloom.lab.scenario.reading import scenario_problems, shipped_scenarios

EVERY = os.environ.get("RACKLOOM_ALL_SCENARIOS") == "1"
SAMPLE = 10
"""The step of the sample of scenarios with a cluster, which take seconds each. Not used for `EVERY`."""
BREAKING = [
    scenario for scenario in shipped_scenarios() if scenario.faults != "none" and "virtual" in scenario.speeds
]
CLUSTERED = [scenario for scenario in BREAKING if "cluster" in scenario.layers]
PLAYED = (
    BREAKING
    if EVERY
    else [scenario for scenario in BREAKING if scenario not in CLUSTERED] + CLUSTERED[::SAMPLE]
)


@pytest.mark.parametrize("scenario", shipped_scenarios(), ids=lambda scenario: scenario.name)
def test_something_breaks_unless_the_file_says_that_nothing_does(scenario):
    assert (scenario.without_faults == scenario) == (scenario.faults == "none")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", PLAYED, ids=lambda scenario: scenario.name)
def test_a_day_on_which_nothing_breaks_is_told_from_one_on_which_it_does(scenario):
    calm = scenario.without_faults
    if any(scenario_problems(calm)):
        return  # Its expectations have no meaning without the fault.
    played = play_scenario(calm, speed="virtual", home=None, report=lambda _: None)
    assert not played.ok
