"""A refusal names the blocker of the gang, and each fix that it names was planned."""

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.core.place.place_sites import busy_sites, faults, gangs, held, site, workers

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import Gang, GangGroup, PlacementSite
from rackloom.core.place.gang_fixes import PlacementFix, find_fixes, plan_gang
from rackloom.core.place.gang_planner import gang_fits, try_gang
from rackloom.core.place.search.site_view import SiteCapacity, capacity_for
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(busy_sites(), gangs())
def test_every_fix_that_is_named_leads_to_a_sound_plan(where: PlacementSite, gang: Gang) -> None:
    assume(try_gang(where, gang, SearchBudget()) is None)
    for fix in every_fix(where, gang):
        assert fix.text
        plan = try_gang(fix.site, fix.gang, SearchBudget())
        assert plan is not None
        assert faults(fix.site, fix.gang, plan) == []
        assert sum(hold.gpus for hold in fix.site.holds) <= sum(hold.gpus for hold in where.holds)


def every_fix(where: PlacementSite, gang: Gang) -> Iterator[PlacementFix]:
    return find_fixes(capacity_for(where, gang), gang, SearchBudget())


def fix_of(where: PlacementSite, gang: Gang) -> str | None:
    with pytest.raises(Refused) as refused:
        plan_gang(where, gang)
    return refused.value.nearest_fix


def test_a_small_job_that_may_move_is_moved() -> None:
    where = site(2, 18, held("n0-0", "small", movable=True), held("n1-0", "pinned"))
    assert fix_of(where, workers(18)) == "move small from n0-0 to n1-1 (4 GPUs restart)"


def test_a_cordoned_tray_is_returned() -> None:
    plain = site(1)
    shut = (*plain.trays[:-1], type(plain.trays[0])(name="n0-17", clique="c0", gpus=4, shut="cordoned"))
    with pytest.raises(Refused) as refused:
        plan_gang(PlacementSite(shut), workers(18))
    assert refused.value.reason == (
        "job asks for 18 worker with 4 GPUs each in one clique; the nearest, clique c0, has room for"
        " 17 of 18 worker: n0-17 (cordoned)"
    )
    assert refused.value.nearest_fix == "return n0-17 to service (now: cordoned)"


def test_a_gang_larger_than_a_clique_is_cut() -> None:
    assert fix_of(site(3), workers(32)) == (
        "cut it into segments of 16: GPUs of different segments share no memory"
    )


def test_spares_are_given_up_first() -> None:
    assert fix_of(site(1), workers(18, spares=1)) == "keep 0 spare trays instead of 1"


def test_many_spares_cost_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Gang] = []

    def counted(capacity: SiteCapacity, gang: Gang, budget: SearchBudget) -> bool:
        tried.append(gang)
        return gang_fits(capacity, gang, budget)

    monkeypatch.setattr("rackloom.core.place.gang_fixes.gang_fits", counted)
    assert fix_of(site(1), workers(1, spares=4096)) == "keep 17 spare trays instead of 4096"
    assert len(tried) < 10
    crowded = site(40, 2, *(held(f"n{at}-0", "other") for at in range(40)))
    list(every_fix(crowded, workers(41, spares=4096)))
    assert len(tried) < 100


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(busy_sites(), gangs(), st.integers(1, 8))
def test_as_many_spares_are_kept_as_can_be(where: PlacementSite, gang: Gang, spares: int) -> None:
    asked = replace(gang, spares=spares)
    assume(gang.segment is None and try_gang(where, asked, SearchBudget()) is None)
    fitting = [
        fewer
        for fewer in range(spares)
        if try_gang(where, replace(gang, spares=fewer), SearchBudget()) is not None
    ]
    texts = [fix.text for fix in every_fix(where, asked) if fix.text.startswith("keep")]
    assert texts == [f"keep {most} spare trays instead of {spares}" for most in fitting[-1:]]


def test_lower_priority_makes_way_and_equal_priority_is_waited_for() -> None:
    low = site(1, 2, held("n0-0", "low", priority=1))
    assert fix_of(low, workers(2, priority=2, segment=1)) == "preempt low (lower priority, 4 GPUs)"
    busy = site(1, 1, held("n0-0", "peer", priority=1))
    assert fix_of(busy, workers(1, priority=1)) == "wait until peer ends (4 GPUs)"


def test_several_segments_may_need_several_cliques_cured() -> None:
    holds = tuple(TrayHold(owner=f"job-{clique}", tray=f"n{clique}-0", gpus=4) for clique in range(2))
    where = site(2, 4, *holds)
    assert fix_of(where, workers(8, segment=4, priority=1)) is not None
    texts = [fix.text for fix in every_fix(where, workers(8, segment=4, priority=1))]
    assert any("job-0" in text and "job-1" in text for text in texts)


def test_groups_may_be_let_apart() -> None:
    groups = tuple(GangGroup(name=name, members=4, gpus=4) for name in ("prefill", "decode"))
    assert fix_of(site(2, 6), Gang(name="job", groups=groups)) == "let each group have a clique of its own"


def test_where_nothing_helps_no_fix_is_named() -> None:
    assert fix_of(site(1, 2, gpus=4), workers(1, gpus=8)) is None
