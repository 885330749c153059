"""Pods whose claims nobody has allocated: those of one owner are alike, and wait for one reason."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from rackloom.prove.doctor.checks.view import at_node, at_pod
from rackloom.prove.doctor.evidence import ClusterSeen
from rackloom.prove.doctor.findings import Finding, fails
from rackloom.prove.doctor.names import CLAIMS
from rackloom.prove.doctor.words import some
from rackloom.prove.picture.workloads import ClaimSeen, PodSeen

_EXPLAIN = (
    "kubectl get resourceclaims,deviceclasses,nodes -A -o yaml > claims.yaml"
    " && kubectl get resourceslices -o yaml > slices.yaml"
    " && rackloom claim explain -f claims.yaml --slices slices.yaml"
)
"""What takes each device away from each claim that has none."""
Waiting = tuple[PodSeen, dict[str, ClaimSeen]]
"""A pod with its claims that have no device, by their names in the pod."""


def check_waiting(seen: ClusterSeen) -> Iterator[Finding]:
    """One finding for each owner of pods whose claims are pending, and for each such pod without one."""
    for subject, waiting in _by_owner(seen).items():
        yield _waiting(subject, waiting)


def _by_owner(seen: ClusterSeen) -> Mapping[str, list[Waiting]]:
    found: defaultdict[str, list[Waiting]] = defaultdict(list)
    for pod in seen.pods:
        # A gated pod is held back on purpose: the scheduler has not looked at it yet.
        claims = (
            {} if pod.gated else {key: seen.claim(pod.namespace, name) for key, name in pod.claims.items()}
        )
        pending = {key: one for key, one in claims.items() if one is not None and not one.allocated}
        if pending:
            found[pod.owner or f"Pod {pod.namespace}/{pod.name}"].append((pod, pending))
    return found


def _waiting(subject: str, waiting: list[Waiting]) -> Finding:
    pods = [pod for pod, _ in waiting]
    since = [one for one in (pod.since for pod in pods) if one is not None]
    first = pods[0]
    return fails(
        CLAIMS,
        subject,
        _said(waiting),
        f"{_EXPLAIN}  # the scheduler's own words: kubectl -n {first.namespace} describe pod {first.name}",
        evidence=tuple(_told(*one) for one in waiting),
        where=(
            *(at_pod(f"{pod.namespace}/{pod.name}") for pod in pods),
            *dict.fromkeys(at_node(pod.node) for pod in pods if pod.node),
        ),
        since=min(since, default=None),
    )


def _said(waiting: list[Waiting]) -> str:
    if len(waiting) == 1:
        names = [one.name for one in waiting[0][1].values()]
    else:
        names = list(dict.fromkeys(key for _, pending in waiting for key in pending))
    pods = "" if len(waiting) == 1 else f" of {len(waiting)} pods"
    one = len(names) == 1 and not pods
    claims = f"{'ResourceClaim' if len(names) == 1 else 'ResourceClaims'} {some(names)}{pods}"
    return f"{claims} {'is' if one else 'are'} pending: no device is allocated"


def _told(pod: PodSeen, pending: Mapping[str, ClaimSeen]) -> str:
    claims = ", ".join(one.name for one in pending.values())
    return f"Pod {pod.namespace}/{pod.name}: {claims} not allocated"
