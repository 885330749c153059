"""A switch that was stopped is started by `heal`, unless it answers again by then."""

import asyncio
from types import SimpleNamespace

import pytest

from rackloom.topology import profiles
from rackloom.topology.build import build_site
from rackloom.twin.names import SeededNames
from rackloom.twin.scenario import site_actions as actions
from rackloom.twin.scenario.hands import carve_hands
from rackloom.twin.scenario.stage import Answer
from rackloom.twin.scenario.values import Heal
from rackloom.twin.switches.faults import Faults
from rackloom.twin.switches.racks import fabrics_of

STOPS = actions.SwitchStops()
MOVES = actions.SwitchLeaderMoves()
ANSWERS = actions.SwitchAnswers()
RESTARTS = actions.SwitchRestarts(forgets="names")


class Switch:
    """Notes what is done to it."""

    def __init__(self, fabric):
        self.fabric, self.faults, self.url = fabric, Faults(), "http://switch"
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
    async def operate(*_):
        return Answer(200, None)

    async def whole():
        for step in steps:
            await hands[type(step)](step)

    site = build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("stops"))
    (fabric,) = fabrics_of(site, "stops")
    switch = Switch(fabric)
    there = SimpleNamespace(switches=[switch], operate=operate, untaken=tuple, mend=lambda: None)
    hands = carve_hands(there)
    asyncio.run(whole())
    return switch.done


def test_heal_starts_what_was_stopped():
    assert done(STOPS, Heal()) == ["away", "back"]


@pytest.mark.parametrize(
    ("again", "by"), [(MOVES, ["moved"]), (ANSWERS, ["back"]), (RESTARTS, ["away", "back"])]
)
def test_heal_lets_be_what_answers_again(again, by):
    assert done(STOPS, again, Heal()) == ["away", *by]
