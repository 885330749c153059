"""The findings of an examination as metrics: for a file of `rackloom doctor`, and on the page of a site.

Both have the same names, so that one alert serves both. Every check has a series with zero from the start, so
that the first finding is a change and not a new series. The file is for the textfile collector of Prometheus'
node exporter, and is replaced atomically. If the examination itself fails, `write_failed_textfile` writes
`rackloom_doctor_ok 0`: a monitor must not keep reading an old success.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from rackloom.app.textfile import write_registry
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding, Severity
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus, NvlinkDomainRecord, SiteSnapshot


def write_textfile(file: Path, snapshot: SiteSnapshot, findings: tuple[Finding, ...]) -> None:
    """Put the result into `file`, whole or not at all. Raises Refused if it cannot be written."""
    write_registry(file, registry_of(snapshot.at, snapshot.layers, snapshot.domains, findings))


def write_failed_textfile(file: Path, now: float) -> None:
    """Write to `file` that nothing could be examined at `now` (seconds since the epoch). Raises Refused."""
    write_registry(file, _new_registry(False, now))


def registry_of(
    at: float,
    layers: Iterable[LayerStatus],
    domains: Collection[NvlinkDomainRecord],
    findings: Collection[Finding],
) -> CollectorRegistry:
    """The series of an examination that was made at `at` (seconds since the epoch)."""
    registry = _new_registry(not findings, at)
    labels = ("check", "severity")
    found = Gauge("rackloom_doctor_findings", "Findings by check and severity.", labels, registry=registry)
    counts = Counter((finding.check, finding.severity.value) for finding in findings)
    for name in Check:
        found.labels(name.value, Severity.ERROR.value).set(0)
    for (check, severity), count in counts.items():
        found.labels(check, severity).set(count)
    places = Counter((finding.check, finding.place) for finding in findings if finding.place)
    by_place = Gauge("rackloom_doctor_places", "Findings by place.", ("check", "place"), registry=registry)
    for (check, place), count in places.items():
        by_place.labels(check, place).set(count)
    known = Gauge("rackloom_doctor_layer_known", "1 if the layer was read.", ("layer",), registry=registry)
    for layer in layers:
        is_read = layer.unknown_since is None and layer.at is not None
        # In the fabric layer, at least one domain must be current.
        if layer.layer is Layer.FABRIC:
            is_read = is_read and any(domain.unknown_since is None for domain in domains)
        known.labels(layer.layer.value).set(is_read)
    return registry


def _new_registry(ok: bool, now: float) -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("rackloom_doctor_ok", "1 if everything read is as it should be.", registry=registry).set(ok)
    at = Gauge("rackloom_doctor_examined_seconds", "When, seconds since the epoch.", registry=registry)
    at.set(now)
    return registry
