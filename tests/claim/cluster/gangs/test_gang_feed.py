"""Gangs are placed from watches: nothing is listed at rest, and a stale watch places no gang."""

import asyncio

import pytest
from tests.claim.cluster.gangs.gang_site import TEAM, Behind, planned, rack_of, run
from tests.claim.cluster.gangs.gang_stories import NIC, at_work, bound_job, claiming_site, opened, over

from rackloom.core.cluster.objects import NODE, POD


def lists_of(site, user="controller"):
    return sum(count for call, count in site.kube.calls.items() if (call.user, call.verb) == (user, "list"))


def test_gangs_at_rest_cost_no_list_and_no_search():
    async def story():
        site = await at_work(racks=2, trays=4)
        job = await bound_job(site, "big", {"launcher": 1, "worker": 4})
        huge = site.job("huge", {"worker": 5})
        await site.until(lambda: site.says("huge", "Placed", "DoesNotFit"))
        await site.until(lambda: site.says("big", "Bound", "AllBound"))
        await asyncio.sleep(10)
        # Of the three versions of DeviceTaintRules, two are not served, and are listed now and then.
        before, rules = lists_of(site), _lists_of_rules(site)
        # Heartbeats offer a gang nothing.
        for number in range(5):
            await site.say_ready("r1-t0", "True")
            await site.user.patch(NODE, "r1-t1", None, {"metadata": {"annotations": {"beat": str(number)}}})
            await asyncio.sleep(10)
        assert lists_of(site) - before == _lists_of_rules(site) - rules
        await over(site, job, huge)

    run(story)


def _lists_of_rules(site):
    calls = site.kube.calls.items()
    return sum(n for call, n in calls if call.verb == "list" and call.resource == "devicetaintrules")


async def open_node(site):
    await site.cordon("r0-t0", is_cordoned=False)


async def end_pod(site):
    await site.user.patch(
        POD, "small-worker-0", TEAM, {"status": {"phase": "Succeeded"}}, subresource="status"
    )


async def delete_pod(site):
    await site.user.delete(POD, "small-worker-0", TEAM, grace_seconds=0)


async def label_node(site):
    await site.user.patch(NODE, "r0-t0", None, {"metadata": {"labels": {"tray": "r0-t0"}}})


@pytest.mark.parametrize("change", [open_node, end_pod, delete_pod, label_node])
def test_a_gang_that_was_refused_is_placed_as_soon_as_the_cluster_has_room(change):
    async def story():
        site = await opened(racks=1, trays=3, again=3600.0)
        if change is open_node:
            await site.cordon("r0-t0")
        if change in (end_pod, delete_pod):
            small = site.job("small", {"worker": 1}, gang=False)
            await site.until(lambda: site.is_bound("small", 1))
            small.is_wanted = False
        site.start()
        job = site.job("big", {"worker": 3})
        if change is label_node:
            plain = job.pod

            def pod(group, number):
                made = plain(group, number)
                made["spec"]["nodeSelector"] = {"tray": "r0-t0"}
                return made

            job.pod, job.sizes = pod, {"worker": 1}
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        await asyncio.sleep(30)
        assert await site.says("big", "Placed", "DoesNotFit")
        await change(site)
        await site.until(lambda: site.says("big", "Placed", "Placed"), seconds=5)
        await site.end()

    run(story)


def test_a_gang_that_waited_for_a_template_or_a_device_class_is_placed_when_it_comes():
    async def story():
        site = await claiming_site(1, 3, again=3600.0)
        site.start()
        job = site.job("big", {"worker": 3}, templates=["nics"])
        await asyncio.sleep(30)
        assert not await site.ungated("big")
        await site.make_template("nics", 1, NIC)
        await site.until(lambda: site.is_bound("big", 3), seconds=30)
        await over(site, job)

    run(story)


def test_a_burst_of_changes_causes_one_pass():
    async def story():
        site = await opened(racks=2, trays=8)
        for tray in site.trays:
            await site.cordon(tray)
        site.start()
        job = site.job("big", {"worker": 8})
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        reads = _reads_of_nodes(site)
        for tray in site.trays:
            await site.cordon(tray, is_cordoned=False)
        await site.until(lambda: site.says("big", "Placed", "Placed"))
        assert _reads_of_nodes(site) - reads <= 2 * 8, "the trays of its plan, and once more in the check"
        await over(site, job)

    run(story)


def _reads_of_nodes(site):
    calls = site.kube.calls.items()
    return sum(
        n for call, n in calls if (call.user, call.verb, call.resource) == ("controller", "get", "nodes")
    )


def test_a_plan_rests_on_the_nodes_as_they_are_not_as_a_late_watch_shows_them():
    async def story():
        site = await opened(racks=2, trays=4)
        old = await site.user.list(NODE)
        for tray in ("r0-t1", "r0-t3"):
            await site.cordon(tray)
        site.start(api=Behind(site.kube, "controller", NODE, old))
        job = site.job("big", {"worker": 4})
        trays = (await planned(site, "big")).trays
        assert {rack_of(tray) for tray in trays} == {"r1"}
        site.api.caught_up.set()
        await site.until(lambda: site.is_bound("big", 4))
        await over(site, job)

    run(story)


def test_trays_are_checked_for_pods_that_a_late_watch_does_not_show():
    async def story():
        site = await opened(racks=2, trays=4)
        site.start()
        job = site.job("big", {"worker": 4})
        trays = (await planned(site, "big")).trays
        await site.kill()
        other = site.job("small", {"worker": 0}, gang=False)
        await asyncio.sleep(0.01)
        old = await site.user.list(POD)
        pod = other.pod("worker", 0)
        await site.user.create(POD, pod | {"spec": {**pod["spec"], "nodeName": trays[2]}})
        behind = Behind(site.kube, "controller", POD, old)
        site.start(api=behind)
        await asyncio.sleep(60)
        assert not set((await site.places("big")).values()) & set(trays)
        behind.caught_up.set()
        await site.until(lambda: site.is_bound("big", 4))
        await over(site, job)

    run(story)
