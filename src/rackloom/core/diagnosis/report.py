"""Findings for people: the text page of `rackloom doctor`, and fix commands for the examined site.

`render_findings` prints the layers with the times of their readings, then the findings with the worst first:
title, affected tenants and jobs, message, evidence, consequences by check, and the fix in numbered steps.
Findings with the same severity, check and message are shown as one. Long lists are cut and counted. JSON has
them whole. Unprintable characters become `?`, so that no name can control the terminal.

`with_site_commands` rewrites the fix of each finding: `kubectl` gets the options of the cluster, and
`rackloom admin` gets the variables that reach the operator's interface, or a replacement if the site has
no such interface.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import msgspec

from rackloom.core.diagnosis.findings import Finding, Severity, first_few, unique
from rackloom.core.diagnosis.repair_steps import repair_advice, repair_steps
from rackloom.core.diagnosis.snapshot import Layer, SiteSnapshot, grouped

# Fix commands with the options of the examined site.


_KUBECTL = re.compile(r"\bkubectl (?=[-a-z])")
_ADMIN = re.compile(r"\brackloom admin (?=[a-z])")
_COMMENT = "  # "


class SiteCommands(msgspec.Struct, frozen=True, kw_only=True):
    """How commands reach a site. Empty fields change nothing."""

    kubectl: str = ""
    """Options of kubectl."""
    admin: str = ""
    """Variables before `rackloom admin`."""
    admin_lacks: str = ""
    """What the operator must still provide for it, in words."""
    instead: str = ""
    """A command that replaces `rackloom admin`, if the site has no admin interface."""
    then: str = ""
    """How to use that command."""


def with_site_commands(findings: Iterable[Finding], commands: SiteCommands) -> tuple[Finding, ...]:
    """The findings, each with its fix as a command for this site."""
    fixes = ((finding, _for_site(finding.fix, commands)) for finding in findings)
    return tuple(msgspec.structs.replace(finding, fix=fix, steps=repair_steps(fix)) for finding, fix in fixes)


def _for_site(fix: str, commands: SiteCommands) -> str:
    if commands.kubectl:
        fix = _KUBECTL.sub(lambda _: f"kubectl {commands.kubectl} ", fix)
    if _ADMIN.match(fix) is None:
        return fix
    if commands.instead:
        command, _, comment = fix.partition(_COMMENT)
        return _with_comment(commands.instead, f"{commands.then} {command}", comment)
    admin = f"{commands.admin} rackloom admin ".lstrip()
    command, _, comment = _ADMIN.sub(lambda _: admin, fix).partition(_COMMENT)
    return _with_comment(command, comment, commands.admin_lacks)


def _with_comment(command: str, *notes: str) -> str:
    comment = "; ".join(note for note in notes if note)
    return f"{command}{_COMMENT}{comment}" if comment else command


# The text page.


MOST_LINES = 6
"""Lines of evidence, and of consequences. The rest is counted, and complete in JSON."""
MOST_FINDINGS = 40
"""Findings in full, the worst first, equal ones as one. The rest is counted by check."""
MOST_SUBJECTS = 4
"""Named in one line."""
_WIDTH = max(map(len, Severity)) + 2


def render_findings(snapshot: SiteSnapshot, findings: tuple[Finding, ...], host: str | None = None) -> str:
    """The text page. `host` is the host, if any, with its own files read too."""
    lines = _page_lines(snapshot, findings, host)
    # Names come from tenants and clusters: a control character in one could steer the terminal.
    return "\n".join("".join(char if char.isprintable() else "?" for char in line) for line in lines)


def _page_lines(snapshot: SiteSnapshot, findings: tuple[Finding, ...], host: str | None) -> Iterator[str]:
    yield "examined:"
    for layer in snapshot.layers:
        if layer.unknown_since is not None:
            state = f"unknown since {rfc3339(layer.unknown_since)}: {layer.problem}"
        else:
            read = "" if layer.at is None else f", read {rfc3339(layer.at)}"
            state = f"{', '.join(_counts(layer.layer, snapshot))}{read}"
            # The problem of a partial reading, beside its counts.
            state = f"{state}; {layer.problem}" if layer.problem else state
        mark = " (simulated)" if layer.layer in snapshot.simulated else ""
        yield f"  {layer.layer}{mark}: {state}"
    if host is not None:
        yield f"  host: {host}"
    if snapshot.simulated:
        yield "what is simulated says nothing of real machines"
    groups = _group_alike(findings)
    for alike in groups[:MOST_FINDINGS]:
        yield ""
        yield from _finding_lines(alike)
    yield ""
    # The counts by check still show a fault that is everywhere among the findings that are left out.
    if len(groups) > MOST_FINDINGS:
        cut = Counter(
            (finding.severity, finding.check) for alike in groups[MOST_FINDINGS:] for finding in alike
        )
        yield f"and {cut.total()} more, whole with --json:"
        yield from (f"  {count} {severity}  {check}" for (severity, check), count in cut.items())
        yield ""
    yield summary_line(findings)


def _counts(layer: Layer, snapshot: SiteSnapshot) -> Iterator[str]:
    if layer is Layer.FABRIC:
        yield _counted(len(snapshot.domains), "domain")
        yield _counted(len(snapshot.fabric_gpus), "GPU")
        yield _counted(len(snapshot.partitions), "partition")
    elif layer is Layer.SITE:
        yield _counted(len(snapshot.machines), "machine")
        yield _counted(len(snapshot.logicals), "logical partition")
    elif layer is Layer.CLUSTER:
        yield _counted(len(snapshot.nodes), "node")
        yield _counted(len(snapshot.compute_domains), "ComputeDomain")
        kinds = Counter(device.kind for device in snapshot.devices)
        published = (f"{count} {kind}" for kind, count in sorted(kinds.items()))
        yield f"devices: {', '.join(published) or 'none'}"
    else:
        yield _counted(len(snapshot.transfers), "transfer")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _group_alike(findings: tuple[Finding, ...]) -> list[list[Finding]]:
    """Findings that differ only in their subjects, grouped in the order of the first of each group."""
    pairs = (((finding.severity, finding.check, finding.message), finding) for finding in findings)
    return list(grouped(pairs).values())


def _finding_lines(alike: list[Finding]) -> Iterator[str]:
    """The first of these in full, and the subjects of the others."""
    first = alike[0]
    since = "" if first.since is None else f"  since {rfc3339(first.since)}"
    yield f"{first.severity.upper():{_WIDTH}}{first.title or first.subject}{since}"
    affected = unique(*(name for finding in alike for name in finding.affects))
    if affected:
        yield f"  affects {first_few(affected, MOST_SUBJECTS)}"
    yield f"  {first.check}: {first.subject}: {first.message}"
    yield from _first_lines(first.evidence, "    ")
    if len(alike) > 1:
        yield f"  and the same of {first_few([finding.subject for finding in alike[1:]], MOST_SUBJECTS)}"
    consequences = tuple(text for finding in alike for text in finding.consequences)
    if consequences:
        yield "  and therefore:"
        yield from _first_lines(tuple(consequences_by_check(consequences)), "    ")
    # The first fix step by step, with the action of each step. Of the others only the commands.
    fixes = unique(*(finding.fix for finding in alike))
    for number, step in enumerate(repair_steps(fixes[0]), start=1):
        yield f"  {number}. {step.command}"
        yield f"     {step.effect}: {step.does}"
    if advice := repair_advice(fixes[0]):
        yield f"  note: {advice}"
    if len(fixes) > 1:
        yield "  for the others:"
        yield from _first_lines(fixes[1:], "    ")
    if first.runbook:
        yield f"  runbook: rackloom doctor --runbook {first.runbook}"


def consequences_by_check(consequences: Iterable[str]) -> Iterator[str]:
    """One line for each check, which names the first subjects."""
    pairs = (text.partition(": ") for text in consequences)
    subjects = grouped((check, subject) for check, _, subject in pairs)
    return (f"{check}: {first_few(found, MOST_SUBJECTS)}" for check, found in subjects.items())


def _first_lines(lines: tuple[str, ...], indent: str) -> Iterator[str]:
    for line in lines[:MOST_LINES]:
        yield f"{indent}{line}"
    if len(lines) > MOST_LINES:
        yield f"{indent}and {len(lines) - MOST_LINES} more"


def summary_line(findings: tuple[Finding, ...]) -> str:
    """All findings in a sentence. It is the last line, which stays visible when a terminal has scrolled."""
    if not findings:
        return "all holds"
    counts = Counter(finding.severity for finding in findings)
    by_severity = ", ".join(f"{count} {severity}" for severity, count in counts.items())
    several = len(_group_alike(findings)) > 1
    begin = f"; begin with: {findings[0].title or findings[0].subject}" if several else ""
    return f"{_counted(len(findings), 'finding')}: {by_severity}{begin}"


def rfc3339(seconds: float) -> str:
    """RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
