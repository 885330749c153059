"""Loops that were begun together spread over the interval, each always at the same place in it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

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


class _Failing:
    """A pass that fails so often, and ends the loop after that."""

    def __init__(self, failures: int) -> None:
        self.endpoint = SimpleNamespace(id="e")
        self.left = failures

    async def run(self) -> bool:
        self.left -= 1
        if self.left < 0:
            raise asyncio.CancelledError
        return False


def test_a_failed_pass_is_tried_again_after_half_a_second_and_then_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def wait(_loop: EndpointLoop, seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(EndpointLoop, "_wait", wait)
    work: Any = _Failing(9)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(EndpointLoop(work, INTERVAL)._work())
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
