"""The whole carve plane in virtual time: judged seeds, reproducible traces, and every point of death."""

import gc
import os
import subprocess
import sys
from functools import cache

import pytest
from tests.simulation.carving.injector import CONFLICT_FAULT_WEIGHTS, FAULT_WEIGHTS
from tests.simulation.carving.run import LoadPlan, RunResult, count_crash_points, run_script, simulate

SHORT = LoadPlan(seconds=400)

DIGEST = """
from tests.simulation.carving.run import LoadPlan, simulate
print(simulate(11, LoadPlan(seconds=200)).digest, simulate(11, LoadPlan(seconds=200, replicas=2)).digest)
"""


@cache
def played(seed: int) -> RunResult:
    """The first run of a seed: a trace is compared with that of another run."""
    return simulate(seed, SHORT)


@pytest.mark.parametrize(
    "seed", [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(15)]
)
def test_every_promise_is_kept(seed: int) -> None:
    result = played(seed)
    assert result.broken is None, "\n".join(result.trace[-40:])
    assert result.checks > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_processes_that_share_the_records_keep_them_too(seed: int) -> None:
    result = simulate(seed, LoadPlan(seconds=300, replicas=2))
    assert result.broken is None, "\n".join(result.trace[-40:])
    assert result.lives >= 2


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 2])
def test_a_domain_is_never_asked_for_more_partitions_than_it_holds(room: int) -> None:
    for seed in range(3):
        assert simulate(seed, LoadPlan(seconds=300, think=8, max_partitions=room)).broken is None


@pytest.mark.slow
def test_faults_of_every_kind_happen() -> None:
    kinds = {kind for seed in range(6) for kind in simulate(seed, LoadPlan(seconds=100, pause=1)).faults}
    assert kinds == set(FAULT_WEIGHTS)


@pytest.mark.slow
def test_a_seed_is_a_trace_byte_for_byte() -> None:
    first, second = played(5), simulate(5, SHORT)
    assert first.trace == second.trace
    assert first.trace != played(6).trace


@pytest.mark.slow
def test_a_trace_does_not_depend_on_the_process_that_made_it() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.slow
def test_a_trace_does_not_depend_on_when_python_collects_garbage() -> None:
    """A collected asynchronous generator schedules its end. Seed 2 has one that shows in the trace."""
    thresholds = gc.get_threshold()
    digests = set()
    try:
        for threshold in (20, 10_000_000):
            gc.set_threshold(threshold)
            digests.add(simulate(2, LoadPlan()).digest)
    finally:
        gc.set_threshold(*thresholds)
    assert len(digests) == 1


@pytest.mark.slow
def test_a_fault_in_one_domain_delays_no_other() -> None:
    for seed in range(3):
        assert simulate(seed, LoadPlan(pause=None, seconds=200, patience=2.0, dark_rack=True)).broken is None


STRIDE = 23
"""`run.py --deaths` tries every point. This tries some, which include all kinds of point."""


@pytest.mark.slow
def test_death_at_a_write_or_call_loses_nothing_that_was_acknowledged() -> None:
    points = count_crash_points()
    assert points > 60
    for point in range(1, points + 1, STRIDE):
        result = run_script(point)
        assert result.broken is None, f"killed at point {point} of {points}"
        assert result.lives == 2


@pytest.mark.slow
def test_a_domain_may_come_back_under_another_uuid() -> None:
    plan = LoadPlan(seconds=400, pause=60, kinds={"new-domain-uuid": 1})
    assert not any(simulate(seed, plan).broken for seed in range(6))


@pytest.mark.slow
def test_a_second_controller_that_lies_is_neither_believed_nor_obeyed() -> None:
    plan = LoadPlan(seconds=400, pause=30, kinds=CONFLICT_FAULT_WEIGHTS)
    assert not any(simulate(seed, plan).broken for seed in range(4))


@pytest.mark.slow
def test_hardware_that_two_domains_list_is_left_alone() -> None:
    plan = LoadPlan(seconds=400, pause=30, kinds={"listed-twice": 1})
    assert not any(simulate(seed, plan).broken for seed in range(3))


@pytest.mark.slow
def test_a_list_may_omit_a_partition_whose_trays_are_away() -> None:
    plan = LoadPlan(seconds=600, pause=6, kinds={"list-omits": 3, "tray-away": 1, "tray-swapped": 1})
    assert not any(simulate(seed, plan).broken for seed in range(6))
