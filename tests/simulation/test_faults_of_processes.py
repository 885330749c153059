"""Runs in which processes stop for longer than a lease, and in which the disk of the records fails."""

import pytest
from tests.simulation.carving.run import LoadPlan, simulate

STOPS = {"stop": 1, "stop-soon": 1, "stop-recorded": 1}
DISK = {"disk-full": 1, "disk-error": 1}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    "kinds", [STOPS, DISK, STOPS | DISK | {"kill-soon": 1}], ids=["stops", "disk", "all"]
)
def test_every_promise_is_kept(kinds: dict[str, int], replicas: int) -> None:
    plan = LoadPlan(seconds=300, think=6, pause=15, kinds=kinds, replicas=replicas)
    for seed in range(2):
        result = simulate(seed, plan)
        assert result.broken is None, "\n".join(result.trace[-40:])
        assert set(result.faults) == set(kinds)


@pytest.mark.slow
def test_requests_are_answered_and_refused_while_the_disk_is_full() -> None:
    """Writes are answered 503, and those writes have no effect."""
    result = simulate(1, LoadPlan(seconds=300, think=3, pause=20, kinds={"disk-full": 1}))
    assert result.broken is None
    answers = [line.split() for line in result.trace if " rest " in line]
    assert {words[3] for words in answers if words[5] == "503"} >= {"POST", "DELETE"}
    assert any(words[3] == "GET" and words[5] == "200" for words in answers)
