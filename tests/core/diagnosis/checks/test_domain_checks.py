"""ComputeDomain evidence in, findings with a fix out. Applying the fix makes the check hold."""

import textwrap

import msgspec
import pytest
from inline_snapshot import snapshot

from rackloom.core.cluster.domain_objects import ComputeDomain, ComputeDomainStatus
from rackloom.core.cluster.objects import Condition
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.checks.domains import check_domains
from rackloom.core.diagnosis.evidence import ClusterEvidence
from rackloom.core.diagnosis.findings import CheckState, verdict
from rackloom.core.diagnosis.snapshot import ClaimRecord, ImexMeshRecord, PodRecord, TemplateRecord


def condition(type_, status, reason="AllNodesReady", message="2 nodes ready"):
    return Condition(type=type_, status=status, reason=reason, message=message)


DOMAIN = ComputeDomain(
    namespace="team",
    name="job",
    uid="cd-1",
    template="imex-channel-0",
    status=ComputeDomainStatus(conditions=(condition("Ready", "True"), condition("Degraded", "False"))),
)


def pod(number, node):
    return PodRecord(
        namespace="team",
        name=f"worker-{number}",
        uid=f"pod-{number}",
        node=node,
        templates={"channel": "imex-channel-0"},
        claims={"channel": f"claim-{number}"},
    )


def claim(number):
    return ClaimRecord(
        namespace="team",
        name=f"claim-{number}",
        domain="cd-1",
        allocated=True,
        reserved_for=(f"pod-{number}",),
    )


WELL = ClusterEvidence(
    domains=(DOMAIN,),
    templates=(TemplateRecord(namespace="team", name="imex-channel-0", domain="cd-1"),),
    claims=(claim(0), claim(1)),
    pods=(pod(0, "n0"), pod(1, "n1")),
    daemons=tuple(
        ImexMeshRecord(domain="cd-1", node=node, clique="a.1", complete=True) for node in ("n0", "n1")
    ),
    cliques={"n0": "a.1", "n1": "a.1"},
)


def changed(**fields):
    return msgspec.structs.replace(WELL, **fields)


def of(check, seen):
    return [domain for domain in check_domains(seen) if domain.check == check]


def test_a_healthy_job_holds_in_all_five():
    findings = check_domains(WELL)
    assert {finding.check for finding in findings} == {
        Check.CLAIMS,
        Check.ACTIVE,
        Check.TEMPLATES,
        Check.ONE_CLIQUE,
        Check.MESH,
    }
    assert verdict(findings) is CheckState.HOLDS
    assert not any(finding.fix for finding in findings)


def test_nothing_seen_is_no_success():
    assert verdict(()) is CheckState.UNKNOWN


def replaced(record, **fields):
    return msgspec.structs.replace(record, **fields)


READY_NOT = ComputeDomainStatus(
    conditions=(condition("Ready", "False", "NoNodes", "no channel of it is in use"),)
)
TAKEN = ComputeDomainStatus(
    conditions=(condition("Degraded", "True", "TemplateNameTaken", "x exists; delete it"),)
)
ILL = {
    "pending": (Check.CLAIMS, changed(claims=(replaced(claim(0), allocated=False), claim(1)))),
    "not-reserved": (Check.CLAIMS, changed(claims=(replaced(claim(0), reserved_for=()), claim(1)))),
    "full": (
        Check.CLAIMS,
        changed(claims=(replaced(claim(0), reserved_for=tuple(map(str, range(256)))), claim(1))),
    ),
    "no-claim": (Check.CLAIMS, changed(claims=(claim(1),))),
    "not-ready": (Check.ACTIVE, changed(domains=(replaced(DOMAIN, status=READY_NOT),))),
    "degraded": (Check.ACTIVE, changed(domains=(replaced(DOMAIN, status=TAKEN),))),
    "misspelt": (Check.TEMPLATES, changed(pods=(replaced(pod(0, "n0"), templates={"c": "imex-chanel-0"}),))),
    "not-made": (Check.TEMPLATES, changed(templates=())),
    "elsewhere": (
        Check.TEMPLATES,
        changed(domains=(), templates=(replaced(WELL.templates[0], namespace="other"),)),
    ),
    "no-domain": (Check.TEMPLATES, changed(domains=(), templates=())),
    "two-cliques": (Check.ONE_CLIQUE, changed(cliques={"n0": "a.1", "n1": "a.2"})),
    "two-cliques-by-daemons": (
        Check.ONE_CLIQUE,
        changed(daemons=(WELL.daemons[0], replaced(WELL.daemons[1], clique="a.2"))),
    ),
    "one-without-fabric": (
        Check.ONE_CLIQUE,
        changed(daemons=(WELL.daemons[0], replaced(WELL.daemons[1], clique=""))),
    ),
    "not-meshed": (
        Check.MESH,
        changed(
            daemons=(replaced(WELL.daemons[0], complete=False, missing=("0 -> 1: INVALID",)), WELL.daemons[1])
        ),
    ),
}


@pytest.mark.parametrize("case", ILL)
def test_each_illness_is_found_once_with_what_to_change(case):
    check, seen = ILL[case]
    failed = [finding for finding in of(check, seen) if finding.state is CheckState.FAILS]
    assert failed
    assert all(finding.fix and finding.message for finding in failed)
    assert verdict(check_domains(seen)) is CheckState.FAILS


def test_what_is_said():
    lines = [
        f"{case}: {finding.message} -- {finding.fix}"
        for case in ILL
        for finding in [first_failure(*ILL[case])]
    ]
    assert "\n".join(textwrap.fill(line, 100, subsequent_indent="  ") for line in lines) == snapshot("""\
pending: ResourceClaim claim-0 is pending: no device is allocated -- kubectl get
  resourceclaims,deviceclasses,nodes -A -o yaml > claims.yaml && kubectl get resourceslices -o yaml
  > slices.yaml && rackloom claim explain -f claims.yaml --slices slices.yaml  # the scheduler's own
  words: kubectl -n team describe pod worker-0
not-reserved: ResourceClaim claim-0 is allocated, but not reserved for it -- kubectl -n team delete
  pod worker-0  # so that it is scheduled anew
full: ResourceClaim claim-0 is allocated, but not reserved for it -- kubectl -n team describe
  resourceclaim claim-0  # one claim serves 256 pods: split the job
no-claim: its ResourceClaim claim-0 does not exist -- kubectl -n team get resourceclaims  # create
  it, or name a template, from which it is made
not-ready: NoNodes: no channel of it is in use -- kubectl -n team describe computedomain job  #
  start pods that name its template: it has the nodes on which they land
degraded: TemplateNameTaken: x exists; delete it -- kubectl -n team describe computedomain job  #
  change what the message names
misspelt: it names template imex-chanel-0, which no ComputeDomain in team makes -- kubectl -n team
  get resourceclaimtemplates  # name imex-channel-0 in the pod, or imex-chanel-0 in
  spec.channel.resourceClaimTemplate
not-made: template imex-channel-0 of ComputeDomain team/job has not been made -- kubectl -n team
  describe computedomain job  # is rackloom controller running?
elsewhere: it names template imex-channel-0, which no ComputeDomain in team makes -- kubectl -n team
  get resourceclaimtemplates  # create the ComputeDomain in team: its template is in other
no-domain: it names template imex-channel-0, which no ComputeDomain in team makes -- kubectl -n team
  get resourceclaimtemplates  # create a ComputeDomain with spec.channel.resourceClaimTemplate.name
  imex-channel-0
two-cliques: its pods are in cliques a.1, a.2: no memory is shared between these -- kubectl -n team
  get pods -o wide  # create them anew with a required podAffinity to each other over
  nvidia.com/gpu.clique, or with the webhook, which adds it; where they are meant to be apart, with
  a ComputeDomain for each clique
two-cliques-by-daemons: the IMEX daemons of its pods are in cliques a.1, a.2: no memory is shared
  between these -- kubectl -n team get pods -o wide  # create them anew with a required podAffinity
  to each other over nvidia.com/gpu.clique, or with the webhook, which adds it; where they are meant
  to be apart, with a ComputeDomain for each clique
one-without-fabric: the IMEX daemons of its pods are in cliques (no fabric), a.1: no memory is
  shared between these -- kubectl -n team get pods -o wide  # create them anew with a required
  podAffinity to each other over nvidia.com/gpu.clique, or with the webhook, which adds it; where
  they are meant to be apart, with a ComputeDomain for each clique
not-meshed: 1 of 2 IMEX daemons do not reach all their peers -- kubectl get pods -A -o wide -l
  resource.nvidia.com/computeDomain  # open TCP 50000 and 50005 between them; their nodes need one
  driver version\
""")


def first_failure(check, seen):
    return next(finding for finding in of(check, seen) if finding.state is CheckState.FAILS)


def test_pods_in_two_cliques_are_shown_by_both_sides_and_since_the_status_says_so():
    reported = msgspec.structs.replace(
        condition("SpansCliques", "True", "SeveralCliques"), last_transition_time="2027-01-15T07:00:00Z"
    )
    domain = replaced(DOMAIN, status=ComputeDomainStatus(conditions=(*DOMAIN.status.conditions, reported)))
    (found,) = of(Check.ONE_CLIQUE, changed(domains=(domain,), cliques={"n0": "a.1", "n1": "a.2"}))
    assert found.evidence == (
        "cluster: node n0 is in a.1",
        "cluster: node n1 is in a.2",
        "IMEX daemon on n0: entered a.1",
        "IMEX daemon on n1: entered a.1",
        "status: condition SpansCliques is True",
    )
    assert found.since == 1_800_000_000 - 3600
    assert found.sides == (("node n0",), ("node n1",))


def test_the_daemon_that_a_moved_pod_left_behind_puts_nobody_apart():
    behind = ImexMeshRecord(domain="cd-1", node="n9", clique="a.2", complete=None)
    (found,) = of(
        Check.ONE_CLIQUE, changed(daemons=(*WELL.daemons, behind), cliques={**WELL.cliques, "n9": "a.2"})
    )
    assert found.state is CheckState.HOLDS


UNSEEN = {
    "mesh-not-told": (Check.MESH, changed(daemons=(replaced(WELL.daemons[0], complete=None),))),
    "no-clique-label": (Check.ONE_CLIQUE, changed(cliques={"n0": "a.1"})),
    "no-conditions": (Check.ACTIVE, changed(domains=(replaced(DOMAIN, status=ComputeDomainStatus()),))),
    "host-managed": (
        Check.ACTIVE,
        changed(
            domains=(
                replaced(DOMAIN, status=ComputeDomainStatus(conditions=(condition("Ready", "Unknown"),))),
            )
        ),
    ),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_what_was_not_observed_is_unknown(case):
    check, seen = UNSEEN[case]
    assert {finding.state for finding in of(check, seen)} == {CheckState.UNKNOWN}
    assert verdict(check_domains(seen)) is CheckState.UNKNOWN


def test_a_domain_without_a_fabric_has_no_mesh_to_check():
    seen = changed(daemons=(ImexMeshRecord(domain="cd-1", node="n0", clique="", complete=None),))
    assert not of(Check.MESH, seen)


def test_pods_of_one_job_that_wait_are_one_finding():
    """Four pods of two claims each, of one job that finds no room, and one pod without an owner."""
    pods = tuple(
        replaced(
            pod(number, ""),
            owner="" if number == 4 else "Job team/train",
            claims={"channel": f"channel-{number}", "gpus": f"gpus-{number}"},
            since=100.0 + number,
        )
        for number in range(5)
    )
    claims = tuple(
        replaced(claim(number), name=name, allocated=False, reserved_for=())
        for number, waiting in enumerate(pods)
        for name in waiting.claims.values()
    )
    job, alone = of(Check.CLAIMS, changed(pods=pods, claims=claims))
    assert (job.subject, job.since) == ("Job team/train", 100.0)
    assert job.message == "ResourceClaims channel, gpus of 4 pods are pending: no device is allocated"
    assert len(job.evidence) == 4
    assert {f"pod team/worker-{number}" for number in range(4)} <= set(job.where)
    assert alone.subject == "Pod team/worker-4"
    assert alone.message == "ResourceClaims channel-4, gpus-4 are pending: no device is allocated"
