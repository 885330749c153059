"""Kueue's check decides from watches: nothing is listed at rest, and a stale watch admits no workload."""

import asyncio

from tests.claim.cluster.gangs.gang_site import Behind
from tests.claim.cluster.kueue.kueue_site import KueueSite, run

from rackloom.claim.kube.api import KubeError
from rackloom.core.cluster.kueue_objects import PENDING, REJECTED
from rackloom.core.cluster.objects import NODE, POD, RESOURCE_FLAVOR
from rackloom.core.kueue.plans import recorded_plans


def lists_of(site):
    """Lists of whole kinds. Of DeviceTaintRules, versions that are not served are listed now and then."""
    calls = site.kube.calls.items()
    lists = [(call, n) for call, n in calls if (call.user, call.verb) == ("controller", "list")]
    return sum(n for call, n in lists if call.resource not in ("devicetaintrules", "pods"))


def reads_of(site, verb, resource):
    wanted = ("controller", verb, resource)
    return sum(n for call, n in site.kube.calls.items() if (call.user, call.verb, call.resource) == wanted)


async def trays_of(site, name):
    updates = (await site.check(name)).get("podSetUpdates") or ()
    return {tray for _, planned in recorded_plans(updates) for tray in planned.trays}


async def at_work(**chosen):
    site = KueueSite(racks=2, trays=4, **chosen)
    await site.begin()
    await site.add_check()
    site.kueue = site.run_kueue()
    return site


def test_at_rest_and_for_a_verdict_nothing_is_listed_but_the_pods_of_the_planned_trays():
    async def story():
        site = await at_work()
        site.start()
        await site.submit("first", 4)
        await site.until(lambda: site.is_admitted("first"))
        whole, pods = lists_of(site), reads_of(site, "list", "pods")
        for beat in range(5):
            await site.user.patch(NODE, "r0-t0", None, {"metadata": {"annotations": {"beat": str(beat)}}})
            await site.occupy("r0-t0", name=f"cpu-{beat}", gpus=0)
            await asyncio.sleep(10)
        assert (lists_of(site), reads_of(site, "list", "pods")) == (whole, pods)
        await site.submit("second", 3)
        await site.until(lambda: site.is_admitted("second"))
        assert (lists_of(site), reads_of(site, "list", "pods")) == (whole, pods + 3)
        await site.end()

    run(story)


def test_a_plan_rests_on_nodes_as_they_are_not_as_a_late_watch_shows_them():
    async def story():
        site = await at_work()
        old = await site.user.list(NODE)
        await site.user.patch(NODE, "r0-t2", None, {"spec": {"unschedulable": True}})
        api = Behind(site.kube, "controller", NODE, old)
        site.start(api)
        await site.submit("train", 4)
        await site.until(lambda: site.is_admitted("train"))
        assert await trays_of(site, "train") == {f"r1-t{tray}" for tray in range(4)}
        await site.end()

    run(story)


def test_a_plan_takes_no_tray_with_a_pod_that_a_late_watch_does_not_show():
    async def story():
        site = await at_work()
        old = await site.user.list(POD)
        await site.occupy("r0-t1")
        api = Behind(site.kube, "controller", POD, old)
        site.start(api)
        await site.submit("train", 4)
        await site.until(lambda: site.is_admitted("train"))
        assert await trays_of(site, "train") == {f"r1-t{tray}" for tray in range(4)}
        await site.end()

    run(story)


def test_a_workload_is_not_refused_for_good_because_of_nodes_that_a_late_watch_does_not_show():
    async def story():
        site = await at_work()
        old = await site.user.list(NODE)
        for tray in range(4, 6):
            await site.power_on(f"r0-t{tray}")
        api = Behind(site.kube, "controller", NODE, old)
        site.start(api)
        await site.submit("large", 6)
        await site.until(lambda: site.is_in("large", PENDING))
        await asyncio.sleep(60)
        assert not any("never fit" in message for message in site.kueue.messages.get("large", ()))
        assert not await site.is_in("large", REJECTED)
        api.caught_up.set()
        await site.until(lambda: site.is_admitted("large"))
        await site.end()

    run(story)


def test_nothing_is_decided_without_the_flavors():
    """A flavor adds rules to pods, so a workload is not planned on nodes that it excludes."""

    async def story():
        site = await at_work()
        api = WithoutFlavors(site.kube, "controller", None, None)
        site.start(api)
        await site.submit("train", 4)
        await site.until(lambda: site.is_in("train", PENDING))
        await asyncio.sleep(60)
        assert await site.is_in("train", PENDING)
        api.is_blind = False
        await site.until(lambda: site.is_admitted("train"))
        await site.end()

    run(story)


class WithoutFlavors(Behind):
    is_blind = True

    async def list(self, kind, namespace=None, **chosen):
        if kind == RESOURCE_FLAVOR and self.is_blind:
            raise KubeError(403, "Forbidden", "no right")
        return await super().list(kind, namespace, **chosen)
