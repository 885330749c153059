"""The life of a lease, against what RFC 2131 (4.4) says of it, under any answers at any times."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz import tries

from rackloom.claim.node.nic.lease import (
    ASKS,
    LEAST_SECONDS,
    LOST,
    Answer,
    Do,
    Grant,
    Lease,
    Outlook,
    Said,
    Seat,
    began,
    due_at,
    step,
    woken,
)

MAC = "02:00:00:00:00:09"
ADDRESS = "10.9.0.77/24"
WITH = (Seat.LOOSE, Seat.SET)


def grant(seconds, address=ADDRESS, t1=0.5, t2=0.875):
    return Grant(
        address=address,
        server="10.9.0.1",
        server_mac="02:00:00:00:00:01",
        seconds=seconds,
        renew_after=seconds * t1,
        rebind_after=seconds * t2,
    )


LEASED = st.sampled_from([0.5, 8.0, 100.0, 3600.0, 86400.0, 2.0**32 - 1])
GRANTS = st.builds(grant, LEASED, st.sampled_from([ADDRESS, ADDRESS, "10.9.0.66/24", "10.9.0.77/16"]))
ANSWERS = GRANTS | st.sampled_from(list(Said))
"""An answer, to whichever request."""


@st.composite
def lives(draw):
    """Leases with what happened to each: how much time passed, where its interface was, what was heard."""
    lease = began(grant(draw(LEASED)), MAC, 1000.0)
    now, happened = 1000.0, []
    for _ in range(draw(st.integers(0, 12))):
        fraction = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5]))
        now += max(0.0, fraction * (due_at(lease) - now)) if due_at(lease) < float("inf") else 60.0
        if draw(st.integers(0, 9)) == 0:
            lease = woken(lease)
        seat, answer = draw(st.sampled_from(list(Seat))), None
        if draw(st.booleans()):
            asked_at = draw(st.sampled_from([lease.asked_at, lease.asked_at, lease.since - 1.0]))
            answer = Answer(asked_at=asked_at, said=draw(ANSWERS))
        after = step(lease, now, seat, answer)
        happened.append((lease, now, seat, answer, after))
        lease = after.lease
    return happened


def asks(after):
    return [do for do in after.todo if do in ASKS]


def is_for_us(lease, answer):
    """Whether an answer prolongs the lease."""
    return (
        answer is not None
        and isinstance(answer.said, Grant)
        and answer.said.address.startswith("10.9.0.77/")
        and answer.asked_at >= lease.since
        and lease.outlook is not Outlook.REFUSED
    )


@settings(max_examples=tries(300))
@given(lives())
def test_no_address_stays_beyond_its_lease_and_none_is_taken_before(life):
    for lease, now, seat, answer, after in life:
        end = answer.asked_at + answer.said.seconds if is_for_us(lease, answer) else lease.until
        assert after.lease.until == end
        if now >= end:
            assert after.lease.outlook in LOST
        elif is_for_us(lease, answer):
            assert after.lease.outlook is Outlook.HELD
        elif after.lease.outlook is Outlook.EXPIRED:
            assert lease.outlook is Outlook.EXPIRED
        is_lost = after.lease.outlook in LOST
        assert (Do.REMOVE in after.todo) == (is_lost and seat in WITH)
        assert (Do.SET in after.todo) == (not is_lost and seat in (Seat.BARE, Seat.LOOSE))


@settings(max_examples=tries(300))
@given(lives())
def test_each_state_asks_in_its_own_way(life):
    for _, now, seat, _, after in life:
        for way in asks(after):
            lease = after.lease
            assert lease.asked_at == now
            assert lease.outlook is not Outlook.REFUSED
            if way is Do.RENEW:
                assert seat in WITH
                assert lease.renew_at <= now < lease.rebind_at
            if way is Do.REBIND:
                assert seat in WITH
                assert lease.rebind_at <= now < lease.until
        assert len(asks(after)) <= 1


@settings(max_examples=tries(300))
@given(lives())
def test_every_change_is_told_once_and_no_is_for_good(life):
    for lease, _, _, _, after in life:
        assert (Do.TELL in after.todo) == (after.lease.outlook is not lease.outlook)
        if lease.outlook is Outlook.REFUSED:
            assert after.lease.outlook is Outlook.REFUSED
            assert not asks(after)
        assert after.lease.grant.address == lease.grant.address
        assert after.lease.mac == MAC


@settings(max_examples=tries(300))
@given(lives(), st.floats(0, 1))
def test_nothing_is_due_before_it_is_due_and_everything_can_be_written_down(life, fraction):
    for _, now, seat, _, after in life:
        due = min(due_at(after.lease), now + 10_000.0)
        early = now + (due - now) * fraction
        if now <= early < due:
            again = step(after.lease, early, seat)
            assert again.lease == after.lease
            assert set(again.todo) <= {Do.REMOVE, Do.SET}
        assert msgspec.json.decode(msgspec.json.encode(after.lease), type=Lease) == after.lease


@pytest.mark.parametrize("seconds", [8.0, 100.0, 3600.0, 86400.0])
def test_a_silent_network_is_asked_seldom_and_to_the_end(seconds):
    lease, now, asked, told = began(grant(seconds), MAC, 0.0), 0.0, [], []
    while lease.outlook is not Outlook.EXPIRED:
        now = due_at(lease)
        after = step(lease, now, Seat.SET)
        asked += [(way, now) for way in asks(after)]
        told += [after.lease.outlook] if Do.TELL in after.todo else []
        lease = after.lease
        heard = step(lease, now, Seat.SET, Answer(asked_at=lease.asked_at, said=Said.NOTHING))
        told += [heard.lease.outlook] if Do.TELL in heard.todo else []
        lease = heard.lease
    assert told == [Outlook.SILENT, Outlook.EXPIRED]
    assert lease.silent_since == asked[0][1] == seconds * 0.5
    assert now == seconds
    ways = [way for way, _ in asked]
    assert ways == sorted(ways, key=[Do.RENEW, Do.REBIND, Do.REBOOT].index)
    assert set(ways) == ASKS
    assert len(asked) <= 30
    for (way, at), (later, then) in itertools.pairwise(asked):
        assert way is not later or then - at >= LEAST_SECONDS
    # What is lost is asked for again: seldom, and as after a reboot.
    (way,) = asks(step(lease, due_at(lease), Seat.BARE))
    assert (way, due_at(lease) - now) == (Do.REBOOT, LEAST_SECONDS)


def test_a_new_life_of_the_plugin_asks_at_once_and_goes_on_without_an_answer():
    lease = woken(began(grant(3600.0), MAC, 0.0))
    after = step(lease, 100.0, Seat.SET)
    assert after.todo == (Do.REBOOT,)
    heard = step(after.lease, 105.0, Seat.SET, Answer(asked_at=100.0, said=Said.NOTHING))
    assert heard.todo == (Do.TELL,)
    assert heard.lease.outlook is Outlook.SILENT
    assert due_at(heard.lease) == 1800.0
    refused = step(after.lease, 105.0, Seat.SET, Answer(asked_at=100.0, said=Said.NO))
    assert refused.todo == (Do.REMOVE, Do.TELL)


def test_a_question_without_answer_counts_although_another_was_asked_meanwhile():
    first = step(began(grant(8.0), MAC, 0.0), 4.0, Seat.SET)
    second = step(first.lease, 7.0, Seat.SET)
    heard = step(second.lease, 7.5, Seat.SET, Answer(asked_at=4.0, said=Said.NOTHING))
    assert (heard.todo, heard.lease.silent_since) == ((Do.TELL,), 4.0)
    granted = step(heard.lease, 7.6, Seat.SET, Answer(asked_at=7.0, said=grant(8.0)))
    late = step(granted.lease, 7.7, Seat.SET, Answer(asked_at=4.0, said=Said.NO))
    assert (late.todo, late.lease) == ((), granted.lease)


def test_an_address_that_was_lost_comes_back_with_its_lease():
    lost = step(began(grant(100.0), MAC, 0.0), 100.0, Seat.SET)
    assert lost.todo == (Do.REMOVE, Do.TELL, Do.REBOOT)
    back = step(lost.lease, 101.0, Seat.BARE, Answer(asked_at=100.0, said=grant(100.0)))
    assert back.todo == (Do.SET, Do.TELL)
    assert (back.lease.outlook, back.lease.until) == (Outlook.HELD, 200.0)
