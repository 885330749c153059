"""The rack map of a large site: from a picture to the page, and from one change to what is sent for it.

.venv/bin/python -m benchmarks.rack_map --racks 100
"""

import argparse
import gzip
import json
from collections.abc import Callable
from typing import TypeVar

import msgspec
from benchmarks.site_figures import load, spent
from tests.web.pictures import picture

from rackloom.web.colouring import Mode
from rackloom.web.live import Now
from rackloom.web.parts import Painter
from rackloom.web.reading import Reading
from rackloom.web.render import changes, page
from rackloom.web.scene import scene

T = TypeVar("T")
HOLDERS = ("acme",) * 10 + (None,) * 3 + ("blue",) * 4 + ("crimson",) * 6


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process, and what came of them: on a busy machine wall times mislead."""
    begun = spent()
    done = work()
    return round(spent() - begun, 3), done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--racks", type=int, default=100)
    racks = parser.parse_args().racks
    seen = picture(racks, 18, HOLDERS)
    # The templates are compiled once in the life of a process.
    Painter(None, Mode.PARTITION, 9).follow(
        Now(number=1, whole=scene(Reading(picture=picture(1, 1, HOLDERS))))
    )
    painter = Painter(None, Mode.PARTITION, 9)
    joined, whole = timed(lambda: scene(Reading(picture=seen)))
    drawn, sheet = timed(lambda: painter.follow(Now(number=1, whole=whole)))
    written, text = timed(lambda: page("provider", Mode.PARTITION, "0.1", dict(sheet.all())))
    sick = (msgspec.structs.replace(seen.fabric_gpus[0], healthy=False), *seen.fabric_gpus[1:])
    changed = scene(Reading(picture=msgspec.structs.replace(seen, fabric_gpus=sick)))
    redrawn, after = timed(lambda: painter.follow(Now(number=2, whole=changed)))
    sent = changes(after.since(1))
    as_tenant, _ = timed(lambda: Painter("blue", Mode.PARTITION, 9).follow(Now(number=1, whole=whole)))
    figures = {
        "racks": racks,
        "gpus": len(whole.seats),
        "cpu_seconds_to_join": joined,
        "cpu_seconds_to_draw": drawn,
        "cpu_seconds_to_write_the_page": written,
        "cpu_seconds_in_all": round(joined + drawn + written, 3),
        "page_kib": len(text) // 1024,
        "page_kib_compressed": len(gzip.compress(text.encode(), 6)) // 1024,
        "cpu_seconds_to_draw_for_a_tenant": as_tenant,
        "cpu_seconds_to_follow_one_change": redrawn,
        "kib_sent_for_one_change": round(len(sent) / 1024, 1),
    }
    print(json.dumps(figures | load()))


if __name__ == "__main__":
    main()
