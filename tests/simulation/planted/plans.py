"""Loads to simulate while a bug is planted, so that it shows soon."""

from collections.abc import Callable

import pytest
from tests.simulation.carving.injector import CONFLICT_FAULT_WEIGHTS, FAULT_WEIGHTS
from tests.simulation.carving.run import LoadPlan as SimPlan

Bug = Callable[[pytest.MonkeyPatch], None]
"""Changes production code."""

CALM = SimPlan(pause=None, seconds=400, think=12)
BUSY = SimPlan(pause=None, seconds=300, think=3, patience=4.0)
PROMPT = SimPlan(pause=None, seconds=300, think=12, patience=8.0)
LYING = SimPlan(seconds=400, think=12, pause=30, kinds=CONFLICT_FAULT_WEIGHTS)
TWICE = SimPlan(seconds=400, think=12, pause=30, kinds={"listed-twice": 1})
CRAMPED = SimPlan(pause=None, seconds=400, think=6, max_partitions=1)
WATCHFUL = SimPlan(pause=None, seconds=400, think=6, operator=8)
DARK = SimPlan(pause=None, seconds=300, think=12, patience=2.0, dark_rack=True)


def only(*kinds: str, pause: float = 15, think: float = 12) -> SimPlan:
    """With faults of these kinds alone."""
    return SimPlan(seconds=400, think=think, pause=pause, kinds={kind: FAULT_WEIGHTS[kind] for kind in kinds})
