"""The result of a check: a subject and whether it holds, fails or is unknown, with evidence and a fix.

`holds`, `fails` and `unknown` construct findings. A finding that fails or is unknown names a command that
changes it, or that makes it visible. `where` lists everything that it concerns. `sides` groups places
that differ from one another, so that a cause at all but one side explains the difference.

`severity_order` sorts: the worst severity first, then the order of the catalogue, then the subject. An
unknown that affects tenants' instances ranks just before warnings. `verdict` sums up: one failure fails the
whole, and without a failure any unknown, or no finding at all, keeps it unknown.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from rackloom.core.diagnosis.catalogue import HOST_CHECKS, SITE_CHECKS
from rackloom.core.diagnosis.repair_steps import RepairStep


def first_few(names: Sequence[str], most: int = 3) -> str:
    """The first `most` names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def unique(*names: str) -> tuple[str, ...]:
    """Each name once, in the order of first occurrence."""
    return tuple(dict.fromkeys(names))


class CheckState(StrEnum):
    """Whether the requirement of a check is met."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "unknown"


class Severity(StrEnum):
    """How serious a finding is, the worst first."""

    CRITICAL = "critical"
    """Tenants are not isolated from each other."""
    ERROR = "error"
    """Something requested does not work."""
    WARNING = "warning"
    """It works now, but is degraded or about to fail."""
    UNKNOWN = "unknown"
    """It could not be observed."""
    NONE = "none"
    """Nothing is wrong."""


class Level(StrEnum):
    """How the parts that a finding names are marked, the worst first."""

    CRITICAL = "critical"
    DEGRADED = "degraded"
    UNKNOWN = "unknown"


LEVELS = {
    Severity.CRITICAL: Level.CRITICAL,
    Severity.ERROR: Level.CRITICAL,
    Severity.WARNING: Level.DEGRADED,
    Severity.UNKNOWN: Level.UNKNOWN,
}
"""The level of each severity that a finding may have."""
_SEVERITY_RANK = {severity: rank for rank, severity in enumerate(Severity)}
_CHECK_RANK: dict[str, int] = {check: rank for rank, check in enumerate((*HOST_CHECKS, *SITE_CHECKS))}


class Finding(msgspec.Struct, frozen=True):
    """The result of one check of one subject."""

    check: str
    subject: str
    """Its subject, such as `Pod team/worker-0` or `node tray-3`."""
    state: CheckState
    severity: Severity
    message: str
    evidence: tuple[str, ...] = ()
    """The report of each source, with its name."""
    where: tuple[str, ...] = ()
    """Everything that it concerns, as `node n1`, `domain 5c1d`, `machine m-3`: findings that share an entry
    may have one cause."""
    sides: tuple[tuple[str, ...], ...] = ()
    """For places that differ from one another: groups of equal places. Causes at all sides but one explain
    the difference."""
    since: float | None = None
    """Its start, in seconds since the epoch, or None if no layer reports it."""
    fix: str = ""
    """A command that fixes it, or shows what must change. Empty if it holds."""
    instances: int = 0
    """Number of tenants' instances that have an unknown state because of it."""
    consequences: tuple[str, ...] = ()
    """Findings that follow from it and are not listed separately, as `check: subject`."""
    title: str = ""
    """The problem and its place, as every surface names them: `rack-02/slot-4/gpu-2 is lost`."""
    place: str = ""
    """Its place, as the title names it: `rack-02/slot-4/gpu-2`. Empty if no layer knows the place."""
    affects: tuple[str, ...] = ()
    """Jobs, pods and tenants that use what it concerns: `MPIJob team/train`, `tenant blue`."""
    steps: tuple[RepairStep, ...] = ()
    """The commands of `fix`, each with its action and its effect."""
    runbook: str = ""
    """The name of its runbook: `rackloom doctor --runbook NAME` prints it."""


def holds(
    check: str, subject: str, message: str, *, evidence: tuple[str, ...] = (), where: tuple[str, ...] = ()
) -> Finding:
    """It was observed to be as it should be."""
    return Finding(check, subject, CheckState.HOLDS, Severity.NONE, message, evidence, where)


def fails(
    check: str,
    subject: str,
    message: str,
    fix: str,
    *,
    severity: Severity = Severity.ERROR,
    evidence: tuple[str, ...] = (),
    where: tuple[str, ...] = (),
    sides: tuple[tuple[str, ...], ...] = (),
    since: float | None = None,
) -> Finding:
    """It was observed not to be as it should be. `fix` is a command that changes it."""
    return Finding(check, subject, CheckState.FAILS, severity, message, evidence, where, sides, since, fix)


def unknown(
    check: str,
    subject: str,
    message: str,
    fix: str,
    *,
    evidence: tuple[str, ...] = (),
    where: tuple[str, ...] = (),
    since: float | None = None,
    instances: int = 0,
) -> Finding:
    """It could not be observed. `fix` is a command that makes it visible."""
    state, severity = CheckState.UNKNOWN, Severity.UNKNOWN
    return Finding(check, subject, state, severity, message, evidence, where, (), since, fix, instances)


def needs_attention(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that need attention, in their order: an unknown state alone does not."""
    return [finding for finding in findings if LEVELS[finding.severity] is not Level.UNKNOWN]


def verdict(findings: tuple[Finding, ...]) -> CheckState:
    """FAILS with any failure, UNKNOWN with anything unknown or no finding at all, or else HOLDS."""
    states = {finding.state for finding in findings}
    if CheckState.FAILS in states:
        return CheckState.FAILS
    return CheckState.UNKNOWN if CheckState.UNKNOWN in states or not findings else CheckState.HOLDS


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """The worst severity of at least one finding."""
    return min((finding.severity for finding in findings), key=_SEVERITY_RANK.__getitem__)


def severity_order(finding: Finding) -> tuple[float, int, str]:
    """Sort key: the worst first, then the order of the catalogue, then by subject."""
    # An unknown state of instances may hide an error, so it ranks between errors and warnings.
    hides_instances = finding.severity is Severity.UNKNOWN and finding.instances > 0
    rank = _SEVERITY_RANK[Severity.WARNING] - 0.5 if hides_instances else _SEVERITY_RANK[finding.severity]
    return rank, _CHECK_RANK.get(finding.check, len(_CHECK_RANK)), finding.subject
