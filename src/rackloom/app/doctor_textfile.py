"""The doctor's result for the textfile collector of Prometheus' node exporter."""

from collections import Counter
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from rackloom.errors import Refused
from rackloom.prove.doctor import names
from rackloom.prove.doctor.findings import Finding, Severity
from rackloom.prove.picture.values import Picture


def write_textfile(file: Path, picture: Picture, findings: tuple[Finding, ...]) -> None:
    """Put the result into `file`, whole or not at all. Raises Refused where it cannot be written.

    Every check has a series from the start, with zero, so that the first finding is a change.
    """
    try:
        write_to_textfile(str(file), registry_of(picture, findings))
    except OSError as error:
        raise Refused(
            f"{file} could not be written: {error.strerror}",
            nearest_fix="name a .prom file in the collector's directory",
        ) from error


def registry_of(picture: Picture, findings: tuple[Finding, ...]) -> CollectorRegistry:
    """The series."""
    registry = CollectorRegistry()
    Gauge("rackloom_doctor_ok", "1 if everything read is as it should be.", registry=registry).set(
        0 if findings else 1
    )
    at = Gauge("rackloom_doctor_examined_seconds", "When, seconds since the epoch.", registry=registry)
    at.set(picture.at)
    labels = ("check", "severity")
    found = Gauge("rackloom_doctor_findings", "Findings by check and severity.", labels, registry=registry)
    counts = Counter((one.check, one.severity.value) for one in findings)
    for check in names.ALL:
        found.labels(check, Severity.ERROR.value).set(0)
    for (check, severity), count in counts.items():
        found.labels(check, severity).set(count)
    known = Gauge("rackloom_doctor_layer_known", "1 if the layer was read.", ("layer",), registry=registry)
    for layer in picture.layers:
        known.labels(layer.layer.value).set(1 if layer.unknown_since is None else 0)
    return registry
