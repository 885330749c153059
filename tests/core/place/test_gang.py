"""One gang: every plan is sound, and one group is placed whenever there is room for it."""

from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.place.place_sites import busy_sites, faults, gangs, held, site, workers

from rackloom.core.cluster.trays import FreeRegionCount, Gang, GangGroup, PlacementSite, PlacementTray
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_planner import plan_in_cliques, try_gang
from rackloom.core.place.search import tray_assignment
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused


@settings(max_examples=150, deadline=None)
@given(busy_sites(), gangs())
def test_a_plan_seats_everybody_soundly(where: PlacementSite, gang: Gang) -> None:
    plan = try_gang(where, gang, SearchBudget())
    assume(plan is not None)
    assert plan is not None
    assert faults(where, gang, plan) == []


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(busy_sites(), gangs())
def test_one_group_is_placed_wherever_brute_force_finds_room(where: PlacementSite, gang: Gang) -> None:
    serious = [group for group in gang.groups if not group.is_helper]
    assume(len(serious) == 1 and gang.segment is None)
    assert (try_gang(where, gang, SearchBudget()) is not None) == _has_room(where, gang, serious[0])


def _has_room(where: PlacementSite, gang: Gang, group: GangGroup) -> bool:
    """Whether a clique fits the group with some number of members per tray, with spares set aside."""
    used = {
        tray.name: sum(hold.gpus for hold in where.holds if hold.tray == tray.name) for tray in where.trays
    }
    for clique in {tray.clique for tray in where.trays}:
        slots = sorted(
            (
                (tray.gpus - used[tray.name]) // group.gpus
                for tray in where.trays
                if tray.clique == clique and not tray.shut and not (gang.exclusive and used[tray.name])
            ),
            reverse=True,
        )
        if gang.spares == 0 and sum(slots) >= group.members:
            return True
        if gang.spares and _has_spare(slots, group.members):
            return True
    return False


def _has_spare(slots: list[int], members: int) -> bool:
    """The planner fills scarce trays first and whole, so the rest must stand in for the fullest tray."""
    rising = sorted(slot for slot in slots if slot)
    fullest = 0
    for number, slot in enumerate(rising):
        here = min(slot, members)
        fullest, members = max(fullest, here), members - here
        if members == 0:
            return any(rest >= fullest for rest in rising[number + 1 :])
    return False


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_groups_apart_are_placed_in_as_few_cliques_as_brute_force_finds(
    free: list[int], sizes: list[int]
) -> None:
    where = PlacementSite(
        tuple(
            PlacementTray(name=f"n{c}-{t}", clique=f"c{c}", gpus=4)
            for c, trays in enumerate(free)
            for t in range(trays)
        )
    )
    groups = tuple(
        GangGroup(name=f"g{number}", members=size, gpus=4, share=str(number))
        for number, size in enumerate(sizes)
    )
    plan = try_gang(where, Gang(name="job", groups=groups), SearchBudget())
    ways = [
        len(set(way))
        for way in product(range(len(free)), repeat=len(sizes))
        if all(
            sum(s for s, c in zip(sizes, way, strict=True) if c == at) <= room for at, room in enumerate(free)
        )
    ]
    assert (plan and len(plan.cliques)) == (min(ways) if ways else None)


def test_the_gang_keeps_large_holes_whole_rather_than_fit_tightly() -> None:
    plan = plan_gang(site(2, 18, held("n1-0", "other")), workers(2))
    assert plan.cliques == ("c0",)
    assert plan.price == (FreeRegionCount(2, 17, 16), FreeRegionCount(1, 35, 33))


def test_a_launcher_stands_beside_the_first_worker() -> None:
    groups = (GangGroup(name="launcher", members=1, gpus=0), GangGroup(name="worker", members=18, gpus=4))
    plan = plan_gang(site(1), Gang(name="job", groups=groups))
    assert [seat.tray for seat in plan.seats[:2]] == ["n0-0", "n0-0"]
    assert len(plan.trays) == 18


def test_small_members_fill_trays_that_are_in_use_before_an_empty_one() -> None:
    plan = plan_gang(site(1, 6, held("n0-3", "other", 2)), workers(3, gpus=1))
    assert [seat.tray for seat in plan.seats] == ["n0-3", "n0-3", "n0-0"]


def test_segments_use_as_few_cliques_as_they_can() -> None:
    plan = plan_gang(site(4), workers(32, segment=8))
    assert plan.cliques == ("c0", "c1")
    assert len(plan.trays) == 32


def test_segments_run_on_through_a_group_that_follows_another() -> None:
    """18 ranks, the first in a separate group: 16 share a clique, and the other 2 share one."""
    groups = (
        GangGroup(name="launcher", members=1, gpus=4),
        GangGroup(name="worker", members=17, gpus=4, follows=True),
    )
    plan = plan_gang(site(2, 16), Gang(name="job", groups=groups, segment=16))
    cliques = [seat.tray.partition("-")[0] for seat in plan.seats]
    assert cliques == ["n0"] * 16 + ["n1"] * 2


def test_groups_may_have_a_clique_each() -> None:
    groups = tuple(GangGroup(name=name, members=12, gpus=4, share=name) for name in ("prefill", "decode"))
    assert len(plan_gang(site(2), Gang(name="job", groups=groups)).cliques) == 2


def test_spare_trays_are_kept_in_the_clique_of_the_gang() -> None:
    plan = plan_gang(site(1), workers(16, spares=2))
    assert len(plan.spares) == 2
    assert not set(plan.spares) & set(plan.trays)


@pytest.mark.parametrize("trays", [18, 20])
def test_interchangeable_spares_are_the_last_trays(trays: int) -> None:
    plan = plan_gang(site(1, trays), workers(16, spares=2))
    assert plan.spares == (f"n0-{trays - 1}", f"n0-{trays - 2}")


@pytest.mark.parametrize("trays", [18, 20])
def test_the_preference_among_interchangeable_spares_is_one_function(
    trays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tray_assignment, "in_spare_order", iter)
    tray_assignment.solve_and_count.cache_clear()
    try:
        assert plan_gang(site(1, trays), workers(16, spares=2)).spares == ("n0-0", "n0-1")
    finally:
        tray_assignment.solve_and_count.cache_clear()


def test_nodes_without_a_clique_share_memory_with_nobody() -> None:
    where = PlacementSite(
        tuple(PlacementTray(name=f"h100-{number}", clique=None, gpus=8) for number in range(2))
    )
    assert plan_gang(where, workers(2, gpus=4)).trays == ("h100-0",)
    with pytest.raises(Refused, match="in one clique"):
        plan_gang(where, workers(2, gpus=8))


@pytest.mark.parametrize(
    ("gang", "reason"),
    [
        (workers(0), "no member"),
        (workers(1, gpus=0), "nothing to place"),
        (workers(1, segment=0), "segment"),
        (workers(1, spares=-1), "spare"),
        (workers(1, gpus=-1), "fewer than 0"),
    ],
)
def test_a_gang_that_cannot_be_meant_is_refused_with_a_fix(gang: Gang, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        plan_gang(site(1), gang)
    assert refused.value.nearest_fix


def test_a_clique_that_is_named_but_too_small_is_refused() -> None:
    with pytest.raises(Refused, match="does not fit in clique c0"):
        plan_in_cliques(site(2, 4), workers(6), ["c0"])
