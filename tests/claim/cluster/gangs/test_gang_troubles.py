"""A problem of one gang is reported, and keeps no other gang from its trays."""

import asyncio
import threading

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, planned, run
from tests.claim.cluster.gangs.gang_stories import at_work, bound_job, holds, opened, over

from rackloom.core.cluster.objects import GANG_PLAN, POD
from rackloom.core.cluster.pods import SIZE_ANNOTATION
from rackloom.core.gangs import placement
from rackloom.lab.kube.faults import RequestFault


@pytest.mark.slow
def test_a_gang_on_which_the_planner_fails_keeps_no_other_waiting(monkeypatch):
    honest = placement.plan_or_refuse

    def failing(site, gang, refusal):
        if gang.name == "team/cursed":
            raise ZeroDivisionError
        return honest(site, gang, refusal)

    monkeypatch.setattr(placement, "plan_or_refuse", failing)

    async def story():
        site = await at_work(racks=1, trays=4)
        site.job("cursed", {"worker": 2})
        await asyncio.sleep(5)
        await bound_job(site, "fine", {"worker": 2})
        assert "planner failed" in (await site.record("cursed")).status.condition("Placed").message
        await site.end()

    run(story)


def test_a_gang_whose_job_cannot_be_read_keeps_no_other_waiting():
    async def story():
        site = await at_work(racks=1, trays=2)
        site.kube.faults.add(RequestFault(verb="get", resource="jobs", code=500, reason="InternalError"))
        ill = site.job("ill", {"worker": 3})
        await site.until(lambda: site.says("ill", "Placed", "DoesNotFit"))
        await ill.fail("ill-worker-0")
        await ill.again("ill-worker-0")
        await bound_job(site, "fine", {"worker": 2})
        assert site.kube.faults.hits
        await site.end()

    run(story)


def test_a_gang_whose_job_cannot_be_read_is_placed_itself():
    async def story():
        site = await opened(racks=1, trays=2)
        site.kube.faults.add(RequestFault(verb="get", resource="jobs", code=500, reason="InternalError"))
        ill = site.job("ill", {"worker": 2})
        await site.until(lambda: site.has_pods("ill", 2))
        await ill.fail("ill-worker-0")
        await ill.again("ill-worker-0")
        site.start()
        await site.until(holds(site, ["r0-t0", "r0-t1"]))
        assert site.kube.faults.hits
        await site.end()

    run(story)


def test_trays_of_a_plan_that_was_taken_away_by_force_are_freed():
    async def story():
        site = await at_work(racks=1, trays=4)
        await bound_job(site, "big", {"worker": 4})
        old = (await site.record("big")).uid
        await site.kill()
        await site.user.patch(GANG_PLAN, "big", TEAM, {"metadata": {"finalizers": None}})
        await site.user.delete(GANG_PLAN, "big", TEAM)
        site.start()

        async def freed():
            return old not in (await site.taints()).values()

        await site.until(freed)
        await site.until(lambda: site.says("big", "Placed", "NotHeld"))
        assert await site.is_bound("big", 4), "pods that run are left alone"
        await site.end()

    run(story)


def test_deleting_the_plan_of_a_gang_at_work_frees_nothing_before_its_end():
    async def story():
        site = await at_work(racks=1, trays=4)
        job = await bound_job(site, "big", {"worker": 4})
        await site.user.delete(GANG_PLAN, "big", TEAM)
        await asyncio.sleep(60)
        assert len(await site.taints()) == 4
        await over(site, job)

    run(story)


def test_a_gang_that_cannot_be_read_any_more_keeps_no_other_from_being_placed():
    async def story():
        site = await at_work(racks=2, trays=2)
        huge = site.job("huge", {"worker": 3})
        await site.until(lambda: site.says("huge", "Placed", "DoesNotFit"))
        huge.gpus = "half"
        await site.user.delete(POD, "huge-worker-0", TEAM, grace_seconds=0)
        await bound_job(site, "big", {"worker": 2})
        await site.end()

    run(story)


def test_a_refusal_names_no_job_of_another_namespace():
    async def story():
        site = await opened(racks=1, trays=2)
        limits = {"limits": {"nvidia.com/gpu": "1"}}
        spec = {"containers": [{"name": "main", "resources": limits}], "nodeName": "r0-t0"}
        await site.user.create(
            POD, {"metadata": {"name": "merger", "namespace": "kube-system"}, "spec": spec}
        )
        site.start()
        site.job("big", {"worker": 2})
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        message = (await site.record("big")).status.condition("Placed").message
        assert "in use by another job" in message
        assert "merger" not in message
        await site.end()

    run(story)


def test_a_search_does_not_keep_the_loop(monkeypatch):
    """The loop renews the lease of the leader. A run in virtual time would not show that it waits."""
    asked, search = [], placement.plan_or_refuse

    def noted(where, gang, refusal):
        asked.append(threading.get_ident())
        return search(where, gang, refusal)

    async def story():
        site = await at_work(racks=1, trays=2)
        site.job("big", {"worker": 2})
        await planned(site, "big")
        await site.end()

    monkeypatch.setattr(placement, "plan_or_refuse", noted)
    asyncio.run(story())
    assert asked
    assert threading.get_ident() not in asked


def test_pods_that_disagree_about_their_gang_are_told():
    async def story():
        site = await at_work(racks=1, trays=4)
        job = site.job("big", {"worker": 2})
        honest = job.pod

        def other(group, number):
            pod = honest(group, number)
            pod["metadata"]["annotations"][SIZE_ANNOTATION] = f"worker={2 + number}"
            return pod

        job.pod = other
        await site.until(lambda: site.says("big", "Placed", "InvalidGang"))
        assert not await site.ungated("big")
        await site.end()

    run(story)


def test_trays_of_pods_that_went_before_they_were_let_go_are_given_back():
    async def story():
        site = await at_work(racks=1, trays=4)
        job = site.job("big", {"worker": 4})
        await planned(site, "big")
        job.is_wanted = False
        for pod in (await site.pods("big"))[:3]:
            await site.user.delete(POD, pod["metadata"]["name"], TEAM, grace_seconds=0)

        async def is_free():
            return not await site.taints() and (await site.record("big")).plan is None

        await asyncio.sleep(site.settings.bind_after / 2)
        assert (await site.record("big")).plan is not None, "they may be made anew"
        placed = (await site.record("big")).status.condition("Placed")
        assert (placed.status, placed.reason) == ("False", "WaitingForMembers")
        await site.until(is_free)
        assert not await site.ungated("big")
        await bound_job(site, "other", {"worker": 4})
        await site.end()

    run(story)


def test_a_pod_that_is_made_anew_in_time_finds_the_trays_of_its_gang():
    async def story():
        site = await at_work(racks=1, trays=4)
        job = site.job("big", {"worker": 4})
        plan = await planned(site, "big")
        await site.user.delete(POD, "big-worker-0", TEAM, grace_seconds=0)
        await site.until(lambda: site.is_bound("big", 4))
        assert (await site.record("big")).plan == plan
        assert (await site.record("big")).status.condition("Placed").status == "True"
        await over(site, job)

    run(story)
