"""A scenario does not pass if its fault never struck: it would show nothing about that fault."""

import pytest
from tests.lab.scenario.texts import CARVED, END, HEAD, READY

from rackloom.app.twin.scenarios import play_scenario
from rackloom.lab.scenario.reading import parse_scenario

NEVER_CALLED = 'do = "switch-mistreats"\nrpc = "RemoveGpusFromPartition"\nhow = "omits-header"\ntimes = 2'
HEAL = '[[step]]\ndo = "heal"\n'


def last_line(text):
    scenario = parse_scenario(text, "x", "x.toml")
    played = play_scenario(scenario, speed="virtual", home=None, report=lambda _: None)
    return played.ok, played.lines[-1].what, played.lines[-1].seen


MOVES = '[[step]]\ndo = "switch-leader-moves"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (NEVER_CALLED, "2 calls of RemoveGpusFromPartition of rack-01"),
        ('do = "network-bad"\nhow = "accepted-only"', "1 changes of rack-01"),
        (f'do = "network-bad"\nhow = "applied-twice"\n{MOVES}', "1 changes of rack-01"),
        ('do = "service-dies"\npoint = 1000000', "the service's death at its point 1000000"),
        ('do = "switch-hides"\ninstance = "job/1"\nlists = 99', "99 lists without partition 1 of rack-01"),
    ],
)
def test_at_the_end(step, message):
    ok, what, seen = last_line(f"{HEAD}{CARVED}{READY}[[step]]\n{step}\n{END}")
    assert (ok, what) == (False, "the end")
    assert seen == f"still to come: {message}; the scenario shows nothing of it"


def test_when_all_is_repaired():
    ok, what, seen = last_line(f"{HEAD}[[step]]\n{NEVER_CALLED}\n{HEAL}{END}")
    assert (ok, what) == (False, "heal")
    assert seen.startswith("still to come: 2 calls of RemoveGpusFromPartition")


@pytest.mark.slow
def test_a_death_that_another_was_set_over_has_not_come():
    deaths = "".join(f'[[step]]\ndo = "service-dies"\npoint = {point}\n' for point in (2, 1))
    ok, what, seen = last_line(f"{HEAD}{deaths}{CARVED}{READY}{END}")
    assert (ok, what) == (False, "the end")
    assert seen.startswith("still to come: the service's death at its point 2;")
