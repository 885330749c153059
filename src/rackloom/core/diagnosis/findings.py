"""What a check returns: a subject and whether it holds, fails or is unknown, with evidence and a fix.

`holds`, `fails` and `unknown` construct findings. A finding that fails or is unknown names a command that
changes it, or that makes it visible. `where` lists everything that it concerns; `sides` groups places
that differ from one another, so that a cause at all but one side explains the difference.

`severity_order` sorts: the worst severity first, then the order of the catalogue, then the subject. An
unknown that leaves tenants' instances without an answer ranks just before warnings. `verdict` sums up:
one failure fails the whole, and without a failure any unknown, or no finding at all, keeps it unknown.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from rackloom.core.diagnosis import catalogue


def first_few(things: Sequence[str], most: int = 3) -> str:
    """The first `most` of them, and how many more there are."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(things[:most]) + more


def unique(*things: str) -> tuple[str, ...]:
    """Each once, in the order in which they were first named."""
    return tuple(dict.fromkeys(things))


class CheckState(StrEnum):
    """Of one thing that should be so."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    """How bad it is, the worst first."""

    CRITICAL = "critical"
    """Tenants are not kept apart."""
    ERROR = "error"
    """Something that was asked for does not work."""
    WARNING = "warning"
    """It works, and will not for long, or not as well as it could."""
    UNKNOWN = "unknown"
    """It could not be observed."""
    NONE = "none"
    """Nothing is wrong."""


_SEVERITY_RANK = {severity: rank for rank, severity in enumerate(Severity)}
_CHECK_RANK = {check: place for place, check in enumerate((*catalogue.HOST_CHECKS, *catalogue.SITE_CHECKS))}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one subject."""

    check: str
    subject: str
    """What it is about: `Pod team/worker-0`, `node tray-3`."""
    state: CheckState
    severity: Severity
    message: str
    evidence: tuple[str, ...] = ()
    """What each side says, with who says it."""
    where: tuple[str, ...] = ()
    """Everything that it concerns, as `node n1`, `domain 5c1d`, `machine m-3`: findings that share one may
    have one cause."""
    sides: tuple[tuple[str, ...], ...] = ()
    """Where it is that places differ, those alike together. A cause that leaves one side only explains it."""
    since: float | None = None
    """Since when, seconds since the epoch; None: no layer tells."""
    fix: str = ""
    """A command that changes it, or leads to what must change; empty where it holds."""
    instances: int = 0
    """How many tenants' instances nobody can speak for because of it."""
    consequences: tuple[str, ...] = ()
    """What follows from it and is not listed by itself, as `check: subject`."""


def holds(
    check: str, subject: str, message: str, *, evidence: tuple[str, ...] = (), where: tuple[str, ...] = ()
) -> Finding:
    """It is as it should be, and was observed so."""
    return Finding(
        check=check,
        subject=subject,
        state=CheckState.HOLDS,
        severity=Severity.NONE,
        message=message,
        evidence=evidence,
        where=where,
    )


def fails(
    check: str,
    subject: str,
    message: str,
    fix: str,
    *,
    severity: Severity = Severity.ERROR,
    evidence: tuple[str, ...] = (),
    where: tuple[str, ...] = (),
    since: float | None = None,
) -> Finding:
    """It is not."""
    return Finding(
        check=check,
        subject=subject,
        state=CheckState.FAILS,
        severity=severity,
        message=message,
        evidence=evidence,
        where=where,
        since=since,
        fix=fix,
    )


def unknown(
    check: str,
    subject: str,
    message: str,
    fix: str,
    *,
    evidence: tuple[str, ...] = (),
    where: tuple[str, ...] = (),
    since: float | None = None,
) -> Finding:
    """It could not be observed; `fix` is what would make it visible."""
    return Finding(
        check=check,
        subject=subject,
        state=CheckState.UNKNOWN,
        severity=Severity.UNKNOWN,
        message=message,
        evidence=evidence,
        where=where,
        since=since,
        fix=fix,
    )


def verdict(findings: tuple[Finding, ...]) -> CheckState:
    """The worst of all: one failure fails, and without one whatever is unknown keeps it unknown."""
    states = {finding.state for finding in findings}
    if CheckState.FAILS in states:
        return CheckState.FAILS
    return CheckState.UNKNOWN if CheckState.UNKNOWN in states or not findings else CheckState.HOLDS


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """Of one or more."""
    return min((finding.severity for finding in findings), key=_SEVERITY_RANK.__getitem__)


def worse_finding(one: Finding, other: Finding) -> Finding:
    """The one that is worse, the first of equals."""
    return min((one, other), key=lambda finding: _SEVERITY_RANK[finding.severity])


def severity_order(finding: Finding) -> tuple[float, int, str]:
    """What findings are sorted by: the worst first, then what others rest on, then by subject.

    What leaves instances in the dark may be an error, and comes before what is only a warning.
    """
    dark = finding.severity is Severity.UNKNOWN and finding.instances > 0
    rank = _SEVERITY_RANK[Severity.WARNING] - 0.5 if dark else _SEVERITY_RANK[finding.severity]
    return rank, _CHECK_RANK.get(finding.check, len(_CHECK_RANK)), finding.subject
