"""Checks of the conditions that controllers and nodes write on gangs, pods and claims.

The part of Rackloom that acts on an object records each problem as a condition, with a Warning event of the
same reason. These checks repeat no decision: each condition becomes one finding with its reason, its message
and its time. So the doctor, the map and `kubectl describe` name the same problems. The nodes of the pods that
use an object are places of its finding: a node that is not ready explains why its devices are not.
"""

from collections.abc import Iterator

from rackloom.core.cluster.objects import GANG_PLAN, POD, RESOURCE_CLAIM, ResourceKind
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.evidence import ClusterEvidence
from rackloom.core.diagnosis.findings import Finding, fails, unknown
from rackloom.core.diagnosis.index import at_node, at_pod

_CHECKS: dict[ResourceKind, tuple[Check, str]] = {
    GANG_PLAN: (Check.GANG, "change what the message names"),
    POD: (Check.CLAIMS, "delete the pod, so that its owner makes another"),
    RESOURCE_CLAIM: (Check.PREPARED, "delete its pod once the cause is gone"),
}


def check_conditions(cluster: ClusterEvidence) -> Iterator[Finding]:
    """A finding for each condition."""
    nodes = {pod.key: at_node(pod.node) for pod in cluster.pods if pod.node}
    for found in cluster.reported:
        check, hint = _CHECKS[found.kind]
        condition, subject = found.condition, f"{found.kind.kind} {found.namespace}/{found.name}"
        message = ": ".join(filter(None, (found.device, condition.reason, condition.message)))
        fix = f"kubectl -n {found.namespace} describe {found.kind.plural} {found.name}  # {hint}"
        pods = (f"{found.namespace}/{found.name}",) if found.kind == POD else found.pods
        where = (subject, *map(at_pod, pods), *(nodes[pod] for pod in pods if pod in nodes))
        if condition.status == "Unknown":
            yield unknown(check, subject, message, fix, where=where, since=condition.since)
            continue
        evidence = (f"status: condition {condition.type} is {condition.status}",)
        yield fails(check, subject, message, fix, evidence=evidence, where=where, since=condition.since)
