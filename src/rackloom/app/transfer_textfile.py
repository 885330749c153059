"""The result of a transfer for the textfile collector of Prometheus' node exporter.

A transfer that a timer repeats becomes a time series of the path's rate. Each arm has its rate, its
percentiles (of its runs the slowest), whether its data arrived unchanged, and whether it was slower than the
device promises. A measurement that failed leaves `rackloom_transfer_proved 0` and no rates: a monitor must
not keep reading an old success.
"""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from rackloom.app.textfile import write_registry
from rackloom.core.transfer.values import AlignmentReport, Arm

ARM_LABELS = ("arm", "gpu", "device", "together")
BYTES_OF_GB = 1e9


def write_transfer_textfile(file: Path, report: AlignmentReport | None, now: float) -> None:
    """Put `report` of a measurement at `now` (seconds since the epoch) into `file`. None if it failed.

    Raises Refused if the file cannot be written.
    """
    write_registry(file, transfer_registry(report, now))


def transfer_registry(report: AlignmentReport | None, now: float) -> CollectorRegistry:
    """The series."""
    registry = CollectorRegistry()

    def gauge(name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, labels, registry=registry)

    gauge("rackloom_transfer_measured_seconds", "When, seconds since the epoch.").set(now)
    proved = report is not None and report.proved
    gauge("rackloom_transfer_proved", "1 if all data was verified and the promised devices carried it.").set(
        proved
    )
    rate = gauge("rackloom_transfer_rate_bytes_per_second", "Mean rate of the runs.", *ARM_LABELS)
    latency = gauge(
        "rackloom_transfer_request_seconds", "Percentile of one request.", *ARM_LABELS, "quantile"
    )
    verified = gauge("rackloom_transfer_verified", "1 if the data arrived unchanged.", *ARM_LABELS)
    short = gauge(
        "rackloom_transfer_short", "1 if slower than the device promises; 0 also if unknown.", *ARM_LABELS
    )
    for arm in () if report is None else report.arms:
        labels = (arm.name, arm.gpu, arm.device or "", str(arm.together).lower())
        rate.labels(*labels).set(arm.mean_GBps * BYTES_OF_GB)
        verified.labels(*labels).set(all(run.verified for run in arm.runs))
        short.labels(*labels).set(any(run.expectation.outcome == "short" for run in arm.runs))
        for quantile, seconds in _slowest(arm):
            latency.labels(*labels, quantile).set(seconds)
    emulated = gauge("rackloom_transfer_emulated", "1 if shaped links stand for the devices.")
    emulated.set(report is not None and report.emulated)
    return registry


def _slowest(arm: Arm) -> Iterator[tuple[str, float]]:
    yield "0.5", max(run.p50_seconds for run in arm.runs)
    yield "0.95", max(run.p95_seconds for run in arm.runs)
    yield "0.99", max(run.p99_seconds for run in arm.runs)
