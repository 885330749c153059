"""The history of the last day survives the process: what is whole in its file, and nothing else."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.web.snapshots import AT, snapshot

from rackloom.core.diagnosis.findings import unknown
from rackloom.web import history_file, live
from rackloom.web.history import SiteHistory, sharing_racks
from rackloom.web.history_file import DAMAGED, HistoryFile
from rackloom.web.history_keeper import HistoryKeeper
from rackloom.web.live import LiveMap
from rackloom.web.model import SiteMap, SiteMapCache, SiteReading, TimelineEntry, update_site_map
from rackloom.web.render import render_history

HOLDERS = ("acme", None, "blue")


def maps_of(count, *, begin=AT, racks=2):
    """One map per minute. In each, a different GPU is sick."""
    cache, found = SiteMapCache(), []
    seen = snapshot(racks, 3, HOLDERS)
    for minute in range(count):
        gpus = tuple(
            msgspec.structs.replace(gpu, healthy=number != minute % len(seen.fabric_gpus))
            for number, gpu in enumerate(seen.fabric_gpus)
        )
        now = msgspec.structs.replace(seen, at=begin + 60 * minute, fabric_gpus=gpus)
        happened = TimelineEntry(at=AT, tenant=None, what="made", where="", outcome="done")
        reading = SiteReading(
            snapshot=now,
            findings=(unknown("check", "node n", "is silent", "ask it"),),
            examined_at=now.at,
            happenings=(happened,),
        )
        whole, cache = update_site_map(reading, cache)
        found.append(whole)
    return tuple(found)


MAPS = maps_of(6)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "map-history.db"


def saved(path, maps):
    file = HistoryFile(path)
    file.save(maps)
    file.close()


def loaded(path):
    file = HistoryFile(path)
    found = file.load()
    file.close()
    return found


# The file.


def test_what_was_saved_is_loaded_and_what_was_not_there_is_no_error(path):
    assert loaded(path).maps == ()
    saved(path, MAPS)
    found = loaded(path)
    assert (found.maps, found.damaged) == (MAPS, False)
    assert path.stat().st_mode & 0o777 == 0o600


def test_racks_that_did_not_change_are_stored_and_loaded_once(path):
    saved(path, MAPS)
    with closing(sqlite3.connect(path)) as connection:
        (racks,) = connection.execute("SELECT count(*) FROM part WHERE kind = 'rack'").fetchone()
    assert racks == len({id(rack) for whole in MAPS for rack in whole.racks})
    found = loaded(path).maps
    assert len({id(rack) for whole in found for rack in whole.racks}) == racks


def test_the_file_holds_no_more_than_the_history(path):
    file = HistoryFile(path)
    for number in range(len(MAPS)):
        file.save(MAPS[max(0, number - 1) : number + 1])
    file.save(MAPS[-1:])
    file.close()
    assert loaded(path).maps == MAPS[-1:]
    with closing(sqlite3.connect(path)) as connection:
        (parts,) = connection.execute("SELECT count(*) FROM part").fetchone()
    assert parts == len(MAPS[-1].racks) + len(MAPS[-1].compute_domains)


def test_a_later_process_goes_on_with_the_file(path):
    saved(path, MAPS[:3])
    file = HistoryFile(path)
    first = file.load().maps
    file.save((*first, *MAPS[3:]))
    file.close()
    assert loaded(path).maps == MAPS


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_of_a_damaged_file_what_is_whole_is_loaded_and_nothing_is_invented(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "map-history.db"
    saved(path, MAPS)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(content))
    with suppress(sqlite3.OperationalError):
        found = loaded(path)
        assert set(map(_at, found.maps)) <= set(map(_at, MAPS))
        known = {whole.at: whole for whole in MAPS}
        assert all(whole == known[whole.at] for whole in found.maps)
        # After any damage, the next save works and keeps the intact maps.
        saved(path, (*found.maps, *MAPS[-1:]) if MAPS[-1] not in found.maps else found.maps)
        assert set(map(_at, found.maps)) <= set(map(_at, loaded(path).maps))


def _at(whole: SiteMap) -> float:
    return whole.at


def test_a_rack_whose_bytes_changed_takes_its_maps_along_and_the_file_is_set_aside(path):
    saved(path, MAPS)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE part SET body = zeroblob(9) WHERE id = (SELECT max(id) FROM part)")
        connection.commit()
    found = loaded(path)
    assert found.damaged
    assert found.maps == MAPS[:-1]
    assert path.with_name(path.name + DAMAGED).exists()
    assert loaded(path).maps == ()


def test_a_file_of_another_version_is_begun_anew(path, monkeypatch):
    saved(path, MAPS)
    monkeypatch.setattr(history_file, "_FINGERPRINT", "another")
    assert loaded(path).maps == ()
    saved(path, MAPS[:1])
    assert loaded(path).maps == MAPS[:1]


def test_a_file_belongs_to_one_process(path):
    first, second = HistoryFile(path), HistoryFile(path)
    first.save(MAPS)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        second.save(MAPS[:1])
    first.close()
    assert loaded(path).maps == MAPS


KILLED = """
import sys
from pathlib import Path
from tests.web.test_history_kept import maps_of
from rackloom.web.history_file import HistoryFile
file, maps = HistoryFile(Path(sys.argv[1])), maps_of(40)
print("ready", flush=True)
for number in range(len(maps)):
    file.save(maps[max(0, number - 9) : number + 1])
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_process_that_is_killed_between_or_in_writes_leaves_a_whole_file(path, seed):
    after = random.Random(seed).randrange(1, 30)
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == str(after):
                process.send_signal(signal.SIGKILL)
                break
        rest = [int(line) for line in process.stdout]
    newest = max([after, *rest])
    found = loaded(path)
    assert not found.damaged
    maps = maps_of(40)
    # The last save that was reported is in the file. The next one may be too.
    assert found.maps in [maps[max(0, number - 9) : number + 1] for number in (newest, newest + 1)]


FULL = """
import resource, signal, sqlite3, sys
from pathlib import Path
from tests.web.test_history_kept import maps_of
from rackloom.web.history_file import HistoryFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file, maps = HistoryFile(Path(sys.argv[1])), maps_of(30)
file.save(maps[:2])
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
try:
    file.save(maps)
except (OSError, sqlite3.Error) as error:
    print("refused", flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
if len(sys.argv) > 2:
    file.save(maps)
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [(), ("again",)])
def test_a_disk_without_room_refuses_and_keeps_what_there_was(path, again):
    command = [sys.executable, "-c", FULL, str(path), *again]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "refused\n"
    assert loaded(path).maps == maps_of(30)[: 30 if again else 2]


# The keeper, and the map.


class Site:
    """A source of the map whose `changed` never returns."""

    def __init__(self, begin):
        self._now = begin

    async def read(self):
        self._now += 60
        return SiteReading(snapshot=msgspec.structs.replace(snapshot(2, 3, HOLDERS), at=self._now))

    async def changed(self):
        await asyncio.Event().wait()


@pytest.fixture
def _often(monkeypatch):
    monkeypatch.setattr(live, "RECORD_SECONDS", 0.01)


async def recorded(path, begin, until):
    """A map that records until `until(map)`, and is then stopped as a service is."""
    feed = LiveMap(Site(begin), lambda: begin)
    keeper = HistoryKeeper(HistoryFile(path), lambda: begin)
    task = asyncio.create_task(feed.record(keeper))
    while not (feed.keeper and feed.history.maps and until(feed)):
        await asyncio.sleep(0.005)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return feed


def run(path, begin, until):
    return asyncio.run(asyncio.wait_for(recorded(path, begin, until), 60))


@pytest.mark.usefixtures("_often")
def test_a_restarted_service_shows_the_history_of_the_one_before_with_a_gap_between(path):
    before = run(path, AT, lambda feed: len(feed.history.maps) >= 3)
    later = AT + 2 * 3600
    after = run(path, later, lambda feed: feed.history.oldest < later and len(feed.history.maps) >= 6)
    old = [whole for whole in after.history.maps if whole.at < later]
    assert {whole.at for whole in old} <= {whole.at for whole in before.history.maps}
    assert [gap[1] for gap in after.history.gaps] == [later + 60]
    # Racks that did not change are stored once.
    assert len({id(rack) for whole in after.history.maps for rack in whole.racks}) <= 2


@pytest.mark.usefixtures("_often")
def test_a_file_that_cannot_be_written_stops_nothing_and_the_page_says_so(tmp_path):
    folder = tmp_path / "home"
    path = folder / "map-history.db"  # the directory does not exist
    feed = run(path, AT, lambda feed: feed.keeper.unkept_since is not None and len(feed.history.maps) > 3)
    assert feed.keeper.unkept_since == AT
    text = render_history((), operator=True, past=None, unkept_since=feed.keeper.unkept_since)
    assert "The history has not been kept since" in text

    async def mended():
        folder.mkdir()
        await feed.keeper.save(feed.history)

    asyncio.run(mended())
    feed.keeper._file.close()
    assert feed.keeper.unkept_since is None
    assert loaded(path).maps == feed.history.maps


@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize("content", [b"", b"not a database" * 999, os.urandom(9000)])
def test_what_is_no_history_is_begun_anew(path, content):
    path.write_bytes(content)
    feed = run(path, AT, lambda feed: len(feed.history.maps) > 2)
    assert feed.keeper.unkept_since is None
    assert loaded(path).maps == feed.history.maps


def test_a_page_whose_history_is_in_memory_only_says_so():
    assert "in memory only" in render_history((), operator=True, past=None, is_kept=False)
    assert "in memory only" not in render_history((), operator=True, past=None)


# Restoring.


def test_only_what_is_older_is_restored_and_within_the_limits():
    history = SiteHistory(racks_kept=4)
    present = maps_of(1, begin=AT + 3600)[0]
    history.add(present)
    history.restore(sharing_racks((*MAPS, *maps_of(2, begin=AT + 7200)), present))
    assert history.maps[-1] is present
    assert all(whole.at < present.at for whole in history.maps[:-1])
    assert len({id(rack) for whole in history.maps for rack in whole.racks}) <= 4


def test_nothing_older_than_a_day_is_restored():
    history = SiteHistory()
    history.add(maps_of(1, begin=AT + 25 * 3600)[0])
    history.restore(MAPS)
    assert [whole.at for whole in history.maps] == [AT + 25 * 3600]
