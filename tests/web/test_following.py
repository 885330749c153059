"""A map that follows changes equals a freshly drawn map, for operators and for tenants."""

import asyncio
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.web.snapshots import GPUS, examined, snapshot

from rackloom.core.diagnosis import incremental
from rackloom.core.diagnosis.findings import fails
from rackloom.core.diagnosis.index import at_partition, places_around
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.web import model as scenes
from rackloom.web import painters, render
from rackloom.web.frames import ColourMode, GpuState, RackFrames, update_rack_frames
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteMapCache, TimelineEntry, site_map, update_site_map
from rackloom.web.overview import cell_id
from rackloom.web.painters import Painter, PainterMemory, Painters
from rackloom.web.racks import rack_id

RACKS, TRAYS = 3, 2
HOLDERS = ("acme", None, "blue", "acme", "blue", None)


def handed_over(seen, number):
    """A tray goes to the next holder. For a while, its pods and transfer are still the previous holder's."""
    tray = number % (RACKS * TRAYS)
    if tray >= len(seen.machines):
        return seen  # Records of machines went: there is no such tray any more.
    now = [machine.tenant.removesuffix("-id") if machine.tenant else None for machine in seen.machines]
    now[tray] = {"acme": "blue", "blue": None, None: "acme"}[now[tray]]
    other = snapshot(RACKS, TRAYS, tuple(now))
    machines = list(seen.machines)
    machines[tray] = msgspec.structs.replace(other.machines[tray], held_since=seen.at)
    names = {machine.id for machine in machines}
    wanted = [gpu for gpu in other.instance_gpus if gpu.machine in names]
    return msgspec.structs.replace(seen, machines=tuple(machines), instance_gpus=tuple(wanted))


def gone(field):
    def change(seen, number):
        records = list(getattr(seen, field))
        if records:
            del records[number % len(records)]
        return msgspec.structs.replace(seen, **{field: tuple(records)})

    return change


def toggled(field, **values):
    """A record is marked so, or is as it was at first."""

    def change(seen, number):
        records = list(getattr(seen, field))
        if records:
            at = number % len(records)
            name, value = next(iter(values.items()))
            back = None if field == "domains" else {"cordoned": False, "ready": True, "healthy": True}[name]
            reported = back if getattr(records[at], name) == value else value
            records[at] = msgspec.structs.replace(records[at], **{name: reported})
        return msgspec.structs.replace(seen, **{field: tuple(records)})

    return change


def reserved_or_not(seen, number):
    records = list(seen.machines)
    if records:
        at = number % len(records)
        holder = None if records[at].reserved_for else ("acme-id", "blue-id")[number % 2]
        records[at] = msgspec.structs.replace(records[at], reserved_for=holder)
    return msgspec.structs.replace(seen, machines=tuple(records))


def layer_lost_or_back(seen, number):
    layer = tuple(Layer)[number % len(Layer)]
    reported = tuple(
        msgspec.structs.replace(status, unknown_since=None if status.unknown_since else seen.at)
        if status.layer is layer
        else status
        for status in seen.layers
    )
    return msgspec.structs.replace(seen, layers=reported)


def time_passes(seen, number):
    at = seen.at + number
    layers = tuple(msgspec.structs.replace(layer, at=at) for layer in seen.layers)
    return msgspec.structs.replace(seen, at=at, layers=layers)


def as_at_first(seen, number):
    first = snapshot(RACKS, TRAYS, HOLDERS)
    return msgspec.structs.replace(first, at=seen.at, layers=seen.layers)


KINDS = (
    handed_over,
    handed_over,
    gone("machines"),
    gone("fabric_gpus"),
    gone("devices"),
    gone("uses"),
    gone("compute_domains"),
    toggled("machines", cordoned=True),
    toggled("nodes", ready=False),
    toggled("fabric_gpus", healthy=False),
    toggled("domains", unknown_since=1.0),
    reserved_or_not,
    layer_lost_or_back,
    layer_lost_or_back,
    time_passes,
    as_at_first,
)
STORIES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 999)), min_size=1, max_size=6)


FIRST = snapshot(RACKS, TRAYS, HOLDERS)
FINDINGS = tuple(
    fails("check", f"GPU {number}", "is sick", "mend it", where=places_around((seat.chain,)))
    for number, seat in enumerate(site_map(examined(FIRST)).gpus)
)
HAPPENED = tuple(
    TimelineEntry(
        at=FIRST.at,
        tenant=holder,
        what="",
        where="",
        places=(at_partition("domain-0", name),),
        outcome="done",
    )
    for holder, name in (("acme", "acme-0-nvl"), ("blue", "blue-0-nvl"))
)


def told_of(seen):
    """Findings and operations name things that move, change hands and go."""
    return examined(seen, findings=FINDINGS, examined_at=FIRST.at, happenings=HAPPENED)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    story=STORIES,
    org=st.sampled_from([None, "acme", "blue"]),
    mode=st.sampled_from(ColourMode),
    whole_racks=st.sampled_from([0, RACKS]),
)
def test_following_gives_what_drawing_anew_gives(story, org, mode, whole_racks):
    with patch.object(painters, "WHOLE_RACKS", whole_racks):
        follow_a_story(story, org, mode)


def follow_a_story(story, org, mode):
    opened = [rack_id("rack-00"), rack_id("rack-02")]
    seen, seated = snapshot(RACKS, TRAYS, HOLDERS), SiteMapCache()
    following, forgetful = Painter(org, mode, 9), Painter(org, mode, 9)
    for number, (change, with_) in enumerate([(lambda seen, _: seen, 0), *story], 1):
        seen = change(seen, with_)
        reading = told_of(seen)
        whole, seated = update_site_map(reading, seated)
        anew = site_map(reading)
        assert whole == anew
        forgetful.memory = PainterMemory()
        # The racks that are opened change, as viewers come and go.
        some = opened[: number % 3]
        drawn = following.follow(LiveReading(number=number, whole=whole), some)
        again = forgetful.follow(LiveReading(number=number, whole=anew), some)
        assert drawn == again
        alone = update_rack_frames(anew, org, RackFrames())
        assert (following.memory.frames.frames, drawn.whole) == (alone.frames, alone.whole)


def test_racks_that_did_not_change_are_the_very_same_scene():
    seen = snapshot(RACKS, TRAYS, HOLDERS)
    before, seated = update_site_map(examined(seen), SiteMapCache())
    later = toggled("fabric_gpus", healthy=False)(time_passes(seen, 9), 0)
    after, _ = update_site_map(examined(later), seated)
    assert [rack is other for rack, other in zip(after.racks, before.racks, strict=True)] == [
        False,
        True,
        True,
    ]


def test_a_rack_of_which_no_record_changed_is_hatched_when_its_source_is_lost():
    seen = snapshot(RACKS, TRAYS, HOLDERS)
    painter = Painter(None, ColourMode.PARTITION, 9)
    whole, seated = update_site_map(examined(seen), SiteMapCache())
    painter.follow(LiveReading(number=1, whole=whole))
    lost = layer_lost_or_back(seen, tuple(Layer).index(Layer.FABRIC))
    whole, seated = update_site_map(examined(lost), seated)
    sheet = painter.follow(LiveReading(number=2, whole=whole))
    states = [cell.state for part in sheet.racks.values() for tray in part.drawn.trays for cell in tray.cells]
    assert states == [GpuState.UNKNOWN] * RACKS * TRAYS * GPUS
    whole, _ = update_site_map(examined(seen), seated)
    back = painter.follow(LiveReading(number=3, whole=whole))
    assert {part.changed for part in back.racks.values()} == {3}


def counted(monkeypatch, module, name):
    """The calls of a function from now on: each call appends its first argument."""
    calls, does = [], getattr(module, name)

    def counting(first, *rest):
        calls.append(first)
        return does(first, *rest)

    monkeypatch.setattr(module, name, counting)
    return calls


ONE_CHANGE = {
    toggled("fabric_gpus", healthy=False): ["domain"],
    toggled("machines", cordoned=True): ["chassis"],
    gone("devices"): ["node"],
    toggled("nodes", ready=False): [],
}


@pytest.mark.parametrize("change", ONE_CHANGE, ids=["sick GPU", "cordoned tray", "device gone", "node lost"])
def test_one_change_is_the_work_of_one_rack(monkeypatch, change):
    seen = snapshot(RACKS, TRAYS, HOLDERS)
    painter = Painter(None, ColourMode.PARTITION, 9)
    whole, seated = update_site_map(examined(seen), SiteMapCache())
    painter.follow(LiveReading(number=1, whole=whole))
    taken_apart = counted(monkeypatch, incremental, "_grouped")
    made = [
        counted(monkeypatch, *where)
        for where in (
            (incremental, "gpu_chains"),
            (scenes, "_gpus_by_rack"),
            (scenes, "_make_rack"),
            (painters, "drawn_rack"),
        )
    ]
    written = counted(monkeypatch, render, "render_rack")
    later, seated = update_site_map(examined(change(time_passes(seen, 9), 0)), seated)
    sheet = painter.follow(LiveReading(number=2, whole=later))
    assert [records.kind for records in taken_apart] == ONE_CHANGE[change]
    assert [len(calls) for calls in made] == [1, 1, 1, 1]
    assert [rack.name for rack in written] == ["rack-00"]
    assert [id_ for id_, _ in sheet.since(1) if id_ in sheet.racks] == [written[0].id]


def sheets(following, orgs, number, seen, seated=None):
    """The sheets of a reading for these organisations, one after another."""
    whole, seated = update_site_map(examined(seen), seated or SiteMapCache())

    async def drawn():
        now = LiveReading(number=number, whole=whole)
        return [await following.sheet((org, ColourMode.USE), now) for org in orgs]

    return asyncio.run(drawn()), seated


def test_racks_of_others_are_drawn_once_for_all_tenants(monkeypatch):
    monkeypatch.setattr(painters, "WHOLE_RACKS", 0)
    drawn = counted(monkeypatch, painters, "overview_cell")
    seen, following = snapshot(5, 1, ("acme", "blue", None, None, None)), Painters(9)
    _, seated = sheets(following, ["acme", "blue"], 1, seen)
    # Five racks for those without a GPU, and the one of each tenant.
    assert [frame.rack.name for frame in drawn] == [*(f"rack-0{n}" for n in range(5)), "rack-00", "rack-01"]
    drawn.clear()
    later = time_passes(snapshot(5, 1, ("acme", "blue", None, None, "crimson")), 9)
    (acme, blue), _ = sheets(following, ["acme", "blue"], 2, later, seated)
    assert [frame.rack.name for frame in drawn] == ["rack-04"]
    changed = cell_id("rack-04")
    assert [id_ for id_, _ in acme.since(1) if id_ in acme.cells] == [changed]
    assert acme.cells[changed] is blue.cells[changed]


@pytest.mark.parametrize("skipped", [False, True], ids=["each reading", "every other reading"])
def test_a_rack_that_a_tenant_gave_back_is_sent_to_it(monkeypatch, skipped):
    monkeypatch.setattr(painters, "WHOLE_RACKS", 0)
    seen, following = snapshot(5, 1, ("acme", "blue", None, None, None)), Painters(9)
    (first, _), seated = sheets(following, ["acme", "blue"], 1, seen)
    blues = snapshot(5, 1, ("blue", "blue", None, None, None))
    given = msgspec.structs.replace(blues, tenants=seen.tenants)
    if skipped:
        _, seated = sheets(following, ["blue"], 2, given, seated)
    (acme,), seated = sheets(following, ["acme"], 3, given, seated)
    cell = next(iter(first.cells))
    assert [id_ for id_, _ in acme.since(1) if id_ in acme.cells] == [cell]
    (again,), _ = sheets(following, ["acme"], 4, time_passes(given, 9), seated)
    assert [id_ for id_, _ in again.since(3) if id_ in again.cells] == []


def test_panels_that_show_the_same_are_not_written_again(monkeypatch):
    seen = snapshot(RACKS, TRAYS, HOLDERS)
    painter = Painter("blue", ColourMode.USE, 9)
    whole, seated = update_site_map(examined(seen), SiteMapCache())
    before = painter.follow(LiveReading(number=1, whole=whole))
    timeline, room = (counted(monkeypatch, render, f"render_{name}") for name in ("timeline", "capacity"))
    # A GPU of another tenant falls sick, in a rack in which this one has nothing.
    later = toggled("fabric_gpus", healthy=False)(time_passes(seen, 9), 0)
    whole, _ = update_site_map(examined(later), seated)
    after = painter.follow(LiveReading(number=2, whole=whole))
    assert (timeline, room) == ([], [])
    assert after.panels["timeline"] is before.panels["timeline"]
    assert after.panels["reading"].changed == 2


def test_a_reading_in_which_nothing_changed_is_no_work(monkeypatch):
    seen = snapshot(RACKS, TRAYS, HOLDERS)
    painter = Painter(None, ColourMode.PARTITION, 9)
    whole, seated = update_site_map(examined(seen), SiteMapCache())
    painter.follow(LiveReading(number=1, whole=whole))
    made = [
        counted(monkeypatch, *where)
        for where in (
            (incremental, "_grouped"),
            (incremental, "_records_by_share"),
            (incremental, "gpu_chains"),
            (scenes, "_gpus_by_rack"),
            (scenes, "_make_rack"),
            (painters, "drawn_rack"),
            (render, "render_rack"),
        )
    ]
    anew = snapshot(RACKS, TRAYS, HOLDERS)
    later, _ = update_site_map(examined(time_passes(anew, 9)), seated)
    painter.follow(LiveReading(number=2, whole=later))
    assert made == [[]] * len(made)


def test_what_somebody_has_joined_already_is_not_joined_again(monkeypatch):
    seen = snapshot(RACKS, TRAYS, HOLDERS)
    joined = incremental.join_shares(seen, incremental.JoinedShares())
    calls = counted(monkeypatch, incremental, "gpu_chains")
    assert update_site_map(examined(seen, joined=joined), SiteMapCache())[0] == site_map(examined(seen))
    assert len(calls) == RACKS, "only `scene`, which is not given them, joins"
