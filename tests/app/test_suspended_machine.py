"""A machine that was suspended: what is old is shown as old after the resume."""

import asyncio
import time

import pytest

from rackloom.app.config import load_config
from rackloom.app.process import elapsed_seconds
from rackloom.app.site import parts


@pytest.fixture
def suspend(monkeypatch: pytest.MonkeyPatch):
    """Let seconds pass that only a clock counts which runs while the machine is suspended."""
    slept = 0.0
    read = time.clock_gettime

    def suspended(seconds):
        nonlocal slept
        slept += seconds

    monkeypatch.setattr(
        time, "clock_gettime", lambda clock: read(clock) + slept * (clock == time.CLOCK_BOOTTIME)
    )
    return suspended


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has this clock")
def test_the_time_of_a_suspension_counts(suspend):
    before = elapsed_seconds()
    suspend(3600.0)
    assert 3600.0 <= elapsed_seconds() - before < 3700.0


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux has this clock")
def test_the_clock_of_a_site_counts_a_suspension(ground, suspend):
    async def scenario():
        async with parts.assemble(load_config(ground.config())) as opened:
            before = opened.clock()
            suspend(3600.0)
            assert 3600.0 <= opened.clock() - before < 3700.0
            assert opened.reconciler._elapsed is elapsed_seconds

    asyncio.run(scenario())
