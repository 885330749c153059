"""Members that claim devices are placed on trays that have them, and on no other."""

import asyncio

from tests.claim.cluster.gangs.gang_site import TEAM, planned, rack_of, run
from tests.claim.cluster.gangs.gang_stories import NIC, bound_job, claiming_site, over

from rackloom.core.cluster.objects import POD


async def take_nics(site, tray):
    """A pod without GPUs is bound to a tray, and claims all of its NICs."""
    other = site.job("other", {"worker": 0}, gpus=0, gang=False, templates=["four-nics"])
    await asyncio.sleep(0.01)
    pod = other.pod("worker", 0)
    await site.user.create(POD, pod | {"spec": {**pod["spec"], "nodeSelector": {"tray": tray}}})

    async def is_there():
        return (await site.places("other")) == {"other-worker-0": tray}

    return is_there


def test_a_gang_whose_gpus_are_claimed_has_them_on_its_trays():
    async def story():
        site = await claiming_site(2, 3)
        await site.publish()
        site.start()
        job = site.job("big", {"worker": 3}, gpus=0, templates=["gpus"])
        await site.until(lambda: site.says("big", "Placed", "WaitingForClaimTemplates"))
        assert not await site.taints()
        await site.make_template("gpus", 4)
        await site.until(lambda: site.is_bound("big", 3))
        places = await site.places("big")
        assert len(set(places.values())) == 3
        assert len({rack_of(node) for node in places.values()}) == 1
        await over(site, job)

    run(story)


def test_members_that_name_claims_of_their_own_are_placed():
    async def story():
        site = await claiming_site(2, 3)
        await site.publish()
        site.start()
        job = site.job("big", {"worker": 2}, gpus=0, own_claims=True)
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        for number in range(2):
            await site.make_claim(f"big-worker-{number}", 4)
        await site.until(lambda: site.is_bound("big", 2))
        assert len(set((await site.places("big")).values())) == 2
        await over(site, job)

    run(story)


def test_a_gang_whose_members_claim_nics_passes_over_a_rack_where_one_is_missing():
    async def story():
        site = await claiming_site(2, 3, without=["r0-t1"])
        await site.make_template("nics", 2, NIC)
        site.start()
        job = site.job("big", {"worker": 3}, templates=["nics"])
        late = site.job("late", {"worker": 3}, templates=["nics"])
        await site.until(lambda: site.is_bound("big", 3))
        assert {rack_of(node) for node in (await site.places("big")).values()} == {"r1"}
        assert (await site.record("big")).gang.groups[0].devices == "nics"
        await site.until(lambda: site.says("late", "Placed", "DoesNotFit"))
        assert not await site.ungated("late")
        await job.end()
        await site.until(lambda: site.is_bound("late", 3))
        await over(site, late)

    run(story)


def test_a_tray_whose_nics_somebody_took_is_passed_over_though_its_gpus_are_free():
    async def story():
        site = await claiming_site(2, 3)
        await site.make_template("nics", 2, NIC)
        await site.make_template("four-nics", 4, NIC)
        await site.label_trays()
        await site.until(await take_nics(site, "r0-t0"))
        site.start()
        site.job("big", {"worker": 3}, templates=["nics"])
        site.job("plain", {"worker": 3})
        await site.until(lambda: site.is_bound("big", 3))
        assert {rack_of(node) for node in (await site.places("big")).values()} == {"r1"}
        await site.until(lambda: site.is_bound("plain", 3))
        assert {rack_of(node) for node in (await site.places("plain")).values()} == {"r0"}
        await site.end()

    run(story)


def test_a_plan_is_given_up_when_somebody_takes_its_nics_before_it_was_reserved():
    async def story():
        site = await claiming_site(2, 3)
        await site.make_template("nics", 2, NIC)
        await site.make_template("four-nics", 4, NIC)
        await site.label_trays()
        site.start()
        site.job("big", {"worker": 3}, templates=["nics"])
        rack = rack_of((await planned(site, "big")).trays[0])
        await site.kill()
        await site.until(await take_nics(site, f"{rack}-t2"))
        site.start()
        await site.until(lambda: site.is_bound("big", 3))
        nodes = set((await site.places("big")).values())
        assert {rack_of(node) for node in nodes} == {"r0", "r1"} - {rack}
        assert set(await site.taints()) == nodes
        await site.end()

    run(story)


def test_a_member_of_a_lost_tray_moves_to_one_that_has_its_nics():
    async def story():
        site = await claiming_site(1, 6, without=["r0-t0"])
        await site.make_template("nics", 2, NIC)
        await site.make_template("four-nics", 4, NIC)
        await site.label_trays()
        site.start()
        job = await bound_job(site, "big", {"worker": 3}, templates=["nics"])
        before = await site.places("big")
        free = sorted({tray for tray in site.trays if tray != "r0-t0"} - set(before.values()))
        await site.until(await take_nics(site, free[0]))
        await site.say_ready(before["big-worker-1"], "Unknown")

        async def moved():
            return (await site.places("big")).get("big-worker-1") == free[1]

        await site.until(moved)
        await job.end()
        await site.until(site.is_clean)
        assert await site.user.get(POD, "other-worker-0", TEAM)
        await site.end()

    run(story)
