"""Work under a lease, in virtual time: when it is cancelled, and which timers remain."""

import asyncio
import math

import pytest

from rackloom.carve.reconcile.domain_pass import LeaseGuard
from rackloom.carve.reconcile.records import Lease
from rackloom.lab.virtual.event_loop import Deadlock, run_simulation

LEASE = Lease("endpoint", "me", 1)
for_ever = asyncio.Event


def test_work_is_cancelled_at_the_deadline_and_not_before():
    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(for_ever().wait())
        guard = LeaseGuard(LEASE, 5.0)
        guard.protect(task)
        await asyncio.sleep(4.9)
        assert not guard.has_ended()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loop.time() == 5.0
        assert guard.has_ended(), "from the instant of the deadline on"

    run_simulation(0, main)


def test_only_the_last_of_several_deadlines_counts():
    async def main():
        task = asyncio.create_task(for_ever().wait())
        guard = LeaseGuard(LEASE, 5.0)
        guard.protect(task)
        for deadline in (6.0, math.inf, 7.0, math.inf, 8.0):
            guard.extend(deadline)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.get_running_loop().time() == 8.0

    run_simulation(0, main)


@pytest.mark.parametrize(("deadline", "cancelled_at"), [(5.0, 5.0), (1.0, 2.0)])
def test_a_deadline_that_is_moved_later_counts_from_the_start(deadline, cancelled_at):
    async def main():
        task = asyncio.create_task(for_ever().wait())
        guard = LeaseGuard(LEASE, 9.0)
        guard.protect(task)
        await asyncio.sleep(2.0)
        guard.extend(deadline)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.get_running_loop().time() == cancelled_at

    run_simulation(0, main)


def test_a_deadline_may_be_moved_before_there_is_any_work():
    async def main():
        guard = LeaseGuard(LEASE, 5.0)
        guard.extend(3.0)
        task = asyncio.create_task(for_ever().wait())
        guard.protect(task)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.get_running_loop().time() == 3.0

    run_simulation(0, main)


@pytest.mark.parametrize("deadline", [5.0, math.inf])
def test_nothing_stays_scheduled_for_work_that_has_ended(deadline):
    loops = []

    async def main():
        loops.append(asyncio.get_running_loop())
        task = asyncio.create_task(asyncio.sleep(1.0, "finished"))
        guard = LeaseGuard(LEASE, deadline)
        guard.protect(task)
        assert guard.lease == LEASE
        assert await task == "finished"
        await for_ever().wait()

    with pytest.raises(Deadlock):
        run_simulation(0, main)
    assert loops[0].time() == 1.0, "there was no later timer to wait for"
