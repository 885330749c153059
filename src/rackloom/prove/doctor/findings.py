"""What a check says: it holds, it does not, or it is unknown; how bad that is, and what to do."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from rackloom.prove.doctor import names


class State(StrEnum):
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


_RANKS = {severity: rank for rank, severity in enumerate(Severity)}
_LAYERS = {check: place for place, check in enumerate((*names.OF_HOST, *names.ALL))}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One check of one subject."""

    check: str
    subject: str
    """What it is about: `Pod team/worker-0`, `node tray-3`."""
    state: State
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
        state=State.HOLDS,
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
        state=State.FAILS,
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
        state=State.UNKNOWN,
        severity=Severity.UNKNOWN,
        message=message,
        evidence=evidence,
        where=where,
        since=since,
        fix=fix,
    )


def verdict(findings: tuple[Finding, ...]) -> State:
    """The worst of all: one failure fails, and without one whatever is unknown keeps it unknown."""
    states = {one.state for one in findings}
    if State.FAILS in states:
        return State.FAILS
    return State.UNKNOWN if State.UNKNOWN in states or not findings else State.HOLDS


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """Of one or more."""
    return min((one.severity for one in findings), key=_RANKS.__getitem__)


def worse(one: Finding, other: Finding) -> Finding:
    """The one that is worse, the first of equals."""
    return min((one, other), key=lambda finding: _RANKS[finding.severity])


def badness(finding: Finding) -> tuple[float, int, str]:
    """What findings are sorted by: the worst first, then what others rest on, then by subject.

    What leaves instances in the dark may be an error, and comes before what is only a warning.
    """
    dark = finding.severity is Severity.UNKNOWN and finding.instances > 0
    rank = _RANKS[Severity.WARNING] - 0.5 if dark else _RANKS[finding.severity]
    return rank, _LAYERS.get(finding.check, len(_LAYERS)), finding.subject
