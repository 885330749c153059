"""Unlike groups that may be apart are placed if there is room, in no more cliques than they need."""

from random import Random

import pytest
from tests.core.place.place_brute import best_ways
from tests.core.place.place_sites import faults

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import Gang, GangGroup, PlacementSite, PlacementTray
from rackloom.core.place.gang_planner import try_gang
from rackloom.core.place.search.tray_assignment import SearchBudget

CASES = 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("cliques", "trays", "kept", "others"), [((4, 10), 6, 0, 10), ((2, 6), 18, 1, 8), ((5, 10), 18, 1, 20)]
)
def test_groups_that_fill_some_cliques_take_no_more_than_those(
    cliques: tuple[int, int], trays: int, kept: int, others: int, seed: int
) -> None:
    """Such a site is too large for a full search, but one way to place the groups is known.

    `kept`: trays of each clique that this way leaves free.
    """
    chance = Random(seed)
    for number in range(CASES):
        filled = [chance.randint(trays // 2, trays) for _ in range(chance.randint(*cliques))]
        sizes = [size for room in filled for size in cut(chance, room - kept)]
        more = [chance.randint(1, trays) for _ in range(chance.randint(0, others))]
        where, gang = open_site(chance.sample(filled + more, len(filled + more))), apart(sizes)
        plan = try_gang(where, gang, SearchBudget())
        label = f"case {number} of seed {seed}: groups of {sizes}"
        assert plan is not None, label
        assert faults(where, gang, plan) == [], label
        assert len(plan.cliques) <= len(filled), label


def cut(chance: Random, room: int) -> list[int]:
    """Sizes of groups that fill a clique."""
    sizes = []
    while room:
        sizes.append(chance.randint(min(3, room), room))
        room -= sizes[-1]
    return sizes


def open_site(free: list[int]) -> PlacementSite:
    """A clique of empty trays for each number in `free`."""
    return PlacementSite(
        tuple(
            PlacementTray(name=f"n{clique}-{at}", clique=f"c{clique}", gpus=4)
            for clique, trays in enumerate(free)
            for at in range(trays)
        )
    )


def apart(sizes: list[int]) -> Gang:
    """A group of each size. Every member takes a tray."""
    groups = (GangGroup(name=f"g{at}", members=size, gpus=4, share=str(at)) for at, size in enumerate(sizes))
    return Gang(name="job", groups=tuple(groups))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_members_of_unlike_sizes_take_as_few_cliques_as_brute_force_finds(seed: int) -> None:
    """4 domains of up to 6 trays of 8 GPUs, of which a part is in use."""
    chance = Random(seed)
    for number in range(8):
        where, gang = used_site(chance), of_sizes(chance)
        best, plan = best_ways(where, gang), try_gang(where, gang, SearchBudget())
        label = f"case {number} of seed {seed}"
        assert (plan and len(plan.cliques)) == (best and best[0]), label


def used_site(chance: Random) -> PlacementSite:
    trays, holds = [], []
    for clique in range(chance.randint(1, 4)):
        for at in range(chance.randint(1, 6)):
            name = f"n{clique}-{at}"
            trays.append(PlacementTray(name=name, clique=f"c{clique}", gpus=8))
            if used := chance.choice((0, 1, 2, 3, 4, 8)):
                holds.append(TrayHold(owner="other", tray=name, gpus=used))
    return PlacementSite(tuple(trays), tuple(holds))


def of_sizes(chance: Random) -> Gang:
    """Two or three groups, each of which may be apart from the others."""
    groups = (
        GangGroup(name=f"g{at}", members=chance.randint(1, 9), gpus=chance.choice((1, 2, 4)), share=str(at))
        for at in range(chance.randint(2, 3))
    )
    return Gang(name="job", groups=tuple(groups))


def test_a_large_group_of_small_members_leaves_room_for_small_groups_of_large_ones() -> None:
    """On 6, 6 and 7 free GPUs, 9 members of one GPU leave room for two of 4 only if they come second."""
    used = tuple(TrayHold(owner="other", tray=f"n0-{at}", gpus=gpus) for at, gpus in enumerate((2, 2, 1)))
    trays = tuple(PlacementTray(name=f"n0-{at}", clique="c0", gpus=8) for at in range(3))
    groups = (
        GangGroup(name="small", members=9, gpus=1, share="small"),
        GangGroup(name="large", members=2, gpus=4, share="large"),
    )
    where, gang = PlacementSite(trays, used), Gang(name="job", groups=groups)
    plan = try_gang(where, gang, SearchBudget())
    assert plan is not None
    assert faults(where, gang, plan) == []
