"""The choice of trays against everything that could have been chosen, on sites small enough to try it all."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.place.trays import DomainRoom, TrayRequest, TrayRoom, choose_trays
from rackloom.errors import Refused


@st.composite
def sites(draw: st.DrawFn) -> tuple[DomainRoom, ...]:
    rooms = []
    for number in range(draw(st.integers(0, 4))):
        health = draw(st.lists(st.booleans(), max_size=4))
        trays = tuple(TrayRoom(f"d{number}t{tray}", healthy) for tray, healthy in enumerate(health))
        rooms.append(DomainRoom(f"d{number}", trays, draw(st.integers(0, 3))))
    if draw(st.booleans()):
        rooms.append(DomainRoom(None, (TrayRoom("x0", True),) * draw(st.integers(0, 1)), 0))
    return tuple(rooms)


def home_of(tray: str, rooms: Sequence[DomainRoom]) -> DomainRoom:
    return next(room for room in rooms if tray in room.free)


@given(sites(), st.integers(1, 6), st.booleans())
def test_a_choice_is_free_healthy_distinct_and_complete(
    rooms: tuple[DomainRoom, ...], wanted: int, one_domain: bool
) -> None:
    try:
        chosen = choose_trays(TrayRequest(wanted, one_domain), rooms).trays
    except Refused:
        return
    assert len(set(chosen)) == wanted
    assert set(chosen) <= {tray for room in rooms for tray in room.free}


@given(sites(), st.integers(2, 6))
def test_one_domain_is_the_best_of_all_choices_in_one_domain(
    rooms: tuple[DomainRoom, ...], wanted: int
) -> None:
    possible = [
        (-room.members, len(room.free) - wanted)
        for room in rooms
        if room.domain is not None
        for _ in combinations(room.free, wanted)
    ]
    try:
        placement = choose_trays(TrayRequest(wanted, one_domain=True), rooms)
    except Refused:
        assert possible == []
        return
    (home,) = {home_of(tray, rooms).domain for tray in placement.trays}
    room = next(room for room in rooms if room.domain == home)
    assert (-room.members, len(room.free) - wanted) == min(possible)
    assert home is not None
    assert home in placement.reason


@given(sites(), st.integers(1, 6))
def test_spread_is_refused_only_when_the_site_is_full(rooms: tuple[DomainRoom, ...], wanted: int) -> None:
    free = sum(len(room.free) for room in rooms)
    if free >= wanted:
        assert len(choose_trays(TrayRequest(wanted, one_domain=False), rooms).trays) == wanted
    else:
        with pytest.raises(Refused, match=f"requested {wanted}, available {free}"):
            choose_trays(TrayRequest(wanted, one_domain=False), rooms)


@given(sites(), st.integers(1, 6))
def test_spread_leaves_no_tray_next_to_members_for_one_further_away(
    rooms: tuple[DomainRoom, ...], wanted: int
) -> None:
    try:
        chosen = set(choose_trays(TrayRequest(wanted, one_domain=False), rooms).trays)
    except Refused:
        return
    taken = [home_of(tray, rooms) for tray in chosen]
    left = [room for room in rooms if room.domain is not None and set(room.free) - chosen]
    assert min(room.members for room in taken) >= max((room.members for room in left), default=0)


@given(sites(), st.integers(1, 6), st.booleans(), st.randoms())
def test_the_order_in_which_domains_are_named_does_not_matter(
    rooms: tuple[DomainRoom, ...], wanted: int, one_domain: bool, random: object
) -> None:
    shuffled = list(rooms)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert outcome(wanted, one_domain, rooms) == outcome(wanted, one_domain, shuffled)


def outcome(wanted: int, one_domain: bool, rooms: Sequence[DomainRoom]) -> object:
    try:
        return choose_trays(TrayRequest(wanted, one_domain), rooms)
    except Refused as refusal:
        return refusal.reason


def test_a_full_domain_names_the_fix_that_would_be_accepted() -> None:
    rooms = [DomainRoom(f"d{number}", (TrayRoom(f"t{number}", True),), 0) for number in range(2)]
    with pytest.raises(Refused) as refusal:
        choose_trays(TrayRequest(2, one_domain=True), rooms)
    assert refusal.value.reason == (
        "Topology optimization requires all 2 machines on same NVLink domain,"
        " but best domain only has 1 available"
    )
    assert "topologyOptimized to false" in (refusal.value.nearest_fix or "")
    spread = choose_trays(TrayRequest(2, one_domain=False), rooms)
    assert spread.trays == ("t0", "t1")
    assert "no memory shared" in spread.reason
