"""A changed view equals a fresh view, and the cost of a change depends on its size only."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.core.place.place_sites import busy_sites, gangs, held, outcome_of, site, workers

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import Gang, PlacementSite, PlacementTray
from rackloom.core.place.batch import plan_batch
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_planner import view_with_plan_reserved, with_plan_reserved
from rackloom.core.place.search.site_view import CliqueTrays, SiteView

Change = tuple[tuple[PlacementTray, ...], tuple[TrayHold, ...], tuple[TrayHold, ...]]
"""Replaced trays, holds that end, holds that begin."""


@st.composite
def changes(draw: st.DrawFn, where: PlacementSite) -> Change:
    """Some trays are shut, opened or resized, and jobs end and begin."""
    trays = draw(st.lists(st.sampled_from(where.trays), max_size=3, unique_by=lambda tray: tray.name))
    replaced = tuple(
        replace(tray, shut=draw(st.sampled_from((None, "cordoned"))), gpus=draw(st.sampled_from((2, 4))))
        for tray in trays
    )
    freed = draw(st.lists(st.sampled_from(where.holds), max_size=3)) if where.holds else []
    begun = tuple(
        held(draw(st.sampled_from(where.trays)).name, draw(st.sampled_from(("job", "job-1", "new"))), gpus)
        for gpus in draw(st.lists(st.sampled_from((1, 2, 4)), max_size=2))
    )
    return replaced, tuple(freed), begun


def after(where: PlacementSite, change: Change) -> PlacementSite:
    """The site with a change, as a value."""
    trays, freed, begun = change
    new = {tray.name: tray for tray in trays}
    holds = (*(hold for hold in where.holds if hold not in freed), *begun)
    return PlacementSite(tuple(new.get(tray.name, tray) for tray in where.trays), holds)


def content(view: SiteView, owner: str, exclusive: bool) -> object:
    """All that a search can see of a view."""
    states = view.states(owner, exclusive)
    return (
        [(name, state.trays, state.states, state.shape.key) for name, state in states.cliques.items()],
        {key: list(alike.orders) for key, alike in states.shapes.items()},
        states.regions,
        [(name, inside.trays, sorted(inside.holds, key=str)) for name, inside in view.cliques.items()],
        sorted(view.cliques_of(owner)),
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(busy_sites(cliques=9), gangs(), st.data())
def test_a_changed_view_is_a_new_one(where: PlacementSite, gang: Gang, data: st.DataObject) -> None:
    view = SiteView.of(where)
    view.states()
    for _ in range(3):
        change = data.draw(changes(where))
        where = after(where, change)
        trays, freed, begun = change
        view = view.changed(trays=trays, freed=freed, taken=begun)
        fresh = SiteView.of(where)
        for owner, exclusive in (("", False), ("", True), ("job-1", False), (gang.name, gang.exclusive)):
            assert content(view, owner, exclusive) == content(fresh, owner, exclusive)
        assert view.site.trays == where.trays
        assert sorted(view.site.holds, key=str) == sorted(where.holds, key=str)
        answers = [str(outcome_of(lambda seen=seen: plan_gang(seen, gang))) for seen in (view, where)]  # type: ignore[misc]
        assert answers[0] == answers[1]


@settings(max_examples=50, deadline=None)
@given(busy_sites(), gangs())
def test_a_plan_is_reserved_alike_in_a_view(where: PlacementSite, gang: Gang) -> None:
    plans = plan_batch(where, [gang])
    for plan in plans:
        reserved = SiteView.of(with_plan_reserved(where, gang, plan))
        assert content(view_with_plan_reserved(SiteView.of(where), gang, plan), "", True) == content(
            reserved, "", True
        )


def test_a_tray_that_is_new_or_elsewhere_is_no_change() -> None:
    view = SiteView.of(site(2, 3))
    for tray in (replace(view.site.trays[0], clique="c1"), replace(view.site.trays[0], name="n9-9")):
        with pytest.raises(ValueError, match=f"tray {tray.name} was not in clique"):
            view.changed(trays=[tray])
    assert content(view.changed(taken=[held("n9-9", "job")]), "", False) == content(view, "", False)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[CliqueTrays]:
    """Every clique from which trays are read."""
    seen: list[CliqueTrays] = []
    states = CliqueTrays.states

    def counted(inside: CliqueTrays, owner: str, exclusive: bool) -> object:
        seen.append(inside)
        return states(inside, owner, exclusive)

    monkeypatch.setattr(CliqueTrays, "states", counted)
    return seen


def test_a_plan_after_a_change_looks_at_the_cliques_that_changed(computed: list[CliqueTrays]) -> None:
    view = SiteView.of(site(400, 4, held("n7-1", "other"), held("n9-2", "job")))
    plan_gang(view, workers(4))
    assert len(computed) == 401  # all, and the clique where the gang itself holds a tray
    computed.clear()
    view = view.changed(freed=[held("n7-1", "other")], taken=[held("n8-0", "other")])
    plan = plan_gang(view, workers(4))
    assert len(computed) == 3
    assert plan == plan_gang(view.site, workers(4))
