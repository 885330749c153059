"""Whole jobs on a fake cluster: placed, reserved, pinned and let go together, and nothing left behind."""

import asyncio
import threading
from contextlib import suppress

import pytest
from tests.claim.cluster.gang.gang_site import TEAM, GangSite, rack_of

from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.planner import PlacePlanner
from rackloom.claim.kube.api import NotFound
from rackloom.claim.kube.kinds import GANG_PLAN, NODE, POD
from rackloom.twin import simloop
from rackloom.twin.kube import Fault
from rackloom.twin.kube.controllers import PodClaims


def run(story, seed=1):
    simloop.run(seed, story)


def test_a_gang_comes_to_one_rack_whole_and_leaves_nothing():
    async def story():
        site = GangSite(racks=2, trays=4)
        await site.begin()
        site.start()
        job = site.job("big", {"launcher": 1, "worker": 4})
        await site.until(lambda: site.is_bound("big", 5))
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
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story)


async def planned(site, gang):
    """The plan of a gang in the moment in which it is recorded."""
    async with asyncio.timeout(60):
        while True:
            with suppress(NotFound):
                if plan := (await site.record(gang)).plan:
                    return plan
            await asyncio.sleep(0.001)


def test_a_gang_that_can_never_fit_takes_nothing_and_says_what_would_help():
    async def story():
        site = GangSite(racks=2, trays=4)
        await site.begin()
        site.start()
        job = site.job("huge", {"worker": 5})
        await site.until(lambda: site.says("huge", "Placed", "DoesNotFit"))
        told = (await site.record("huge")).condition("Placed").message
        await asyncio.sleep(60)
        assert not await site.taints()
        assert not await site.let_go("huge")
        events = await site.events("DoesNotFit")
        assert {one["involvedObject"]["kind"] for one in events} == {"GangPlan", "Job"}
        assert all(one["message"] == told for one in events)
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story)


def test_a_gang_waits_for_all_of_its_pods_and_says_how_many_are_missing():
    async def story():
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 4})
        obj = job.pod
        job.pod = lambda group, number: obj(group, min(number, 2))
        await site.until(lambda: site.says("big", "Placed", "WaitingForMembers"))
        await asyncio.sleep(10)
        said = (await site.record("big")).condition("Placed").message
        assert "worker 3 of 4" in said
        assert not await site.let_go("big")
        job.pod = obj
        await site.until(lambda: site.is_bound("big", 4))
        await site.end()

    run(story)


def test_of_two_gangs_one_has_the_rack_whole_and_the_other_comes_after_it():
    async def story(seed):
        site = GangSite(racks=1, trays=4, seed=seed)
        await site.begin()
        site.start()
        jobs = {name: site.job(name, {"worker": 3}) for name in ("one", "two")}

        async def somebody_won():
            return any([await site.is_bound(name, 3) for name in jobs])

        await site.until(somebody_won)
        (winner,) = [name for name in jobs if await site.is_bound(name, 3)]
        (loser,) = set(jobs) - {winner}
        await site.until(lambda: site.says(loser, "Placed", "DoesNotFit"))
        assert not await site.let_go(loser)
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
        site = GangSite(racks=1, trays=4, seed=seed)
        await site.begin()
        site.start()
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
        assert not await site.let_go(loser)
        first.cancel()
        for job in jobs.values():
            await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story, seed)


def test_pods_of_others_do_not_come_to_reserved_trays():
    async def story():
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
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


def test_a_lost_node_moves_one_member_to_a_spare_of_its_clique_and_no_other():
    async def story(is_gone):
        site = GangSite(racks=2, trays=5)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 4}, spares=1)
        await site.until(lambda: site.is_bound("big", 4))
        before = await site.places("big")
        assert len(await site.taints()) == 5, "the spare is reserved too"
        pods = {one["metadata"]["name"]: one["metadata"]["uid"] for one in await site.pods("big")}
        lost = before["big-worker-2"]
        if is_gone:
            await site.user.delete(NODE, lost)
        else:
            await site.say_ready(lost, "Unknown")
            await site.until(lambda: site.says("big", "Bound", "TrayNotReady"))

        async def moved():
            nodes = (await site.places("big")).values()
            return len(nodes) == 4 and all(nodes) and lost not in nodes

        await site.until(moved)
        after = await site.places("big")
        assert {name for name in before if before[name] != after[name]} == {"big-worker-2"}
        assert rack_of(after["big-worker-2"]) == rack_of(lost)
        now = {one["metadata"]["name"]: one["metadata"]["uid"] for one in await site.pods("big")}
        assert [name for name in pods if pods[name] != now[name]] == ["big-worker-2"]
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert set(await site.taints()) == set(after.values())
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    for is_gone in (False, True):
        run(lambda is_gone=is_gone: story(is_gone))


def test_a_lost_node_without_a_spare_is_told_and_the_rest_stays():
    async def story():
        site = GangSite(racks=2, trays=4)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 4})
        await site.until(lambda: site.is_bound("big", 4))
        before = await site.places("big")
        await site.say_ready(before["big-worker-0"], "Unknown")

        async def told():
            bound = (await site.record("big")).condition("Bound")
            return bound.reason == "TrayLost" and "no other tray" in bound.message

        await site.until(told)
        assert await site.places("big") == before
        await site.say_ready(before["big-worker-0"], "True")
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert await site.places("big") == before
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story)


def test_a_pod_that_cannot_be_bound_goes_to_another_tray_of_the_clique():
    async def story():
        site = GangSite(racks=1, trays=5)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 4})
        site.kube.faults.add(Fault(verb="patch", resource="pods", user="kube-scheduler"))
        await site.until(lambda: site.has_let_go("big", 4))
        tray = (await site.record("big")).plan.trays[1]
        await site.cordon(tray)
        site.kube.faults.clear()
        await site.until(lambda: site.is_bound("big", 4))
        assert tray not in (await site.places("big")).values()
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert tray not in await site.taints()
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story)


def test_a_rack_that_somebody_came_into_before_it_was_reserved_is_given_up_untouched():
    async def story():
        site = GangSite(racks=2, trays=4)
        await site.begin()
        site.start()
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
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story)


def test_a_pod_that_is_kept_from_a_free_tray_is_made_anew():
    async def story():
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 4})
        honest = job.pod

        def stubborn(group, number):
            pod = honest(group, number)
            if number == 1:
                pod["spec"]["nodeSelector"] = {"nobody": "has-this"}
            return pod

        job.pod = stubborn

        async def waits():
            unbound = [name for name, node in (await site.places("big")).items() if not node]
            return unbound == ["big-worker-1"] and await site.has_let_go("big", 4)

        await site.until(waits)
        job.pod = honest
        places = await site.places("big")
        await site.until(lambda: site.is_bound("big", 4))
        after = await site.places("big")
        assert {name for name in places if places[name] != after[name]} == {"big-worker-1"}
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story)


def test_a_gang_whose_gpus_are_claimed_has_them_on_its_trays():
    async def story():
        site = GangSite(racks=2, trays=3)
        await site.begin()
        site.tasks.append(asyncio.create_task(PodClaims(site.kube, site.rng).run()))
        site.tasks.append(asyncio.create_task(site.gatekeeper().run()))
        await site.publish_gpus()
        site.start()
        job = site.job("big", {"worker": 3}, gpus=0)
        plain = job.pod

        def claiming(group, number):
            pod = plain(group, number)
            pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]
            return pod

        job.pod = claiming
        await site.until(lambda: site.says("big", "Placed", "WaitingForClaimTemplates"))
        assert not await site.taints()
        await site.make_template("gpus", 4)
        await site.until(lambda: site.is_bound("big", 3))
        places = await site.places("big")
        assert len(set(places.values())) == 3
        assert len({rack_of(node) for node in places.values()}) == 1
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story)


def test_a_gang_on_which_the_planner_fails_keeps_no_other_waiting(monkeypatch):
    honest = PlacePlanner.plan_gang

    def failing(planner, site, gang):
        if gang.name == "team/cursed":
            raise ZeroDivisionError
        return honest(planner, site, gang)

    monkeypatch.setattr(PlacePlanner, "plan_gang", failing)

    async def story():
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
        site.job("cursed", {"worker": 2})
        await asyncio.sleep(5)
        site.job("fine", {"worker": 2})
        await site.until(lambda: site.is_bound("fine", 2))
        assert "planner failed" in (await site.record("cursed")).condition("Placed").message
        await site.end()

    run(story)


def test_trays_of_a_plan_that_was_taken_away_by_force_are_freed():
    async def story():
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
        site.job("big", {"worker": 4})
        await site.until(lambda: site.is_bound("big", 4))
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
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 4})
        await site.until(lambda: site.is_bound("big", 4))
        await site.user.delete(GANG_PLAN, "big", TEAM)
        await asyncio.sleep(60)
        assert len(await site.taints()) == 4
        await job.end()
        await site.until(site.is_clean)
        await site.end()

    run(story)


def test_a_gang_that_cannot_be_read_any_more_keeps_no_other_from_being_placed():
    async def story():
        site = GangSite(racks=2, trays=2)
        await site.begin()
        site.start()
        huge = site.job("huge", {"worker": 3})
        await site.until(lambda: site.says("huge", "Placed", "DoesNotFit"))
        huge.gpus = "half"
        await site.user.delete(POD, "huge-worker-0", TEAM, grace_seconds=0)
        site.job("big", {"worker": 2})
        await site.until(lambda: site.is_bound("big", 2))
        await site.end()

    run(story)


def test_a_refusal_names_no_job_of_another_namespace():
    async def story():
        site = GangSite(racks=1, trays=2)
        await site.begin()
        limits = {"limits": {"nvidia.com/gpu": "1"}}
        spec = {"containers": [{"name": "main", "resources": limits}], "nodeName": "r0-t0"}
        await site.user.create(
            POD, {"metadata": {"name": "merger", "namespace": "kube-system"}, "spec": spec}
        )
        site.start()
        site.job("big", {"worker": 2})
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        told = (await site.record("big")).condition("Placed").message
        assert "in use by another job" in told
        assert "merger" not in told
        await site.end()

    run(story)


def test_a_search_does_not_keep_the_loop(monkeypatch):
    """The loop renews the lease of the leader; an hour of virtual time would not show what it waits for."""
    asked, search = [], PlacePlanner.plan_gang

    def noted(self, where, gang):
        asked.append(threading.get_ident())
        return search(self, where, gang)

    async def story():
        site = GangSite(racks=1, trays=2)
        await site.begin()
        site.start()
        site.job("big", {"worker": 2})
        await planned(site, "big")
        await site.end()

    monkeypatch.setattr(PlacePlanner, "plan_gang", noted)
    asyncio.run(story())
    assert asked
    assert threading.get_ident() not in asked


def test_pods_that_disagree_about_their_gang_are_told():
    async def story():
        site = GangSite(racks=1, trays=4)
        await site.begin()
        site.start()
        job = site.job("big", {"worker": 2})
        honest = job.pod

        def other(group, number):
            pod = honest(group, number)
            pod["metadata"]["annotations"][marks.SIZE_ANNOTATION] = f"worker={2 + number}"
            return pod

        job.pod = other
        await site.until(lambda: site.says("big", "Placed", "InvalidGang"))
        assert not await site.let_go("big")
        await site.end()

    run(story)
