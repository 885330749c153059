"""The rack map of a large site: the first page, an opened rack, and what one change costs and sends.

The first page of a process joins the layers; every other page finds them joined. Both are printed: the whole
as `cpu_seconds_in_all`, the rest as `cpu_seconds_of_the_page`. The site has a finding and operations, because
these have to be found on the map.

python benchmarks/rack_map.py                # 100 racks, 7,200 GPUs
python benchmarks/rack_map.py --racks 10
python benchmarks/rack_map.py --history      # also what an hour of the past takes
python benchmarks/rack_map.py --heal         # only how soon findings come and go
python benchmarks/rack_map.py --served       # only a served site with the pages of 100 tenants
python benchmarks/rack_map.py --quick        # 2 racks: shows that it works
"""

import argparse
import asyncio
import gc
import gzip
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec

# The snapshots are those of the tests.
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.rack_map_served import served_figures
from benchmarks.site_figures import load, spent
from tests.core.diagnosis.healthy import healthy
from tests.web.snapshots import snapshot

from benchmarks import goals
from rackloom.app.process import freeze_loaded_objects
from rackloom.app.site.rack_map import POLL_SECONDS
from rackloom.app.snapshot.background_examiner import Examiner
from rackloom.core.diagnosis.findings import Finding, fails
from rackloom.core.diagnosis.incremental import JoinedShares, join_shares
from rackloom.core.diagnosis.index import at_domain, at_gpu, at_node
from rackloom.core.diagnosis.snapshot import SiteSnapshot
from rackloom.web.changes import changes_between
from rackloom.web.frames import ColourMode
from rackloom.web.history import SiteHistory
from rackloom.web.history_file import HistoryFile
from rackloom.web.live import LiveMap, LiveReading
from rackloom.web.model import SiteMap, SiteMapCache, SiteReading, TimelineEntry, site_map, update_site_map
from rackloom.web.painters import PageSheet, Painter
from rackloom.web.racks import rack_id
from rackloom.web.render import render_changes, render_no_choice, render_page
from rackloom.web.tenancy import NOBODY
from rackloom.web.trends import Trend
from rackloom.web.view import PageView

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


def read(seen: SiteSnapshot) -> SiteReading:
    """The snapshot with a finding and operations, as every site has them, and a finding for each sick GPU."""
    node, domain = seen.nodes[-1].name, seen.domains[-1].uuid
    found = fails("check", f"node {node}", "is wrong", "mend it", where=(at_node(node), at_domain(domain)))
    sick = [
        fails("check", f"GPU {gpu.guid}", "is sick", "mend it", where=(at_gpu(gpu.domain, gpu.guid),))
        for gpu in seen.fabric_gpus
        if not gpu.healthy
    ]
    happened = TimelineEntry(
        at=seen.at, tenant=None, what="made", where="", places=(at_domain(domain),), outcome="done"
    )
    return SiteReading(
        snapshot=seen, findings=(*sick, found), examined_at=seen.at, happenings=(happened,) * 30
    )


def page_of(view: PageView, sheet: PageSheet) -> str:
    """The page, as a browser gets it."""
    racks = [rack.name for rack in sheet.whole.racks]
    return render_page("provider", view, "0.1", dict(sheet.all()), render_no_choice(), racks)


def compressed_kib(text: str) -> int:
    """KiB that are sent."""
    return len(gzip.compress(text.encode(), 6)) // 1024


SERVED_SECONDS = 20.0
ROUNDS = 5
"""How often each fault comes and goes."""
CHANGED = 50
"""Of so many racks one changes between two readings of the history."""


def readings_of_an_hour(seen: SiteSnapshot) -> Iterator[SiteReading]:
    """A reading a minute; in each, all GPUs of other racks are sick."""
    for minute in range(60):
        gpus = tuple(
            msgspec.structs.replace(gpu, healthy=(number // 72 + minute) % CHANGED != 0)
            for number, gpu in enumerate(seen.fabric_gpus)
        )
        at = seen.at + 60 * minute
        domains = tuple(msgspec.structs.replace(domain, observed_at=at) for domain in seen.domains)
        yield read(msgspec.structs.replace(seen, at=at, fabric_gpus=gpus, domains=domains))


def history_figures(seen: SiteSnapshot) -> dict[str, float]:
    """What an hour of the past takes of memory, and what its charts and a comparison take of CPU."""
    history, cache = SiteHistory(), SiteMapCache()
    readings = readings_of_an_hour(seen)
    whole, cache = update_site_map(next(readings), cache)
    history.add(whole)
    tracemalloc.start()
    for reading in readings:
        whole, cache = update_site_map(reading, cache)
        history.add(whole)
    del reading
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    maps = history.maps
    charted, _ = timed(lambda: Trend(None).follow(maps))
    compared, _ = timed(lambda: changes_between(maps[0], maps[-1]))
    return {
        "racks": len(whole.racks),
        "maps_of_an_hour": len(maps),
        "different_racks": len({id(rack) for kept in maps for rack in kept.racks}),
        "history_mib": round(size / 2**20, 1),
        "cpu_seconds_to_chart": charted,
        "cpu_seconds_to_compare": compared,
    } | file_figures(maps)


def file_figures(maps: Sequence[SiteMap]) -> dict[str, float]:
    """What the file of the history takes: all of it written at once, one more map, and all of it read."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "history.db"
        file = HistoryFile(path)
        first, _ = timed(lambda: file.save(maps[:-1]))
        later, _ = timed(lambda: file.save(maps))
        file.close()
        loaded, found = timed(HistoryFile(path).load)
        assert found.maps == tuple(maps)
        return {
            "file_mib": round(path.stat().st_size / 2**20, 1),
            "cpu_seconds_to_save_all": first,
            "cpu_seconds_to_save_one_more": later,
            "cpu_seconds_to_load": loaded,
        }


class PlantedSite:
    """A source of the map, as `rackloom serve` has one, of a site in memory: it is not read from a database.

    A change is noticed by polling, as there.
    """

    def __init__(self, snapshot: SiteSnapshot) -> None:
        self.now = self._read = snapshot
        self._joined = JoinedShares()
        self._examiner = Examiner()

    async def read(self) -> SiteReading:
        """The site now, joined and examined as `rackloom serve` does it."""
        self._read = self.now
        seen = msgspec.structs.replace(self.now, at=time.time())
        with self._examiner.halted():
            self._joined = joined = await asyncio.to_thread(join_shares, seen, self._joined)
        examined = await self._examiner.newest(seen, joined)
        self._news = self._examiner.news
        return SiteReading(snapshot=seen, joined=joined, findings=examined.findings, examined_at=examined.at)

    async def changed(self) -> None:
        """Return when the site or the findings are not those of the last reading."""
        while self.now is self._read and self._examiner.news == self._news:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


FAULTS: Mapping[str, tuple[str, dict[str, object]]] = {
    "sick GPU": ("fabric_gpus", {"healthy": False}),
    "node not ready": ("nodes", {"ready": False}),
    "tainted device": ("devices", {"taints": ("gpu.nvidia.com/xid=79:NoSchedule",)}),
    "link down": ("devices", {"link": "down"}),
    "claim not allocated": ("claims", {"allocated": False}),
    "GPU pending": ("instance_gpus", {"status": "Pending"}),
}
"""The field of a record that goes wrong, and what is wrong with it."""


def with_fault(site: SiteSnapshot, field: str, changes: dict[str, object]) -> SiteSnapshot:
    """The site with a fault in the middle."""
    records = list(getattr(site, field))
    place = next(
        number
        for number in range(len(records) // 2, len(records))
        if "link" not in changes or records[number].kind == "nic"
    )
    records[place] = msgspec.structs.replace(records[place], **changes)
    return msgspec.structs.replace(site, **{field: tuple(records)})


def there(findings: tuple[Finding, ...]) -> bool:
    """Whether there is a finding."""
    return bool(findings)


def gone(findings: tuple[Finding, ...]) -> bool:
    """Whether there is none."""
    return not findings


async def until(live: LiveMap, is_found: Callable[[tuple[Finding, ...]], bool]) -> None:
    """Wait for a reading of the map whose findings are so."""
    reading = await live.fresh()
    while not is_found(reading.whole.findings or ()):
        reading = await live.after(reading.number)


async def heal_figures(racks: int) -> AsyncIterator[dict[str, object]]:
    """Seconds from each fault to its finding on the map, and from its end to a map without the finding."""
    well = healthy(racks)
    site = PlantedSite(well)
    live = LiveMap(site, time.time)
    async with live.watched():
        await until(live, gone)
        for name, (field, changes) in FAULTS.items():
            found: list[float] = []
            closed: list[float] = []
            begun_cpu = spent()
            for _ in range(ROUNDS):
                for now, seconds, wanted in (
                    (with_fault(well, field, changes), found, True),
                    (well, closed, False),
                ):
                    await asyncio.sleep(random.uniform(0.5, 1.5))  # noqa: S311 (when a fault comes)
                    site.now, begun = now, time.perf_counter()
                    await until(live, there if wanted else gone)
                    seconds.append(time.perf_counter() - begun)
            yield {
                "racks": racks,
                "fault": name,
                "rounds": ROUNDS,
                "seconds_until_found": round(statistics.median(found), 2),
                "longest_until_found": round(max(found), 2),
                "seconds_until_closed": round(statistics.median(closed), 2),
                "longest_until_closed": round(max(closed), 2),
                "cpu_seconds_of_a_change": round((spent() - begun_cpu) / (2 * ROUNDS), 2),
            }


async def print_heal_figures(racks: int) -> None:
    """A line for each fault."""
    async for figures in heal_figures(racks):
        print(json.dumps(goals.judged("rack_map", figures | load())), flush=True)


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--racks", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="2 racks, and their history")
    parser.add_argument("--history", action="store_true", help="also an hour of the past")
    parser.add_argument("--heal", action="store_true", help="only how soon findings come and go")
    parser.add_argument("--served", action="store_true", help="only a served site")
    parser.add_argument("--tenants", type=int, default=100, help="with a page open, of a served site")
    asked = parser.parse_args()
    racks = 2 if asked.quick else asked.racks
    # As `rackloom serve` does: what is imported takes no part in collections, and full ones are rare.
    freeze_loaded_objects()
    if asked.heal:
        asyncio.run(print_heal_figures(racks))
        return
    if asked.served:
        print(json.dumps(asyncio.run(served_figures(racks, asked.tenants, SERVED_SECONDS))))
        return
    seen = snapshot(racks, 18, HOLDERS)
    # The templates are compiled once in the life of a process.
    for some in (1, 10):
        small = LiveReading(number=1, whole=site_map(read(snapshot(some, 1, HOLDERS))))
        page_of(PageView(mode=ColourMode.USE), Painter(None, ColourMode.USE, 9).follow(small))
    painter, nobodys = Painter(None, ColourMode.USE, 9), Painter(NOBODY, ColourMode.USE, 9)
    tenant = Painter("blue", ColourMode.USE, 9, nobodys=nobodys)
    first_rack = frozenset({rack_id("rack-00")})
    view = PageView(mode=ColourMode.USE)
    opening = PageView(mode=ColourMode.USE, racks=("rack-00",))
    joined, (whole, seated) = timed(lambda: update_site_map(read(seen), SiteMapCache()))
    now = LiveReading(number=1, whole=whole)
    drawn, sheet = timed(lambda: painter.follow(now))
    written, text = timed(lambda: page_of(view, sheet))
    opened, opened_text = timed(lambda: page_of(opening, painter.follow(now, first_rack)))
    for_all_tenants, _ = timed(lambda: nobodys.follow(now))
    as_tenant, own = timed(lambda: tenant.follow(now))
    rejoined, (changed, _) = timed(lambda: update_site_map(read(one_sick_gpu(seen)), seated))
    later = LiveReading(number=2, whole=changed)
    redrawn, after = timed(lambda: painter.follow(later))
    redrawn_rack, after_opened = timed(lambda: painter.follow(later, first_rack))
    again_for_all_tenants, _ = timed(lambda: nobodys.follow(later))
    again_as_tenant, _ = timed(lambda: tenant.follow(later))
    figures = {
        "racks": racks,
        "gpus": len(whole.gpus),
        "cpu_seconds_to_join": joined,
        "cpu_seconds_to_draw": drawn,
        "cpu_seconds_to_write_the_page": written,
        "cpu_seconds_of_the_page": round(drawn + written, 3),
        "cpu_seconds_in_all": round(joined + drawn + written, 3),
        "page_kib": len(text) // 1024,
        "page_kib_compressed": compressed_kib(text),
        "cpu_seconds_to_open_a_rack": opened,
        "opened_page_kib_compressed": compressed_kib(opened_text),
        "cpu_seconds_to_draw_for_all_tenants": for_all_tenants,
        "cpu_seconds_to_draw_for_a_tenant": as_tenant,
        "tenant_page_kib_compressed": compressed_kib(page_of(view, own)),
        "cpu_seconds_to_join_one_change": rejoined,
        "cpu_seconds_to_draw_one_change": redrawn,
        "cpu_seconds_to_draw_one_change_in_an_opened_rack": redrawn_rack,
        "cpu_seconds_to_draw_one_change_for_all_tenants": again_for_all_tenants,
        "cpu_seconds_to_draw_one_change_for_a_tenant": again_as_tenant,
        "one_change_of_everything": round((rejoined + redrawn) / (joined + drawn), 3),
        "kib_sent_for_one_change": round(len(render_changes(after.since(1))) / 1024, 1),
        "kib_sent_for_one_change_in_an_opened_rack": round(
            len(render_changes(after_opened.since(1))) / 1024, 1
        ),
    }
    print(json.dumps(goals.judged("rack_map", figures | load())))
    if asked.history or asked.quick:
        print(json.dumps(history_figures(seen) | load()))
    if asked.quick:
        asyncio.run(print_heal_figures(racks))
        print(json.dumps(asyncio.run(served_figures(racks, 2, 1.0))))


if __name__ == "__main__":
    main()
