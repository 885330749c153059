"""Checks of ComputeDomains, from the template that a pod names to the mesh of the IMEX daemons.

In the order in which things come about:

- `TEMPLATES`: each ResourceClaimTemplate that a pod names exists; a similar name or another namespace is
  suggested;
- `CLAIMS`: each claim is allocated and reserved for its pod. A claim serves 256 pods at most. Pending
  claims are grouped by the owner of their pods, because these wait for one reason. Pods with scheduling
  gates are held back on purpose and are not judged;
- `ACTIVE`: the conditions that the ComputeDomain controller wrote;
- `ONE_CLIQUE`: all pods of a ComputeDomain are in one clique, by the labels of their nodes and by what
  the IMEX daemons entered. One may lag behind the other while a fabric is partitioned anew;
- `MESH`: every IMEX daemon reaches its peers. Where no daemon was read on any node in use, the mesh is
  unknown.
"""

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime

import msgspec

from rackloom.core.diagnosis.catalogue import ACTIVE, CLAIMS, MESH, ONE_CLIQUE, TEMPLATES
from rackloom.core.diagnosis.evidence import ClusterEvidence, ImexDaemonRecord
from rackloom.core.diagnosis.findings import Finding, fails, first_few, holds, unknown
from rackloom.core.diagnosis.index import at_node, at_pod
from rackloom.core.diagnosis.snapshot import ClaimRecord, PodRecord
from rackloom.core.domains import names
from rackloom.core.domains.compute_domain import ComputeDomain, Condition

# Pods that wait for devices, grouped by their owner.


_EXPLAIN_COMMANDS = (
    "kubectl get resourceclaims,deviceclasses,nodes -A -o yaml > claims.yaml"
    " && kubectl get resourceslices -o yaml > slices.yaml"
    " && rackloom claim explain -f claims.yaml --slices slices.yaml"
)
"""What takes each device away from each claim that has none."""
PendingPod = tuple[PodRecord, dict[str, ClaimRecord]]
"""A pod with its claims that have no device, by their names in the pod."""


def check_pending(seen: ClusterEvidence) -> Iterator[Finding]:
    """One finding for each owner of pods whose claims are pending, and for each such pod without one."""
    for subject, waiting in _pending_by_owner(seen).items():
        yield _pending_finding(subject, waiting)


def _pending_by_owner(seen: ClusterEvidence) -> Mapping[str, list[PendingPod]]:
    found: defaultdict[str, list[PendingPod]] = defaultdict(list)
    for pod in seen.pods:
        # A gated pod is held back on purpose: the scheduler has not looked at it yet.
        claims = (
            {} if pod.gated else {key: seen.claim(pod.namespace, name) for key, name in pod.claims.items()}
        )
        pending = {key: claim for key, claim in claims.items() if claim is not None and not claim.allocated}
        if pending:
            found[pod.owner or f"Pod {pod.namespace}/{pod.name}"].append((pod, pending))
    return found


def _pending_finding(subject: str, waiting: list[PendingPod]) -> Finding:
    pods = [pod for pod, _ in waiting]
    since = [one for one in (pod.since for pod in pods) if one is not None]
    first = pods[0]
    return fails(
        CLAIMS,
        subject,
        _pending_message(waiting),
        f"{_EXPLAIN_COMMANDS}  # the scheduler's own words:"
        f" kubectl -n {first.namespace} describe pod {first.name}",
        evidence=tuple(_pending_evidence(*one) for one in waiting),
        where=(
            *(at_pod(f"{pod.namespace}/{pod.name}") for pod in pods),
            *dict.fromkeys(at_node(pod.node) for pod in pods if pod.node),
        ),
        since=min(since, default=None),
    )


def _pending_message(waiting: list[PendingPod]) -> str:
    if len(waiting) == 1:
        names = [one.name for one in waiting[0][1].values()]
    else:
        names = list(dict.fromkeys(key for _, pending in waiting for key in pending))
    pods = "" if len(waiting) == 1 else f" of {len(waiting)} pods"
    one = len(names) == 1 and not pods
    claims = f"{'ResourceClaim' if len(names) == 1 else 'ResourceClaims'} {first_few(names)}{pods}"
    return f"{claims} {'is' if one else 'are'} pending: no device is allocated"


def _pending_evidence(pod: PodRecord, pending: Mapping[str, ClaimRecord]) -> str:
    claims = ", ".join(one.name for one in pending.values())
    return f"Pod {pod.namespace}/{pod.name}: {claims} not allocated"


# Templates, claims, conditions, cliques and meshes.


NO_FABRIC = "(no fabric)"


def check_domains(seen: ClusterEvidence) -> tuple[Finding, ...]:
    """All findings about a cluster, in the order in which things come about."""
    pods = [finding for pod in seen.pods for finding in (*_templates(pod, seen), *_claims(pod, seen))]
    pods += check_pending(seen)
    domains = [finding for domain in seen.domains for finding in _check_domain(domain, seen)]
    return (*pods, *domains)


def _check_domain(domain: ComputeDomain, seen: ClusterEvidence) -> Iterator[Finding]:
    yield _active(domain, seen)
    yield from _one_clique(domain, seen)
    yield from _mesh(domain, seen)


def _templates(pod: PodRecord, seen: ClusterEvidence) -> Iterator[Finding]:
    here = seen.templates_in(pod.namespace)
    promised = {one.template: one for one in seen.domains_in(pod.namespace)}
    for name in pod.templates.values():
        if name in here:
            yield holds(TEMPLATES, _pod_subject(pod), f"template {name} exists")
            continue
        if name in promised:
            domain = promised[name]
            said = f"template {name} of ComputeDomain {domain.key} has not been made"
            fix = (
                f"kubectl -n {pod.namespace} describe computedomain {domain.name}"
                "  # is rackloom controller running?"
            )
        else:
            said = f"it names template {name}, which no ComputeDomain in {pod.namespace} makes"
            fix = _template_fix(name, pod.namespace, here | promised.keys(), seen)
        evidence = (
            f"pod: template {name}",
            f"templates in {pod.namespace}: {', '.join(sorted(here)) or '-'}",
        )
        where, since = _pod_places(pod), pod.since
        yield fails(TEMPLATES, _pod_subject(pod), said, fix, evidence=evidence, where=where, since=since)


def _template_fix(wanted: str, namespace: str, known: set[str], seen: ClusterEvidence) -> str:
    elsewhere = sorted(template.namespace for template in seen.templates if template.name == wanted)
    list_them = f"kubectl -n {namespace} get resourceclaimtemplates"
    if elsewhere:
        return f"{list_them}  # create the ComputeDomain in {namespace}: its template is in {elsewhere[0]}"
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
    if near:
        return f"{list_them}  # name {near[0]} in the pod, or {wanted} in spec.channel.resourceClaimTemplate"
    return f"{list_them}  # create a ComputeDomain with spec.channel.resourceClaimTemplate.name {wanted}"


def _claims(pod: PodRecord, seen: ClusterEvidence) -> Iterator[Finding]:
    # A gated pod is held back on purpose: the scheduler has not looked at it yet.
    for name in () if pod.gated else pod.claims.values():
        claim = seen.claim(pod.namespace, name)
        if claim is not None and not claim.allocated:
            continue
        if claim is not None and pod.uid in claim.reserved_for:
            yield holds(CLAIMS, _pod_subject(pod), f"ResourceClaim {name} is allocated,reserved")
        else:
            said, fix = _claim_trouble(pod, name, claim)
            evidence = (f"pod: ResourceClaim {name}", f"claim: {_claim_state(claim)}")
            where, since = _pod_places(pod), pod.since
            yield fails(CLAIMS, _pod_subject(pod), said, fix, evidence=evidence, where=where, since=since)


def _claim_trouble(pod: PodRecord, name: str, claim: ClaimRecord | None) -> tuple[str, str]:
    """What is wrong with a claim that a pod cannot use though it is not the scheduler's turn, and the fix."""
    here = f"kubectl -n {pod.namespace}"
    if claim is None:
        said = f"its ResourceClaim {name} does not exist"
        return said, f"{here} get resourceclaims  # create it, or name a template, from which it is made"
    full = len(claim.reserved_for) >= names.PODS_PER_CLAIM
    fix = (
        f"{here} describe resourceclaim {name}  # one claim serves 256 pods: split the job"
        if full
        else f"{here} delete pod {pod.name}  # so that it is scheduled anew"
    )
    return f"ResourceClaim {name} is allocated, but not reserved for it", fix


def _claim_state(claim: ClaimRecord | None) -> str:
    if claim is None:
        return "none of that name"
    allocated = "allocated" if claim.allocated else "not allocated"
    return f"{allocated}, reserved for {len(claim.reserved_for)} pods"


def _active(domain: ComputeDomain, seen: ClusterEvidence) -> Finding:
    subject = f"ComputeDomain {domain.key}"
    ready, degraded = domain.status.condition("Ready"), domain.status.condition("Degraded")
    where = _domain_places(domain, seen)
    if degraded is not None and degraded.status == "True":
        return _condition_fails(domain, degraded, where)
    if ready is None:
        fix = "kubectl get pods -A -l app.kubernetes.io/name=rackloom  # is rackloom controller running?"
        return unknown(ACTIVE, subject, "it has no conditions yet", fix, where=where)
    if ready.status == "True":
        return holds(ACTIVE, subject, ready.message)
    if ready.reason == "NoNodes" and not seen.users(domain.uid):
        return holds(ACTIVE, subject, "nobody uses it now")
    if ready.status == "Unknown":
        said = f"{ready.reason}: {ready.message}"
        return unknown(ACTIVE, subject, said, _SHOW_DAEMONS, where=where, since=_condition_since(ready))
    return _condition_fails(domain, ready, where)


def _condition_fails(domain: ComputeDomain, said: Condition, where: tuple[str, ...]) -> Finding:
    hint = _HINTS.get(said.reason, "change what the message names")
    return fails(
        ACTIVE,
        f"ComputeDomain {domain.key}",
        f"{said.reason}: {said.message}",
        f"kubectl -n {domain.namespace} describe computedomain {domain.name}  # {hint}",
        evidence=(
            f"status: condition {said.type} is {said.status}",
            f"status: {len(domain.status.nodes)} nodes",
        ),
        where=where,
        since=_condition_since(said),
    )


def _condition_since(condition: Condition) -> float | None:
    told = condition.last_transition_time
    return datetime.fromisoformat(told).timestamp() if told else None


_SHOW_DAEMONS = f"kubectl get pods -A -o wide -l {names.COMPUTE_DOMAIN_LABEL}  # read the logs of its daemons"
_HINTS = {
    "NoNodes": "start pods that name its template: it has the nodes on which they land",
    "TooFewNodes": "start the missing pods, or leave spec.numNodes out: it gates nothing",
    "CliqueNotWarm": "no daemon is READY on any node of that clique",
    "ImexStartFailed": "read the logs of its daemons: nvidia-imex says there what it does not accept",
}


def _one_clique(domain: ComputeDomain, seen: ClusterEvidence) -> Iterator[Finding]:
    """By the labels of the nodes, and by what the daemons there entered.

    One may be behind the other when a fabric is partitioned anew under the job.
    """
    subject = f"ComputeDomain {domain.key}"
    nodes = {pod.node for pod in seen.users(domain.uid) if pod.node}
    if not nodes:
        return
    labels = {node: seen.cliques[node] for node in sorted(nodes) if seen.cliques.get(node)}
    daemons = {daemon.node: daemon.clique for daemon in seen.daemons_of(domain.uid) if daemon.node in nodes}
    entered = {node: clique or NO_FABRIC for node, clique in sorted(daemons.items()) if clique is not None}
    for whose, cliques in (("its pods are", labels), ("the IMEX daemons of its pods are", entered)):
        if len(set(cliques.values())) > 1:
            yield _several_cliques(
                domain, seen, f"{whose} in cliques", cliques, _clique_evidence(domain, nodes, labels, entered)
            )
            return
    unlabelled = sorted(nodes - labels.keys())
    if unlabelled:
        fix = f"kubectl get nodes -L {names.GPU_CLIQUE_LABEL}  # run rackloom node imex with --clique-label"
        said = f"no clique is known of {', '.join(unlabelled)}: label {names.GPU_CLIQUE_LABEL} is missing"
        yield unknown(ONE_CLIQUE, subject, said, fix, where=tuple(map(at_node, unlabelled)))
    else:
        yield holds(ONE_CLIQUE, subject, f"{len(nodes)} nodes in clique {next(iter(labels.values()))}")


def _several_cliques(
    domain: ComputeDomain,
    seen: ClusterEvidence,
    where: str,
    cliques: Mapping[str, str],
    told: tuple[str, ...],
) -> Finding:
    fix = (
        f"kubectl -n {domain.namespace} get pods -o wide  # create them anew with a required podAffinity"
        f" to each other over {names.GPU_CLIQUE_LABEL}, or with the webhook, which adds it; where they are"
        " meant to be apart, with a ComputeDomain for each clique"
    )
    said = f"{where} {', '.join(sorted(set(cliques.values())))}: no memory is shared between these"
    spans = domain.status.condition(names.SPANS_CLIQUES)
    found = fails(
        ONE_CLIQUE,
        f"ComputeDomain {domain.key}",
        said,
        fix,
        evidence=told,
        where=_domain_places(domain, seen),
        since=_condition_since(spans) if spans is not None and spans.status == "True" else None,
    )
    return msgspec.structs.replace(found, sides=_nodes_by_clique(cliques))


def _clique_evidence(
    domain: ComputeDomain, nodes: set[str], labels: Mapping[str, str], entered: Mapping[str, str]
) -> tuple[str, ...]:
    """What each side says of each node."""
    spans = domain.status.condition(names.SPANS_CLIQUES)
    status = () if spans is None else (f"status: condition {names.SPANS_CLIQUES} is {spans.status}",)
    cluster = (f"cluster: node {node} is in {labels.get(node, '-')}" for node in sorted(nodes))
    daemons = (f"IMEX daemon on {node}: entered {clique}" for node, clique in entered.items())
    return (*cluster, *daemons, *status)


def _nodes_by_clique(cliques: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for node, clique in cliques.items():
        found[clique].append(at_node(node))
    return tuple(tuple(found[clique]) for clique in sorted(found))


def _mesh(domain: ComputeDomain, seen: ClusterEvidence) -> Iterator[Finding]:
    daemons = [daemon for daemon in seen.daemons_of(domain.uid) if daemon.clique != ""]
    if daemons:
        yield _mesh_finding(f"ComputeDomain {domain.key}", daemons)
    else:
        yield from _no_daemon_read(domain, seen)


def _no_daemon_read(domain: ComputeDomain, seen: ClusterEvidence) -> Iterator[Finding]:
    """It is at work, and nobody was heard of its mesh."""
    nodes = {pod.node for pod in seen.users(domain.uid) if pod.node and seen.cliques.get(pod.node)}
    ready = domain.status.condition("Ready")
    by_host = ready is not None and ready.reason == "HostManaged"
    if nodes and not by_host and not nodes & seen.nodes_of_daemons:
        yield unknown(
            MESH,
            f"ComputeDomain {domain.key}",
            f"no IMEX daemon of it was read in namespace {seen.daemons_in}: nobody knows of its mesh",
            f"kubectl get pods -A -o wide -l {names.COMPUTE_DOMAIN_LABEL}"
            "  # name the namespace that they are in: rackloom doctor --namespace",
            evidence=(
                f"cluster: pods that use it are on {first_few(sorted(nodes))}",
                f"namespace {seen.daemons_in}: no daemon on any of these {len(nodes)} nodes",
            ),
            where=_domain_places(domain, seen),
        )


def _mesh_finding(subject: str, daemons: list[ImexDaemonRecord]) -> Finding:
    apart = [daemon for daemon in daemons if daemon.meshed is False]
    if apart:
        said = f"{len(apart)} of {len(daemons)} IMEX daemons do not reach all their peers"
        fix = (
            f"kubectl get pods -A -o wide -l {names.COMPUTE_DOMAIN_LABEL}"
            "  # open TCP 50000 and 50005 between them; their nodes need one driver version"
        )
        told = tuple(f"daemon on {one.node}: misses {first_few(one.missing)}" for one in apart)
        return fails(MESH, subject, said, fix, evidence=told, where=_daemon_places(subject, apart))
    silent = sorted(daemon.node for daemon in daemons if daemon.meshed is None)
    if silent:
        said = f"not reported by {', '.join(silent)}"
        where = (subject, *map(at_node, silent))
        return unknown(MESH, subject, said, _SHOW_DAEMONS, where=where)
    return holds(MESH, subject, f"{len(daemons)} daemons reach all their peers")


def _pod_subject(pod: PodRecord) -> str:
    return f"Pod {pod.namespace}/{pod.name}"


def _pod_places(pod: PodRecord) -> tuple[str, ...]:
    return (at_pod(f"{pod.namespace}/{pod.name}"), *([at_node(pod.node)] if pod.node else []))


def _domain_places(domain: ComputeDomain, seen: ClusterEvidence) -> tuple[str, ...]:
    users = seen.users(domain.uid)
    nodes = sorted({pod.node for pod in users if pod.node} | {node.name for node in domain.status.nodes})
    pods = (at_pod(f"{pod.namespace}/{pod.name}") for pod in users)
    return (f"ComputeDomain {domain.key}", *map(at_node, nodes), *pods)


def _daemon_places(subject: str, daemons: list[ImexDaemonRecord]) -> tuple[str, ...]:
    return (subject, *(at_node(daemon.node) for daemon in daemons))
