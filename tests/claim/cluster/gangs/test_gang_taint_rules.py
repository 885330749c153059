"""Devices that a DeviceTaintRule taints: no gang is planned there, from the moment when the rule appears."""

import asyncio

import pytest
from tests.claim.cluster.gangs.gang_site import rack_of, run
from tests.claim.cluster.gangs.gang_stories import opened, over

from rackloom.core.cluster import names
from rackloom.core.cluster.objects import DEVICE_TAINT_RULES
from rackloom.lab.kube.controllers.claims import ResourceClaimController
from rackloom.lab.kube.objects import TypeSchema

V1, BETA = DEVICE_TAINT_RULES[:2]


async def claiming_site(racks, trays, kind=None):
    """GPUs are claimed, and the server serves DeviceTaintRules of this kind, or none if it is None."""
    site = await opened(racks=racks, trays=trays)
    if kind is not None:
        site.kube.serve(kind, TypeSchema(status=True, generation=True))
    site.tasks.append(asyncio.create_task(ResourceClaimController(site.kube, site.rng).run()))
    site.tasks.append(asyncio.create_task(site.gatekeeper().run()))
    await site.publish()
    await site.make_template("gpus", 4)
    return site


async def taint(site, kind, name, **selector):
    spec = {"deviceSelector": selector, "taint": {"key": "example.com/checked", "effect": "NoSchedule"}}
    await site.user.create(kind, {"metadata": {"name": name}, "spec": spec})


def claiming(site, name, size):
    return site.job(name, {"worker": size}, gpus=0, templates=["gpus"])


@pytest.mark.parametrize("kind", [V1, BETA])
def test_a_gang_passes_over_a_tray_with_a_tainted_gpu_and_so_does_the_next(kind):
    async def story():
        site = await claiming_site(2, 3, kind)
        await taint(site, kind, "first", driver=names.GPU_DRIVER, pool="r0-t1", device="device-2")
        site.start()
        first = claiming(site, "first", 3)
        await site.until(lambda: site.is_bound("first", 3))
        assert {rack_of(node) for node in (await site.places("first")).values()} == {"r1"}
        await taint(site, kind, "second", driver=names.GPU_DRIVER, pool="r0-t0")
        second = claiming(site, "second", 1)
        await site.until(lambda: site.is_bound("second", 1))
        assert set((await site.places("second")).values()) == {"r0-t2"}
        await over(site, first, second)

    run(story)


def test_a_gang_that_waited_starts_at_once_when_the_rule_is_deleted():
    async def story():
        site = await claiming_site(1, 2, V1)
        site.settings = type(site.settings)(lost_after=60.0, bind_after=30.0, again=3600.0)
        await taint(site, V1, "all")
        site.start()
        job = claiming(site, "big", 2)
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        await site.user.delete(V1, "all")
        await site.until(lambda: site.is_bound("big", 2), seconds=60)
        await over(site, job)

    run(story)


def test_a_plan_is_given_up_when_a_rule_taints_its_tray_before_the_pods_are_let_go():
    async def story():
        site = await claiming_site(2, 3, V1)
        site.start()
        job = claiming(site, "big", 3)
        await site.until(lambda: site.says("big", "Placed", "Placed"))
        rack = rack_of((await site.record("big")).plan.trays[0])
        await taint(site, V1, "late", pool=f"{rack}-t1")
        await site.until(lambda: site.is_bound("big", 3))
        assert {rack_of(node) for node in (await site.places("big")).values()} == {"r0", "r1"} - {rack}
        await over(site, job)

    run(story)


def test_a_server_without_the_rules_is_asked_seldom_and_its_gangs_are_placed():
    async def story():
        site = await claiming_site(1, 3)
        site.start()
        job = claiming(site, "big", 3)
        await site.until(lambda: site.is_bound("big", 3))
        before = _asked(site)
        await asyncio.sleep(3600)
        per_minute = (_asked(site) - before) / 60
        assert per_minute <= 3 * 4, "an informer of each version, twice a minute"
        await over(site, job)

    run(story)


def _asked(site):
    plural = DEVICE_TAINT_RULES[0].plural
    return sum(n for call, n in site.kube.calls.items() if plural in call.resource)
