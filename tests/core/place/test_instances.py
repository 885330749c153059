"""The choice of trays, compared with every possible choice on small sites."""

from collections.abc import Sequence
from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.place.instance_trays import (
    AllocationUse,
    DomainFreeTrays,
    FreeTray,
    TrayRequest,
    choose_trays,
)
from rackloom.errors import Refused

ills = st.sampled_from([None, None, "GPU 0 degraded"])


@st.composite
def sites(draw: st.DrawFn) -> tuple[DomainFreeTrays, ...]:
    rooms = []
    for number in range(draw(st.integers(0, 4))):
        health = draw(st.lists(st.tuples(ills, st.sampled_from([None, None, None, "paused"])), max_size=4))
        trays = tuple(FreeTray(f"d{number}t{tray}", sick, shut) for tray, (sick, shut) in enumerate(health))
        rooms.append(DomainFreeTrays(f"d{number}", trays, draw(st.integers(0, 3))))
    if draw(st.booleans()):
        rooms.append(DomainFreeTrays(None, (FreeTray("x0"),) * draw(st.integers(0, 1)), 0))
    return tuple(rooms)


requests = st.builds(TrayRequest, st.integers(1, 6), st.booleans(), st.booleans(), st.booleans())


def usable(rooms: Sequence[DomainFreeTrays], request: TrayRequest) -> dict[str, DomainFreeTrays]:
    return {tray: room for room in rooms for tray in room.free(allow_sick=request.allow_sick)}


@given(sites(), requests)
def test_a_choice_is_free_healthy_distinct_and_complete(
    rooms: tuple[DomainFreeTrays, ...], request: TrayRequest
) -> None:
    try:
        chosen = choose_trays(request, rooms).trays
    except Refused:
        return
    assert len(set(chosen)) == request.trays
    assert set(chosen) <= usable(rooms, request).keys()
    if request.beside_members:
        homes = {usable(rooms, request)[tray] for tray in chosen}
        assert len(homes) == 1
        assert homes.pop().members or not any(room.members for room in rooms if room.domain)


@given(sites(), st.integers(2, 6))
def test_one_domain_is_the_best_of_all_choices_in_one_domain(
    rooms: tuple[DomainFreeTrays, ...], wanted: int
) -> None:
    request = TrayRequest(wanted, one_domain=True)
    possible = [
        (-room.members, len(room.free()) - wanted)
        for room in rooms
        if room.domain is not None
        for _ in combinations(room.free(), wanted)
    ]
    try:
        placement = choose_trays(request, rooms)
    except Refused:
        assert possible == []
        return
    (room,) = {usable(rooms, request)[tray] for tray in placement.trays}
    assert (-room.members, len(room.free()) - wanted) == min(possible)
    assert room.domain is not None
    assert room.domain in placement.reason


@given(sites(), st.integers(1, 6))
def test_spread_is_refused_only_when_the_site_is_full(
    rooms: tuple[DomainFreeTrays, ...], wanted: int
) -> None:
    free = sum(len(room.free()) for room in rooms)
    if free >= wanted:
        assert len(choose_trays(TrayRequest(wanted, one_domain=False), rooms).trays) == wanted
    else:
        with pytest.raises(Refused, match=f"requested {wanted}, available {free}"):
            choose_trays(TrayRequest(wanted, one_domain=False), rooms)


@given(sites(), st.integers(1, 6))
def test_spread_leaves_no_tray_next_to_members_for_one_further_away(
    rooms: tuple[DomainFreeTrays, ...], wanted: int
) -> None:
    request = TrayRequest(wanted, one_domain=False)
    try:
        chosen = set(choose_trays(request, rooms).trays)
    except Refused:
        return
    taken = [usable(rooms, request)[tray] for tray in chosen]
    left = [room for room in rooms if room.domain is not None and set(room.free()) - chosen]
    assert min(room.members for room in taken) >= max((room.members for room in left), default=0)


@given(sites(), requests, st.randoms())
def test_the_order_in_which_domains_are_named_does_not_matter(
    rooms: tuple[DomainFreeTrays, ...], request: TrayRequest, random: object
) -> None:
    shuffled = list(rooms)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert outcome(request, rooms) == outcome(request, shuffled)


@st.composite
def partly_reserved_sites(draw: st.DrawFn) -> tuple[DomainFreeTrays, ...]:
    """At most 9 trays. In each domain some wait for the tenant, some for another and some are unreserved."""
    owners = st.lists(st.sampled_from(["mine", "other", None, None]), max_size=3)
    return tuple(
        DomainFreeTrays(
            f"d{number}",
            tuple(
                FreeTray(f"d{number}t{tray}", draw(ills), owner=owner)
                for tray, owner in enumerate(draw(owners))
            ),
            draw(st.integers(0, 2)),
        )
        for number in range(draw(st.integers(0, 3)))
    )


@given(partly_reserved_sites(), requests, st.integers(0, 6), st.integers(0, 3), st.integers(0, 3))
def test_a_choice_within_the_quota_is_found_whenever_there_is_one(
    rooms: tuple[DomainFreeTrays, ...], asked: TrayRequest, allocated: int, used: int, elsewhere: int
) -> None:
    request = msgspec.structs.replace(asked, tenant="mine")
    home = {tray: room for room in rooms for tray in room.free(tenant="mine", allow_sick=request.allow_sick)}
    own = {tray.tray for room in rooms for tray in room.trays if tray.owner == "mine"}
    use = AllocationUse(allocated, used, len(own) + elsewhere)

    def keeps_to_the_request(trays: Sequence[str]) -> bool:
        domains = {home[tray].domain for tray in trays}
        if request.beside_members and any(room.members for room in rooms):
            return len(domains) == 1 and home[trays[0]].members > 0
        return len(domains) == 1 or not (request.one_domain or request.beside_members)

    def lacking(trays: Sequence[str]) -> int:
        return use.lacking(len(trays), len(own.intersection(trays)))

    possible = [
        trays
        for trays in combinations(home, request.trays)
        if keeps_to_the_request(trays) and not lacking(trays)
    ]
    # A request over quota even with reserved trays alone is refused before trays are chosen.
    if use.lacking(request.trays, request.trays):
        assert not possible
        return
    limited = msgspec.structs.replace(request, most_unreserved=max(0, use.unreserved))
    try:
        chosen = choose_trays(limited, rooms).trays
    except Refused:
        assert not possible
        return
    assert set(chosen) <= home.keys()
    assert len(set(chosen)) == request.trays
    assert keeps_to_the_request(chosen)
    assert not lacking(chosen)


def outcome(request: TrayRequest, rooms: Sequence[DomainFreeTrays]) -> object:
    try:
        return choose_trays(request, rooms)
    except Refused as refusal:
        return (refusal.reason, refusal.nearest_fix)


@given(sites(), requests)
def test_the_nearest_fix_is_accepted(rooms: tuple[DomainFreeTrays, ...], request: TrayRequest) -> None:
    try:
        choose_trays(request, rooms)
    except Refused as refusal:
        if refusal.nearest_fix is not None:
            choose_trays(applied(refusal.nearest_fix, request), rooms)


def applied(fix: str, request: TrayRequest) -> TrayRequest:
    if fix.startswith("ask for at most "):
        return msgspec.structs.replace(request, trays=int(fix.rpartition(" ")[2]))
    return msgspec.structs.replace(
        request,
        one_domain=request.one_domain and "topologyOptimized to false" not in fix,
        beside_members=request.beside_members and "requireSameDomain to false" not in fix,
        allow_sick=request.allow_sick or "allowUnhealthyMachine to true" in fix,
    )


def test_what_is_left_of_a_spread_request_goes_where_it_fits_tightest() -> None:
    rooms = [DomainFreeTrays(f"d{trays}", (FreeTray(trays, count=trays),), 0) for trays in (3, 4, 6)]
    assert choose_trays(TrayRequest(9, one_domain=False), rooms).trays == (6,) * 6 + (3,) * 3


def test_a_full_domain_names_the_fix_that_would_be_accepted() -> None:
    rooms = [DomainFreeTrays(f"d{number}", (FreeTray(f"t{number}"),), 0) for number in range(2)]
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


def test_sick_trays_are_passed_over_and_named() -> None:
    ill = FreeTray("t0", sick="GPU 1 degraded")
    room = DomainFreeTrays("d", (ill, FreeTray("t1")), 0)
    placement = choose_trays(TrayRequest(1, one_domain=True), [room])
    assert placement.trays == ("t1",)
    assert placement.reason.endswith("passed over t0 (GPU 1 degraded)")
    allowed = choose_trays(TrayRequest(1, one_domain=True, allow_sick=True), [room])
    assert allowed.trays == ("t0",)
    assert "passed over" not in allowed.reason


def test_a_tray_that_is_shut_is_not_offered_to_anybody() -> None:
    room = DomainFreeTrays("d", (FreeTray("t0", sick="GPU 0 no nvlink", shut="paused"),), 0)
    with pytest.raises(Refused) as refusal:
        choose_trays(TrayRequest(1, one_domain=True, allow_sick=True), [room])
    assert refusal.value.nearest_fix is None


def test_new_members_stay_in_the_domain_of_the_old_ones_when_required() -> None:
    home = DomainFreeTrays("home", (FreeTray("h0"),), 4)
    roomy = DomainFreeTrays("roomy", (FreeTray("r0"), FreeTray("r1")), 0)
    assert choose_trays(TrayRequest(1, True, beside_members=True), [roomy, home]).trays == ("h0",)
    with pytest.raises(
        Refused, match="domain home, where the logical partition lives, has 1 free"
    ) as refused:
        choose_trays(TrayRequest(2, True, beside_members=True), [roomy, home])
    assert "set requireSameDomain to false" in (refused.value.nearest_fix or "")
