"""The leader of Rackloom's controllers: a change stays visible for a while, and two leaders always fail."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.lab.scenario.texts import END, HEAD

from rackloom.app.twin.scenarios import play_scenario
from rackloom.claim.kube.leader import LeaderElection
from rackloom.lab.scenario.control_plane import leader
from rackloom.lab.scenario.model import NotObserved
from rackloom.lab.scenario.reading import parse_scenario
from rackloom.lab.scenario.stage import Stage

TWO = f"{HEAD}candidates = 2\n"
LEADER = '[[step]]\nexpect = "leader"\nwithin = 60\n'
KILLED = '[[step]]\ndo = "leader-killed"\ndown = 5\n'
NODE = '[[step]]\nexpect = "node"\ntray = "rack-01/slot-0"\nwithin = 60\n'
CONNECTED = '[[step]]\ndo = "leader-connected"\nat = 30\n'


def played(*steps):
    scenario = parse_scenario("".join((TWO, *steps)), "x", "x.toml")
    return play_scenario(scenario, speed="virtual", home=None, report=lambda _: None)


@pytest.mark.slow
def test_a_new_leader_is_seen_for_a_while():
    seen = played(LEADER, KILLED, f"{LEADER}changed = true\nstays = 5\n")
    assert (seen.ok, seen.lines[-1].seen.endswith("did; for 5 s")) == (True, True)


def test_the_one_before_is_whom_the_step_before_saw():
    async def named(*_):
        return {"spec": {"holderIdentity": candidates.leader}}

    async def checks():
        await first.run(stage)
        stage.begin_step()
        with pytest.raises(NotObserved, match="a still leads"):
            await second.run(stage)
        candidates.leader = "b"
        assert [await second.run(stage) for _ in "xy"] == ["b leads, as the Lease says; before, a did"] * 2
        stage.begin_step()
        with pytest.raises(NotObserved, match="b still leads"):
            await third.run(stage)

    candidates = SimpleNamespace(overlaps=[], leader="a")
    kube = SimpleNamespace(store=SimpleNamespace(listeners=[]))
    cluster = SimpleNamespace(candidates=candidates, api=SimpleNamespace(get=named), nodes=(), kube=kube)
    stage = Stage(SimpleNamespace(site=SimpleNamespace(domains=()), switches=()), cluster)
    first, second, third = (leader(within=1, changed=changed) for changed in (False, True, True))
    asyncio.run(checks())


@pytest.mark.slow
@pytest.mark.parametrize(("last", "what"), [(END, "expect invariants"), (NODE, "the end")])
def test_two_that_lead_at_once_fail_it_though_nobody_looks(monkeypatch, last, what):
    monkeypatch.setattr(LeaderElection, "_is_free", lambda *_: True)
    seen = played(CONNECTED, last)
    assert (seen.ok, seen.lines[-1].what.startswith(what)) == (False, True)
    assert seen.lines[-1].seen.endswith("led at once")
