"""A lost tray: one spare of the same clique takes over, and no other member moves."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.place.place_sites import busy_sites, gangs, held, outcome_of, site, workers

from rackloom.core.cluster.trays import Gang, PlacementSite
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_planner import try_gang, with_plan_reserved
from rackloom.core.place.job_moves import replace_member, with_trays_closed
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused


@settings(max_examples=100, deadline=None)
@given(busy_sites(), gangs(), st.data())
def test_only_the_lost_members_move_and_they_stay_in_their_clique(
    where: PlacementSite, gang: Gang, data: Any
) -> None:
    plan = try_gang(where, gang, SearchBudget())
    assume(plan is not None)
    assert plan is not None
    lost = data.draw(st.sampled_from(plan.trays))
    after = with_trays_closed(with_plan_reserved(where, gang, plan), [lost], "lost")
    mended = outcome_of(lambda: replace_member(after, gang, plan, lost))
    if isinstance(mended, Refused):
        assert gang.spares == 0, "a spare was kept for this"
        assert mended.nearest_fix
        return
    clique = {tray.name: tray.clique for tray in where.trays}
    for before, now in zip(plan.seats, mended.seats, strict=True):
        assert (before.tray == lost) == (before != now)
        assert clique[before.tray] == clique[now.tray]
    assert lost not in mended.trays
    assert not set(mended.spares) & set(mended.trays)


def test_a_reserved_spare_is_asked_first() -> None:
    plan = plan_gang(site(1), workers(4, spares=1))
    after = with_trays_closed(with_plan_reserved(site(1), workers(4, spares=1), plan), ["n0-0"], "lost")
    mended = replace_member(after, workers(4, spares=1), plan, "n0-0")
    assert mended.seats[0].tray == plan.spares[0]
    assert mended.spares == ()


def test_a_full_clique_has_nothing_to_mend_with() -> None:
    plan = plan_gang(site(2), workers(18))
    with pytest.raises(Refused, match="no other tray of clique c0") as refused:
        replace_member(site(2), workers(18), plan, "n0-0")
    assert refused.value.nearest_fix == "return n0-0 to service, or start job anew in another clique"


def test_only_trays_of_the_plan_can_be_lost() -> None:
    plan = plan_gang(site(1), workers(2))
    with pytest.raises(Refused, match="no member on n0-17"):
        replace_member(site(1), workers(2), plan, "n0-17")
    with pytest.raises(Refused, match="not in the site"):
        replace_member(PlacementSite(()), workers(2), plan, "n0-0")


def test_trays_of_other_jobs_are_left_alone() -> None:
    gang = workers(2)
    plan = plan_gang(site(1, 3), gang)
    with pytest.raises(Refused):
        replace_member(site(1, 3, held("n0-2", "other", 1)), gang, plan, "n0-0")
