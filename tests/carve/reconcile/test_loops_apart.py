"""Loops that were begun together spread over the interval, each always at the same place in it."""

from types import SimpleNamespace
from typing import Any

from rackloom.carve.reconcile.loop import EndpointLoop

INTERVAL = 60.0


def _rests(endpoints: int) -> list[float]:
    works: list[Any] = [SimpleNamespace(endpoint=SimpleNamespace(id=f"e{n}")) for n in range(endpoints)]
    return sorted(EndpointLoop(work, INTERVAL)._first_rest() for work in works)


def test_a_thousand_endpoints_fill_the_interval_evenly() -> None:
    rests = _rests(1000)
    assert 0.0 <= rests[0] <= rests[-1] <= INTERVAL
    tenths = [sum(INTERVAL * n / 10 <= rest < INTERVAL * (n + 1) / 10 for rest in rests) for n in range(10)]
    assert max(tenths) < 2 * min(tenths)


def test_a_restart_puts_each_at_its_place_again() -> None:
    assert _rests(20) == _rests(20)
