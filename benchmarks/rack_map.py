"""The rack map of a large site: from a picture to the page, and from one change to what is sent for it.

python benchmarks/rack_map.py                # 100 racks, 7,200 GPUs
python benchmarks/rack_map.py --racks 10
python benchmarks/rack_map.py --quick        # 2 racks: shows that it works
"""

import argparse
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

# The snapshots are those of the tests.
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.site_figures import load, spent
from tests.web.snapshots import snapshot

from rackloom.core.diagnosis.snapshot import SiteSnapshot
from rackloom.web.frames import ColourMode
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteMapCache, SiteReading, site_map, update_site_map
from rackloom.web.painters import Painter
from rackloom.web.render import render_changes, render_page

T = TypeVar("T")
HOLDERS = ("acme",) * 10 + (None,) * 3 + ("blue",) * 4 + ("crimson",) * 6


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process, and what came of them: on a busy machine wall times mislead."""
    begun = spent()
    done = work()
    return round(spent() - begun, 3), done


def one_sick_gpu(seen: SiteSnapshot) -> SiteSnapshot:
    """A reading a second later in which one GPU is sick."""
    layers = tuple(msgspec.structs.replace(layer, at=seen.at + 1) for layer in seen.layers)
    gpus = (msgspec.structs.replace(seen.fabric_gpus[0], healthy=False), *seen.fabric_gpus[1:])
    return msgspec.structs.replace(seen, at=seen.at + 1, layers=layers, fabric_gpus=gpus)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--racks", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="2 racks")
    asked = parser.parse_args()
    racks = 2 if asked.quick else asked.racks
    seen = snapshot(racks, 18, HOLDERS)
    # The templates are compiled once in the life of a process.
    Painter(None, ColourMode.PARTITION, 9).follow(
        LiveReading(number=1, whole=site_map(SiteReading(snapshot=snapshot(1, 1, HOLDERS))))
    )
    painter, tenant = Painter(None, ColourMode.PARTITION, 9), Painter("blue", ColourMode.PARTITION, 9)
    joined, (whole, seated) = timed(lambda: update_site_map(SiteReading(snapshot=seen), SiteMapCache()))
    drawn, sheet = timed(lambda: painter.follow(LiveReading(number=1, whole=whole)))
    written, text = timed(lambda: render_page("provider", ColourMode.PARTITION, "0.1", dict(sheet.all())))
    as_tenant, _ = timed(lambda: tenant.follow(LiveReading(number=1, whole=whole)))
    rejoined, (changed, _) = timed(lambda: update_site_map(SiteReading(snapshot=one_sick_gpu(seen)), seated))
    redrawn, after = timed(lambda: painter.follow(LiveReading(number=2, whole=changed)))
    again_as_tenant, _ = timed(lambda: tenant.follow(LiveReading(number=2, whole=changed)))
    figures = {
        "racks": racks,
        "gpus": len(whole.gpus),
        "cpu_seconds_to_join": joined,
        "cpu_seconds_to_draw": drawn,
        "cpu_seconds_to_write_the_page": written,
        "cpu_seconds_in_all": round(joined + drawn + written, 3),
        "page_kib": len(text) // 1024,
        "page_kib_compressed": len(gzip.compress(text.encode(), 6)) // 1024,
        "cpu_seconds_to_draw_for_a_tenant": as_tenant,
        "cpu_seconds_to_join_one_change": rejoined,
        "cpu_seconds_to_draw_one_change": redrawn,
        "cpu_seconds_to_draw_one_change_for_a_tenant": again_as_tenant,
        "one_change_of_everything": round((rejoined + redrawn) / (joined + drawn), 3),
        "kib_sent_for_one_change": round(len(render_changes(after.since(1))) / 1024, 1),
    }
    print(json.dumps(figures | load()))


if __name__ == "__main__":
    main()
