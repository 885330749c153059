"""Refused requests are counted, each in one emission, and a flood of them causes few."""

from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.refusal_log import (
    BURST,
    GROUP_SECONDS,
    MAX_EMISSIONS,
    MAX_FLOWS,
    MAX_GROUPS,
    TOKEN_SECONDS,
    RefusalLog,
)


def flush(log: RefusalLog[str], now: float, **how: bool) -> list[tuple[object, int]]:
    due = log.due(now, **how)
    log.written(due, now)
    return [(emission.key, emission.requests) for emission in due]


def test_the_first_is_emitted_at_once_and_the_rest_by_the_minute() -> None:
    log: RefusalLog[str] = RefusalLog()
    log.add("acme", "quota", "first", 0.0)
    assert flush(log, 1.0) == [("quota", 1)]
    for second in range(2, 50):
        log.add("acme", "quota", "another", float(second))
        assert flush(log, float(second)) == []
    assert flush(log, 1.0 + GROUP_SECONDS) == [("quota", 48)]
    assert flush(log, 1000.0) == []


def test_what_could_not_be_written_stays_and_is_not_counted_twice() -> None:
    log: RefusalLog[str] = RefusalLog()
    log.add("acme", "quota", "first", 0.0)
    lost = log.due(1.0)
    assert len(lost) == 1
    (again,) = log.due(2.0)
    log.add("acme", "quota", "meanwhile", 2.5)
    log.written([again], 3.0)
    assert flush(log, 3.0 + GROUP_SECONDS) == [("quota", 1)]


def test_more_kinds_than_are_listed_are_left_out_with_their_number() -> None:
    log: RefusalLog[str] = RefusalLog()
    for number in range(MAX_GROUPS + 100):
        log.add("acme", f"kind {number}", "", 0.0)
    log.add("quiet", "own", "", 0.0)
    found = dict(flush(log, 1.0))
    assert found[None] == 100
    assert found["own"] == 1
    assert len(found) == MAX_GROUPS + 2


def test_a_flood_for_a_day_causes_few_emissions_and_loses_no_request() -> None:
    log: RefusalLog[str] = RefusalLog()
    emitted: list[tuple[object, int]] = []
    for number in range(24 * 60 * 6):
        now = 10.0 * number
        for kind in range(50):
            log.add("acme", f"{number % 7}-{kind}", "", now)
        emitted += flush(log, now)
    assert len(emitted) <= BURST + 2 * 24 * 60 + 1
    emitted += flush(log, 24 * 3600.0, all_of_it=True)
    assert sum(requests for _, requests in emitted) == 24 * 60 * 6 * 50


def test_the_memory_and_a_transaction_are_bounded() -> None:
    log: RefusalLog[str] = RefusalLog()
    for number in range(MAX_FLOWS + 500):
        log.add(f"org {number}", "kind", "", float(number))
    assert len(log._flows) == MAX_FLOWS + 1
    assert len(log.due(0.0)) == MAX_EMISSIONS


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.floats(0, 100)), max_size=60))
def test_each_request_is_counted_once(requests: list[tuple[str, str, float]]) -> None:
    log: RefusalLog[str] = RefusalLog()
    now, counted = 0.0, 0
    for flow, key, pause in requests:
        now += pause
        log.add(flow, key, "", now)
        counted += sum(number for _, number in flush(log, now))
    counted += sum(number for _, number in flush(log, now, all_of_it=True))
    assert counted == len(requests)


def test_idle_flows_are_forgotten() -> None:
    log: RefusalLog[str] = RefusalLog()
    log.add("acme", "kind", "", 0.0)
    flush(log, 1.0)
    later = 2 * BURST * TOKEN_SECONDS
    log.due(later)
    log.written([], later)
    assert log._flows == {}
