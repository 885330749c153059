"""Whole jobs on a fake cluster: placed, reserved, pinned and ungated together, and nothing left behind."""

import asyncio

from tests.claim.cluster.gangs.gang_site import rack_of, run
from tests.claim.cluster.gangs.gang_stories import at_work, bound_job, over


def test_a_gang_comes_to_one_rack_whole_and_leaves_nothing():
    async def story():
        site = await at_work(racks=2, trays=4)
        job = await bound_job(site, "big", {"launcher": 1, "worker": 4})
        places = await site.places("big")
        workers = [node for pod, node in places.items() if "worker" in pod]
        assert len(set(workers)) == 4
        assert len({rack_of(node) for node in places.values()}) == 1
        record = await site.record("big")
        assert await site.taints() == dict.fromkeys(workers, record.uid)
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        await asyncio.sleep(5)
        writes = site.kube.writes("controller")
        await asyncio.sleep(100)
        assert site.kube.writes("controller") == writes, "a settled gang costs nothing"
        await over(site, job)

    run(story)


def test_a_gang_that_can_never_fit_takes_nothing_and_says_what_would_help():
    async def story():
        site = await at_work(racks=2, trays=4)
        job = site.job("huge", {"worker": 5})
        await site.until(lambda: site.says("huge", "Placed", "DoesNotFit"))
        message = (await site.record("huge")).status.condition("Placed").message
        await asyncio.sleep(60)
        assert not await site.taints()
        assert not await site.ungated("huge")
        events = await site.events("DoesNotFit")
        assert {event["involvedObject"]["kind"] for event in events} == {"GangPlan", "Job"}
        assert all(event["message"] == message for event in events)
        await over(site, job)

    run(story)


def test_a_gang_waits_for_all_of_its_pods_and_says_how_many_are_missing():
    async def story():
        site = await at_work(racks=1, trays=4)
        job = site.job("big", {"worker": 4})
        obj = job.pod
        job.pod = lambda group, number: obj(group, min(number, 2))
        await site.until(lambda: site.says("big", "Placed", "WaitingForMembers"))
        await asyncio.sleep(10)
        message = (await site.record("big")).status.condition("Placed").message
        assert "worker 3 of 4" in message
        assert not await site.ungated("big")
        job.pod = obj
        await site.until(lambda: site.is_bound("big", 4))
        await site.end()

    run(story)


def test_pods_of_others_do_not_come_to_reserved_trays():
    async def story():
        site = await at_work(racks=1, trays=4)
        big = site.job("big", {"worker": 4})
        await site.until(lambda: site.says("big", "Reserved", "Reserved"))
        site.job("small", {"worker": 2}, gang=False)
        await site.until(lambda: site.is_bound("big", 4))
        await asyncio.sleep(30)
        assert set((await site.places("small")).values()) == {None}
        await big.end()
        await site.until(lambda: site.is_bound("small", 2))
        await site.end()

    run(story)
