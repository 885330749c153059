"""A finding of a scenario is seen only if it names the object that was broken, while it is broken."""

import pytest
from tests.lab.scenario.texts import CARVED, HEAD, READY

from rackloom.app.twin.scenarios import play_scenario
from rackloom.lab.scenario.reading import parse_scenario

BREAKS = """
[[step]]
do = "gpu-health"
instance = "job/2"
gpu = "gpu-2"
health = "no-nvlink"
"""
BROKEN = HEAD + "racks = 2\n" + CARVED + READY + BREAKS


def outcome(*steps):
    text = BROKEN + "\n".join(f"[[step]]\n{step}\nwithin = 5\n" for step in steps)
    played = play_scenario(
        parse_scenario(text, "x", "x.toml"), speed="virtual", home=None, report=lambda _: None
    )
    return played.ok, played.lines[-1].seen


def finding(check, *naming):
    return "\n".join(['expect = "finding"', f'check = "{check}"', *naming])


@pytest.mark.slow
@pytest.mark.parametrize(
    "naming",
    [['instance = "job/2"'], ['subject = "gpu-2"', 'instance = "job/2"'], ['tray = "rack-01/slot-1"']],
)
def test_the_broken_one_is_named(naming):
    ok, seen = outcome(finding("GPU health", *naming))
    assert ok, seen
    assert "NO_NVLINK" in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "naming",
    [
        ['instance = "job/1"'],
        ['subject = "gpu-0"', 'instance = "job/2"'],
        ['tray = "rack-02/slot-1"'],
        ['rack = "rack-02"'],
    ],
)
def test_another_one_is_not(naming):
    ok, seen = outcome(finding("GPU health", *naming))
    assert not ok
    assert seen.startswith("the doctor finds GPU health of rack-01/slot-1/gpu-2")


def test_what_is_still_broken_is_not_nothing():
    ok, seen = outcome(finding("GPU health"), 'expect = "no-finding"')
    assert not ok
    assert seen.startswith("the doctor finds GPU health of rack-01/slot-1/gpu-2")
