"""The life of a lease, compared with RFC 2131 (4.4), under any answers at any times."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz import tries

from rackloom.core.nics.lease import (
    LOST_STATES,
    REPEAT_SECONDS,
    REQUEST_ACTIONS,
    AddressState,
    DhcpAnswer,
    DhcpGrant,
    DhcpLease,
    LeaseAction,
    LeaseState,
    RequestFailure,
    advance_lease,
    new_lease,
    next_due_at,
    restored_lease,
)

MAC = "02:00:00:00:00:09"
ADDRESS = "10.9.0.77/24"
WITH = (AddressState.LOOSE, AddressState.SET)


def grant(seconds, address=ADDRESS, t1=0.5, t2=0.875):
    return DhcpGrant(
        address=address,
        server="10.9.0.1",
        server_mac="02:00:00:00:00:01",
        seconds=seconds,
        renew_after=seconds * t1,
        rebind_after=seconds * t2,
    )


LEASED = st.sampled_from([0.5, 8.0, 100.0, 3600.0, 86400.0, 2.0**32 - 1])
GRANTS = st.builds(grant, LEASED, st.sampled_from([ADDRESS, ADDRESS, "10.9.0.66/24", "10.9.0.77/16"]))
ANSWERS = GRANTS | st.sampled_from(list(RequestFailure))
"""An answer to any request."""


@st.composite
def lives(draw):
    """Leases with their events: the time that passed, the state of the interface, and the answer."""
    lease = new_lease(grant(draw(LEASED)), MAC, 1000.0)
    now, happened = 1000.0, []
    for _ in range(draw(st.integers(0, 12))):
        fraction = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5]))
        now += max(0.0, fraction * (next_due_at(lease) - now)) if next_due_at(lease) < float("inf") else 60.0
        if draw(st.integers(0, 9)) == 0:
            lease = restored_lease(lease)
        seat, answer = draw(st.sampled_from(list(AddressState))), None
        if draw(st.booleans()):
            asked_at = draw(st.sampled_from([lease.asked_at, lease.asked_at, lease.since - 1.0]))
            answer = DhcpAnswer(asked_at=asked_at, result=draw(ANSWERS))
        after = advance_lease(lease, now, seat, answer)
        happened.append((lease, now, seat, answer, after))
        lease = after.lease
    return happened


def asks(after):
    return [do for do in after.todo if do in REQUEST_ACTIONS]


def is_for_us(lease, answer):
    """Whether an answer prolongs the lease."""
    return (
        answer is not None
        and isinstance(answer.result, DhcpGrant)
        and answer.result.address.startswith("10.9.0.77/")
        and answer.asked_at >= lease.since
        and lease.state is not LeaseState.REFUSED
    )


@settings(max_examples=tries(300))
@given(lives())
def test_no_address_stays_beyond_its_lease_and_none_is_taken_before(life):
    for lease, now, seat, answer, after in life:
        end = answer.asked_at + answer.result.seconds if is_for_us(lease, answer) else lease.until
        assert after.lease.until == end
        if now >= end:
            assert after.lease.state in LOST_STATES
        elif is_for_us(lease, answer):
            assert after.lease.state is LeaseState.HELD
        elif after.lease.state is LeaseState.EXPIRED:
            assert lease.state is LeaseState.EXPIRED
        is_lost = after.lease.state in LOST_STATES
        assert (LeaseAction.REMOVE in after.todo) == (is_lost and seat in WITH)
        assert (LeaseAction.SET in after.todo) == (
            not is_lost and seat in (AddressState.BARE, AddressState.LOOSE)
        )


@pytest.mark.slow
@settings(max_examples=tries(300))
@given(lives())
def test_each_state_asks_in_its_own_way(life):
    for _, now, seat, _, after in life:
        for way in asks(after):
            lease = after.lease
            assert lease.asked_at == now
            assert lease.state is not LeaseState.REFUSED
            if way is LeaseAction.RENEW:
                assert seat in WITH
                assert lease.renew_at <= now < lease.rebind_at
            if way is LeaseAction.REBIND:
                assert seat in WITH
                assert lease.rebind_at <= now < lease.until
        assert len(asks(after)) <= 1


@pytest.mark.slow
@settings(max_examples=tries(300))
@given(lives())
def test_every_change_is_told_once_and_no_is_for_good(life):
    for lease, _, _, _, after in life:
        assert (LeaseAction.REPORT in after.todo) == (after.lease.state is not lease.state)
        if lease.state is LeaseState.REFUSED:
            assert after.lease.state is LeaseState.REFUSED
            assert not asks(after)
        assert after.lease.grant.address == lease.grant.address
        assert after.lease.mac == MAC


@pytest.mark.slow
@settings(max_examples=tries(300))
@given(lives(), st.floats(0, 1))
def test_nothing_is_due_before_it_is_due_and_everything_can_be_written_down(life, fraction):
    for _, now, seat, _, after in life:
        due = min(next_due_at(after.lease), now + 10_000.0)
        early = now + (due - now) * fraction
        if now <= early < due:
            again = advance_lease(after.lease, early, seat)
            assert again.lease == after.lease
            assert set(again.todo) <= {LeaseAction.REMOVE, LeaseAction.SET}
        assert msgspec.json.decode(msgspec.json.encode(after.lease), type=DhcpLease) == after.lease


@pytest.mark.parametrize("seconds", [8.0, 100.0, 3600.0, 86400.0])
def test_a_silent_network_is_asked_seldom_and_to_the_end(seconds):
    lease, now, asked, reported = new_lease(grant(seconds), MAC, 0.0), 0.0, [], []
    while lease.state is not LeaseState.EXPIRED:
        now = next_due_at(lease)
        after = advance_lease(lease, now, AddressState.SET)
        asked += [(way, now) for way in asks(after)]
        reported += [after.lease.state] if LeaseAction.REPORT in after.todo else []
        lease = after.lease
        heard = advance_lease(
            lease, now, AddressState.SET, DhcpAnswer(asked_at=lease.asked_at, result=RequestFailure.NOTHING)
        )
        reported += [heard.lease.state] if LeaseAction.REPORT in heard.todo else []
        lease = heard.lease
    assert reported == [LeaseState.SILENT, LeaseState.EXPIRED]
    assert lease.silent_since == asked[0][1] == seconds * 0.5
    assert now == seconds
    ways = [way for way, _ in asked]
    assert ways == sorted(ways, key=[LeaseAction.RENEW, LeaseAction.REBIND, LeaseAction.REBOOT].index)
    assert set(ways) == REQUEST_ACTIONS
    assert len(asked) <= 30
    for (way, at), (later, then) in itertools.pairwise(asked):
        assert way is not later or then - at >= REPEAT_SECONDS
    # A lost address is requested again: seldom, and as after a reboot.
    (way,) = asks(advance_lease(lease, next_due_at(lease), AddressState.BARE))
    assert (way, next_due_at(lease) - now) == (LeaseAction.REBOOT, REPEAT_SECONDS)


def test_a_new_life_of_the_plugin_asks_at_once_and_goes_on_without_an_answer():
    lease = restored_lease(new_lease(grant(3600.0), MAC, 0.0))
    after = advance_lease(lease, 100.0, AddressState.SET)
    assert after.todo == (LeaseAction.REBOOT,)
    heard = advance_lease(
        after.lease, 105.0, AddressState.SET, DhcpAnswer(asked_at=100.0, result=RequestFailure.NOTHING)
    )
    assert heard.todo == (LeaseAction.REPORT,)
    assert heard.lease.state is LeaseState.SILENT
    assert next_due_at(heard.lease) == 1800.0
    refused = advance_lease(
        after.lease, 105.0, AddressState.SET, DhcpAnswer(asked_at=100.0, result=RequestFailure.NO)
    )
    assert refused.todo == (LeaseAction.REMOVE, LeaseAction.REPORT)


def test_a_question_without_answer_counts_although_another_was_asked_meanwhile():
    first = advance_lease(new_lease(grant(8.0), MAC, 0.0), 4.0, AddressState.SET)
    second = advance_lease(first.lease, 7.0, AddressState.SET)
    heard = advance_lease(
        second.lease, 7.5, AddressState.SET, DhcpAnswer(asked_at=4.0, result=RequestFailure.NOTHING)
    )
    assert (heard.todo, heard.lease.silent_since) == ((LeaseAction.REPORT,), 4.0)
    granted = advance_lease(heard.lease, 7.6, AddressState.SET, DhcpAnswer(asked_at=7.0, result=grant(8.0)))
    late = advance_lease(
        granted.lease, 7.7, AddressState.SET, DhcpAnswer(asked_at=4.0, result=RequestFailure.NO)
    )
    assert (late.todo, late.lease) == ((), granted.lease)


def test_an_address_that_was_lost_comes_back_with_its_lease():
    lost = advance_lease(new_lease(grant(100.0), MAC, 0.0), 100.0, AddressState.SET)
    assert lost.todo == (LeaseAction.REMOVE, LeaseAction.REPORT, LeaseAction.REBOOT)
    back = advance_lease(
        lost.lease, 101.0, AddressState.BARE, DhcpAnswer(asked_at=100.0, result=grant(100.0))
    )
    assert back.todo == (LeaseAction.SET, LeaseAction.REPORT)
    assert (back.lease.state, back.lease.until) == (LeaseState.HELD, 200.0)
