"""Unlike groups, segments and spares: never refused where brute force finds room, never worse than it."""

from collections import Counter
from random import Random

import pytest
from tests.core.place.place_brute import best_ways, can_carry
from tests.core.place.place_sites import faults, held, site

from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import (
    REGION_SIZES,
    ClaimCapacity,
    Gang,
    GangGroup,
    GangPlan,
    PlacementSite,
    PlacementTray,
)
from rackloom.core.place import gang_planner
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_planner import try_gang
from rackloom.core.place.search import tray_assignment
from rackloom.core.place.search.gang_needs import MAX_NEEDS, MemberNeed, TrayVacancy, colocation_groups
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused

CASES = 150


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_small_gang_is_planned_as_well_as_brute_force_can(seed: int) -> None:
    chance = Random(seed)
    for number in range(CASES):
        where, gang = random_site(chance), random_gang(chance)
        best, plan = best_ways(where, gang), try_gang(where, gang, SearchBudget())
        label = f"case {number} of seed {seed}"
        assert (plan is None) == (best is None), label
        if plan is not None and best is not None:
            assert faults(where, gang, plan) + unable(where, gang, plan) == [], label
            assert len(plan.cliques) == best[0], label
            assert len(colocation_groups(gang)) > 1 or closes(plan) == best[1], label


def random_site(chance: Random) -> PlacementSite:
    """Up to 3 cliques of up to 5 trays. Half of the sites have trays that are all alike when empty."""
    alike = chance.random() < 0.5
    trays, holds = [], []
    for clique in range(chance.randint(1, 3)):
        for number in range(chance.randint(1, 5)):
            name, gpus = f"n{clique}-{number}", 4 if alike else chance.choice((4, 4, 4, 2, 8))
            shut = "cordoned" if chance.random() < 0.1 else None
            rooms = {kind: ClaimCapacity(4, 4) if alike else random_room(chance) for kind in "ab"}
            trays.append(PlacementTray(name=name, clique=f"c{clique}", gpus=gpus, shut=shut, rooms=rooms))
            used = min(gpus, chance.choice((0, 0, 0, 1, 2, 4)))
            holds += [TrayHold(owner="other", tray=name, gpus=used)] if used else []
    return PlacementSite(tuple(trays), tuple(holds))


def random_room(chance: Random) -> ClaimCapacity:
    empty = chance.randint(0, 4)
    return ClaimCapacity(chance.randint(0, empty), empty)


def random_gang(chance: Random) -> Gang:
    """Up to three groups, of which some share a clique."""
    groups = tuple(
        GangGroup(
            name=f"g{number}",
            members=chance.randint(1, 5),
            gpus=chance.choice((1, 2, 3, 4)),
            devices=chance.choice((None, "a", "b")),
            share=chance.choice(("", "", "s")),
        )
        for number in range(chance.randint(1, 3))
    )
    segment = chance.choice((None, None, None, 2, 3))
    if segment is not None and sum(-(-group.members // segment) for group in groups) > 5:
        segment = None
    spares, exclusive = chance.choice((0, 0, 0, 1, 2)), chance.random() < 0.2
    return Gang(name="job", groups=groups, segment=segment, spares=spares, exclusive=exclusive)


def closes(plan: GangPlan) -> tuple[int, ...]:
    price = {hole.trays: hole.before - hole.after for hole in plan.price}
    return tuple(price.get(size, 0) for size in REGION_SIZES)


def unable(where: PlacementSite, gang: Gang, plan: GangPlan) -> list[str]:
    """Spares that cannot take over the load of a tray in their clique, and trays that carry too much."""
    trays = {tray.name: tray for tray in where.trays}
    loads: dict[str, Counter[str]] = {}
    for seat in plan.seats:
        loads.setdefault(seat.tray, Counter())[seat.group] += 1
    return [
        f"{name} cannot carry what is on {used}"
        for used, load in loads.items()
        for name in (used, *plan.spares)
        if trays[name].clique == trays[used].clique
        and not can_carry(where, gang, trays[name], [(group, load[group.name]) for group in gang.groups])
    ]


def prefill_and_decode(prefill: int, decode: int) -> Gang:
    return Gang(
        name="serve",
        groups=(
            GangGroup(name="prefill", members=prefill, gpus=2, devices="a"),
            GangGroup(name="decode", members=decode, gpus=2, devices="b"),
        ),
    )


def test_the_first_group_leaves_the_trays_that_only_the_second_can_use() -> None:
    """Seated one after the other, prefill takes the tray in use first, the only one with decode's devices."""
    both, single = {"a": ClaimCapacity(1, 2), "b": ClaimCapacity(1, 2)}, {"a": ClaimCapacity(2, 2)}
    trays = [
        PlacementTray(name=f"n{number}", clique="c", gpus=4, rooms=single if number else both)
        for number in range(3)
    ]
    plan = try_gang(
        PlacementSite(tuple(trays), (held("n0", "other", 2),)), prefill_and_decode(4, 1), SearchBudget()
    )
    assert plan is not None
    assert [seat.tray for seat in plan.seats] == ["n1", "n1", "n2", "n2", "n0"]


def test_sizes_that_do_not_divide_each_other_are_mixed_where_that_is_the_only_way() -> None:
    groups = (GangGroup(name="three", members=2, gpus=3), GangGroup(name="two", members=5, gpus=2))
    plan = try_gang(site(1, 2, gpus=8), Gang(name="job", groups=groups), SearchBudget())
    assert plan is not None
    assert faults(site(1, 2, gpus=8), Gang(name="job", groups=groups), plan) == []


def test_a_search_that_is_cut_short_still_finds_what_seating_in_turn_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tray_assignment.solve_and_count.cache_clear()
    monkeypatch.setattr(tray_assignment, "MAX_CLIQUE_STEPS", 1)
    try:
        where = PlacementSite(
            tuple(
                PlacementTray(
                    name=f"n{n}",
                    clique="c",
                    gpus=4,
                    rooms={"a": ClaimCapacity(2, 2), "b": ClaimCapacity(2, 2)},
                )
                for n in range(4)
            )
        )
        plan = try_gang(where, prefill_and_decode(4, 4), SearchBudget())
    finally:
        tray_assignment.solve_and_count.cache_clear()
    assert plan is not None
    assert len(plan.trays) == 4


def with_kinds(trays: int, kinds: int) -> PlacementSite:
    """One clique in which every tray can serve each kind."""
    rooms = {f"k{kind}": ClaimCapacity(4, 4) for kind in range(kinds)}
    return PlacementSite(
        tuple(PlacementTray(name=f"n{at}", clique="c", gpus=4, rooms=rooms) for at in range(trays))
    )


def one_of_each(kinds: int, members: int, **more: object) -> Gang:
    groups = tuple(GangGroup(name=f"w{n}", members=members, gpus=1, devices=f"k{n}") for n in range(kinds))
    return Gang(name="job", groups=groups, **more)  # type: ignore[arg-type]


def test_spares_are_chosen_among_those_there_are() -> None:
    """16 likenesses have 300 million multisets of 16. One of them is a choice of 16 different trays."""
    trays = tuple(
        PlacementTray(name=f"n{at}", clique="c", gpus=16, rooms={"k0": ClaimCapacity(room, room)})
        for at in range(18)
        if (room := 1 + at % 16)
    )
    plan = try_gang(PlacementSite(trays), one_of_each(1, 1, spares=16, exclusive=True), SearchBudget())
    assert plan is not None
    assert len(plan.spares) == 16
    assert (
        try_gang(PlacementSite(trays), one_of_each(1, 1, spares=19, exclusive=True), SearchBudget()) is None
    )


def test_all_searches_for_one_gang_share_an_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: set[object] = set()
    plain = tray_assignment.solve_and_count

    def counted(*question: object) -> object:
        found = plain(*question)  # type: ignore[arg-type]
        if found[1]:
            searched.add(question)
        return found

    monkeypatch.setattr(tray_assignment, "solve_and_count", counted)
    monkeypatch.setattr(gang_planner, "SearchBudget", lambda: SearchBudget(1000))
    trays = tuple(
        PlacementTray(name=f"n{clique}-{at}", clique=f"c{clique}", gpus=4, rooms=rooms_of(at, clique))
        for clique in range(12)
        for at in range(18)
    )
    with pytest.raises(Refused):
        plan_gang(PlacementSite(trays), one_of_each(4, 17))
    assert len(searched) == 1


def rooms_of(at: int, clique: int) -> dict[str, ClaimCapacity]:
    """Rooms that make each clique a different problem."""
    sizes = {f"k{kind}": 1 + (at * (clique + 1) + kind) % 4 for kind in range(4)}
    sizes["k0"] += clique
    return {kind: ClaimCapacity(size, size) for kind, size in sizes.items()}


def test_what_competes_for_too_few_trays_is_refused_without_a_search() -> None:
    """Two kinds of 17 members each. A tray takes 4 of one kind, so one kind finds room, but not both."""
    needs = (MemberNeed(1, "k0"), MemberNeed(1, "k1"))
    trays = (TrayVacancy(True, 4, (4, 4)),) * 8
    tray_assignment.solve_and_count.cache_clear()
    assert tray_assignment.solve_and_count(trays, needs, (17, 17), 0) == (None, 0)
    found, steps = tray_assignment.solve_and_count(trays, needs, (16, 16), 0)
    assert found is not None
    assert (found.opened, steps > 0) == (8, True)


def test_more_kinds_than_can_be_searched_are_seated_in_turn() -> None:
    kinds = MAX_NEEDS + 4
    plan = try_gang(with_kinds(18, kinds), one_of_each(kinds, 1), SearchBudget())
    assert plan is not None
    assert len(plan.trays) == kinds
