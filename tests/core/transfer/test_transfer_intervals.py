"""Intervals, compared with published quantiles and hand-counted distributions."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.core.transfer.statistics import compare_rates, mann_whitney, mean_interval, t_quantile

rates = st.lists(st.floats(0.1, 500), min_size=2, max_size=6)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (30, 2.0423), (1e4, 1.9602)],
)
def test_quantiles_are_those_of_the_tables(freedom: float, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_the_interval_of_a_mean_is_students() -> None:
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx(
        (2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3))
    )
    assert mean_interval([1.0]) is None


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        ([1, 2, 3], [4, 5, 6], 2 / 20),
        ([1, 2, 3, 4], [5, 6, 7, 8], 2 / 70),
        ([1, 3], [2, 4], 4 / 6),
        ([1, 1], [1, 1], 1.0),
        ([1, 2], [2, 3], 4 / 6),
    ],
)
def test_rank_probabilities_are_counted_exactly(a: list[float], b: list[float], p: float) -> None:
    assert mann_whitney(a, b) == pytest.approx(p)


def test_the_published_arms_differ_and_their_ratio_comes_out() -> None:
    found = compare_rates([39.07, 39.07, 39.05], [27.54, 27.54, 27.54])
    assert found.ratio == pytest.approx(0.705, abs=1e-3)
    assert found.differs is True
    assert found.p_rank == pytest.approx(0.1)


def test_single_runs_tell_no_difference() -> None:
    found = compare_rates([39.0], [27.0, 27.1])
    assert found.interval is None
    assert found.differs is None
    assert found.ratio == pytest.approx(27.05 / 39, rel=1e-4)


@settings(max_examples=25, deadline=None)
@given(rates, rates)
def test_swapping_the_sides_inverts_the_ratio_and_its_interval(a: list[float], b: list[float]) -> None:
    there, back = compare_rates(a, b), compare_rates(b, a)
    assert there.interval is not None
    assert back.interval is not None
    assert there.ratio * back.ratio == pytest.approx(1)
    # Numbers an ulp apart leave nothing but rounding in the variance.
    assert there.interval.low * back.interval.high == pytest.approx(1, rel=1e-6)
    assert there.p_rank == pytest.approx(back.p_rank)


@settings(max_examples=25, deadline=None)
@given(rates)
def test_the_same_runs_never_differ(a: list[float]) -> None:
    found = compare_rates(a, a)
    assert found.differs is False
    assert found.p_rank == pytest.approx(1)
