"""Repeating an attempt, in virtual time."""

import asyncio
from itertools import pairwise

import pytest

from rackloom.claim.kube.api import KubeError
from rackloom.claim.node.requests import NO_ATTEMPT_ENDED, BackgroundRetries, persist
from rackloom.core.cluster.claims import ClaimRef
from rackloom.errors import Refused, Retry
from rackloom.lab.virtual.event_loop import run_simulation


def now():
    return asyncio.get_running_loop().time()


class Attempts:
    """Fails in the given ways, one after another, and then succeeds."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.times = []

    async def __call__(self):
        self.times.append(now())
        if self.failures:
            raise self.failures.pop(0)
        return "done"


def not_yet(after=0.0):
    return Retry("not yet", after=after)


def test_pauses_double_up_to_three_seconds():
    async def story():
        attempts = Attempts(*(not_yet() for _ in range(7)))
        assert await persist(attempts, deadline=45.0) == "done"
        return [round(late - early, 3) for early, late in pairwise(attempts.times)]

    assert run_simulation(1, story) == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_a_reason_may_ask_for_a_longer_pause():
    async def story():
        attempts = Attempts(not_yet(after=10.0))
        await persist(attempts, deadline=45.0)
        return attempts.times

    assert run_simulation(1, story) == [0.0, pytest.approx(10.0)]


def test_what_is_refused_is_not_repeated():
    async def story():
        attempts = Attempts(not_yet(), Refused("never"))
        with pytest.raises(Refused, match="never"):
            await persist(attempts, deadline=45.0)
        assert len(attempts.times) == 2

    run_simulation(1, story)


def test_at_the_deadline_the_last_reason_is_told():
    async def story():
        attempts = Attempts(Retry("first", after=0.0), *(Retry("last", after=0.0) for _ in range(99)))
        with pytest.raises(Retry, match="last"):
            await persist(attempts, deadline=44.0)
        assert now() == pytest.approx(44.0)

    run_simulation(1, story)


def test_an_attempt_that_hangs_is_cut_off():
    async def hang():
        await asyncio.Event().wait()

    async def story():
        with pytest.raises(Retry, match=NO_ATTEMPT_ENDED):
            await persist(hang, deadline=5.0)

    run_simulation(1, story)


def test_a_timeout_of_the_attempt_itself_is_not_taken_for_the_deadline():
    async def story():
        with pytest.raises(TimeoutError, match="its own"):
            await persist(Attempts(TimeoutError("its own")), deadline=5.0)

    run_simulation(1, story)


def test_a_change_ends_a_pause_and_a_broken_watch_does_not_matter():
    async def changes():
        await asyncio.sleep(1.0)
        yield
        raise KubeError(500, "InternalError", "the watch broke")

    async def story():
        attempts = Attempts(not_yet(after=30.0), not_yet(after=2.0))
        await persist(attempts, deadline=45.0, changes=changes())
        return attempts.times

    assert run_simulation(1, story) == [0.0, pytest.approx(1.0), pytest.approx(3.0)]


def test_changes_are_not_listened_to_before_they_are_needed():
    async def changes():
        raise AssertionError("nobody waits")
        yield

    async def story():
        assert await persist(Attempts(), deadline=5.0, changes=changes()) == "done"

    run_simulation(1, story)


def test_a_claim_that_is_begun_anew_is_not_taken_for_refused():
    async def story():
        times = []

        async def work(ref):
            times.append(now())

        retries = BackgroundRetries(work)
        ref = ClaimRef(namespace="default", name="c", uid="u")
        retries.begin(ref, refused=True)
        retries.begin(ref)
        await asyncio.sleep(1.0)
        await retries.close()
        return times

    assert run_simulation(1, story) == [0.0]
