"""Dead ends are recognised under any names of alike cliques, and cost about the same with many cliques."""

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from tests.core.place.place_sites import workers
from tests.core.place.test_apart import apart, open_site

from rackloom.core.place.gang_planner import try_gang
from rackloom.core.place.search.clique_search import CliqueChoice, CliqueSearch, NogoodTable
from rackloom.core.place.search.gang_needs import MemberNeed
from rackloom.core.place.search.site_view import SiteCapacity
from rackloom.core.place.search.tray_assignment import MAX_GANG_DEAD_ENDS, SearchBudget

SMALL, LARGE = MemberNeed(1, None), MemberNeed(4, None)


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_is_a_dead_end_where_as_many_alike_cliques_had_the_same_inside(seed: int) -> None:
    chance, trays = Random(seed), [3, 3, 3, 2, 2, 1]
    dead_ends = NogoodTable(SiteCapacity(open_site(trays)), {SMALL: 9, LARGE: 9})
    standing: list[dict[MemberNeed, int]] = [{} for _ in trays]
    known: list[Counter[tuple[int, frozenset[tuple[MemberNeed, int]]]]] = []
    for _ in range(300):
        at, inside = chance.randrange(len(trays)), some_members(chance)
        then = [*standing[:at], inside, *standing[at + 1 :]]
        assert dead_ends.has(f"c{at}", inside) == (choice(trays, then) in known)
        standing = then if chance.random() < 0.5 else [*standing[:at], {}, *standing[at + 1 :]]
        dead_ends.changed(f"c{at}", standing[at])
        if chance.random() < 0.3:
            dead_ends.add()
            known.append(choice(trays, standing))
    assert len(dead_ends) > 10


def some_members(chance: Random) -> dict[MemberNeed, int]:
    """The contents of the cliques, independent of their order."""
    members = [(SMALL, chance.randint(1, 2)), (LARGE, 1)]
    return dict(chance.sample(members, chance.randint(1, 2)))


def choice(
    trays: list[int], standing: list[dict[MemberNeed, int]]
) -> Counter[tuple[int, frozenset[tuple[MemberNeed, int]]]]:
    return Counter(
        (size, frozenset(content.items())) for size, content in zip(trays, standing, strict=True) if content
    )


class Looked(dict[MemberNeed, int]):
    """Members that count how often they are read."""

    times = 0

    def items(self) -> object:  # type: ignore[override]
        """The items of the dictionary."""
        self.times += 1
        return super().items()

    def __iter__(self) -> Iterator[MemberNeed]:
        self.times += 1
        return super().__iter__()


def test_what_is_in_a_clique_is_looked_at_when_it_changes_and_not_for_each_choice() -> None:
    dead_ends = NogoodTable(SiteCapacity(open_site([2] * 50)), {LARGE: 60})
    inside = [Looked({LARGE: 1}) for _ in range(49)]
    for at, members in enumerate(inside):
        dead_ends.changed(f"c{at}", members)
    dead_ends.add()
    assert not any(dead_ends.has("c49", {LARGE: 2}) for _ in range(100))
    assert {members.times for members in inside} == {1}


@pytest.mark.parametrize("cliques", [32, 64])
def test_a_search_in_vain_takes_the_fewer_dead_ends_the_more_cliques_are_in_use(
    cliques: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 5 to 9 members would fill all cliques to the last tray. Mostly most of these are in use."""
    found = Counter[str]()
    add = NogoodTable.add

    def counted(dead_ends: NogoodTable) -> None:
        found["dead ends"] += 1
        add(dead_ends)

    monkeypatch.setattr(NogoodTable, "add", counted)
    chance, sizes = Random(1), list[int]()
    while (left := 18 * cliques - sum(sizes)) >= 10:
        sizes.append(chance.randint(5, 9))
    assert try_gang(open_site([18] * cliques), apart([*sizes, left]), SearchBudget()) is None
    assert 400 < found["dead ends"] < 400 + MAX_GANG_DEAD_ENDS // (cliques // 2)


@pytest.mark.parametrize(("trays", "cliques"), [([3, 3, 3], 3), ([3, 5, 3, 2], 2), ([7, 1, 1], 1)])
def test_nothing_is_searched_again_where_counting_shows_that_no_fewer_cliques_take_the_segments(
    trays: list[int], cliques: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three segments of two trays: the odd tray of a clique takes none."""
    runs: list[int | None] = []
    run = CliqueSearch.run

    def noted(search: CliqueSearch, most: int | None = None) -> list[CliqueChoice] | None:
        runs.append(most)
        return run(search, most)

    monkeypatch.setattr(CliqueSearch, "run", noted)
    plan = try_gang(open_site(trays), workers(6, segment=2), SearchBudget())
    assert plan is not None
    assert (len(plan.cliques), runs) == (cliques, [None])
