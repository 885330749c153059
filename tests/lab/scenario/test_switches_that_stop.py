"""`heal` starts a switch that was stopped, unless it answers again by then."""

import asyncio
from types import SimpleNamespace

import pytest

from rackloom.lab.scenario import site_faults, switch_leaders
from rackloom.lab.scenario.every_layer import heal
from rackloom.lab.scenario.rest_client import RestAnswer
from rackloom.lab.scenario.stage import Stage
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

STOPS = site_faults.switch_stops()
MOVES = switch_leaders.switch_leader_moves()
ANSWERS = site_faults.switch_answers()
RESTARTS = site_faults.switch_restarts(forgets="names")


class Switch:
    """Records its calls."""

    def __init__(self, fabric):
        self.fabric, self.faults, self.url = fabric, NmxcFaults(), "http://switch"
        self.done = []

    async def go_away(self):
        self.done.append("away")

    async def come_back(self):
        self.done.append("back")

    async def move(self):
        self.done.append("moved")

    async def old_leader_yields(self):
        pass


def done(*steps):
    async def rest(*_):
        return RestAnswer(200, None)

    async def whole():
        for step in steps:
            await step.run(stage)

    site = build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("stops"))
    (fabric,) = fabrics_of(site, "stops")
    switch = Switch(fabric)
    there = SimpleNamespace(site=site, switches=[switch], rest=rest, untaken=tuple, mend=lambda: None)
    stage = Stage(there)
    asyncio.run(whole())
    return switch.done


def test_heal_starts_what_was_stopped():
    assert done(STOPS, heal()) == ["away", "back"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "by"), [(MOVES, ["moved"]), (ANSWERS, ["back"]), (RESTARTS, ["away", "back"])]
)
def test_heal_lets_be_what_answers_again(again, by):
    assert done(STOPS, again, heal()) == ["away", *by]
