"""Replicas of the twin's controllers are elected by the real code, and two that lead at once are noticed."""

import asyncio
import random
from contextlib import suppress
from types import SimpleNamespace

from rackloom.claim.kube.api import KubeError
from rackloom.claim.kube.leader import LeaderElection, LeaseTimings
from rackloom.core.cluster.objects import LEASE, NODE
from rackloom.core.domains.settings import DEFAULT_NAMESPACE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.scenario.controllers import CLIENT_TIMEOUT, ApiLink, ClockAndRandom, ControllerReplicas
from rackloom.lab.virtual import event_loop
from rackloom.lab.virtual.event_loop import loop_wall_time

TERMS = LeaseTimings()
HANDED_OVER = TERMS.lease + 2 * 1.2 * TERMS.retry + 1
"""Seconds by which another must lead: a lease that is not renewed, and two attempts."""


def run(story):
    """`story(site)` with two candidates that write down, once a second, who of them is at work."""

    async def whole():
        kube = FakeKube(seed=5, namespaces=("default", DEFAULT_NAMESPACE))
        api = DirectApi(kube, "controller")
        rng = random.Random(7)
        site = SimpleNamespace(api=api, written=[])

        async def control(mine):
            while True:
                with suppress(KubeError):
                    await mine.create(NODE, {"metadata": {"name": f"node-{len(site.written)}"}})
                    site.written.append(site.candidates.leader)
                await asyncio.sleep(1)

        site.candidates = ControllerReplicas(control, api, ClockAndRandom(loop_wall_time, rng))
        work = asyncio.create_task(site.candidates.run())
        await asyncio.sleep(10)
        await story(site)
        work.cancel()

    event_loop.run_simulation(3, whole)


async def named(site):
    return (await site.api.get(LEASE, "rackloom-controller", DEFAULT_NAMESPACE))["spec"]["holderIdentity"]


def test_one_leads_and_the_other_waits():
    async def story(site):
        assert site.candidates.leader == await named(site)
        await asyncio.sleep(60)
        assert set(site.written) == {site.candidates.leader}
        assert site.candidates.overlaps == []

    run(story)


def test_a_leader_that_dies_says_nothing_and_is_followed_when_its_lease_is_over():
    async def story(site):
        dead = await site.candidates.kill_leader(down=1000)
        assert await named(site) == dead
        assert site.candidates.leader is None
        before = len(site.written)
        await asyncio.sleep(TERMS.lease - 2 * 1.2 * TERMS.retry)
        assert (site.candidates.leader, len(site.written)) == (None, before)
        await asyncio.sleep(HANDED_OVER - TERMS.lease + 2 * 1.2 * TERMS.retry)
        assert site.candidates.leader == await named(site) != dead
        assert len(site.written) > before
        assert site.candidates.overlaps == []

    run(story)


def test_a_dead_leader_stands_again_under_another_name():
    async def story(site):
        dead = await site.candidates.kill_leader(down=5)
        await asyncio.sleep(HANDED_OVER)
        other = site.candidates.leader
        await site.candidates.kill_leader(down=1000)
        await asyncio.sleep(HANDED_OVER)
        assert site.candidates.leader not in {dead, other, None}
        assert site.candidates.leader.rpartition("-")[0] == dead.rpartition("-")[0]

    run(story)


def test_a_leader_that_is_cut_off_stops_before_the_other_begins():
    async def story(site):
        old = site.candidates.cut_off_leader()
        await asyncio.sleep(TERMS.renew + CLIENT_TIMEOUT)
        assert site.candidates.leader is None
        await asyncio.sleep(HANDED_OVER)
        assert site.candidates.leader not in {old, None}
        site.candidates.connect()
        await asyncio.sleep(60)
        assert site.candidates.leader == await named(site) != old
        assert site.candidates.overlaps == []

    run(story)


def test_nobody_is_killed_or_cut_off_where_nobody_leads():
    async def story(site):
        await site.candidates.kill_leader(down=1000)
        assert await site.candidates.kill_leader(down=1) is None
        assert site.candidates.cut_off_leader() is None

    run(story)


def test_a_leader_that_goes_on_without_its_lease_is_noticed(monkeypatch):
    async def for_ever(_):
        await asyncio.Event().wait()

    async def story(site):
        await asyncio.sleep(HANDED_OVER)
        assert [overlap.endswith("led at once") for overlap in site.candidates.overlaps] == [True]

    monkeypatch.setattr(LeaderElection, "_keep", for_ever)
    run(story)


def test_controllers_that_outlive_their_lease_are_noticed(monkeypatch):
    """A candidate's own state doesn't count: this one reports that it stopped, but works on."""
    left_behind = []

    async def hold(self, lead):
        self._leads = True
        left_behind.append(asyncio.create_task(lead()))
        await self._keep()
        self._leads = False
        return False

    async def story(site):
        site.candidates.cut_off_leader()
        await asyncio.sleep(TERMS.renew + CLIENT_TIMEOUT + HANDED_OVER)
        assert [overlap.endswith("led at once") for overlap in site.candidates.overlaps] == [True]
        for task in left_behind:
            task.cancel()

    monkeypatch.setattr(LeaderElection, "_hold", hold)
    run(story)


def test_what_happens_while_a_link_is_cut_is_heard_after_it():
    async def story():
        kube = FakeKube(seed=5)
        user, link = DirectApi(kube, "user"), ApiLink(DirectApi(kube, "far"))
        heard, lost = [], []

        async def watch():
            version = (await link.api.list(NODE)).resource_version
            while True:
                try:
                    async for event in link.api.watch(NODE, resource_version=version):
                        heard.append(event.object["metadata"]["name"])
                        version = event.object["metadata"]["resourceVersion"]
                except KubeError as error:
                    lost.append(error.code)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(1)
        link.cut()
        await user.create(NODE, {"metadata": {"name": "a"}})
        asked = asyncio.create_task(link.api.get(NODE, "a"))
        await asyncio.sleep(CLIENT_TIMEOUT + 1)
        assert (asked.exception().code, heard) == (0, [])
        link.mend()
        await user.create(NODE, {"metadata": {"name": "b"}})
        await asyncio.sleep(1)
        assert (heard, lost) == (["a", "b"], [0])
        watching.cancel()

    event_loop.run_simulation(3, story)
