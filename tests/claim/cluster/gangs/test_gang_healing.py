"""Trays that are lost and pods that cannot be bound: one member moves, and no other."""

import asyncio

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, rack_of, run
from tests.claim.cluster.gangs.gang_stories import at_work, bound_job, has_left, over

from rackloom.core.cluster.objects import NODE, POD
from rackloom.lab.kube.faults import RequestFault


def test_a_lost_node_moves_one_member_to_a_spare_of_its_clique_and_no_other():
    async def story(is_gone):
        site = await at_work(racks=2, trays=5)
        job = await bound_job(site, "big", {"worker": 4}, spares=1)
        before = await site.places("big")
        assert len(await site.taints()) == 5, "the spare is reserved too"
        pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await site.pods("big")}
        lost = before["big-worker-2"]
        if is_gone:
            await site.user.delete(NODE, lost)
        else:
            await site.say_ready(lost, "Unknown")
            await site.until(lambda: site.says("big", "Bound", "TrayNotReady"))
        await site.until(has_left(site, "big", 4, lost))
        after = await site.places("big")
        assert {name for name in before if before[name] != after[name]} == {"big-worker-2"}
        assert rack_of(after["big-worker-2"]) == rack_of(lost)
        now = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await site.pods("big")}
        assert [name for name in pods if pods[name] != now[name]] == ["big-worker-2"]
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert set(await site.taints()) == set(after.values())
        await over(site, job)

    for is_gone in (False, True):
        run(lambda is_gone=is_gone: story(is_gone))


def test_a_tray_that_cannot_be_read_is_not_lost():
    async def story():
        site = await at_work(racks=1, trays=6)
        job = await bound_job(site, "big", {"worker": 4})
        before = await site.places("big")
        # It stands for a field that is newer than this program: no real API server takes such an amount.
        many = {"status": {"allocatable": {"nvidia.com/gpu": "many"}}}
        await site.user.patch(NODE, before["big-worker-1"], None, many, subresource="status")
        lost = before["big-worker-2"]
        await site.say_ready(lost, "Unknown")
        await site.until(has_left(site, "big", 4, lost))
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        after = await site.places("big")
        assert {name for name in before if before[name] != after[name]} == {"big-worker-2"}
        plan = (await site.record("big")).plan
        assert before["big-worker-1"] in plan.trays
        await over(site, job)

    run(story)


def test_a_lost_node_without_a_spare_is_told_and_the_rest_stays():
    async def story():
        site = await at_work(racks=2, trays=4)
        job = await bound_job(site, "big", {"worker": 4})
        before = await site.places("big")
        await site.say_ready(before["big-worker-0"], "Unknown")

        async def reports_loss():
            bound = (await site.record("big")).status.condition("Bound")
            return bound.reason == "TrayLost" and "no other tray" in bound.message

        await site.until(reports_loss)
        assert await site.places("big") == before
        await site.say_ready(before["big-worker-0"], "True")
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert await site.places("big") == before
        await over(site, job)

    run(story)


def test_a_pod_that_cannot_be_bound_goes_to_another_tray_of_the_clique():
    async def story():
        site = await at_work(racks=1, trays=5)
        job = site.job("big", {"worker": 4})
        site.kube.faults.add(RequestFault(verb="create", resource="pods/binding", user="kube-scheduler"))
        await site.until(lambda: site.has_ungated("big", 4))
        tray = (await site.record("big")).plan.trays[1]
        await site.cordon(tray)
        site.kube.faults.clear()
        await site.until(lambda: site.is_bound("big", 4))
        assert tray not in (await site.places("big")).values()
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        assert tray not in await site.taints()
        await over(site, job)

    run(story)


def test_a_pod_that_is_kept_from_a_free_tray_is_made_anew():
    async def story():
        site = await at_work(racks=1, trays=4)
        for tray in site.trays:
            # Without a number of CPUs a node is not judged by them, and the scheduler gives it none.
            await site.user.patch(
                NODE, tray, None, {"status": {"allocatable": {"cpu": None}}}, subresource="status"
            )
        job = site.job("big", {"worker": 4})
        honest = job.pod

        def stubborn(group, number):
            pod = honest(group, number)
            if number == 1:
                pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "1000"}
            return pod

        job.pod = stubborn

        async def waits():
            unbound = [name for name, node in (await site.places("big")).items() if not node]
            return unbound == ["big-worker-1"] and await site.has_ungated("big", 4)

        await site.until(waits)
        job.pod = honest
        places = await site.places("big")
        await site.until(lambda: site.is_bound("big", 4))
        after = await site.places("big")
        assert {name for name in places if places[name] != after[name]} == {"big-worker-1"}
        await over(site, job)

    run(story)


@pytest.mark.parametrize("spares", [1, 2])
def test_a_spare_that_is_lost_with_a_tray_takes_nobody_over(spares):
    async def story():
        site = await at_work(racks=2, trays=4 + spares)
        job = await bound_job(site, "big", {"worker": 4}, spares=spares)
        before = await site.places("big")
        lost, spare = before["big-worker-0"], (await site.record("big")).plan.spares[0]
        for name in (spare, lost):
            await site.say_ready(name, "Unknown")

        async def moved():
            nodes = (await site.places("big")).values()
            return len(nodes) == 4 and all(nodes) and lost not in nodes

        if spares == 1:
            await site.until(lambda: site.says("big", "Bound", "TrayLost"))
            await asyncio.sleep(60)
            assert await site.places("big") == before, "there is nowhere to go"
            await site.say_ready(spare, "True")
        await site.until(moved)
        after = await site.places("big")
        assert {name for name in before if before[name] != after[name]} == {"big-worker-0"}
        assert (after["big-worker-0"] == spare) == (spares == 1)
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        await over(site, job)

    run(story)


def test_a_tray_that_is_lost_while_its_member_moves_to_it_is_left_again():
    async def story():
        site = await at_work(racks=1, trays=6)
        job = await bound_job(site, "big", {"worker": 4}, spares=2)
        before = await site.places("big")
        spares = (await site.record("big")).plan.spares
        await site.say_ready(before["big-worker-3"], "Unknown")

        async def chosen():
            return set((await site.record("big")).plan.trays) & set(spares)

        await site.until(chosen)
        (first,) = await chosen()
        await site.user.delete(NODE, first)

        async def moved():
            nodes = (await site.places("big")).values()
            return len(nodes) == 4 and all(nodes) and not {before["big-worker-3"], first} & set(nodes)

        await site.until(moved)
        after = await site.places("big")
        assert {name for name in before if before[name] != after[name]} == {"big-worker-3"}
        await over(site, job)

    run(story)


def test_pods_of_which_the_scheduler_says_nothing_are_let_be():
    """A scheduler that is away for longer than a pod may wait is no trouble of any tray."""

    async def story():
        site = await at_work(racks=1, trays=5)
        job = site.job("big", {"worker": 4})
        site.kube.faults.add(RequestFault(verb="create", resource="pods/binding", user="kube-scheduler"))
        await site.until(lambda: site.has_ungated("big", 4))
        before = {pod["metadata"]["uid"] for pod in await site.pods("big")}
        await asyncio.sleep(4 * site.settings.bind_after)
        assert {pod["metadata"]["uid"] for pod in await site.pods("big")} == before
        assert len(await site.taints()) == 4
        site.kube.faults.clear()
        await site.until(lambda: site.is_bound("big", 4))
        await over(site, job)

    run(story)


def test_no_tray_is_reserved_while_somebody_else_holds_the_pods():
    queue = {"name": "kueue.x-k8s.io/admission"}

    async def story():
        site = await at_work(racks=1, trays=4)
        job = site.job("big", {"worker": 4})
        honest = job.pod

        def queued(group, number):
            pod = honest(group, number)
            return pod | {"spec": pod["spec"] | {"schedulingGates": [queue]}}

        job.pod = queued
        await site.until(lambda: site.says("big", "Placed", "WaitingForGates"))
        before = {pod["metadata"]["uid"] for pod in await site.pods("big")}
        await asyncio.sleep(4 * site.settings.bind_after)
        assert not await site.taints()
        pods = await site.pods("big")
        assert {pod["metadata"]["uid"] for pod in pods} == before
        for pod in pods:
            left = [gate for gate in pod["spec"]["schedulingGates"] if gate != queue]
            patch = {"spec": {"schedulingGates": left}}
            await site.user.patch(POD, pod["metadata"]["name"], TEAM, patch)
        await site.until(lambda: site.is_bound("big", 4))
        await over(site, job)

    run(story)
