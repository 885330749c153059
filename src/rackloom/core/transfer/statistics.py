"""Statistics of repeated runs: summaries of one run, and how certain a mean or a ratio of means is.

The unit of comparison is the mean rate of a run, not its iterations. Iterations of one run share
connections, caches and neighbours, so they are far from independent, and a hundred of them would make any
difference look certain. With a single run the noise is unknown, and there is no interval.

- `mean_interval`: Student's t interval of the mean, 95%.
- `compare_rates`: Welch's t-test on the logarithms of the run means, so the result is an interval of the
  ratio. Degrees of freedom are by Welch-Satterthwaite. Beside it stands the two-sided p of the exact
  Mann-Whitney test, which assumes no distribution.
- `mann_whitney` counts rank sums by dynamic programming. Ties get the mean of their ranks. Ranks are
  doubled to stay whole numbers.
- `t_quantile` bisects the distribution function, integrated by Simpson's rule. No statistics package is
  needed.
"""

import math
from collections.abc import Sequence
from math import floor

import msgspec

# One run.


class TimeSummary(msgspec.Struct, frozen=True):
    """Seconds per iteration."""

    avg: float
    min: float
    p50: float
    p95: float
    p99: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks of an ascending, non-empty sequence."""
    position = (len(ordered) - 1) * percent / 100
    low = floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def mean(numbers: Sequence[float]) -> float:
    """Arithmetic mean of a non-empty sequence, never outside its extremes by rounding."""
    return min(max(sum(numbers) / len(numbers), min(numbers)), max(numbers))


def summarize(seconds: Sequence[float]) -> TimeSummary:
    """The figures of the RESULT line from the time of each iteration (at least one)."""
    ordered = sorted(seconds)
    return TimeSummary(
        avg=mean(ordered),
        min=ordered[0],
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
    )


def gigabytes_per_second(size: int, seconds: float) -> float:
    """Decimal GB/s of `size` bytes in `seconds`."""
    return size / seconds / 1e9


def relative_spread(numbers: Sequence[float]) -> float:
    """How far the runs are apart: (largest - smallest) / mean."""
    return (max(numbers) - min(numbers)) / mean(numbers)


# Several runs.


CONFIDENCE = 0.95
_STEPS = 200
"""Simpson's rule over a smooth integrand: errors below 1e-6 for every number of runs."""


class Interval(msgspec.Struct, frozen=True):
    """A two-sided interval of `CONFIDENCE`, in the unit of its numbers."""

    low: float
    high: float


class Ratio(msgspec.Struct, frozen=True):
    """Rate of B over rate of A by Welch's t-test on the logarithms of the run means."""

    ratio: float
    """Geometric mean of B's runs over that of A's."""
    interval: Interval | None
    """None with fewer than two runs on either side: their noise is not known."""
    p_rank: float | None
    """Two-sided p of the exact Mann-Whitney test on the same runs, which assumes no distribution."""

    @property
    def differs(self) -> bool | None:
        """Whether the interval excludes 1, or None without an interval."""
        return None if self.interval is None else not self.interval.low <= 1.0 <= self.interval.high


def mean_interval(numbers: Sequence[float]) -> Interval | None:
    """Student's interval of the mean, or None for a single number, because its noise is not known.

    It assumes independent, roughly normal numbers, which means of many iterations are.
    """
    if len(numbers) < 2:
        return None
    half = t_quantile(len(numbers) - 1) * math.sqrt(_variance(numbers) / len(numbers))
    return Interval(mean(numbers) - half, mean(numbers) + half)


def compare_rates(before: Sequence[float], after: Sequence[float]) -> Ratio:
    """Mean rates of the runs of A and of B, all positive, at least one each."""
    a, b = [math.log(rate) for rate in before], [math.log(rate) for rate in after]
    difference = mean(b) - mean(a)
    if min(len(a), len(b)) < 2:
        return Ratio(math.exp(difference), None, None)
    half = _welch_half_width(a, b)
    interval = Interval(math.exp(difference - half), math.exp(difference + half))
    return Ratio(math.exp(difference), interval, mann_whitney(before, after))


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p: the share of all ways to deal the runs to A and B whose rank sum is at least as extreme.

    Exact, ties included (they get the mean of their ranks).
    """
    ranks = _doubled_ranks([*a, *b])
    total, size = sum(ranks), len(a)
    # sums[k][s] is the number of ways to choose k of the ranks so far with rank sum s. Counting k downwards
    # uses each rank at most once, as in the 0/1 knapsack.
    sums: list[dict[int, int]] = [{0: 1}, *({} for _ in range(size))]
    for rank in ranks:
        for count in range(size, 0, -1):
            for partial, ways in sums[count - 1].items():
                sums[count][partial + rank] = sums[count].get(partial + rank, 0) + ways
    # Both sides times the number of runs, so that the expected sum is a whole number.
    off = abs(len(ranks) * sum(ranks[:size]) - size * total)
    extreme = sum(
        ways for partial, ways in sums[size].items() if abs(len(ranks) * partial - size * total) >= off
    )
    return extreme / math.comb(len(ranks), size)


def t_quantile(freedom: float) -> float:
    """The t that a two-sided interval of CONFIDENCE extends to, for at least one degree of freedom."""
    # Bisection on the angle, in which the distribution function is smooth up to its end at pi/2.
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        # P(|T| < sqrt(freedom) * tan(angle)): the density of t becomes cos^(freedom - 1) in that variable.
        width = middle / _STEPS
        weights = (1 if k in (0, _STEPS) else 4 if k % 2 else 2 for k in range(_STEPS + 1))
        heights = (math.pow(math.cos(k * width), freedom - 1) for k in range(_STEPS + 1))
        area = sum(weight * height for weight, height in zip(weights, heights, strict=True)) * width / 3
        scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
        low, high = (middle, high) if 2 * scale * area < CONFIDENCE else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _welch_half_width(a: Sequence[float], b: Sequence[float]) -> float:
    # Welch's test does not assume that both records have the same variance.
    parts = [_variance(group) / len(group) for group in (a, b)]
    whole = sum(parts)
    if whole == 0.0:
        return 0.0
    shares = [
        part**2 / (len(group) - 1) / whole**2 for part, group in zip(parts, (a, b), strict=True)
    ]  # Welch-Satterthwaite
    return t_quantile(1 / sum(shares)) * math.sqrt(whole)


def _variance(numbers: Sequence[float]) -> float:
    middle = mean(numbers)
    return sum((number - middle) ** 2 for number in numbers) / (len(numbers) - 1)


def _doubled_ranks(numbers: Sequence[float]) -> list[int]:
    """Twice the rank of each number, so that the ranks of ties are whole."""
    return [
        sum(other < number for other in numbers) + sum(other <= number for other in numbers) + 1
        for number in numbers
    ]
