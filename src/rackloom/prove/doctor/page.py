"""Findings for people: what was looked at, then the worst first, each with both sides and its fix."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from rackloom.prove.doctor.findings import Finding, Severity
from rackloom.prove.doctor.words import some, unique
from rackloom.prove.picture.values import Layer, LayerSeen, Picture

MOST_LINES = 6
"""Of evidence and consequences, each; the rest is counted, and whole in JSON."""
MOST_FINDINGS = 40
"""In full, the worst first, those that are alike as one; the rest is counted by check."""
MOST_SUBJECTS = 4
"""Named in one line."""
_WIDTH = max(map(len, Severity)) + 2


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
    groups = _alike(findings)
    for alike in groups[:MOST_FINDINGS]:
        yield ""
        yield from _finding(alike)
    yield ""
    if len(groups) > MOST_FINDINGS:
        yield from _rest(one for alike in groups[MOST_FINDINGS:] for one in alike)
    yield _sum(findings, len(groups))


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


def _alike(findings: tuple[Finding, ...]) -> list[list[Finding]]:
    """Findings that say the same of different things, together; in the order of the first of each."""
    found: defaultdict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for one in findings:
        found[one.severity, one.check, one.message].append(one)
    return list(found.values())


def _finding(alike: list[Finding]) -> Iterator[str]:
    """The first of these in full, and whom else it concerns."""
    one = alike[0]
    since = "" if one.since is None else f"  since {moment(one.since)}"
    yield f"{one.severity.upper():{_WIDTH}}{one.check}: {one.subject}{since}"
    yield f"  {one.message}"
    yield from _some(one.evidence, "    ")
    if len(alike) > 1:
        yield f"  and the same of {some([other.subject for other in alike[1:]], MOST_SUBJECTS)}"
    consequences = tuple(told for other in alike for told in other.consequences)
    if consequences:
        yield "  and therefore:"
        yield from _some(tuple(by_check(consequences)), "    ")
    yield from _fixes(unique(*(other.fix for other in alike)))


def _fixes(fixes: tuple[str, ...]) -> Iterator[str]:
    """Each of its own, where those that are alike have several."""
    yield f"  fix: {fixes[0]}"
    yield from _some(fixes[1:], "       ")


def by_check(consequences: Iterable[str]) -> Iterator[str]:
    """What follows from something, a line for each check, in which the first subjects are named."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for told in consequences:
        check, _, subject = told.partition(": ")
        found[check].append(subject)
    return (f"{check}: {some(subjects, MOST_SUBJECTS)}" for check, subjects in found.items())


def _some(lines: tuple[str, ...], indent: str) -> Iterator[str]:
    for line in lines[:MOST_LINES]:
        yield f"{indent}{line}"
    if len(lines) > MOST_LINES:
        yield f"{indent}and {len(lines) - MOST_LINES} more"


def _rest(findings: Iterable[Finding]) -> Iterator[str]:
    counts = Counter((one.severity, one.check) for one in findings)
    yield f"and {counts.total()} more, whole with --json:"
    yield from (f"  {count} {severity}  {check}" for (severity, check), count in counts.items())
    yield ""


def _sum(findings: tuple[Finding, ...], groups: int) -> str:
    """The last line, which a terminal shows when all else has scrolled away."""
    if not findings:
        return "all holds"
    counts = Counter(one.severity for one in findings)
    told = ", ".join(f"{count} {severity}" for severity, count in counts.items())
    begin = f"; begin with {findings[0].check}: {findings[0].subject}" if groups > 1 else ""
    return f"{_many(len(findings), 'finding')}: {told}{begin}"


def moment(seconds: float) -> str:
    """RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
