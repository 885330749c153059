"""Members that end before the others: trays that no pod will use again are released, and no other tray is."""

import asyncio

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, GangSite, Mortal, rack_of, run
from tests.claim.cluster.gangs.gang_stories import (
    bound_job,
    holds,
    over,
    until_dead_and_again,
    watch_bindings,
)
from tests.claim.cluster.gangs.test_gang_meter import scraped

from rackloom.claim.kube.api import Rejected
from rackloom.core.cluster.gang_owners import LONGEST_JOB_BACKOFF
from rackloom.core.cluster.objects import JOB, NODE, POD


class Unallowed(Mortal):
    """The API client of a controller whose account has no right to read Jobs."""

    async def get(self, kind, name, namespace=None):
        if kind == JOB:
            raise Rejected(403, "Forbidden", "jobs.batch is forbidden")
        return await super().get(kind, name, namespace)


async def running(site, completions=4, *, api=None, **how):
    """A gang of four workers that run."""
    await site.begin()
    site.start(api=api)
    job = await bound_job(site, "big", {"worker": 4}, completions=completions, **how)
    await site.until(lambda: site.says("big", "Bound", "AllBound"))
    return job


async def has_place(site, pod, tray):
    return (await site.places("big")).get(pod) == tray


def test_the_tray_of_a_member_that_succeeded_is_given_back_while_the_others_run():
    async def story():
        site = GangSite(racks=1, trays=5)
        job = await running(site)
        other = site.job("other", {"worker": 2})
        await site.until(lambda: site.says("other", "Placed", "DoesNotFit"))
        places = await site.places("big")
        await job.succeed("big-worker-2")
        left = {node for name, node in places.items() if name != "big-worker-2"}
        await site.until(lambda: site.is_bound("other", 2))
        assert places["big-worker-2"] in (await site.places("other")).values()
        assert set((await site.record("big")).reserved) == left
        bound = (await site.record("big")).status.condition("Bound")
        assert (bound.status, bound.message) == ("True", "3 members are on their trays")
        await over(site, job, other)

    run(story)


def test_a_member_that_fails_afterwards_comes_to_its_own_tray():
    async def story():
        site = GangSite(racks=1, trays=4)
        job = await running(site)
        places = await site.places("big")
        await job.succeed("big-worker-0")
        left = {node for name, node in places.items() if name != "big-worker-0"}
        await site.until(holds(site, left))
        await site.user.delete(POD, "big-worker-3", TEAM, grace_seconds=0)

        async def again():
            found = await site.places("big")
            return len(found) == 4 and found["big-worker-3"] == places["big-worker-3"]

        await site.until(again)
        assert set(await site.taints()) == left
        await over(site, job)

    run(story)


def test_a_member_of_a_tray_that_is_lost_afterwards_moves_and_nobody_else():
    async def story():
        site = GangSite(racks=2, trays=4)
        job = await running(site)
        places = await site.places("big")
        await job.succeed("big-worker-0")
        await site.until(holds(site, {node for name, node in places.items() if name != "big-worker-0"}))
        await site.user.delete(NODE, places["big-worker-1"])

        async def moved():
            found = await site.places("big")
            return len(found) == 4 and found["big-worker-1"] == places["big-worker-0"]

        await site.until(moved)
        after = await site.places("big")
        assert {name for name in places if places[name] != after[name]} == {"big-worker-1"}
        await site.until(holds(site, {node for name, node in after.items() if name != "big-worker-0"}))
        await over(site, job)

    run(story)


@pytest.mark.parametrize("completions", [None, 8])
def test_the_tray_stays_where_the_job_makes_more_pods_or_does_not_say(completions):
    async def story():
        site = GangSite(racks=1, trays=4)
        job = await running(site, completions)
        before = await site.taints()
        await job.succeed("big-worker-1")
        await asyncio.sleep(60)
        assert await site.taints() == before
        assert len((await site.record("big")).plan.seats) == 4
        await over(site, job)

    run(story)


class Counting(Mortal):
    """The API client of a controller, with the number of times that it read a Job."""

    reads = 0

    async def get(self, kind, name, namespace=None):
        self.reads += kind == JOB
        return await super().get(kind, name, namespace)


def test_a_job_is_asked_ever_less_often_while_the_use_of_the_trays_is_the_same_and_not_at_every_event():
    async def story():
        site = GangSite(racks=1, trays=4)
        api = Counting(site.kube, "controller")
        job = await running(site, 8, api=api)
        await job.succeed("big-worker-1")
        await asyncio.sleep(10)
        asked = api.reads
        assert asked
        for number in range(20):
            await site.user.patch(POD, "big-worker-2", TEAM, {"metadata": {"labels": {"step": str(number)}}})
            await asyncio.sleep(2)
        assert api.reads <= asked + 3
        await site.user.patch(JOB, "big", TEAM, {"spec": {"completions": 4}})
        await job.succeed("big-worker-0")
        places = await site.places("big")
        await site.until(holds(site, {places["big-worker-2"], places["big-worker-3"]}))
        await over(site, job)

    run(story)


def test_the_tray_stays_where_the_job_is_of_a_set_that_may_make_it_anew():
    async def story():
        site = GangSite(racks=1, trays=4)
        job = await running(site)
        owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "set", "uid": "u"}
        meta = {"ownerReferences": [owner | {"controller": True}]}
        await site.user.patch(JOB, "big", TEAM, {"metadata": meta})
        await job.succeed("big-worker-1")
        await asyncio.sleep(60)
        assert len(await site.taints()) == 4
        await site.end()

    run(story)


def test_the_tray_stays_where_a_pod_ended_well_because_it_was_deleted():
    async def story():
        site = GangSite(racks=1, trays=4)
        job = await running(site)
        places = await site.places("big")
        await site.user.patch(POD, "big-worker-1", TEAM, {"metadata": {"finalizers": ["test/hold"]}})
        await site.user.delete(POD, "big-worker-1", TEAM, grace_seconds=0)
        await job.succeed("big-worker-1")
        await asyncio.sleep(30)
        assert len(await site.taints()) == 4
        await site.user.patch(POD, "big-worker-1", TEAM, {"metadata": {"finalizers": []}})

        async def again():
            return await site.places("big") == places

        await site.until(again)
        await site.end()

    run(story)


def test_a_controller_that_may_not_read_jobs_keeps_the_tray_and_goes_on():
    async def story():
        site = GangSite(racks=1, trays=4)
        job = await running(site, api=Unallowed(site.kube, "controller"))
        await job.succeed("big-worker-1")
        await asyncio.sleep(30)
        assert len(await site.taints()) == 4
        await over(site, job)

    run(story)


def test_a_job_that_is_made_anew_does_not_start_on_the_rest_of_the_trays():
    async def story():
        site = GangSite(racks=1, trays=4)
        bound = watch_bindings(site)
        job = await running(site)
        places = await site.places("big")
        await job.succeed("big-worker-0")
        await site.until(holds(site, {node for name, node in places.items() if name != "big-worker-0"}))
        # All of its pods are to end. One after the other is gone, while the new job's pods come.
        job.is_wanted = False
        for name in sorted(places):
            await site.user.patch(POD, name, TEAM, {"metadata": {"finalizers": ["test/hold"]}})
            await site.user.delete(POD, name, TEAM, grace_seconds=0)
        await site.user.delete(JOB, "big", TEAM, propagation="Orphan")
        await asyncio.sleep(2)
        bound.clear()
        anew = site.job("big", {"worker": 4}, completions=4)
        for name in sorted(places):
            assert not bound, "nobody goes before all may"
            await site.user.patch(POD, name, TEAM, {"metadata": {"finalizers": []}})
            await asyncio.sleep(10)
        await site.until(lambda: site.is_bound("big", 4))
        assert sorted(map(len, bound.values())) == [1] * 4
        await over(site, anew)

    run(story)


async def all_but_one(site, *, spares=0, **how):
    """A gang of four, three succeeded and the last failed. Returns the job and the tray of the last."""
    job = await running(site, spares=spares, **how)
    places = await site.places("big")
    await all_but_one_end(job)
    return job, places["big-worker-3"]


async def all_but_one_end(job):
    """At once: the controller may see none of it before all of it."""
    for number in range(3):
        await job.succeed(f"big-worker-{number}")
    await job.fail("big-worker-3")


def test_the_tray_of_the_last_member_waits_for_it_when_all_others_have_ended():
    async def story():
        site = GangSite(racks=1, trays=4)
        job, tray = await all_but_one(site)
        await site.until(holds(site, {tray}))
        await asyncio.sleep(400)  # A Job waits up to six minutes between two tries.
        assert set(await site.taints()) == {tray}
        placed = (await site.record("big")).status.condition("Placed")
        assert (placed.status, placed.reason) == ("Unknown", "WaitingForMembers")
        assert "their Job owes 1: if it makes none, their trays are given back after 630 s" in placed.message
        other = site.job("other", {"worker": 4})
        await site.until(lambda: site.says("other", "Placed", "DoesNotFit"))
        await job.again("big-worker-3")
        await site.until(lambda: has_place(site, "big-worker-3-again", tray))
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        await job.succeed("big-worker-3-again")
        await site.until(lambda: site.is_bound("other", 4))
        await over(site, job, other)

    run(story)


def test_just_its_seat_waits_where_the_whole_gang_has_one_tray():
    async def story():
        site = GangSite(racks=1, trays=1)
        job, tray = await all_but_one(site, gpus=1)
        await asyncio.sleep(60)
        assert [seat.tray for seat in (await site.record("big")).plan.seats] == [tray]
        await job.again("big-worker-3")
        await site.until(lambda: has_place(site, "big-worker-3-again", tray))
        await over(site, job)

    run(story)


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"conditions": [{"type": "Failed", "status": "True"}]}},
        {"spec": {"suspend": True}},
        {"spec": {"completions": None}},
    ],
)
def test_nobody_waits_for_the_last_member_where_its_job_makes_it_not(change):
    async def story():
        site = GangSite(racks=1, trays=4)
        job, tray = await all_but_one(site)
        await site.until(holds(site, {tray}))
        await site.user.patch(JOB, "big", TEAM, change, subresource="status" if "status" in change else "")
        await site.until(site.is_clean)
        await job.end()
        await site.end()

    run(story)


def test_a_job_that_goes_on_after_a_pause_is_placed_with_the_members_that_are_left():
    async def story():
        site = GangSite(racks=1, trays=4)
        job, _ = await all_but_one(site)
        await site.user.patch(JOB, "big", TEAM, {"spec": {"suspend": True}})
        await site.until(site.is_clean)
        other = await bound_job(site, "other", {"worker": 4})
        await site.user.patch(JOB, "big", TEAM, {"spec": {"suspend": False}})
        await job.again("big-worker-3")
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        await other.end()
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        (tray,) = await site.taints()
        assert await has_place(site, "big-worker-3-again", tray)
        await job.fail("big-worker-3-again")
        await asyncio.sleep(60)
        await job.again("big-worker-3-again")
        await site.until(lambda: has_place(site, "big-worker-3-again-again", tray))
        assert set(await site.taints()) == {tray}
        await over(site, job)

    run(story)


@pytest.mark.parametrize("last", range(1, 9))
def test_death_after_a_write_while_the_rest_of_a_job_is_placed(last):
    async def story():
        site = GangSite(racks=1, trays=4, seed=last)
        bound = watch_bindings(site)
        job, _ = await all_but_one(site)
        await site.user.patch(JOB, "big", TEAM, {"spec": {"suspend": True}})
        await site.until(site.is_clean)
        await site.kill()
        await site.user.patch(JOB, "big", TEAM, {"spec": {"suspend": False}})
        await job.again("big-worker-3")
        await until_dead_and_again(site, last)
        await site.until(lambda: site.is_bound("big", 5))
        assert bound["big-worker-3-again"] == list(await site.taints())
        await over(site, job)

    run(story, last)


def test_the_tray_is_free_at_last_where_a_job_that_is_not_over_makes_no_pod():
    """Its quota is spent, or its account is gone: such a Job never fails."""

    async def story():
        site = GangSite(racks=1, trays=4)
        job, tray = await all_but_one(site)
        await site.until(lambda: site.says("big", "Placed", "WaitingForMembers"))
        await asyncio.sleep(LONGEST_JOB_BACKOFF)
        assert set(await site.taints()) == {tray}
        await site.kill()
        site.start()
        await site.until(site.is_clean, seconds=40)
        await job.again("big-worker-3")
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert len(await site.taints()) == 1
        await over(site, job)

    run(story)


@pytest.mark.slow
def test_a_last_member_that_comes_and_goes_is_waited_for_each_time():
    async def story():
        site = GangSite(racks=1, trays=4)
        job, tray = await all_but_one(site)
        last = "big-worker-3"
        for _ in range(3):
            await asyncio.sleep(400)
            await job.again(last)
            last = f"{last}-again"
            await site.until(lambda name=last: has_place(site, name, tray))
            await site.until(lambda: site.says("big", "Placed", "Placed"))
            await asyncio.sleep(900)
            await job.fail(last)
        found = await scraped(site)
        assert found["rackloom_gang_placements_total", None] == 1, "the seat was its own all the time"
        assert found["rackloom_gang_ungate_seconds_count", None] == 1
        await over(site, job)

    run(story)


def test_nobody_waits_for_the_last_member_of_a_job_that_is_deleted():
    async def story():
        site = GangSite(racks=1, trays=4)
        job, tray = await all_but_one(site)
        await site.until(holds(site, {tray}))
        job.is_wanted = False
        await site.user.delete(JOB, "big", TEAM, propagation="Orphan")
        await over(site)

    run(story)


@pytest.mark.parametrize("last", range(1, 9))
def test_death_after_a_write_while_the_last_member_is_awaited(last):
    async def story():
        site = GangSite(racks=2, trays=5, seed=last)
        bound = watch_bindings(site)
        job = await running(site, spares=1)
        tray = (await site.places("big"))["big-worker-3"]
        await site.kill()
        await all_but_one_end(job)
        await until_dead_and_again(site, last)
        await asyncio.sleep(40)
        record = await site.record("big")
        assert [seat.tray for seat in record.plan.seats] == [tray]
        await site.until(holds(site, {tray, *record.plan.spares}))
        await site.kill()
        await job.again("big-worker-3")
        await until_dead_and_again(site, last)
        await site.until(lambda: has_place(site, "big-worker-3-again", tray))
        assert bound["big-worker-3-again"] == [tray]
        await over(site, job)

    run(story, last)


@pytest.mark.parametrize("last", range(1, 8))
def test_death_after_a_write_while_a_tray_is_given_back(last):
    async def story():
        site = GangSite(racks=2, trays=5, seed=last)
        job = await running(site, spares=1)
        await asyncio.sleep(5)
        places = await site.places("big")
        await site.kill()
        await job.succeed("big-worker-1")
        await until_dead_and_again(site, last)
        record = await site.record("big")
        left = {node for name, node in places.items() if name != "big-worker-1"} | set(record.plan.spares)
        await site.until(holds(site, left))
        assert len({rack_of(tray) for tray in left}) == 1
        assert await site.places("big") == places
        await over(site, job)

    run(story, last)
