"""CPU of nodes: it counts for members that move and for launchers, as it does for a new plan."""

import asyncio

from tests.claim.cluster.gangs.gang_site import TEAM, run
from tests.claim.cluster.gangs.gang_stories import bound_job, has_left, opened, over
from tests.claim.cluster.gangs.test_gang_where import agent, asking

from rackloom.core.cluster.objects import POD

ALL_CPUS = 144


def launcher(cpu):
    container = {"name": "main", "image": "none", "resources": {"requests": {"cpu": str(cpu)}}}
    return {"launcher": {"containers": [container]}}


async def with_launcher(site, cpu, launcher_cpu, workers=2):
    """A job whose workers have a tray each, and whose launcher requests CPUs too."""
    job = asking(site.job("big", {"launcher": 1, "worker": workers}, cpu=str(cpu)), **launcher(launcher_cpu))
    await site.until(lambda: site.is_bound("big", workers + 1))
    return job, await site.places("big")


async def take(site, tray, cpu):
    await site.user.create(POD, agent(tray, str(cpu)))


async def loses(site, tray):
    await site.say_ready(tray, "Unknown")


def test_a_member_of_a_lost_tray_passes_over_one_whose_cpus_are_taken():
    async def story():
        site = await opened(racks=1, trays=4)
        site.start()
        job = await bound_job(site, "big", {"worker": 2}, cpu="96")
        assert set((await site.places("big")).values()) == {"r0-t0", "r0-t1"}
        await take(site, "r0-t2", 100)
        await loses(site, "r0-t0")
        await site.until(has_left(site, "big", 2, "r0-t0"))
        assert set((await site.places("big")).values()) == {"r0-t1", "r0-t3"}
        await over(site, job)

    run(story)


def test_a_spare_whose_cpus_are_taken_is_passed_over():
    async def story():
        site = await opened(racks=1, trays=4)
        site.start()
        job = await bound_job(site, "big", {"worker": 2}, cpu="96", spares=1)
        (spare,) = (await site.record("big")).plan.spares
        await take(site, spare, 100)
        await loses(site, "r0-t0")
        await site.until(has_left(site, "big", 2, "r0-t0"))
        assert spare not in (await site.places("big")).values()
        await over(site, job)

    run(story)


def test_a_member_that_cannot_move_names_the_cpus_that_are_missing():
    async def story():
        site = await opened(racks=1, trays=3)
        site.start()
        job = await bound_job(site, "big", {"worker": 2}, cpu="96")
        await take(site, "r0-t2", 100)
        await loses(site, "r0-t0")
        await site.until(lambda: site.says("big", "Bound", "TrayLost"))
        await asyncio.sleep(30)
        message = (await site.record("big")).status.condition("Bound").message
        assert "r0-t2 has 44 of the 96 cpu of its members" in message
        await site.user.delete(POD, "agent-r0-t2", TEAM, grace_seconds=0)
        await site.until(has_left(site, "big", 2, "r0-t0"))
        await over(site, job)

    run(story)


def test_a_member_made_anew_whose_cpus_are_taken_by_then_moves():
    async def story():
        site = await opened(racks=1, trays=3)
        site.start()
        job = await bound_job(site, "big", {"worker": 2}, cpu="96")
        await site.user.delete(POD, "big-worker-0", TEAM, grace_seconds=0)
        await take(site, "r0-t0", 100)
        await site.until(has_left(site, "big", 2, "r0-t0"))
        assert set((await site.places("big")).values()) == {"r0-t1", "r0-t2"}
        await over(site, job)

    run(story)


def test_a_launcher_goes_beside_a_member_where_it_has_the_cpus():
    async def story():
        site = await opened(racks=1, trays=2)
        await take(site, "r0-t0", 30)
        site.start()
        job, places = await with_launcher(site, 100, 20)
        assert places["big-launcher-0"] == "r0-t1"
        await over(site, job)

    run(story)


def test_a_gang_goes_to_the_rack_where_its_launcher_has_the_cpus():
    async def story():
        site = await opened(racks=2, trays=2)
        for tray in ("r0-t0", "r0-t1"):
            await take(site, tray, 30)
        site.start()
        job, places = await with_launcher(site, 100, 20)
        assert set(places.values()) == {"r1-t0", "r1-t1"}
        await over(site, job)

    run(story)


def test_a_launcher_without_cpus_is_refused_by_name():
    async def story():
        site = await opened(racks=1, trays=2)
        site.start()
        job = asking(site.job("big", {"launcher": 1, "worker": 2}, cpu="100"), **launcher(60))
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        message = (await site.record("big")).status.condition("Placed").message
        assert f"has {ALL_CPUS} of the 160 cpu of its members" in message
        assert "launcher" in message
        await over(site, job)

    run(story)


def test_a_launcher_made_anew_moves_alone_when_its_cpus_are_taken():
    async def story():
        site = await opened(racks=1, trays=3)
        site.start()
        job, before = await with_launcher(site, 100, 20)
        tray = before["big-launcher-0"]
        uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await site.pods("big")}
        await site.user.delete(POD, "big-launcher-0", TEAM, grace_seconds=0)
        await take(site, tray, 30)

        async def moved():
            place = (await site.places("big")).get("big-launcher-0")
            return place is not None and place != tray

        await site.until(moved)
        after = await site.places("big")
        assert after["big-launcher-0"] in before.values(), "a tray of the gang"
        for name in ("big-worker-0", "big-worker-1"):
            pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await site.pods("big")}
            assert (after[name], pods[name]) == (before[name], uids[name])
        await over(site, job)

    run(story)
