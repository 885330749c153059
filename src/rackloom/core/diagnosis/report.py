"""Findings for people: the text page of `rackloom doctor`, and fix commands for the examined site.

`render_findings` prints which layers were read and when, then the findings with the worst first: message,
evidence, consequences by check, fixes. Findings with the same severity, check and message are shown as
one. Long lists are cut and counted; JSON has them whole. Unprintable characters become `?`, so that
nothing that somebody named can steer a terminal.

`with_site_commands` rewrites the fix of each finding: `kubectl` gets the options of the cluster,
`rackloom admin` the variables that reach the operator's interface, or a replacement where the site serves
none.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import msgspec

from rackloom.core.diagnosis.findings import Finding, Severity, first_few, unique
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus, SiteSnapshot

# Fix commands with the options of the examined site.


_KUBECTL = re.compile(r"\bkubectl (?=[-a-z])")
_ADMIN = re.compile(r"\brackloom admin (?=[a-z])")
_COMMENT = "  # "


class SiteCommands(msgspec.Struct, frozen=True, kw_only=True):
    """How commands reach a site. Empty: as they do of themselves."""

    kubectl: str = ""
    """Options of kubectl."""
    admin: str = ""
    """Variables before `rackloom admin`."""
    admin_lacks: str = ""
    """What whoever runs it must still add, in words."""
    instead: str = ""
    """A command in its place, where the site has no admin interface."""
    then: str = ""
    """What is done with that one."""


def with_site_commands(findings: Iterable[Finding], ways: SiteCommands) -> tuple[Finding, ...]:
    """The findings, each with its fix as a command for this site."""
    return tuple(msgspec.structs.replace(finding, fix=_for_site(finding.fix, ways)) for finding in findings)


def _for_site(fix: str, ways: SiteCommands) -> str:
    if ways.kubectl:
        fix = _KUBECTL.sub(lambda _: f"kubectl {ways.kubectl} ", fix)
    if _ADMIN.match(fix) is None:
        return fix
    if ways.instead:
        command, _, comment = fix.partition(_COMMENT)
        return _with_comment(ways.instead, f"{ways.then} {command}", comment)
    command, _, comment = _ADMIN.sub(lambda _: _join_words(ways.admin, "rackloom admin "), fix).partition(
        _COMMENT
    )
    return _with_comment(command, comment, ways.admin_lacks)


def _join_words(*words: str) -> str:
    return " ".join(word for word in words if word)


def _with_comment(command: str, *told: str) -> str:
    comment = "; ".join(one for one in told if one)
    return f"{command}{_COMMENT}{comment}" if comment else command


# The text page.


MOST_LINES = 6
"""Of evidence and consequences, each; the rest is counted, and whole in JSON."""
MOST_FINDINGS = 40
"""In full, the worst first, those that are alike as one; the rest is counted by check."""
MOST_SUBJECTS = 4
"""Named in one line."""
_WIDTH = max(map(len, Severity)) + 2


def render_findings(picture: SiteSnapshot, findings: tuple[Finding, ...], host: str | None = None) -> str:
    """The whole answer as text, in which nothing that anybody named can steer a terminal.

    `host` is one whose own files were read too.
    """
    return "\n".join(map(_printable, _page_lines(picture, findings, host)))


def _printable(line: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in line)


def _page_lines(picture: SiteSnapshot, findings: tuple[Finding, ...], host: str | None) -> Iterator[str]:
    yield "examined:"
    for layer in picture.layers:
        mark = " (simulated)" if layer.layer in picture.simulated else ""
        yield f"  {layer.layer}{mark}: {_layer_line(layer, picture)}"
    if host is not None:
        yield f"  host: {host}"
    if picture.simulated:
        yield "what is simulated says nothing of real machines"
    groups = _group_alike(findings)
    for alike in groups[:MOST_FINDINGS]:
        yield ""
        yield from _finding_lines(alike)
    yield ""
    if len(groups) > MOST_FINDINGS:
        yield from _cut_findings(one for alike in groups[MOST_FINDINGS:] for one in alike)
    yield _summary_line(findings, len(groups))


def _layer_line(seen: LayerStatus, picture: SiteSnapshot) -> str:
    if seen.unknown_since is not None:
        return f"unknown since {rfc3339(seen.unknown_since)}: {seen.problem}"
    told = _counts(picture)[seen.layer]
    return told if seen.at is None else f"{told}, read {rfc3339(seen.at)}"


def _counts(picture: SiteSnapshot) -> dict[Layer, str]:
    kinds = Counter(device.kind for device in picture.devices)
    published = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    return {
        Layer.FABRIC: _comma_joined(
            _counted(len(picture.domains), "domain"),
            _counted(len(picture.fabric_gpus), "GPU"),
            _counted(len(picture.partitions), "partition"),
        ),
        Layer.SITE: _comma_joined(
            _counted(len(picture.machines), "machine"), _counted(len(picture.logicals), "logical partition")
        ),
        Layer.CLUSTER: _comma_joined(
            _counted(len(picture.nodes), "node"),
            _counted(len(picture.compute_domains), "ComputeDomain"),
            f"devices: {_comma_joined(*published) or 'none'}",
        ),
        Layer.TRANSFER: _counted(len(picture.transfers), "transfer"),
    }


def _comma_joined(*parts: str) -> str:
    return ", ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _group_alike(findings: tuple[Finding, ...]) -> list[list[Finding]]:
    """Findings that say the same of different things, together; in the order of the first of each."""
    found: defaultdict[tuple[str, str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        found[finding.severity, finding.check, finding.message].append(finding)
    return list(found.values())


def _finding_lines(alike: list[Finding]) -> Iterator[str]:
    """The first of these in full, and whom else it concerns."""
    one = alike[0]
    since = "" if one.since is None else f"  since {rfc3339(one.since)}"
    yield f"{one.severity.upper():{_WIDTH}}{one.check}: {one.subject}{since}"
    yield f"  {one.message}"
    yield from _first_lines(one.evidence, "    ")
    if len(alike) > 1:
        yield f"  and the same of {first_few([other.subject for other in alike[1:]], MOST_SUBJECTS)}"
    consequences = tuple(told for other in alike for told in other.consequences)
    if consequences:
        yield "  and therefore:"
        yield from _first_lines(tuple(consequences_by_check(consequences)), "    ")
    yield from _fix_lines(unique(*(other.fix for other in alike)))


def _fix_lines(fixes: tuple[str, ...]) -> Iterator[str]:
    """Each of its own, where those that are alike have several."""
    yield f"  fix: {fixes[0]}"
    yield from _first_lines(fixes[1:], "       ")


def consequences_by_check(consequences: Iterable[str]) -> Iterator[str]:
    """What follows from something, a line for each check, in which the first subjects are named."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for told in consequences:
        check, _, subject = told.partition(": ")
        found[check].append(subject)
    return (f"{check}: {first_few(subjects, MOST_SUBJECTS)}" for check, subjects in found.items())


def _first_lines(lines: tuple[str, ...], indent: str) -> Iterator[str]:
    for line in lines[:MOST_LINES]:
        yield f"{indent}{line}"
    if len(lines) > MOST_LINES:
        yield f"{indent}and {len(lines) - MOST_LINES} more"


def _cut_findings(findings: Iterable[Finding]) -> Iterator[str]:
    counts = Counter((finding.severity, finding.check) for finding in findings)
    yield f"and {counts.total()} more, whole with --json:"
    yield from (f"  {count} {severity}  {check}" for (severity, check), count in counts.items())
    yield ""


def _summary_line(findings: tuple[Finding, ...], groups: int) -> str:
    """The last line, which a terminal shows when all else has scrolled away."""
    if not findings:
        return "all holds"
    counts = Counter(finding.severity for finding in findings)
    told = ", ".join(f"{count} {severity}" for severity, count in counts.items())
    begin = f"; begin with {findings[0].check}: {findings[0].subject}" if groups > 1 else ""
    return f"{_counted(len(findings), 'finding')}: {told}{begin}"


def rfc3339(seconds: float) -> str:
    """RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
