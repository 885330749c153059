"""The player in virtual time, with actions of the test: order, patience, and never a vacuous pass."""

import asyncio
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from rackloom.errors import Refused
from rackloom.lab.scenario import playing, site_expectations, tenants
from rackloom.lab.scenario.every_layer import heal, invariants
from rackloom.lab.scenario.model import NotObserved, Scenario
from rackloom.lab.scenario.played import render_step, render_summary
from rackloom.lab.scenario.playing import describe_step, play_steps
from rackloom.lab.virtual import event_loop

HEAL = heal()
SEEN = invariants(within=10)


def now():
    return asyncio.get_running_loop().time()


def played(*steps, look=None, act=None, end=None):
    async def fine(_):
        return "done"

    async def main():
        lines = []
        scenario = Scenario(name="x", title="t", seen="s", racks=1, profile="p", steps=steps)
        stage = SimpleNamespace(begin_step=lambda: None)
        result = await play_steps(scenario, "virtual", stage, lines.append)
        assert tuple(lines) == result.lines
        return result

    with (
        patch.object(heal, "run", act or fine),
        patch.object(invariants, "run", look or fine),
        patch.object(playing, "require_end", end or (lambda _: None)),
    ):
        return event_loop.run_simulation(1, main)


def true_from(second, until=float("inf")):
    async def look(_):
        if not second <= now() < until:
            raise NotObserved(f"not at {now():.1f}")
        return f"at {now():.1f}"

    return look


@pytest.mark.slow
def test_steps_wait_for_their_time():
    result = played(heal(at=5.0), heal(), heal(at=60.0), SEEN)
    assert [line.began for line in result.lines] == [5.0, 5.0, 60.0, 60.0]
    assert (result.ok, result.expected, result.observed) == (True, 1, 1)


def test_a_step_whose_time_has_passed_comes_at_once():
    result = played(SEEN, heal(at=1.0), look=true_from(4.0))
    assert [line.began for line in result.lines] == [0.0, 4.0]


def test_an_expectation_is_looked_for_until_it_is_seen():
    result = played(SEEN, look=true_from(7.25))
    assert (result.ok, result.lines[0].ended, result.lines[0].seen) == (True, 7.5, "at 7.5")


def test_an_expectation_that_comes_too_late_fails_with_what_was_seen_instead():
    result = played(SEEN, look=true_from(11.0))
    assert (result.ok, result.observed, result.lines[0].seen) == (False, 0, "not at 10.0")


def test_what_must_stay_and_does_not_fails():
    stays = invariants(within=10, stays=5)
    assert played(stays, look=true_from(2.0)).lines[0].seen == "at 7.0; for 5 s"
    gone = played(stays, look=true_from(2.0, until=6.0))
    assert (gone.ok, gone.lines[0].seen) == (False, "it did not stay so for 5 s: not at 6.0")


def test_nothing_is_pretended_after_a_step_that_failed():
    result = played(SEEN, HEAL, SEEN, look=true_from(100.0))
    assert (result.ok, len(result.lines), result.expected, result.observed) == (False, 1, 2, 0)


@pytest.mark.parametrize("error", [NotObserved("no tray"), Refused("not here", nearest_fix="there")])
def test_an_action_that_does_not_come_about_fails_the_scenario(error):
    async def act(_):
        raise error

    result = played(HEAL, SEEN, act=act)
    assert (result.ok, len(result.lines)) == (False, 1)
    assert str(error) in result.lines[0].seen


def test_how_a_step_is_told():
    step = tenants.make_instances(group="job", vpc="net", count=4, tenant="blue")
    assert describe_step(step) == "make-instances group job vpc net count 4 tenant blue"
    assert (
        describe_step(site_expectations.partitions(within=5, count=0)) == "expect partitions within 5 count 0"
    )
    assert (
        describe_step(site_expectations.together(within=1, groups=("a", "b")))
        == "expect together within 1 groups a,b"
    )


def test_a_transcript_tells_what_was_not_seen():
    result = played(SEEN, HEAL, look=true_from(100.0))
    assert "FAILED expect invariants" in render_step(result.lines[0])
    assert render_summary(result).endswith("NOT as it must be")


def test_a_fault_that_struck_nothing_fails_the_scenario_after_its_last_step():
    def end(_):
        raise NotObserved("still to come: 1 calls of Hello of rack-01")

    result = played(HEAL, SEEN, end=end)
    assert (result.ok, result.expected, result.observed) == (False, 1, 1)
    assert [(line.step, line.what, line.ok) for line in result.lines][-1] == (3, "the end", False)


def test_what_fails_before_is_not_told_of_the_end():
    def end(_):
        raise AssertionError

    assert len(played(SEEN, HEAL, look=true_from(99.0), end=end).lines) == 1
