"""Readings are shared, follow changes, and say when they stop."""

import asyncio

import msgspec
import pytest
from tests.web.snapshots import AT, snapshot
from tests.web.stand_ins import ShownSite

from rackloom.web import live
from rackloom.web.live import LiveMap
from rackloom.web.model import SiteReading


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 60))


async def another(feed):
    """The next reading that a client gets by polling."""
    first = await feed.fresh()
    while (seen := await feed.fresh()).number == first.number:
        await asyncio.sleep(0.01)
    return seen


def test_many_who_look_at_once_share_one_reading():
    async def scenario():
        site = ShownSite(SiteReading(snapshot=snapshot(1, 1)))
        feed = LiveMap(site, lambda: 0.0)
        seen = await asyncio.gather(*(feed.fresh() for _ in range(20)))
        return site.reads, {reading.number for reading in seen}

    assert run(scenario()) == (1, {1})


def test_a_reading_that_began_before_a_change_does_not_answer_who_asks_after_it():
    async def scenario():
        site = ShownSite(SiteReading(snapshot=snapshot(1, 1)))
        going_on, read = asyncio.Event(), site.read

        async def slow_read():
            found = await read()
            await going_on.wait()
            return found

        site.read = slow_read
        feed = LiveMap(site, lambda: 0.0)
        early = asyncio.create_task(feed.fresh())
        while not site.reads:
            await asyncio.sleep(0)
        await asyncio.sleep(2 * live.LONGEST_PAUSE)
        site.show(SiteReading(snapshot=snapshot(2, 1)))
        late = [asyncio.create_task(feed.fresh()) for _ in range(5)]
        await asyncio.sleep(0)
        going_on.set()
        return [len(each.whole.gpus) for each in await asyncio.gather(early, *late)], site.reads

    assert run(scenario()) == ([4, *[8] * 5], 2)


def test_a_change_is_read_and_everybody_who_waits_hears_of_it(monkeypatch):
    monkeypatch.setattr(live, "AT_LEAST", 3600.0)

    async def scenario():
        site = ShownSite(SiteReading(snapshot=snapshot(1, 1)))
        feed = LiveMap(site, lambda: 0.0)
        async with feed.watched(), feed.watched():
            first = await feed.after(0)
            waiting = [asyncio.create_task(feed.after(first.number)) for _ in range(3)]
            await asyncio.sleep(0)
            site.show(SiteReading(snapshot=snapshot(2, 1)))
            return [len(reading.whole.gpus) for reading in await asyncio.gather(*waiting)]

    assert run(scenario()) == [8, 8, 8]


def test_the_history_is_recorded_when_nobody_looks(monkeypatch):
    monkeypatch.setattr(live, "RECORD_SECONDS", 0.15)

    async def scenario():
        site = ShownSite(SiteReading(snapshot=snapshot(1, 1)))
        feed = LiveMap(site, lambda: 0.0)
        recording = asyncio.create_task(feed.record())
        try:
            for number in range(1, 4):
                while site.reads < number:
                    await asyncio.sleep(0.01)
                seen = msgspec.structs.replace(snapshot(1, 1), at=AT + 60 * number)
                site.show(SiteReading(snapshot=seen))
            # A site that cannot be read leaves a gap, and the recording goes on.
            site.breaks(True)
            broken = site.reads
            while site.reads == broken:
                await asyncio.sleep(0.01)
            site.breaks(False)
            while feed.history.maps[-1].at < AT + 180:
                await asyncio.sleep(0.01)
        finally:
            recording.cancel()
        return [whole.at - AT for whole in feed.history.maps]

    assert run(scenario()) == [0, 60, 120, 180]


def test_nobody_reads_when_nobody_looks():
    async def scenario():
        site = ShownSite(SiteReading(snapshot=snapshot(1, 1)))
        feed = LiveMap(site, lambda: 0.0)
        async with feed.watched():
            await feed.after(0)
        reads = site.reads
        site.show(SiteReading(snapshot=snapshot(2, 1)))
        await asyncio.sleep(3 * live.PAUSE)
        return site.reads - reads

    assert run(scenario()) == 0


def test_a_site_that_cannot_be_read_keeps_its_picture_and_says_since_when(monkeypatch):
    monkeypatch.setattr(live, "PAUSE", -1.0)

    async def scenario():
        now = [100.0]
        site = ShownSite(SiteReading(snapshot=snapshot(1, 1)))
        feed = LiveMap(site, lambda: now[0])
        await feed.fresh()
        site.broken = True
        seen = []
        for at in (200.0, 300.0):
            now[0] = at
            seen.append(await another(feed))
        site.broken = False
        return seen, await another(feed)

    failed, healed = run(scenario())
    assert [(reading.unread_since, reading.problem, len(reading.whole.gpus)) for reading in failed] == [
        (200.0, "the store is busy", 4)
    ] * 2
    assert healed.unread_since is None


@pytest.mark.slow
def test_the_server_rests_half_as_long_as_the_last_reading_took(monkeypatch):
    monkeypatch.setattr(live, "PAUSE", 0.0)

    async def scenario():
        site = SlowSite(SiteReading(snapshot=snapshot(1, 1)))
        feed = LiveMap(site, lambda: 0.0)
        await feed.fresh()
        await another(feed)
        (begun, ended), (again, _), *_ = site.times
        return ended - begun, again - ended

    took, rested = run(scenario())
    assert rested >= took / 2


def test_the_server_rests_no_longer_than_a_change_may_wait(monkeypatch):
    monkeypatch.setattr(live, "LONGEST_PAUSE", 0.0)

    async def scenario():
        site = SlowSite(SiteReading(snapshot=snapshot(1, 1)))
        feed = LiveMap(site, lambda: 0.0)
        await feed.fresh()
        await feed.fresh()
        return len(site.times)

    assert run(scenario()) == 2


class SlowSite(ShownSite):
    """A site that is slow to read."""

    def __init__(self, reading):
        super().__init__(reading)
        self.times = []

    async def read(self):
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(0.3)
        self.times.append((begun, asyncio.get_running_loop().time()))
        return await super().read()


def test_who_asks_while_somebody_watches_gets_what_is_known(monkeypatch):
    monkeypatch.setattr(live, "AT_LEAST", 3600.0)
    monkeypatch.setattr(live, "PAUSE", 0.0)

    async def scenario():
        site = ShownSite(SiteReading(snapshot=snapshot(1, 1)))
        feed = LiveMap(site, lambda: 0.0)
        async with feed.watched():
            await feed.after(0)
            for _ in range(5):
                await asyncio.sleep(0.05)
                await feed.fresh()
            watched = site.reads
        await another(feed)
        return watched, site.reads > watched

    assert run(scenario()) == (1, True)


def test_a_source_that_cannot_say_whether_it_changed_is_still_read():
    async def scenario():
        site = ShownSite(SiteReading(snapshot=snapshot(1, 1)))
        site.broken = True
        feed = LiveMap(site, lambda: 0.0)
        async with feed.watched():
            failed = await feed.after(0)
            site.broken = False
            healed = failed
            while healed.unread_since is not None:
                healed = await feed.after(healed.number)
        return failed.unread_since, len(healed.whole.gpus)

    assert run(scenario()) == (0.0, 4)
