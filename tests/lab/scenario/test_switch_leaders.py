"""Leaders that move: the site learns of it from the right controller, and a standby gets no changes."""

import pytest
from tests.lab.scenario.texts import CARVED, END, HEAD, READY

from rackloom.app.twin.scenarios import play_scenario
from rackloom.lab.scenario.reading import parse_scenario
from rackloom.lab.virtual.network import MUTATIONS, SimController
from rackloom.lab.virtual.racks import SimRack

REGISTERED = '[[step]]\ndo = "switch-standby-registered"\n'
MOVED = '[[step]]\ndo = "switch-leader-moves"\n'
FOUND = '[[step]]\ndo = "switch-leader-registered"\n'
HEALED = '[[step]]\ndo = "heal"\n'
STAYS = READY + "stays = 70\n"
UNKNOWN = READY.replace('"Ready"', '"Configuring"')  # as REST shows it
KNOWN = '[[step]]\nexpect = "no-finding"\nwithin = 60\n'


def failed(*steps):
    text = "".join((HEAD, CARVED, READY, *steps))
    played = play_scenario(
        parse_scenario(text, "x", "x.toml"), speed="virtual", home=None, report=lambda _: None
    )
    return [line.what for line in played.lines if not line.ok]


def test_nobody_is_ready_while_the_site_looks_where_the_leader_was():
    assert failed(MOVED, STAYS) == ["expect instances within 60.0 stays 70.0 group job status Ready"]


@pytest.mark.slow
def test_all_are_ready_with_a_standby_that_the_site_knows():
    assert failed(REGISTERED, STAYS, MOVED, STAYS) == []


def test_to_heal_is_to_register_the_leader():
    assert failed(MOVED, UNKNOWN, HEALED, READY, STAYS, KNOWN) == []


def test_a_leader_moves_again_and_again():
    assert failed(*[MOVED, FOUND, READY] * 2) == []


@pytest.mark.slow
def test_a_standby_follows_the_one_that_leads():
    """Each standby is the only one that the site knows when its leader is lost."""
    assert failed(REGISTERED, MOVED, FOUND, REGISTERED, MOVED, STAYS) == []


@pytest.mark.slow
def test_a_standby_is_read_and_asked_for_no_change(monkeypatch):
    asked, standbys = [], []
    once, stand_by = SimController._once, SimRack.stand_by

    async def note(self, rpc, request, *, expected):
        asked.append((self, rpc))
        return await once(self, rpc, request, expected=expected)

    async def meet(self):
        url = await stand_by(self)
        standbys.append(self.others[url])
        return url

    monkeypatch.setattr(SimController, "_once", note)
    monkeypatch.setattr(SimRack, "stand_by", meet)
    assert failed(REGISTERED, STAYS) == []
    of_standby = {rpc for switch, rpc in asked if switch in standbys}
    assert "GetGpuInfoList" in of_standby
    assert of_standby & MUTATIONS == set()


RETURNS = '[[step]]\ndo = "switch-old-leader-returns"\n'
YIELDS = '[[step]]\ndo = "switch-old-leader-yields"\n'
READ = '[[step]]\nexpect = "read-again"\nwithin = 120\n'
SUCCEEDED = REGISTERED + READ + MOVED + READY
RELEASED = '[[step]]\ndo = "release-instances"\ngroup = "job"\n'
GONE = '[[step]]\nexpect = "released"\ngroup = "job"\nwithin = 180\n'


def test_nobody_leads_again_where_nobody_led_before():
    assert failed(RETURNS, END) == ["switch-old-leader-returns"]


@pytest.mark.slow
def test_an_old_leader_that_missed_nothing_disturbs_nobody():
    assert failed(SUCCEEDED, RETURNS, STAYS, YIELDS, STAYS, KNOWN) == []


@pytest.mark.slow
def test_an_old_leader_that_the_site_no_longer_knows_is_not_asked():
    assert failed(SUCCEEDED, FOUND, RETURNS, STAYS, RELEASED, GONE, KNOWN) == []


@pytest.mark.slow
def test_what_an_old_leader_accepts_is_not_taken_for_done():
    """While the true leader is slow, only the answer of the old one is available."""
    slow = '[[step]]\ndo = "network-bad"\nhow = "slow"\n'
    assert failed(SUCCEEDED, RETURNS, READ, slow, RELEASED, GONE, HEALED, END, KNOWN) == []
