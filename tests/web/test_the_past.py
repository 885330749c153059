"""The map in the past: pages of past times, the changes since then, and the charts of the last day."""

import asyncio
import re
from datetime import UTC, datetime

import httpx2
import msgspec
import pytest
from tests.web.snapshots import AT, examined, snapshot
from tests.web.stand_ins import ShownSite, doorman
from tests.web.test_pages_served import sign_in

from rackloom.app.listeners import serve_http
from rackloom.core.diagnosis.findings import fails
from rackloom.web.changes import RackDifference, SiteChanges, changes_between
from rackloom.web.live import LiveMap
from rackloom.web.model import SiteMapCache, SiteReading, TimelineEntry, site_map, update_site_map
from rackloom.web.pages import create_pages
from rackloom.web.trends import Trend, trend_charts
from rackloom.web.view import page_path, path_below, time_of_address

LOST = fails("gpu-health", "GPU 1", "GPU 1 is lost", "mend it", since=AT)
HOLDERS = ("acme", None, "blue")


def iso(at):
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def reading(minute=0, holders=HOLDERS, **others):
    seen = msgspec.structs.replace(snapshot(2, 3, holders), at=AT + 60 * minute)
    return SiteReading(snapshot=seen, **others)


def browse(scenario, readings, *, who=None):
    """Run `scenario(client)` on a site that was read several times."""

    async def served():
        site = ShownSite(readings[0])
        live = LiveMap(site, lambda: AT)
        for shown in readings:
            site.show(shown)
            while not live.history.maps or live.history.maps[-1].at < shown.snapshot.at:
                await live.fresh()
        async with (
            serve_http(create_pages(live, doorman, lambda: AT, switch_trays=9), "127.0.0.1:0") as port,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            await sign_in(client, **(who or {}))
            return await scenario(client)

    return asyncio.run(asyncio.wait_for(served(), 120))


# Addresses.


@pytest.mark.parametrize(
    "text", ["2026-11-26T14:05:00Z", "2026-11-26T14:05Z", "2026-11-26T14:05:00", "2026-11-26T14:05"]
)
def test_a_time_in_an_address(text):
    at = time_of_address(text)
    assert path_below(at) == page_path(at) == "/map/at/2026-11-26T14:05:00Z"


@pytest.mark.parametrize(
    "text", ["", "now", "14:05", "2026-13-01T00:00:00Z", "9" * 5000, "2026-11-26T14:05+01"]
)
def test_what_is_no_time(text):
    assert time_of_address(text) is None


# Pages.


# A new user looks into an event at 14:05: type the time, read the site and the changes since.
def test_a_page_shows_the_site_as_it_was_and_what_has_changed_since():
    started = TimelineEntry(at=AT + 90, tenant="acme", what="add gpus", where="domain 0", outcome="done")
    then = reading(0, (None, None, "blue"), findings=())
    now = reading(3, findings=(LOST,), happenings=(started,))

    async def scenario(client):
        past = await client.get(page_path(AT + 20) + "?by=tenant")
        return past, (await client.get("/?by=tenant")).text

    answer, present = browse(scenario, [then, now])
    past = answer.text
    assert answer.status_code == 200
    assert "This is the past" in past
    assert "This is the past" not in present
    assert "acme" not in past.partition('id="racks"')[2].partition("</section>")[0]
    assert "acme" in present.partition('id="racks"')[2].partition("</section>")[0]
    # Links, GPUs, search and export of the page lead to the same time. Nothing follows the present.
    assert 'href="?by=health"' in past
    below = f"/map/at/{iso(AT + 20)}"
    assert f'href="{below}/gpus.csv?by=tenant"' in past
    assert f'data-below="{below}"' in past
    assert 'id="stream"' not in past
    changes = past.partition('id="changes"')[2].partition("</section>")[0]
    assert "acme: +8 GPUs" in changes
    assert "rack-00: 4 taken" in changes
    assert "GPU 1" in changes
    assert "add gpus" in changes
    assert 'id="changes"' not in present


def test_everything_below_a_time_is_of_that_time():
    then, now = reading(0, ("acme", None, "blue")), reading(3, ("blue", None, "blue"))

    async def scenario(client):
        page = (await client.get("/")).text
        gpu = re.search(r'id="(r[0-9a-f]{12})-0-0"', page)[1]
        found = {}
        for name, below in (("then", path_below(AT)), ("now", "/map")):
            found[name] = [
                (await client.get(f"{below}{path}")).text
                for path in ("/gpus.csv", "/search?find=acme", f"/gpu/{gpu}/2/0")
            ]
        return found

    found = browse(scenario, [then, now])
    assert all("acme" in text for text in found["then"])
    assert not any("acme" in text for text in found["now"][:1] + found["now"][2:])


@pytest.mark.parametrize(
    "path", ["/map/at/2001-01-01T00:00:00Z", "/map/at/nonsense", "/map/at/" + "9" * 3000]
)
def test_a_time_that_is_not_known_says_how_far_the_history_reaches(path):
    async def scenario(client):
        return await client.get(path)

    answer = browse(scenario, [reading()])
    assert answer.status_code == 404
    assert "The history begins at" in answer.text
    assert "2001" not in answer.text
    assert "999" not in answer.text


def test_a_form_leads_to_a_time_and_from_the_future_to_the_present():
    async def scenario(client):
        asked = (iso(AT)[:-1], iso(AT + 9999)[:-1], "nonsense")
        return [(await client.get("/map/at", params={"time": t, "by": "tenant"})) for t in asked]

    answers = browse(scenario, [reading(0), reading(2)])
    assert [answer.status_code for answer in answers] == [303] * 3
    assert [answer.headers["location"] for answer in answers] == [
        f"/map/at/{iso(AT)}?by=tenant",
        "/?by=tenant",
        "/",
    ]


def test_a_tenant_sees_its_own_past_and_strangers_none():
    then, now = reading(0, ("acme", None, "blue"), findings=(LOST,)), reading(3)

    async def scenario(client):
        past = (await client.get(page_path(AT))).text
        trends = (await client.get("/map/history")).text
        client.cookies.clear()
        paths = (page_path(AT), path_below(AT) + "/gpus.csv", "/map/history", "/map/at?time=x")
        return past, trends, [(await client.get(path)).status_code for path in paths]

    past, trends, signed_out = browse(scenario, [then, now], who={"org": "blue", "token": "blue-token"})
    assert "acme" not in past
    assert "GPU 1 is lost" not in past
    assert "Your GPUs used by pods" in trends
    assert "acme" not in trends
    assert signed_out == [303, 401, 401, 303]


# Changes.


def test_what_differs_between_two_maps():
    then = site_map(reading(0, (None, None, "blue"), findings=(LOST,)))
    other = msgspec.structs.replace(LOST, subject="GPU 2")
    now = site_map(reading(1, ("acme", None, None), findings=(other,)))
    found = changes_between(then, now)
    assert [finding.subject for finding in found.came] == ["GPU 2"]
    assert [finding.subject for finding in found.healed] == ["GPU 1"]
    assert found.tenants == (("acme", 8), ("blue", -8))
    assert found.racks == (
        RackDifference(rack="rack-00", taken=4, freed=4),
        RackDifference(rack="rack-01", taken=4, freed=4),
    )
    assert changes_between(now, now).is_empty


def test_a_rack_with_more_sick_gpus_than_then():
    well = reading(0)
    sick = tuple(
        msgspec.structs.replace(gpu, healthy=gpu.place.slot != 1) for gpu in well.snapshot.fabric_gpus
    )
    well = examined(well.snapshot)
    ill = examined(msgspec.structs.replace(well.snapshot, fabric_gpus=sick))
    found = changes_between(site_map(well), site_map(ill))
    assert {(rack.rack, rack.problems) for rack in found.racks} == {("rack-00", 4), ("rack-01", 4)}
    assert {rack.problems for rack in changes_between(site_map(ill), site_map(well)).racks} == {-4}


def test_what_was_not_examined_is_neither_new_nor_healed():
    then, now = site_map(reading(0)), site_map(reading(1, findings=(LOST,)))
    assert changes_between(then, now) == SiteChanges()
    assert changes_between(now, then) == SiteChanges()


def test_racks_that_come_and_go():
    small = site_map(SiteReading(snapshot=snapshot(1, 3, HOLDERS)))
    large = site_map(SiteReading(snapshot=snapshot(3, 3, HOLDERS)))
    assert changes_between(small, large).new_racks == ("rack-01", "rack-02")
    assert changes_between(large, small).gone_racks == ("rack-01", "rack-02")


# Charts.


def maps_of(readings):
    cache = SiteMapCache()
    for shown in readings:
        whole, cache = update_site_map(shown, cache)
        yield whole


def test_numbers_over_time_and_an_unread_time_between():
    few, many = (None, None, "blue"), ("acme", "acme", "blue")
    minutes = [*range(5), *range(60, 65)]
    maps = list(maps_of(reading(m, few if m < 60 else many, findings=(LOST,) * (m >= 60)) for m in minutes))
    points = Trend(None).follow(maps)
    assert [point.used for point in points] == [8] * 5 + [24] * 5
    assert [point.attention for point in points] == [0] * 5 + [1] * 5
    assert [point.after_gap for point in points] == [False] * 5 + [True] + [False] * 4
    used, problems, attention = trend_charts(points, operator=True)
    assert used.words == "8 to 24, last 24"
    assert used.line.count("M") == 2, "the line is interrupted"
    assert problems.words == "0 all the time"
    assert attention.words == "0 to 1, last 1"


def test_what_is_unknown_is_drawn_as_a_band():
    seen = snapshot(1, 3, HOLDERS)
    silent = tuple(
        msgspec.structs.replace(domain, unknown_since=AT, problem="UNAVAILABLE") for domain in seen.domains
    )
    shown = [
        examined(msgspec.structs.replace(seen, at=AT)),
        examined(msgspec.structs.replace(seen, at=AT + 60, domains=silent)),
    ]
    points = Trend(None).follow(list(maps_of(shown)))
    assert points[-1].health_unknown == 12
    _, problems, _ = trend_charts(points, operator=True)
    assert problems.band


def test_no_reading_is_no_chart_and_no_error():
    used, *_ = trend_charts(Trend(None).follow(()), operator=True)
    assert (used.words, used.line) == ("unknown", "")


def test_many_readings_are_counted_once():
    maps = list(maps_of(reading(minute) for minute in range(900)))
    trend = Trend(None)
    points = trend.follow(maps)
    assert 60 < len(points) <= 120
    assert points[-1].at == maps[-1].at
    again = trend.follow(maps)
    assert all(a == b for a, b in zip(points, again, strict=True))


# A time in which nothing was recorded.


def test_a_time_of_which_nothing_was_recorded_is_not_shown_as_if_it_were_known():
    async def scenario(client):
        charts = (await client.get("/map/history")).text
        within = (await client.get(f"/map/at/{iso(AT + 3600)}")).text
        before = (await client.get(f"/map/at/{iso(AT + 60)}")).text
        return charts, within, before

    charts, within, before = browse(scenario, [reading(minute) for minute in (0, 1, 120, 121)])
    assert f'data-gaps="{int(AT) + 60}-{int(AT) + 7200} "' in charts
    assert "Nothing was recorded from" in charts
    assert "in memory only" in charts
    assert "is not known" in within
    assert "is not known" not in before
