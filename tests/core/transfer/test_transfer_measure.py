import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.transfer.statistics import (
    gigabytes_per_second,
    mean,
    percentile,
    relative_spread,
    summarize,
)

times = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200)


@given(times, st.floats(0, 100))
def test_percentiles_agree_with_numpy(seconds: list[float], percent: float) -> None:
    numpy = pytest.importorskip("numpy")
    assert math.isclose(
        percentile(sorted(seconds), percent), numpy.percentile(seconds, percent), rel_tol=1e-9
    )


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=200))
def test_percentiles_agree_with_the_standard_library(seconds: list[float]) -> None:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    summary = summarize(seconds)
    for ours, theirs in ((summary.p50, cuts[49]), (summary.p95, cuts[94]), (summary.p99, cuts[98])):
        assert math.isclose(ours, theirs, rel_tol=1e-9)


@given(times)
def test_a_summary_is_ordered_and_within_what_was_measured(seconds: list[float]) -> None:
    summary = summarize(seconds)
    assert summary.min == min(seconds)
    assert summary.min <= summary.p50 <= summary.p95 <= summary.p99 <= max(seconds)
    assert min(seconds) <= summary.avg <= max(seconds)


@given(times)
def test_the_order_of_iterations_does_not_matter(seconds: list[float]) -> None:
    assert summarize(seconds) == summarize(seconds[::-1])


def test_the_published_figures_of_the_example_come_out() -> None:
    # 1 GiB in 27.49 ms and 38.99 ms were published as 39.07 and 27.54 GB/s.
    assert gigabytes_per_second(1 << 30, 0.02749) == pytest.approx(39.07, abs=0.02)
    assert gigabytes_per_second(1 << 30, 0.03899) == pytest.approx(27.54, abs=0.02)


def test_spread_is_relative_to_the_mean() -> None:
    assert relative_spread([9.0, 10.0, 11.0]) == pytest.approx(0.2)
    assert relative_spread([mean([3.0])]) == 0.0
