"""Reserved trays: no other tenant gets one before its time, and without reservations nothing changes."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.place.instance_trays import (
    DomainFreeTrays,
    FreeTray,
    Reservation,
    TrayRequest,
    choose_trays,
    given_up,
    in_force,
    owners_of_trays,
)
from rackloom.errors import Refused

OWNERS = ("a", "b", "c")
requests = st.builds(
    TrayRequest, st.integers(1, 6), st.booleans(), st.booleans(), st.booleans(), st.sampled_from(OWNERS)
)
ills = st.sampled_from([None, None, "GPU 0 degraded"])
shuts = st.sampled_from([None, None, None, "in partition 5, which the site did not make"])
Site = tuple[tuple[DomainFreeTrays, ...], list[Reservation], dict[str, str]]


@st.composite
def sites(draw: st.DrawFn) -> Site:
    """Domains with free trays, reservations that end at 0 to 20, and the reservation of each tray."""
    kept = [
        Reservation(str(number), draw(st.sampled_from(OWNERS)), draw(st.integers(0, 20)))
        for number in range(draw(st.integers(0, 4)))
    ]
    rooms, reserved = [], {}
    for number in range(draw(st.integers(0, 4))):
        states = draw(st.lists(st.tuples(ills, shuts), max_size=4))
        trays = tuple(FreeTray(f"d{number}t{tray}", *state) for tray, state in enumerate(states))
        rooms.append(DomainFreeTrays(f"d{number}", trays, draw(st.integers(0, 2))))
        for tray in trays:
            if kept and draw(st.booleans()):
                reserved[tray.tray] = draw(st.sampled_from(kept)).id
    return tuple(rooms), kept, reserved


def at(site: Site, now: float) -> tuple[DomainFreeTrays, ...]:
    """The room at a given time."""
    rooms, kept, reserved = site
    owners = owners_of_trays(in_force(kept, now), reserved)
    return tuple(
        msgspec.structs.replace(
            room,
            trays=tuple(msgspec.structs.replace(tray, owner=owners.get(tray.tray)) for tray in room.trays),
        )
        for room in rooms
    )


def chosen(request: TrayRequest, rooms: Sequence[DomainFreeTrays]) -> tuple[str, ...] | None:
    try:
        return choose_trays(request, rooms).trays
    except Refused:
        return None


@given(sites(), requests, st.integers(0, 20))
def test_nobody_gets_a_tray_that_is_reserved_for_somebody_else(
    site: Site, request: TrayRequest, now: int
) -> None:
    _, kept, reserved = site
    by_id = {reservation.id: reservation for reservation in kept}
    for tray in chosen(request, at(site, now)) or ():
        if (reservation := by_id.get(reserved.get(tray, ""))) is not None:
            assert reservation.owner == request.tenant or reservation.until <= now


@given(sites(), requests)
def test_at_their_time_reservations_change_nothing_any_more(site: Site, request: TrayRequest) -> None:
    rooms, kept, _ = site
    end = max((reservation.until for reservation in kept), default=0)
    assert in_force(kept, end) == {}
    anybody = msgspec.structs.replace(request, tenant=None)
    assert chosen(request, at(site, end)) == chosen(anybody, rooms)


@given(sites(), requests, st.integers(0, 20))
def test_an_owner_loses_nothing_by_its_reservations(site: Site, request: TrayRequest, now: int) -> None:
    """It gets the trays that it would get if only others had reservations."""
    rooms, kept, reserved = site
    others = [reservation for reservation in kept if reservation.owner != request.tenant]
    if chosen(request, at((rooms, others, reserved), now)) is not None:
        assert chosen(request, at(site, now)) is not None


@given(sites(), st.sampled_from(OWNERS), st.integers(0, 20))
def test_one_tray_is_a_reserved_one_if_the_owner_has_one_that_is_free(
    site: Site, owner: str, now: int
) -> None:
    far = tuple(msgspec.structs.replace(room, members=0) for room in at(site, now))
    own = {tray.tray for room in far for tray in room.trays if tray.owner == owner}
    usable = {tray for room in far for tray in room.free(tenant=owner)}
    got = chosen(TrayRequest(1, one_domain=True, tenant=owner), far)
    assert got is None or got[0] in own or not own & usable


@given(
    st.lists(st.sampled_from("abcdef"), unique=True), st.sets(st.sampled_from("abcdef")), st.integers(0, 7)
)
def test_a_reservation_gives_up_used_trays_last(trays: list[str], used: set[str], keep: int) -> None:
    gone = given_up(trays, used, keep)
    assert len(gone) == max(0, len(trays) - keep)
    assert set(gone) <= set(trays)
    assert not used.intersection(gone) or not (set(trays) - set(gone)) - used


def test_memory_comes_before_reserved_trays() -> None:
    near = DomainFreeTrays("near", (FreeTray("n0"), FreeTray("n1")), members=4)
    tight = DomainFreeTrays("tight", (FreeTray("t0"), FreeTray("t1")), members=0)
    kept = DomainFreeTrays("wide", (FreeTray("k0"), FreeTray("k1", owner="a"), FreeTray("k2")), members=0)
    assert chosen(TrayRequest(1, one_domain=True, tenant="a"), [near, kept]) == ("n0",)
    assert chosen(TrayRequest(2, one_domain=True, tenant="a"), [tight, kept]) == ("k1", "k0")
    assert chosen(TrayRequest(2, one_domain=True, tenant="b"), [tight, kept]) == ("t0", "t1")
    room = DomainFreeTrays("small", (FreeTray("s0", owner="a"),), members=0)
    assert chosen(TrayRequest(2, one_domain=False, tenant="a"), [tight, room]) == ("t0", "t1")


def test_a_refusal_counts_what_is_reserved_for_others_and_names_nobody() -> None:
    trays = (FreeTray("t0"), FreeTray("t1", owner="b"), FreeTray("t2", "sick", owner="b"))
    with pytest.raises(Refused) as refused:
        choose_trays(TrayRequest(2, one_domain=False, tenant="a"), [DomainFreeTrays("d", trays, 0)])
    assert refused.value.reason == (
        "Insufficient machines available: requested 2, available 1; 2 more machines are not available now"
    )
    assert refused.value.nearest_fix is None
