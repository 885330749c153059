"""The benchmark of the transfer runs and prints the promised figures. Its reader judges the speed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.prove.transfer.installation import nixl_missing_reason

TRANSFER = Path(__file__).parents[2] / "benchmarks" / "transfer.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transfer_benchmark", TRANSFER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK = loaded()


@pytest.mark.parametrize(("count", "low", "high"), [(6, 0, 5), (7, 0, 6), (9, 1, 7), (20, 5, 14)])
def test_the_interval_of_a_median_is_that_of_the_tables(count: int, low: int, high: int) -> None:
    assert BENCHMARK.median_interval(list(range(count))) == (low, high)


def test_five_numbers_cannot_give_95_percent() -> None:
    with pytest.raises(AssertionError, match="cannot give 95%"):
        BENCHMARK.median_interval([1.0] * 5)


@given(st.lists(st.floats(0.1, 10), min_size=7, max_size=30))
def test_the_median_is_within_its_interval(numbers: list[float]) -> None:
    low, high = BENCHMARK.median_interval(numbers)
    assert low <= sorted(numbers)[len(numbers) // 2] <= high


def test_a_contended_round_is_discarded_and_counted() -> None:
    """If one measurement is suspect, its whole round is discarded."""
    turns = iter([None, "pushed aside", None])
    ways = {"ours": lambda: (2.0, next(turns)), "other": lambda: (1.0, None)}
    BENCHMARK.FOREIGN = float("inf")  # whatever else this machine does
    kept, discarded = BENCHMARK.rounds(ways, wanted=2, most=9)
    assert kept == [{"ours": 2.0, "other": 1.0}] * 2
    assert discarded == ["pushed aside"]


def test_the_overall_rate_of_ucx_perftest_is_read() -> None:
    output = "[thread 0]  20  1.0\nFinal:     20      0.1  9.9  8.8   4000.00  2000.00   61   30\n"
    assert BENCHMARK.overall_rate(output) == pytest.approx(2000 * (1 << 20) / 1e9)


def test_samples_are_counted_by_place() -> None:
    report = """# Samples: 12  of event 'cpu-clock:pppH'
    50.00%             6  [k] _copy_from_iter
    25.00%             3  [k] _copy_to_iter.part.0
     8.33%             1  [k] do_syscall_64
     8.33%             1  [.] ucp_worker_progress
     8.33%             1  [.] 0x000000000004f3a1
"""
    assert BENCHMARK.places(report) == {
        "copied_from_process": 6,
        "copied_to_process": 3,
        "rest_of_kernel": 1,
        "user_space": 2,
    }


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(nixl_missing_reason() is not None, reason=str(nixl_missing_reason()))
def test_it_prints_a_row_for_each_comparison() -> None:
    done = subprocess.run(
        [sys.executable, str(TRANSFER), "--quick"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr  # one attempt is never enough for a ratio
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[0]["against"] == "raw TCP loopback"
    for row in rows:
        assert row["ratio"] is None
        assert row["rounds"] + row["contended_rounds"] == 1
    assert len(rows) == 2 or "SKIPPED against ucx_perftest" in done.stderr
