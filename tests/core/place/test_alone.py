"""Each share of a gang gets a clique that no other share uses, if that is possible."""

from collections import Counter
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.core.place.place_sites import busy_sites, faults, held, site, workers

from rackloom.core.cluster.trays import Gang, GangGroup, PlacementSite
from rackloom.core.place.gang_planner import shares_clique, try_gang
from rackloom.core.place.search.gang_needs import colocation_groups
from rackloom.core.place.search.site_view import capacity_for
from rackloom.core.place.search.tray_assignment import SearchBudget


@st.composite
def replicas(draw: st.DrawFn) -> Gang:
    """Alike groups, each in a separate share, or one group in segments."""
    members, gpus = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 4)))
    if draw(st.booleans()):
        return workers(draw(st.integers(1, 8)), gpus, segment=members)
    groups = (
        GangGroup(name=f"r{number}", members=members, gpus=gpus, share=f"r{number}")
        for number in range(draw(st.integers(1, 4)))
    )
    return Gang(name="job", groups=tuple(groups))


def can_be_alone(where: PlacementSite, gang: Gang) -> bool:
    """Whether it is possible, by trying every order of cliques."""
    capacity, blocks = capacity_for(where, gang), colocation_groups(gang)
    room = {
        name: [clique.shape.bounds(block[0].need).capacity >= block[0].members for block in blocks]
        for name, clique in capacity.cliques.items()
    }
    return any(
        all(room[clique][number] for number, clique in enumerate(some))
        for some in permutations(room, len(blocks))
    )


@settings(max_examples=200, deadline=None)
@given(busy_sites(), replicas())
def test_every_share_has_a_clique_to_itself_if_there_is_a_way(where: PlacementSite, gang: Gang) -> None:
    plan = try_gang(where, gang, SearchBudget(), apart=True)
    assert (plan is not None) == can_be_alone(where, gang)
    if plan is not None:
        assert faults(where, gang, plan) == []
        assert not shares_clique(gang, plan)
        clique = {tray.name: tray.clique for tray in where.trays}
        size = {group.name: gang.segment or group.members for group in gang.groups}
        blocks = {(seat.group, seat.member // size[seat.group], clique[seat.tray]) for seat in plan.seats}
        assert max(Counter(name for _, _, name in blocks).values()) == 1


def test_spares_are_kept_beside_each_share() -> None:
    gang = workers(4, segment=2, spares=1)
    plan = try_gang(site(2, 3), gang, SearchBudget(), apart=True)
    assert plan is not None
    assert sorted(spare[:2] for spare in plan.spares) == ["n0", "n1"]
    assert try_gang(site(2, 3, held("n1-0", "other")), gang, SearchBudget(), apart=True) is None
    assert (
        try_gang(site(2, 3, held("n1-0", "other")), replace(gang, spares=0), SearchBudget(), apart=True)
        is not None
    )
