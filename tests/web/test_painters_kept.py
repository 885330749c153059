"""Painters of streams stay, however many kinds of viewers look in."""

import asyncio

from tests.web.pictures import picture

from rackloom.web.colouring import Mode
from rackloom.web.live import Now
from rackloom.web.painters import KINDS_KEPT, Painters
from rackloom.web.reading import Reading
from rackloom.web.scene import scene

NOW = Now(number=1, whole=scene(Reading(picture=picture(1, 1))))
LOOKING_IN = [(f"org-{number}", Mode.PARTITION) for number in range(KINDS_KEPT + 4)]


def test_a_painter_with_a_stream_is_kept_until_the_stream_ends():
    async def scenario():
        painters, kind = Painters(0), LOOKING_IN[0]
        before = await painters.sheet(kind, NOW)
        seen = []
        with painters.held(kind):
            seen.append(await after_others(painters, kind))
        seen.append(await after_others(painters, kind))
        return [one is before for one in seen]

    assert asyncio.run(scenario()) == [True, False]


async def after_others(painters, kind):
    """What a kind of viewer is sent of the same reading when many others have looked in."""
    for other in LOOKING_IN[1:]:
        await painters.sheet(other, NOW)
    return await painters.sheet(kind, NOW)
