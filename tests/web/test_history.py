"""Which readings of the last day are kept, and how far apart."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.web.snapshots import AT, snapshot

from rackloom.core.diagnosis.findings import unknown
from rackloom.web.history import CLOSEST_SECONDS, REACH_SECONDS, SiteHistory, gap_after
from rackloom.web.model import SiteMap, SiteMapCache, SiteReading, TimelineEntry, site_map, update_site_map


def empty(at: float) -> SiteMap:
    return SiteMap(at=at)


def test_a_time_is_shown_by_the_newest_reading_before_it():
    history = SiteHistory()
    assert history.find(AT) is None
    assert history.oldest is None
    for minute in range(5):
        history.add(empty(AT + 60 * minute))
    assert history.find(AT - 1) is None
    assert history.find(AT).at == AT
    assert history.find(AT + 119).at == AT + 60
    assert history.find(AT + 9999).at == AT + 240
    assert history.oldest == AT


def test_a_reading_that_is_not_newer_is_left_out():
    history = SiteHistory()
    for at in (AT, AT, AT - 5):
        history.add(empty(at))
    assert [whole.at for whole in history.maps] == [AT]


@given(st.lists(st.floats(0.1, 400), max_size=300))
def test_neighbours_are_close_for_their_age_and_not_too_many(pauses):
    history, now, read = SiteHistory(), AT, []
    for pause in pauses:
        now += pause
        read.append(now)
        history.add(empty(now))
    kept = [whole.at for whole in history.maps]
    assert kept == sorted(set(kept))
    assert set(kept) <= set(read)
    assert kept[-1:] == read[-1:]
    assert all(now - at <= REACH_SECONDS for at in kept)
    # The nearest kept reading is at most the spacing for its age away from any time that was read.
    for at in read:
        if at >= kept[0]:
            shown = history.find(at).at
            assert at - shown <= max(CLOSEST_SECONDS, (now - shown) / 60)


@pytest.mark.slow
def test_a_day_of_readings_takes_a_few_hundred_maps():
    history = SiteHistory()
    for number in range(int(REACH_SECONDS / 5) + 1000):
        history.add(empty(AT + 5 * number))
    kept = [whole.at for whole in history.maps]
    assert 250 < len(kept) < 800
    assert kept[-1] - kept[0] > REACH_SECONDS * 0.97
    assert max(b - a for a, b in pairwise(kept)) < REACH_SECONDS / 55
    hour = [at for at in kept if kept[-1] - at < 3600]
    assert max(b - a for a, b in pairwise(hour)) <= 65


def test_racks_that_change_often_shorten_the_history_and_never_the_present():
    reading, cache, history = SiteReading(snapshot=snapshot(2, 2, ("acme", None))), SiteMapCache(), None
    history = SiteHistory(racks_kept=20)
    for number in range(100):
        sick = tuple(
            msgspec.structs.replace(gpu, healthy=number % 2 == 0) for gpu in reading.snapshot.fabric_gpus
        )
        seen = msgspec.structs.replace(reading.snapshot, at=AT + 60 * number, fabric_gpus=sick)
        whole, cache = update_site_map(SiteReading(snapshot=seen), cache)
        history.add(whole)
    assert len({id(rack) for whole in history.maps for rack in whole.racks}) <= 20
    assert len(history.maps) == 10
    assert history.maps[-1].at == AT + 99 * 60


def test_what_is_read_anew_and_equal_is_kept_once():
    def reading(at):
        finding = unknown("controller", "domain d", "it does not answer", "rackloom admin endpoint list")
        happening = TimelineEntry(at=AT, tenant="acme", what="add", where="domain 0", outcome="done")
        seen = msgspec.structs.replace(snapshot(1, 2, ("acme",)), at=at)
        return site_map(SiteReading(snapshot=seen, findings=(finding,), happenings=(happening,)))

    history = SiteHistory()
    for minute in range(3):
        history.add(reading(AT + 60 * minute))
    first, *others = history.maps
    for other in others:
        assert other.findings[0] is first.findings[0]
        assert other.happenings[0] is first.happenings[0]


def test_a_gap_is_told_from_thinning():
    now = AT + REACH_SECONDS
    assert not gap_after(empty(now - 60), empty(now), now)
    assert gap_after(empty(now - 600), empty(now), now)
    # Yesterday's neighbours are further apart.
    assert not gap_after(empty(AT), empty(AT + 1400), now)
    assert gap_after(empty(AT), empty(AT + 7200), now)
