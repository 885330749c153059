"""Moves that empty a tray or open free regions: each is possible, and its cost is stated."""

from collections import Counter
from operator import sub

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.core.place.place_sites import busy_sites, held, outcome_of, site

from rackloom.core.cluster.trays import REGION_SIZES, PlacementSite
from rackloom.core.place.job_moves import plan_defragmentation, plan_drain
from rackloom.errors import Refused


def holes(where: PlacementSite) -> tuple[int, ...]:
    used = {hold.tray for hold in where.holds}
    empty = Counter(tray.clique for tray in where.trays if not tray.shut and tray.name not in used)
    return tuple(sum(count // size for count in empty.values()) for size in REGION_SIZES)


def gpus_of(where: PlacementSite) -> Counter[str]:
    found: Counter[str] = Counter()
    for hold in where.holds:
        found[hold.owner] += hold.gpus
    return found


@st.composite
def bound_sites(draw: st.DrawFn) -> PlacementSite:
    """Sites with jobs that are kept off some trays, but not off their present ones."""
    where = draw(busy_sites())
    off: dict[str, frozenset[str]] = {}
    for owner in sorted({hold.owner for hold in where.holds}):
        own = {hold.tray for hold in where.holds if hold.owner == owner}
        names = [tray.name for tray in where.trays if tray.name not in own]
        off[owner] = draw(st.frozensets(st.sampled_from(names))) if names else frozenset()
    return PlacementSite(where.trays, tuple(replace(hold, kept_off=off[hold.owner]) for hold in where.holds))


def is_sound(before: PlacementSite, after: PlacementSite) -> bool:
    """No owner lost a GPU, pinned jobs stayed, and no tray is overfull or holds a job that it keeps off."""
    room = {tray.name: tray.gpus for tray in after.trays}
    used: Counter[str] = Counter()
    for hold in after.holds:
        used[hold.tray] += hold.gpus
    pinned = {hold for hold in before.holds if not hold.movable}
    return (
        gpus_of(before) == gpus_of(after)
        and pinned <= set(after.holds)
        and all(used[name] <= room[name] for name in used)
        and not any(hold.tray in hold.kept_off for hold in after.holds)
    )


@settings(max_examples=150, deadline=None)
@given(bound_sites())
def test_defragmentation_opens_larger_holes_or_moves_nothing(where: PlacementSite) -> None:
    found = plan_defragmentation(where)
    assert is_sound(where, found.site)
    assert (holes(found.site) > holes(where)) == bool(found.moves)
    assert all(move.gpus > 0 for move in found.moves)
    change = Counter[int]()
    for move in found.moves:
        change.update({hole.trays: hole.after - hole.before for hole in move.holes})
    reported = tuple(change[size] for size in REGION_SIZES)
    assert reported == tuple(map(sub, holes(found.site), holes(where)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(bound_sites())
def test_a_drained_tray_is_empty_or_somebody_is_named_who_cannot_leave(where: PlacementSite) -> None:
    tray = where.trays[0].name
    found = outcome_of(lambda: plan_drain(where, tray))
    if isinstance(found, Refused):
        assert any(hold.owner in found.reason for hold in where.holds if hold.tray == tray)
        assert found.nearest_fix
        return
    assert is_sound(where, found.site)
    assert not any(hold.tray == tray for hold in found.site.holds)
    assert next(known for known in found.site.trays if known.name == tray).shut


def test_a_member_stays_in_its_clique_if_it_can() -> None:
    jobs = [held("n0-0", "job", movable=True), held("n0-1", "job", movable=True)]
    assert [move.describe() for move in plan_drain(site(2, 3, *jobs), "n0-0").moves] == [
        "move job from n0-0 to n0-2 (4 GPUs restart)"
    ]
    assert [move.describe() for move in plan_drain(site(2, 2, *jobs), "n0-0").moves] == [
        "move job from n0-0, n0-1 to n1-0, n1-1 (8 GPUs restart)"
    ]


def test_two_half_empty_cliques_become_a_whole_one() -> None:
    jobs = [held("n0-0", "small", movable=True), held("n1-0", "pinned")]
    assert [move.describe() for move in plan_defragmentation(site(2, 8, *jobs)).moves] == [
        "move small from n0-0 to n1-1 (4 GPUs restart)"
    ]


def test_a_tray_that_is_not_there_cannot_be_drained() -> None:
    with pytest.raises(Refused, match="no tray is called nope"):
        plan_drain(site(1, 2), "nope")
