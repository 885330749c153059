"""Checks of ComputeDomains, from the template that a pod names to the mesh of the IMEX daemons.

In the order in which a ComputeDomain comes up:

- `TEMPLATES`: each ResourceClaimTemplate that a pod names exists. A similar name or another namespace is
  suggested.
- `CLAIMS`: each claim is allocated and reserved for its pod. A claim serves 256 pods at most. Pending claims
  are grouped by the owner of their pods, because these wait for one reason. DeviceTaintRules that hold them
  up are named with their devices. Pods with scheduling gates are held back on purpose and are not judged.
- `ACTIVE`: the conditions that the ComputeDomain controller wrote.
- `ONE_CLIQUE`: all pods of a ComputeDomain are in one clique, by the labels of their nodes and by the entries
  of the IMEX daemons. One may lag behind the other while a fabric is repartitioned.
- `MESH`: every IMEX daemon reaches its peers. If no daemon was read on any node in use, the mesh is unknown.
"""

import difflib
from collections.abc import Iterator

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.cluster.objects import Condition
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.checks.conditions import check_conditions
from rackloom.core.diagnosis.evidence import ClusterEvidence
from rackloom.core.diagnosis.findings import Finding, fails, first_few, holds, unknown
from rackloom.core.diagnosis.index import at_node, at_pod
from rackloom.core.diagnosis.snapshot import ClaimRecord, ImexMeshRecord, PodRecord, grouped

# Pods that wait for devices, grouped by their owner.


_EXPLAIN_COMMANDS = (
    "kubectl get resourceclaims,deviceclasses,nodes -A -o yaml > claims.yaml"
    " && kubectl get resourceslices -o yaml > slices.yaml"
    " && rackloom claim explain -f claims.yaml --slices slices.yaml"
)
"""Explains for each pending claim why it cannot have each device."""
PendingPod = tuple[PodRecord, dict[str, ClaimRecord]]
"""A pod with its claims that have no device, by their names in the pod."""


def check_pending(cluster: ClusterEvidence) -> Iterator[Finding]:
    """One finding for each owner of pods with pending claims, and for each such pod without an owner."""
    by_owner: dict[str, list[PendingPod]] = {}
    for pod in cluster.pods:
        # A gated pod is held back on purpose: the scheduler has not considered it yet.
        if pod.gated:
            continue
        claims = {key: cluster.claim(pod.namespace, name) for key, name in pod.claims.items()}
        pending = {key: claim for key, claim in claims.items() if claim is not None and not claim.allocated}
        if pending:
            by_owner.setdefault(pod.owner or _pod_subject(pod), []).append((pod, pending))
    for subject, pods in by_owner.items():
        yield _pending_finding(subject, pods)


def _pending_finding(subject: str, waiting: list[PendingPod]) -> Finding:
    pods = [pod for pod, _ in waiting]
    claims = [claim for _, pending in waiting for claim in pending.values()]
    # Pods of one owner name their claims alike. A single pod is shown with the claims themselves.
    names, of_pods = [claim.name for claim in claims], ""
    if len(waiting) > 1:
        names = list(dict.fromkeys(key for _, pending in waiting for key in pending))
        of_pods = f" of {len(waiting)} pods"
    kind = "ResourceClaim" if len(names) == 1 else "ResourceClaims"
    verb = "is" if len(names) == 1 and not of_pods else "are"
    # Taint rules that withhold devices are a known cause. Otherwise only the allocator can explain it.
    withheld = dict.fromkeys(device for claim in claims for device in claim.withheld)
    by_rule = grouped((device.rule, f"{device.node}/{device.device}") for device in withheld)
    own_words = f"the scheduler's own words: kubectl -n {pods[0].namespace} describe pod {pods[0].name}"
    cause, fix = "no device is allocated", f"{_EXPLAIN_COMMANDS}  # {own_words}"
    if by_rule:
        cause = "; ".join(
            f"DeviceTaintRule {rule} withholds {first_few(devices)}" for rule, devices in by_rule.items()
        )
        show = " && ".join(f"kubectl describe devicetaintrule {rule}" for rule in by_rule)
        fix = f"{show}  # delete it when its devices may be used, or wait for others; {own_words}"
    return fails(
        Check.CLAIMS,
        subject,
        f"{kind} {first_few(names)}{of_pods} {verb} pending: {cause}",
        fix,
        evidence=tuple(
            f"{_pod_subject(pod)}: {', '.join(claim.name for claim in pending.values())} not allocated"
            for pod, pending in waiting
        ),
        where=(
            *(at_pod(pod.key) for pod in pods),
            *dict.fromkeys(at_node(pod.node) for pod in pods if pod.node),
        ),
        since=min((pod.since for pod in pods if pod.since is not None), default=None),
    )


# Templates, claims, conditions, cliques and meshes.


NO_FABRIC = "(no fabric)"


def check_domains(cluster: ClusterEvidence) -> tuple[Finding, ...]:
    """Findings about reported conditions, pods, pending claims, then about each ComputeDomain."""
    found = list(check_conditions(cluster))
    for pod in cluster.pods:
        found += (*_templates(pod, cluster), *_claims(pod, cluster))
    found += check_pending(cluster)
    for domain in cluster.domains:
        found += (_active(domain, cluster), *_one_clique(domain, cluster), *_mesh(domain, cluster))
    return tuple(found)


def _templates(pod: PodRecord, cluster: ClusterEvidence) -> Iterator[Finding]:
    here = cluster.templates_in(pod.namespace)
    promised = {domain.template: domain for domain in cluster.domains_in(pod.namespace)}
    for name in pod.templates.values():
        if name in here:
            yield holds(Check.TEMPLATES, _pod_subject(pod), f"template {name} exists")
            continue
        if name in promised:
            domain = promised[name]
            message = f"template {name} of ComputeDomain {domain.key} has not been made"
            fix = (
                f"kubectl -n {pod.namespace} describe computedomain {domain.name}"
                "  # is rackloom controller running?"
            )
        else:
            message = f"it names template {name}, which no ComputeDomain in {pod.namespace} makes"
            fix = _template_fix(name, pod.namespace, here | promised.keys(), cluster)
        evidence = (
            f"pod: template {name}",
            f"templates in {pod.namespace}: {', '.join(sorted(here)) or '-'}",
        )
        where, since = _pod_places(pod), pod.since
        yield fails(
            Check.TEMPLATES, _pod_subject(pod), message, fix, evidence=evidence, where=where, since=since
        )


def _template_fix(wanted: str, namespace: str, known: frozenset[str], cluster: ClusterEvidence) -> str:
    elsewhere = sorted(template.namespace for template in cluster.templates if template.name == wanted)
    show = f"kubectl -n {namespace} get resourceclaimtemplates"
    if elsewhere:
        return f"{show}  # create the ComputeDomain in {namespace}: its template is in {elsewhere[0]}"
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
    if near:
        return f"{show}  # name {near[0]} in the pod, or {wanted} in spec.channel.resourceClaimTemplate"
    return f"{show}  # create a ComputeDomain with spec.channel.resourceClaimTemplate.name {wanted}"


def _claims(pod: PodRecord, cluster: ClusterEvidence) -> Iterator[Finding]:
    # A gated pod is held back on purpose: the scheduler has not considered it yet.
    for name in () if pod.gated else pod.claims.values():
        claim = cluster.claim(pod.namespace, name)
        if claim is not None and not claim.allocated:
            continue
        if claim is not None and pod.uid in claim.reserved_for:
            yield holds(Check.CLAIMS, _pod_subject(pod), f"ResourceClaim {name} is allocated,reserved")
        else:
            message, fix = _claim_trouble(pod, name, claim)
            evidence = (f"pod: ResourceClaim {name}", f"claim: {_claim_state(claim)}")
            where, since = _pod_places(pod), pod.since
            yield fails(
                Check.CLAIMS, _pod_subject(pod), message, fix, evidence=evidence, where=where, since=since
            )


def _claim_trouble(pod: PodRecord, name: str, claim: ClaimRecord | None) -> tuple[str, str]:
    """Why a pod cannot use a claim that is not pending, and the fix."""
    here = f"kubectl -n {pod.namespace}"
    if claim is None:
        message = f"its ResourceClaim {name} does not exist"
        return message, f"{here} get resourceclaims  # create it, or name a template, from which it is made"
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


def _active(domain: ComputeDomain, cluster: ClusterEvidence) -> Finding:
    subject = f"ComputeDomain {domain.key}"
    ready, degraded = domain.status.condition("Ready"), domain.status.condition("Degraded")
    where = _domain_places(domain, cluster)
    if degraded is not None and degraded.status == "True":
        return _condition_fails(domain, degraded, where)
    if ready is None:
        fix = "kubectl get pods -A -l app.kubernetes.io/name=rackloom  # is rackloom controller running?"
        return unknown(Check.ACTIVE, subject, "it has no conditions yet", fix, where=where)
    if ready.status == "True":
        return holds(Check.ACTIVE, subject, ready.message)
    if ready.reason == "NoNodes" and not cluster.users(domain.uid):
        return holds(Check.ACTIVE, subject, "nobody uses it now")
    if ready.status == "Unknown":
        message = f"{ready.reason}: {ready.message}"
        return unknown(Check.ACTIVE, subject, message, _SHOW_DAEMONS, where=where, since=ready.since)
    return _condition_fails(domain, ready, where)


def _condition_fails(domain: ComputeDomain, condition: Condition, where: tuple[str, ...]) -> Finding:
    hint = _HINTS.get(condition.reason, "change what the message names")
    return fails(
        Check.ACTIVE,
        f"ComputeDomain {domain.key}",
        f"{condition.reason}: {condition.message}",
        f"kubectl -n {domain.namespace} describe computedomain {domain.name}  # {hint}",
        evidence=(
            f"status: condition {condition.type} is {condition.status}",
            f"status: {len(domain.status.nodes)} nodes",
        ),
        where=where,
        since=condition.since,
    )


_SHOW_DAEMONS = f"kubectl get pods -A -o wide -l {names.COMPUTE_DOMAIN_LABEL}  # read the logs of its daemons"
_HINTS = {
    "NoNodes": "start pods that name its template: it has the nodes on which they land",
    "TooFewNodes": "start the missing pods, or leave spec.numNodes out: it gates nothing",
    "CliqueNotWarm": "no daemon is READY on any node of that clique",
    "ImexStartFailed": "read the logs of its daemons: nvidia-imex says there what it does not accept",
}


def _one_clique(domain: ComputeDomain, cluster: ClusterEvidence) -> Iterator[Finding]:
    """Judge by the labels of the nodes first, then by the cliques that their daemons entered.

    Labels and daemons may disagree for a while when the fabric is partitioned again under a running job.
    """
    subject = f"ComputeDomain {domain.key}"
    nodes = {pod.node for pod in cluster.users(domain.uid) if pod.node}
    if not nodes:
        return
    labels = {node: cluster.cliques[node] for node in sorted(nodes) if cluster.cliques.get(node)}
    daemons = {
        daemon.node: daemon.clique for daemon in cluster.daemons_of(domain.uid) if daemon.node in nodes
    }
    entered = {node: clique or NO_FABRIC for node, clique in sorted(daemons.items()) if clique is not None}
    for members, cliques in (("its pods", labels), ("the IMEX daemons of its pods", entered)):
        sides = grouped((clique, at_node(node)) for node, clique in cliques.items())
        if len(sides) < 2:
            continue
        spans = domain.status.condition(names.SPANS_CLIQUES)
        yield fails(
            Check.ONE_CLIQUE,
            subject,
            f"{members} are in cliques {', '.join(sorted(sides))}: no memory is shared between these",
            f"kubectl -n {domain.namespace} get pods -o wide  # create them anew with a required podAffinity"
            f" to each other over {names.GPU_CLIQUE_LABEL}, or with the webhook, which adds it; where they"
            " are meant to be apart, with a ComputeDomain for each clique",
            # The evidence shows labels and daemons, because one may lag behind the other.
            evidence=(
                *(f"cluster: node {node} is in {labels.get(node, '-')}" for node in sorted(nodes)),
                *(f"IMEX daemon on {node}: entered {clique}" for node, clique in entered.items()),
                *((f"status: condition {names.SPANS_CLIQUES} is {spans.status}",) if spans else ()),
            ),
            where=_domain_places(domain, cluster),
            sides=tuple(tuple(sides[clique]) for clique in sorted(sides)),
            since=spans.since if spans is not None and spans.status == "True" else None,
        )
        return
    unlabelled = sorted(nodes - labels.keys())
    if unlabelled:
        fix = f"kubectl get nodes -L {names.GPU_CLIQUE_LABEL}  # run rackloom node imex with --clique-label"
        message = f"no clique is known of {', '.join(unlabelled)}: label {names.GPU_CLIQUE_LABEL} is missing"
        yield unknown(Check.ONE_CLIQUE, subject, message, fix, where=tuple(map(at_node, unlabelled)))
    else:
        yield holds(Check.ONE_CLIQUE, subject, f"{len(nodes)} nodes in clique {next(iter(labels.values()))}")


def _mesh(domain: ComputeDomain, cluster: ClusterEvidence) -> Iterator[Finding]:
    daemons = [daemon for daemon in cluster.daemons_of(domain.uid) if daemon.clique != ""]
    if daemons:
        yield _mesh_finding(f"ComputeDomain {domain.key}", daemons)
    else:
        yield from _no_daemon_read(domain, cluster)


def _no_daemon_read(domain: ComputeDomain, cluster: ClusterEvidence) -> Iterator[Finding]:
    """The ComputeDomain is in use, and no daemon on its nodes was read."""
    nodes = {pod.node for pod in cluster.users(domain.uid) if pod.node and cluster.cliques.get(pod.node)}
    ready = domain.status.condition("Ready")
    by_host = ready is not None and ready.reason == "HostManaged"
    if nodes and not by_host and not nodes & cluster.nodes_of_daemons:
        yield unknown(
            Check.MESH,
            f"ComputeDomain {domain.key}",
            f"no IMEX daemon of it was read in namespace {cluster.daemons_in}: nobody knows of its mesh",
            f"kubectl get pods -A -o wide -l {names.COMPUTE_DOMAIN_LABEL}"
            "  # name the namespace that they are in: rackloom doctor --namespace",
            evidence=(
                f"cluster: pods that use it are on {first_few(sorted(nodes))}",
                f"namespace {cluster.daemons_in}: no daemon on any of these {len(nodes)} nodes",
            ),
            where=_domain_places(domain, cluster),
        )


def _mesh_finding(subject: str, daemons: list[ImexMeshRecord]) -> Finding:
    apart = [daemon for daemon in daemons if daemon.complete is False]
    if apart:
        message = f"{len(apart)} of {len(daemons)} IMEX daemons do not reach all their peers"
        fix = (
            f"kubectl get pods -A -o wide -l {names.COMPUTE_DOMAIN_LABEL}"
            "  # open TCP 50000 and 50005 between them; their nodes need one driver version"
        )
        evidence = tuple(f"daemon on {daemon.node}: misses {first_few(daemon.missing)}" for daemon in apart)
        return fails(
            Check.MESH,
            subject,
            message,
            fix,
            evidence=evidence,
            where=(subject, *(at_node(daemon.node) for daemon in apart)),
        )
    silent = sorted(daemon.node for daemon in daemons if daemon.complete is None)
    if silent:
        message = f"not reported by {', '.join(silent)}"
        where = (subject, *map(at_node, silent))
        return unknown(Check.MESH, subject, message, _SHOW_DAEMONS, where=where)
    return holds(Check.MESH, subject, f"{len(daemons)} daemons reach all their peers")


def _pod_subject(pod: PodRecord) -> str:
    return f"Pod {pod.key}"


def _pod_places(pod: PodRecord) -> tuple[str, ...]:
    return (at_pod(pod.key), *([at_node(pod.node)] if pod.node else []))


def _domain_places(domain: ComputeDomain, cluster: ClusterEvidence) -> tuple[str, ...]:
    users = cluster.users(domain.uid)
    nodes = sorted({pod.node for pod in users if pod.node} | {node.name for node in domain.status.nodes})
    pods = (at_pod(pod.key) for pod in users)
    return (f"ComputeDomain {domain.key}", *map(at_node, nodes), *pods)
