"""The arithmetic of a measurement, without clock or I/O."""

from collections.abc import Sequence
from math import floor

import msgspec


class Summary(msgspec.Struct, frozen=True):
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


def summarize(seconds: Sequence[float]) -> Summary:
    """The figures of the RESULT line from the time of each iteration (at least one)."""
    ordered = sorted(seconds)
    return Summary(
        avg=mean(ordered),
        min=ordered[0],
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
    )


def gigabytes_per_second(size: int, seconds: float) -> float:
    """Decimal GB/s of `size` bytes in `seconds`."""
    return size / seconds / 1e9


def spread(numbers: Sequence[float]) -> float:
    """How far the runs are apart: (largest - smallest) / mean."""
    return (max(numbers) - min(numbers)) / mean(numbers)
