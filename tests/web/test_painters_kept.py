"""Painters of streams stay, however many kinds of viewers look in."""

import asyncio
import threading

from tests.web.snapshots import snapshot

from rackloom.web.frames import ColourMode
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteReading, site_map
from rackloom.web.painters import KINDS_KEPT, Painter, Painters

NOW = LiveReading(number=1, whole=site_map(SiteReading(snapshot=snapshot(1, 1))))
LOOKING_IN = [(f"org-{number}", ColourMode.PARTITION) for number in range(KINDS_KEPT + 4)]


def test_a_painter_with_a_stream_is_kept_until_the_stream_ends():
    async def scenario():
        painters, kind = Painters(0), LOOKING_IN[0]
        before = await painters.sheet(kind, NOW)
        seen = []
        with painters.held(kind):
            seen.append(await after_others(painters, kind))
        seen.append(await after_others(painters, kind))
        return [sheet.panels is before.panels for sheet in seen]

    assert asyncio.run(scenario()) == [True, False]


async def after_others(painters, kind):
    """The sheet that a kind of viewer gets of the same reading after many other kinds have looked in."""
    for other in LOOKING_IN[1:]:
        await painters.sheet(other, NOW)
    return await painters.sheet(kind, NOW)


def test_a_client_that_goes_away_leaves_no_thread_beside_the_next(monkeypatch):
    painting = Painting(Painter.follow)
    monkeypatch.setattr(Painter, "follow", lambda painter, *now: painting.follow(painter, *now))

    async def scenario():
        painters, kind = Painters(0), LOOKING_IN[0]
        gone = asyncio.create_task(painters.sheet(kind, NOW))
        assert await asyncio.to_thread(painting.begun.wait, 60)
        gone.cancel()
        await asyncio.wait([gone])
        later = asyncio.create_task(painters.sheet(kind, NOW))
        await asyncio.sleep(0.2)
        begun = painting.times
        painting.go.set()
        return gone.cancelled(), begun, (await later).number, painting.times

    assert asyncio.run(scenario()) == (True, 1, 1, 2)


class Painting:
    """Painting that waits until it may continue, and counts its starts."""

    def __init__(self, follow):
        self._follow = follow
        self.times = 0
        self.begun, self.go = threading.Event(), threading.Event()

    def follow(self, painter, *now):
        self.times += 1
        self.begun.set()
        assert self.go.wait(60)
        return self._follow(painter, *now)
