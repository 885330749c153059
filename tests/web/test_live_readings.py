"""Readings are shared, follow changes, and say when they stop."""

import asyncio

from tests.web.pictures import picture
from tests.web.stand_ins import ShownSite

from rackloom.web import live
from rackloom.web.live import Live
from rackloom.web.reading import Reading


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 60))


def test_many_who_look_at_once_share_one_reading():
    async def scenario():
        site = ShownSite(Reading(picture=picture(1, 1)))
        feed = Live(site, lambda: 0.0)
        seen = await asyncio.gather(*(feed.fresh() for _ in range(20)))
        return site.reads, {one.number for one in seen}

    assert run(scenario()) == (1, {1})


def test_a_change_is_read_and_everybody_who_waits_hears_of_it(monkeypatch):
    monkeypatch.setattr(live, "AT_LEAST", 3600.0)

    async def scenario():
        site = ShownSite(Reading(picture=picture(1, 1)))
        feed = Live(site, lambda: 0.0)
        async with feed.watched(), feed.watched():
            first = await feed.after(0)
            waiting = [asyncio.create_task(feed.after(first.number)) for _ in range(3)]
            await asyncio.sleep(0)
            site.show(Reading(picture=picture(2, 1)))
            return [len(one.whole.seats) for one in await asyncio.gather(*waiting)]

    assert run(scenario()) == [8, 8, 8]


def test_nobody_reads_when_nobody_looks():
    async def scenario():
        site = ShownSite(Reading(picture=picture(1, 1)))
        feed = Live(site, lambda: 0.0)
        async with feed.watched():
            await feed.after(0)
        reads = site.reads
        site.show(Reading(picture=picture(2, 1)))
        await asyncio.sleep(3 * live.PAUSE)
        return site.reads - reads

    assert run(scenario()) == 0


def test_a_site_that_cannot_be_read_keeps_its_picture_and_says_since_when(monkeypatch):
    monkeypatch.setattr(live, "PAUSE", -1.0)

    async def scenario():
        now = [100.0]
        site = ShownSite(Reading(picture=picture(1, 1)))
        feed = Live(site, lambda: now[0])
        await feed.fresh()
        site.broken = True
        seen = []
        for at in (200.0, 300.0):
            now[0] = at
            seen.append(await feed.fresh())
        site.broken = False
        return seen, await feed.fresh()

    failed, healed = run(scenario())
    assert [(one.unread_since, one.problem, len(one.whole.seats)) for one in failed] == [
        (200.0, "the store is busy", 4)
    ] * 2
    assert healed.unread_since is None


def test_a_source_that_cannot_say_whether_it_changed_is_still_read():
    async def scenario():
        site = ShownSite(Reading(picture=picture(1, 1)))
        site.broken = True
        feed = Live(site, lambda: 0.0)
        async with feed.watched():
            failed = await feed.after(0)
            site.broken = False
            healed = failed
            while healed.unread_since is not None:
                healed = await feed.after(healed.number)
        return failed.unread_since, len(healed.whole.seats)

    assert run(scenario()) == (0.0, 4)
