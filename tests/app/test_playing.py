"""Shipped scenarios on the production code, and a scenario with a wrong expectation fails."""

from functools import cache
from pathlib import Path

import pytest
from tests.lab.scenario.texts import CARVED, END, HEAD, READY

from rackloom.app.twin.scenarios import play_scenario
from rackloom.errors import Refused
from rackloom.lab.scenario.files import find_scenario
from rackloom.lab.scenario.reading import parse_scenario, read_scenario, shipped_scenarios


def ignore(_):
    """Nobody watches."""


def outcome(played):
    return [(line.what, line.seen) for line in played.lines if not line.ok]


def known(name):
    return read_scenario(find_scenario(Path(name)))


@cache
def played_in_virtual_time(name):
    """The first play of a scenario. Its comparison is with a second one."""
    return play_scenario(known(name), speed="virtual", home=None, report=ignore)


def named(speed):
    return [scenario.name for scenario in shipped_scenarios() if speed in scenario.speeds]


@pytest.mark.slow
@pytest.mark.parametrize("name", named("virtual"))
def test_in_virtual_time(name):
    played = played_in_virtual_time(name)
    assert outcome(played) == []
    assert played.ok
    assert played.observed == played.expected > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["partition-gone", "service-killed", "tray-swapped", "reply-lost"])
def test_over_sockets_in_real_time(name):
    played = play_scenario(known(name), speed="real", home=None, report=ignore)
    assert outcome(played) == []
    assert played.ok


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tray-split-loses-label", "gpu-xid", "watches-expire"])
def test_with_a_cluster(name):
    played = play_scenario(known(name), speed="real", home=None, report=ignore)
    assert outcome(played) == []
    assert played.ok


@pytest.mark.slow
@pytest.mark.parametrize("name", ["service-dies-at-each-write", "imex-index-churn", "nmxm-list-race"])
def test_virtual_time_is_the_same_every_time(name):
    again = play_scenario(known(name), speed="virtual", home=None, report=ignore)
    assert again == played_in_virtual_time(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "seen"),
    [
        ('expect = "partitions"\ncount = 2\nwithin = 2', "rack-01 holds 'rl-"),
        ('expect = "instances"\ngroup = "job"\nstatus = "Error"\nwithin = 2', "job/1 is Ready: "),
        ('expect = "released"\ngroup = "job"\nwithin = 2', "2 of 2 are still there"),
        ('expect = "logical-partition"\nname = "lp"\nstatus = "Pending"\nwithin = 2', "lp is Ready: "),
        (
            'expect = "interface"\ninstance = "job/1"\ngpu = "gpu-0"\nstatus = "Error"\nwithin = 2',
            "gpu-0 of job/1 is ",
        ),
        ('expect = "read-again"\nwithin = 2', "the newest reading is that of "),
        ('expect = "finding"\ncheck = "GPU health"\nwithin = 2', "the doctor finds nothing"),
    ],
)
def test_what_is_not_so_is_not_observed(step, seen):
    scenario = parse_scenario(f"{HEAD}{CARVED}{READY}[[step]]\n{step}\n", "wrong", "wrong.toml")
    played = play_scenario(scenario, speed="virtual", home=None, report=ignore)
    assert not played.ok
    assert played.observed == played.expected - 1
    assert played.lines[-1].seen.startswith(seen)


def test_a_request_that_is_refused_ends_the_scenario():
    more = '[[step]]\ndo = "make-instances"\ngroup = "more"\nvpc = "net"\ncount = 18\n'
    played = play_scenario(
        parse_scenario(HEAD + CARVED + more + END, "x", "x"), speed="virtual", home=None, report=ignore
    )
    assert not played.ok
    assert played.lines[-1].seen.startswith("POST instance/batch: 4")


def test_a_speed_that_cannot_play_it_is_refused_before_anything_starts():
    with pytest.raises(Refused, match=r"cannot be played in real time: steps \d+.*--speed virtual"):
        play_scenario(known("clock-set-back"), speed="real", home=None, report=ignore)


@pytest.mark.slow
def test_a_home_that_is_given_is_kept(tmp_path):
    home = tmp_path / "home"
    assert play_scenario(known("reply-lost"), speed="real", home=home, report=ignore).ok
    assert (home / "site.db").exists()
