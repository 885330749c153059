"""Gangs, pods and controllers that want the same rack at once, and caches that are behind."""

import asyncio

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, Behind, planned, rack_of, run
from tests.claim.cluster.gangs.gang_stories import at_work, opened, over

from rackloom.core.cluster.objects import GANG_PLAN, JOB, NODE, POD
from rackloom.core.cluster.pods import GANG_LABEL


def test_of_two_gangs_one_has_the_rack_whole_and_the_other_comes_after_it():
    async def story(seed):
        site = await at_work(racks=1, trays=4, seed=seed)
        jobs = {name: site.job(name, {"worker": 3}) for name in ("one", "two")}

        async def somebody_won():
            return any([await site.is_bound(name, 3) for name in jobs])

        await site.until(somebody_won)
        (winner,) = [name for name in jobs if await site.is_bound(name, 3)]
        (loser,) = set(jobs) - {winner}
        await site.until(lambda: site.says(loser, "Placed", "DoesNotFit"))
        assert not await site.ungated(loser)
        assert set((await site.taints()).values()) == {(await site.record(winner)).uid}
        await jobs[winner].end()
        await site.until(lambda: site.is_bound(loser, 3))
        await site.end()

    for seed in range(4):
        run(lambda seed=seed: story(seed), seed)


@pytest.mark.parametrize("seed", range(6))
def test_two_controllers_at_once_give_no_tray_to_two_gangs(seed):
    """A leader that lost its lease and does not know it: their plans may overlap, their pods never do."""

    async def story():
        site = await at_work(racks=1, trays=4, seed=seed)
        first = site.controller
        site.start()
        jobs = {name: site.job(name, {"worker": 3}) for name in ("one", "two")}

        async def somebody_won():
            return any([await site.is_bound(name, 3) for name in jobs])

        await site.until(somebody_won)
        await asyncio.sleep(60)
        whole = [name for name in jobs if await site.is_bound(name, 3)]
        assert len(whole) == 1
        (loser,) = set(jobs) - set(whole)
        assert not await site.ungated(loser)
        first.cancel()
        await over(site, *jobs.values())

    run(story, seed)


def test_a_rack_that_somebody_came_into_before_it_was_reserved_is_given_up_untouched():
    async def story():
        site = await at_work(racks=2, trays=4)
        job = site.job("big", {"worker": 4})
        tray = (await planned(site, "big")).trays[2]
        other = site.job("small", {"worker": 0}, gang=False)
        await asyncio.sleep(0.01)
        pod = other.pod("worker", 0)
        await site.user.create(POD, pod | {"spec": {**pod["spec"], "nodeName": tray}})
        await site.until(lambda: site.is_bound("big", 4))
        nodes = set((await site.places("big")).values())
        assert {rack_of(node) for node in nodes} == {"r0", "r1"} - {rack_of(tray)}
        assert set(await site.taints()) == nodes
        await over(site, job)

    run(story)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [POD, GANG_PLAN, NODE])
@pytest.mark.parametrize("moment", ["before its pods", "before its plan", "before it was let go"])
def test_a_controller_that_sees_the_past_takes_nothing_back(kind, moment):
    """A new leader, whose cache of one kind is from a time before the last one had let the gang go."""

    async def story():
        site = await opened(racks=1, trays=4)
        labels = {"labels": GANG_LABEL} if kind == POD else {}
        old = await site.user.list(kind, **labels)
        job = site.job("big", {"worker": 4})
        if moment != "before its pods":
            await site.until(lambda: site.has_pods("big", 4))
            old = await site.user.list(kind, **labels)
        site.start()
        if moment == "before it was let go":
            await site.until(lambda: site.says("big", "Reserved", "Reserved"))
            old = await site.user.list(kind, **labels)
            assert not await site.ungated("big")
        await site.until(lambda: site.is_bound("big", 4))
        await asyncio.sleep(5)
        await site.kill()
        before = (await site.places("big"), await site.taints(), (await site.record("big")).plan)
        uids = [pod["metadata"]["uid"] for pod in await site.pods("big")]
        await site.say_ready(before[0]["big-worker-1"], "Unknown")
        behind = Behind(site.kube, "controller", kind, old)
        site.start(api=behind)
        await asyncio.sleep(200)
        after = (await site.places("big"), await site.taints(), (await site.record("big")).plan)
        assert after == before
        assert [pod["metadata"]["uid"] for pod in await site.pods("big")] == uids
        behind.caught_up.set()
        await site.until(lambda: site.says("big", "Bound", "TrayLost"))
        await over(site, job)

    run(story)


@pytest.mark.parametrize("dies", [False, True])
def test_a_job_that_is_deleted_while_half_of_it_was_let_go_leaves_nothing(dies):
    async def story():
        site = await at_work(racks=1, trays=6)
        job = site.job("big", {"worker": 6})
        await begun(site, "big")
        half = len(await site.ungated("big"))
        if dies:
            await site.kill()
        await job.end()
        assert 0 < half < 6
        if dies:
            assert len(await site.taints()) == 6
            site.start()
        await over(site)

    run(story)


@pytest.mark.parametrize("change", [{"size": 3}, {"size": 6}, {"gpus": 2}])
@pytest.mark.parametrize("moment", ["reserved", "begun"])
def test_a_job_that_is_made_anew_under_its_name_is_placed_as_it_is_now(change, moment):
    """Its pods are others before its plan is gone: with other members, or of other needs."""

    async def story():
        site = await at_work(racks=2, trays=6)
        job = site.job("big", {"worker": 5})
        if moment == "begun":
            await begun(site, "big")
        else:
            await site.until(lambda: site.says("big", "Reserved", "Reserved"))
        await site.kill()
        await job.end()
        await site.user.delete(JOB, "big", TEAM)
        anew = site.job("big", {"worker": change.get("size", 5)}, gpus=change.get("gpus", 4))
        await site.until(lambda: site.has_pods("big", anew.sizes["worker"]))
        site.start()
        await site.until(lambda: site.is_bound("big", anew.sizes["worker"]))
        places = await site.places("big")
        assert len({rack_of(node) for node in places.values()}) == 1
        (group,) = (await site.record("big")).gang.groups
        assert (group.members, group.gpus) == (anew.sizes["worker"], anew.gpus)
        assert set(await site.taints()) == set(places.values())
        await over(site, anew)

    run(story)


async def begun(site, gang):
    """Wait until the first pods of a gang are ungated."""
    async with asyncio.timeout(60):
        while not await site.ungated(gang):
            await asyncio.sleep(0.001)
