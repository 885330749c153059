"""ComputeDomains from the template that pods name to the mesh of their daemons."""

import difflib
from collections.abc import Iterator

from rackloom.claim.domain import names
from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.doctor.evidence import ClusterSeen, DaemonSeen, PodSeen
from rackloom.prove.doctor.findings import Finding, fails, holds, unknown

CLAIMS, ACTIVE, TEMPLATES, ONE_CLIQUE, MESH = (
    "claims allocated,reserved",
    "ComputeDomain active",
    "template names match",
    "pods in one clique",
    "IMEX mesh complete",
)


def check_domains(seen: ClusterSeen) -> tuple[Finding, ...]:
    """All findings about a cluster, in the order in which things come about."""
    pods = [finding for pod in seen.pods for finding in (*_templates(pod, seen), *_claims(pod, seen))]
    domains = [finding for one in seen.domains for finding in _domain(one, seen)]
    return (*pods, *domains)


def _domain(domain: ComputeDomain, seen: ClusterSeen) -> Iterator[Finding]:
    yield _active(domain)
    yield from _one_clique(domain, seen)
    yield from _mesh(domain, seen)


def _templates(pod: PodSeen, seen: ClusterSeen) -> Iterator[Finding]:
    here = {one.name for one in seen.templates if one.namespace == pod.namespace}
    promised = {one.template: one.key for one in seen.domains if one.namespace == pod.namespace}
    for name in pod.templates.values():
        if name in here:
            yield holds(TEMPLATES, _of(pod), f"template {name} exists")
        elif name in promised:
            said = f"template {name} of ComputeDomain {promised[name]} has not been made"
            fix = f"see the conditions of {promised[name]}; is rackloom controller running?"
            yield fails(TEMPLATES, _of(pod), said, fix)
        else:
            said = f"it names template {name}, which no ComputeDomain in {pod.namespace} makes"
            yield fails(TEMPLATES, _of(pod), said, _rename(name, pod.namespace, here | promised.keys(), seen))


def _rename(wanted: str, namespace: str, known: set[str], seen: ClusterSeen) -> str:
    elsewhere = sorted(one.namespace for one in seen.templates if one.name == wanted)
    if elsewhere:
        return f"create the ComputeDomain in {namespace}: its template is in {elsewhere[0]}"
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
    if near:
        return f"name {near[0]} in the pod, or {wanted} in spec.channel.resourceClaimTemplate"
    return f"create a ComputeDomain in {namespace} with spec.channel.resourceClaimTemplate.name {wanted}"


def _claims(pod: PodSeen, seen: ClusterSeen) -> Iterator[Finding]:
    for name in pod.claims.values():
        claim = seen.claim(pod.namespace, name)
        if claim is None:
            fix = "create it, or name a template, for which a claim is made by itself"
            yield fails(CLAIMS, _of(pod), f"its ResourceClaim {name} does not exist", fix)
        elif not claim.allocated:
            fix = (
                f"see why no node fits: kubectl describe pod -n {pod.namespace} {pod.name}; "
                "rackloom claim explain names the nearest fix"
            )
            yield fails(CLAIMS, _of(pod), f"ResourceClaim {name} is pending: no device is allocated", fix)
        elif pod.uid not in claim.reserved_for:
            full = len(claim.reserved_for) >= names.PODS_PER_CLAIM
            fix = (
                "split the job: one claim serves 256 pods"
                if full
                else "delete the pod, so that it is scheduled anew"
            )
            yield fails(CLAIMS, _of(pod), f"ResourceClaim {name} is allocated, but not reserved for it", fix)
        else:
            yield holds(CLAIMS, _of(pod), f"ResourceClaim {name} is allocated,reserved")


def _active(domain: ComputeDomain) -> Finding:
    subject = f"ComputeDomain {domain.key}"
    ready, degraded = domain.status.condition("Ready"), domain.status.condition("Degraded")
    if degraded is not None and degraded.status == "True":
        return fails(
            ACTIVE, subject, f"{degraded.reason}: {degraded.message}", "change what the message names"
        )
    if ready is None:
        return unknown(ACTIVE, subject, "it has no conditions yet", "start rackloom controller")
    if ready.status == "True":
        return holds(ACTIVE, subject, ready.message)
    if ready.status == "Unknown":
        return unknown(
            ACTIVE, subject, f"{ready.reason}: {ready.message}", "ask nvidia-imex-ctl -q on its nodes"
        )
    return fails(ACTIVE, subject, f"{ready.reason}: {ready.message}", _FIXES.get(ready.reason, _SEE_DAEMONS))


_SEE_DAEMONS = (
    "read the logs of its daemon pods in the driver's namespace, and check their nodes with rackloom doctor"
)
_FIXES = {
    "NoNodes": "start pods that name its template; a ComputeDomain has the nodes on which they land",
    "TooFewNodes": "start the missing pods, or leave spec.numNodes out: it gates nothing",
    "CliqueNotWarm": "check the nodes of that clique: no daemon is READY on any of them",
}


def _one_clique(domain: ComputeDomain, seen: ClusterSeen) -> Iterator[Finding]:
    subject = f"ComputeDomain {domain.key}"
    nodes = {pod.node for pod in seen.users(domain.uid) if pod.node}
    if not nodes:
        return
    unlabelled = sorted(node for node in nodes if not seen.cliques.get(node))
    cliques = sorted({seen.cliques[node] for node in nodes if seen.cliques.get(node)})
    if len(cliques) > 1:
        fix = (
            f"give the pods a required podAffinity with topologyKey {names.GPU_CLIQUE_LABEL} that selects "
            "each other, or install the webhook, which adds it; then create them anew"
        )
        yield fails(ONE_CLIQUE, subject, f"its pods are in cliques {', '.join(cliques)}", fix)
    elif unlabelled:
        fix = "run rackloom node imex with --clique-label; look at the fabric state of the GPUs there"
        said = f"no clique is known of {', '.join(unlabelled)}: label {names.GPU_CLIQUE_LABEL} is missing"
        yield unknown(ONE_CLIQUE, subject, said, fix)
    else:
        yield holds(ONE_CLIQUE, subject, f"{len(nodes)} nodes in clique {cliques[0]}")


def _mesh(domain: ComputeDomain, seen: ClusterSeen) -> Iterator[Finding]:
    daemons = [one for one in seen.daemons if one.domain == domain.uid and one.clique != ""]
    if daemons:
        yield _mesh_of(f"ComputeDomain {domain.key}", daemons)


def _mesh_of(subject: str, daemons: list[DaemonSeen]) -> Finding:
    apart = [one for one in daemons if one.meshed is False]
    if apart:
        said = "; ".join(f"{one.node}: {', '.join(one.missing)}" for one in apart)
        fix = "open TCP ports 50000 and 50005 between these pods; their nodes need one driver version"
        return fails(MESH, subject, f"IMEX is not connected: {said}", fix)
    silent = sorted(one.node for one in daemons if one.meshed is None)
    if silent:
        return unknown(MESH, subject, f"not reported by {', '.join(silent)}", _SEE_DAEMONS)
    return holds(MESH, subject, f"{len(daemons)} daemons reach all their peers")


def _of(pod: PodSeen) -> str:
    return f"Pod {pod.namespace}/{pod.name}"
