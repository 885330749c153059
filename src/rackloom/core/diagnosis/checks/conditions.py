"""Checks of what controllers and nodes report about gangs, pods and claimed devices.

The part of Rackloom that acts on an object records as a condition of it what it found wrong, with a Warning
event of the same reason. These checks repeat no decision: each condition becomes one finding with its reason,
its message and its time, so that the doctor, the map and `kubectl describe` name the same problems.
"""

from collections.abc import Iterator

from rackloom.core.cluster.objects import GANG_PLAN, POD, RESOURCE_CLAIM, ResourceKind
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Finding, fails, unknown
from rackloom.core.diagnosis.index import at_pod
from rackloom.core.diagnosis.snapshot import ReportedCondition

_CHECKS: dict[ResourceKind, tuple[Check, str]] = {
    GANG_PLAN: (Check.GANG, "change what the message names"),
    POD: (Check.CLAIMS, "delete the pod, so that it is made anew"),
    RESOURCE_CLAIM: (Check.PREPARED, "delete its pod once the cause is gone"),
}


def check_conditions(reported: tuple[ReportedCondition, ...]) -> Iterator[Finding]:
    """A finding for each condition."""
    for found in reported:
        check, hint = _CHECKS[found.kind]
        condition, subject = found.condition, f"{found.kind.kind} {found.namespace}/{found.name}"
        device = f"{found.device}: " if found.device else ""
        message = f"{device}{condition.reason}: {condition.message}"
        fix = f"kubectl -n {found.namespace} describe {found.kind.plural} {found.name}  # {hint}"
        key = f"{found.namespace}/{found.name}"
        where = (at_pod(key) if found.kind == POD else subject, *map(at_pod, found.pods))
        if condition.status == "Unknown":
            yield unknown(check, subject, message, fix, where=where, since=condition.since)
            continue
        evidence = (f"status: condition {condition.type} is {condition.status}",)
        yield fails(check, subject, message, fix, evidence=evidence, where=where, since=condition.since)
