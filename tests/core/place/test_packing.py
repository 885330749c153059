"""Many gangs: never worse than brute force on small sites, near HiGHS's optimum on large ones."""

from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.place.packing_score import packing_score
from tests.core.place.place_sites import held, site

from rackloom.core.cluster.trays import Gang, GangGroup, PlacementSite, PlacementTray
from rackloom.core.place.batch import plan_batch
from rackloom.core.place.search.packing import (
    PackingAssignment,
    PackingClique,
    PackingItem,
    best_fit_decreasing,
    improved,
    pack,
)

cliques_of_4x6 = st.lists(st.builds(PackingClique, st.integers(0, 6), st.booleans()), min_size=1, max_size=4)
blocks = st.lists(st.integers(1, 6), min_size=1, max_size=2).map(lambda found: tuple(sorted(found)[::-1]))
items_of_4x6 = st.lists(st.builds(PackingItem, blocks, st.integers(1, 3)), max_size=4)


def is_sound(cliques: list[PackingClique], items: list[PackingItem], assignment: PackingAssignment) -> bool:
    free = [clique.empty for clique in cliques]
    for item, where in zip(items, assignment, strict=True):
        for block, clique in zip(item.sizes if where else (), where or (), strict=True):
            free[clique] -= block
    return min(free) >= 0


def brute_force(cliques: list[PackingClique], items: list[PackingItem]) -> int:
    """The best score of all assignments."""
    ways = [[None, *product(range(len(cliques)), repeat=len(item.sizes))] for item in items]
    return max(
        packing_score(cliques, items, assignment)
        for assignment in product(*ways)
        if is_sound(cliques, items, assignment)
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(cliques_of_4x6, items_of_4x6)
def test_a_small_site_is_packed_as_well_as_brute_force_can(
    cliques: list[PackingClique], items: list[PackingItem]
) -> None:
    found = pack(cliques, items)
    assert is_sound(cliques, items, found)
    assert packing_score(cliques, items, found) == brute_force(cliques, items)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.builds(PackingClique, st.integers(0, 18), st.booleans()), min_size=2, max_size=8),
    st.lists(st.builds(PackingItem, blocks, st.integers(1, 3)), max_size=20),
)
def test_improvement_never_loses_what_best_fit_had(
    cliques: list[PackingClique], items: list[PackingItem]
) -> None:
    first = best_fit_decreasing(cliques, items)
    better = improved(cliques, items, best_fit_decreasing(cliques, items))
    assert is_sound(cliques, items, better)
    assert packing_score(cliques, items, better) >= packing_score(cliques, items, first)


def case(racks: int, gangs: int, seed: int) -> tuple[list[PackingClique], list[PackingItem]]:
    """Racks of 18 with 1 % of trays down, and more gangs than fit."""
    chance = Random(seed)
    cliques = [PackingClique(sum(chance.random() >= 0.01 for _ in range(18))) for _ in range(racks)]
    sizes = (1, 2, 4, 5, 6, 8, 9, 12, 16, 17)
    return cliques, [PackingItem((chance.choice(sizes),), chance.choice((1, 2, 3))) for _ in range(gangs)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_80_gangs_on_32_racks_come_within_1_percent_of_the_optimum(seed: int) -> None:
    highspy: Any = pytest.importorskip(
        "highspy", reason="HiGHS, which certifies the optimum, is not installed"
    )
    cliques, items = case(32, 80, seed)
    ours = packing_score(cliques, items, pack(cliques, items))
    assert ours >= 0.99 * upper_bound(highspy, cliques, items)


def upper_bound(highspy: Any, cliques: list[PackingClique], items: list[PackingItem]) -> float:
    """No assignment scores more: HiGHS's optimum if gangs may be cut and cliques cost nothing to open."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("solve_relaxation", True)
    placed = {
        (item, clique): model.addBinary()
        for item in range(len(items))
        for clique in range(len(cliques))
        if items[item].sizes[0] <= cliques[clique].empty
    }
    for item in range(len(items)):
        model.addConstr(sum(variable for (number, _), variable in placed.items() if number == item) <= 1)
    for clique in range(len(cliques)):
        trays = sum(
            items[item].sizes[0] * variable for (item, where), variable in placed.items() if where == clique
        )
        model.addConstr(trays <= cliques[clique].empty)
    model.maximize(sum(items[item].worth * variable for (item, _), variable in placed.items()))
    return float(model.getInfo().objective_function_value)


def test_a_batch_runs_what_is_worth_most() -> None:
    gangs = [
        Gang(
            name=f"gang-{number}", groups=(GangGroup(name="worker", members=size, gpus=4),), priority=priority
        )
        for number, (size, priority) in enumerate([(3, 0), (4, 5), (2, 0), (2, 5)])
    ]
    found = plan_batch(site(1, 6, held("n0-0", "other", 1)), gangs)
    assert [plan.gang for plan in found] == ["gang-1"]
    trays = [tray for plan in plan_batch(site(2, 6), gangs) for tray in plan.trays]
    assert len(trays) == len(set(trays)) == 11


def left_over(where: PlacementSite, gangs: list[Gang]) -> tuple[str, ...]:
    """The gangs without a plan."""
    placed = {plan.gang for plan in plan_batch(where, gangs)}
    return tuple(gang.name for gang in gangs if gang.name not in placed)


def whole(name: str, members: int, priority: int = 0) -> Gang:
    return Gang(name=name, groups=(GangGroup(name="worker", members=members, gpus=4),), priority=priority)


def test_gangs_of_whole_trays_and_others_share_a_site() -> None:
    small = Gang(name="small", groups=(GangGroup(name="worker", members=4, gpus=1),), priority=9)
    assert left_over(site(1, 6), [small, whole("whole", 5)]) == ()


def test_no_number_of_lesser_gangs_outweighs_one_of_higher_priority() -> None:
    lesser = [whole(f"lesser-{number}", 3) for number in range(2)]
    assert left_over(site(1, 6), [*lesser, whole("urgent", 4, 1)]) == ("lesser-0", "lesser-1")
    small = Gang(name="small", groups=(GangGroup(name="worker", members=1, gpus=1),), priority=2)
    assert left_over(site(1, 6), [whole("all", 6, 1), small]) == ("all",)


def test_gangs_are_packed_together_where_one_by_one_leaves_somebody_over() -> None:
    """The tightest clique for the first gang, of 4 trays, has 5, in which 3 and 2 would fit."""
    where = site(2, 6, held("n1-0", "other"))
    gangs = [whole("four", 4), whole("three", 3), whole("two-a", 2), whole("two-b", 2)]
    assert left_over(where, gangs) == ()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 1)), min_size=1, max_size=4),
)
def test_a_batch_places_as_much_as_brute_force_can(free: list[int], asked: list[tuple[int, int]]) -> None:
    trays = [
        PlacementTray(name=f"n{clique}-{number}", clique=f"c{clique}", gpus=4)
        for clique, count in enumerate(free)
        for number in range(count)
    ]
    gangs = [whole(f"gang-{number}", *shape) for number, shape in enumerate(asked)]
    done = plan_batch(PlacementSite(tuple(trays)), gangs)
    placed = {plan.gang for plan in done}
    assert by_priority(gangs, placed) == max(
        by_priority(gangs, {gang.name for gang, at in zip(gangs, way, strict=True) if at is not None})
        for way in product([None, *range(len(free))], repeat=len(gangs))
        if all(
            sum(size for (size, _), at in zip(asked, way, strict=True) if at == clique) <= room
            for clique, room in enumerate(free)
        )
    )


def by_priority(gangs: list[Gang], placed: set[str]) -> tuple[int, int]:
    """Members of the higher priority, then of the lower."""
    members = [(gang.priority, gang.groups[0].members) for gang in gangs if gang.name in placed]
    return sum(count for priority, count in members if priority), sum(
        count for priority, count in members if not priority
    )
