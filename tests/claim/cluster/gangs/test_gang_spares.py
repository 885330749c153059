"""Spare trays: no quota counts them, so a namespace keeps a few and no more."""

from tests.claim.cluster.gangs.gang_site import run
from tests.claim.cluster.gangs.gang_stories import at_work, bound_job, over

from rackloom.core.gangs import placement


def test_a_namespace_keeps_so_many_spares_and_is_told_how_many_are_left():
    async def story():
        site = await at_work(racks=2, trays=6, max_spares=3)
        first = await bound_job(site, "first", {"worker": 3}, spares=2)
        second = site.job("second", {"worker": 3}, spares=3)
        await site.until(lambda: site.says("second", "Placed", "DoesNotFit"))
        message = (await site.record("second")).status.condition("Placed").message
        assert "would keep 3 spare trays" in message
        assert "1 more" in message
        assert "set annotation rackloom.dev/gang-spares to 1" in message
        assert not await site.ungated("second")
        assert len(await site.taints()) == 5
        await second.end()
        third = await bound_job(site, "third", {"worker": 3}, spares=1)
        await first.end()
        fourth = await bound_job(site, "fourth", {"worker": 3}, spares=2)
        await over(site, third, fourth)

    run(story)


def test_where_no_spares_may_be_kept_the_fix_is_to_ask_for_none():
    async def story():
        site = await at_work(racks=1, trays=6, max_spares=0)
        site.job("big", {"worker": 3}, spares=1)
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        assert "gang-spares to 0" in (await site.record("big")).status.condition("Placed").message
        await site.end()

    run(story)


def test_no_search_is_made_for_more_spares_than_there_is_room_for(monkeypatch):
    honest, sought = placement.plan_or_refuse, []

    def counted(site, gang, refusal):
        sought.append(gang.spares)
        return honest(site, gang, refusal)

    monkeypatch.setattr(placement, "plan_or_refuse", counted)

    async def story():
        site = await at_work(racks=1, trays=12, max_spares=2)
        site.job("big", {"worker": 5}, spares=5)
        await site.until(lambda: site.says("big", "Placed", "DoesNotFit"))
        message = (await site.record("big")).status.condition("Placed").message
        assert "would keep 5 spare trays or more, and its namespace may keep 2 more" in message
        assert "gang-spares to 2" in message
        assert set(sought) == {2}
        await site.end()

    run(story)
