"""Findings for people: what was looked at, then the worst first, each with both sides and its fix."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

from rackloom.prove.doctor.findings import Finding
from rackloom.prove.picture.values import Layer, LayerSeen, Picture

MOST_LINES = 6
"""Of evidence and consequences, each; the rest is counted, and whole in JSON."""
MOST_FINDINGS = 40
"""In full, the worst first; the rest is counted by check."""


def page(picture: Picture, findings: tuple[Finding, ...], host: str | None = None) -> str:
    """The whole answer as text, in which nothing that anybody named can steer a terminal.

    `host` is one whose own files were read too.
    """
    return "\n".join(map(_printable, _lines(picture, findings, host)))


def _printable(line: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in line)


def _lines(picture: Picture, findings: tuple[Finding, ...], host: str | None) -> Iterator[str]:
    yield "examined:"
    for layer in picture.layers:
        mark = " (simulated)" if layer.layer in picture.simulated else ""
        yield f"  {layer.layer}{mark}: {_layer(layer, picture)}"
    if host is not None:
        yield f"  host: {host}"
    if picture.simulated:
        yield "what is simulated says nothing of real machines"
    for one in findings[:MOST_FINDINGS]:
        yield ""
        yield from _finding(one)
    yield ""
    if len(findings) > MOST_FINDINGS:
        yield from _rest(findings[MOST_FINDINGS:])
    yield _sum(findings)


def _layer(seen: LayerSeen, picture: Picture) -> str:
    if seen.unknown_since is not None:
        return f"unknown since {moment(seen.unknown_since)}: {seen.problem}"
    told = _counts(picture)[seen.layer]
    return told if seen.at is None else f"{told}, read {moment(seen.at)}"


def _counts(picture: Picture) -> dict[Layer, str]:
    kinds = Counter(one.kind for one in picture.devices)
    published = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    return {
        Layer.FABRIC: _listed(
            _many(len(picture.domains), "domain"),
            _many(len(picture.fabric_gpus), "GPU"),
            _many(len(picture.partitions), "partition"),
        ),
        Layer.SITE: _listed(
            _many(len(picture.machines), "machine"), _many(len(picture.logicals), "logical partition")
        ),
        Layer.CLUSTER: _listed(
            _many(len(picture.nodes), "node"),
            _many(len(picture.compute_domains), "ComputeDomain"),
            f"devices: {_listed(*published) or 'none'}",
        ),
        Layer.TRANSFER: _many(len(picture.transfers), "transfer"),
    }


def _listed(*parts: str) -> str:
    return ", ".join(parts)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _finding(one: Finding) -> Iterator[str]:
    since = "" if one.since is None else f"  since {moment(one.since)}"
    yield f"{one.severity.upper()}  {one.check}  {one.subject}{since}"
    yield f"  {one.message}"
    yield from _some(one.evidence, "    ")
    if one.consequences:
        yield "  and therefore:"
        yield from _some(one.consequences, "    ")
    yield f"  fix: {one.fix}"


def _some(lines: tuple[str, ...], indent: str) -> Iterator[str]:
    for line in lines[:MOST_LINES]:
        yield f"{indent}{line}"
    if len(lines) > MOST_LINES:
        yield f"{indent}and {len(lines) - MOST_LINES} more"


def _rest(findings: tuple[Finding, ...]) -> Iterator[str]:
    counts = Counter((one.severity, one.check) for one in findings)
    yield f"and {len(findings)} more, whole with --json:"
    yield from (f"  {count} {severity}  {check}" for (severity, check), count in counts.items())
    yield ""


def _sum(findings: tuple[Finding, ...]) -> str:
    if not findings:
        return "all holds"
    counts = Counter(one.severity for one in findings)
    told = ", ".join(f"{count} {severity}" for severity, count in counts.items())
    return f"{_many(len(findings), 'finding')}: {told}"


def moment(seconds: float) -> str:
    """RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
