"""What pods require of nodes and of each other, as it is read from manifests."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.cluster.views import read_site
from tests.core.place.place_sites import site

from rackloom.core.allocate.objects import NodeSelector, NodeSelectorRequirement, NodeSelectorTerm
from rackloom.core.cluster.jobs import Job, read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import read_node
from rackloom.core.cluster.pods import REQUIRED, LabelSelector, read_pod
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.scheduling import (
    NodeRule,
    is_node_selected,
    selector_matches,
    unmet_requirements,
)
from rackloom.core.cluster.trays import (
    BoundNeighbours,
    Gang,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
    combine_sites,
)
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_requests import gang_of_job, groups_by_trays, terms_of_groups
from rackloom.core.place.plan_notes import unsupported_constraints
from rackloom.errors import Refused

LABELS = SchedulerLabels()
HOST = "kubernetes.io/hostname"
CLIQUE = "nvidia.com/gpu.clique"


def need(operator: str, *values: str, key: str = "zone") -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


def on_nodes(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}}


def pods(kind: str, key: str = HOST, **term: Any) -> dict[str, Any]:
    return {"affinity": {kind: {REQUIRED: [{"topologyKey": key, **term}]}}}


def like(**labels: str) -> dict[str, Any]:
    return {"labelSelector": {"matchLabels": labels}}


def template(gpus: int = 1, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    limits = {"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}
    return {"metadata": {"labels": labels or {}}, "spec": {"containers": [{"name": "c", **limits}], **spec}}


def mpi(worker: dict[str, Any], launcher: dict[str, Any] | None = None, name: str = "m") -> dict[str, Any]:
    specs = {"Launcher": {"template": launcher or template(0)}, "Worker": {"replicas": 4, "template": worker}}
    return {"kind": "MPIJob", "metadata": {"name": name}, "spec": {"mpiReplicaSpecs": specs}}


def job_set(**groups: dict[str, Any]) -> dict[str, Any]:
    jobs = [{"name": name, "template": {"spec": {"template": group}}} for name, group in groups.items()]
    return {"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": jobs}}


def read(value: dict[str, Any], *others: dict[str, Any]) -> Job:
    (job,) = read_jobs([value, *others], LABELS)
    return job


def node(name: str, **labels: str) -> dict[str, Any]:
    metadata = {"name": name, "labels": {CLIQUE: "c", **labels}}
    return {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}


@pytest.mark.parametrize(
    ("terms", "fits"),
    [
        ([{"matchExpressions": [need("In", "a", "b")]}], "ab"),
        ([{"matchExpressions": [need("In", "a"), need("Exists", key="big")]}], ""),
        ([{"matchExpressions": [need("In", "a")]}, {"matchExpressions": [need("In", "b")]}], "ab"),
        ([{"matchExpressions": [need("NotIn", "a")]}], "bcd"),
        ([{"matchExpressions": [need("DoesNotExist", key="size")]}], "ad"),
        ([{"matchExpressions": [need("Gt", "5", key="size")]}], "c"),
        ([{"matchExpressions": [need("Lt", "5", key="size")]}], "b"),
        ([{"matchFields": [need("In", "n-d", key="metadata.name")]}], "d"),
        ([], ""),
    ],
)
def test_a_node_is_shut_for_members_whose_required_node_affinity_it_is_not(
    terms: list[dict[str, Any]], fits: str
) -> None:
    nodes = [
        node("n-a", zone="a"),
        node("n-b", zone="b", size="2"),
        node("n-c", zone="c", size="9"),
        node("n-d"),
    ]
    (_, worker) = read(mpi(template(**on_nodes(*terms)))).groups
    trays = read_site(nodes, [], rule=worker.need.rule).trays
    assert "".join(tray.name[-1] for tray in trays if tray.shut is None) == fits
    assert all(tray.is_unfit == (tray.shut is not None) for tray in trays)


def test_what_a_node_is_not_is_told() -> None:
    terms = [{"matchExpressions": [need("In", "b", "c"), need("Exists", key="big")]}, {"matchFields": []}]
    rule = read(mpi(template(nodeSelector={"kind": "x"}, **on_nodes(*terms)))).groups[1].need.rule
    assert list(unmet_requirements(rule, read_node(node("n")))) == [
        "not kind=x",
        "not zone In b/c and big Exists",
    ]


def test_an_affinity_that_the_api_server_would_not_take_is_refused() -> None:
    with pytest.raises(Refused, match="zone: 'Like' is not a node selector operator"):
        read(mpi(template(**on_nodes({"matchExpressions": [need("Like", "b")]}))))
    with pytest.raises(Refused, match="not shaped like one"):
        read(mpi(template(**on_nodes({"matchLabels": {"zone": "b"}}))))


WORDS = st.sampled_from(["a", "b", "5", "9"])
REQUIREMENTS = st.one_of(
    st.builds(
        NodeSelectorRequirement, key=WORDS, operator=st.sampled_from(["In", "NotIn"]), values=st.tuples(WORDS)
    ),
    st.builds(NodeSelectorRequirement, key=WORDS, operator=st.sampled_from(["Exists", "DoesNotExist"])),
)
TERMS = st.builds(NodeSelectorTerm, match_expressions=st.lists(REQUIREMENTS, max_size=2).map(tuple))


@given(st.dictionaries(WORDS, WORDS, max_size=2), st.lists(TERMS, max_size=3), st.dictionaries(WORDS, WORDS))
def test_a_rule_holds_where_all_labels_and_one_term_do(
    chosen: dict[str, str], terms: list[NodeSelectorTerm], has: dict[str, str]
) -> None:
    rule = NodeRule(chosen, NodeSelector(node_selector_terms=tuple(terms)))
    some = any(
        term.match_expressions and all(_is(expression, has) for expression in term.match_expressions)
        for term in terms
    )
    assert (not list(unmet_requirements(rule, read_node({"metadata": {"name": "n", "labels": has}})))) == (
        chosen.items() <= has.items() and some
    )


def _is(selector_requirement: NodeSelectorRequirement, has: dict[str, str]) -> bool:
    held = selector_requirement.key in has and (
        not selector_requirement.values or has[selector_requirement.key] in selector_requirement.values
    )
    return held == (selector_requirement.operator in ("In", "Exists"))


def test_one_rule_serves_the_planner_and_the_simulated_scheduler() -> None:
    terms = on_nodes({"matchExpressions": [need("Exists", key="big")]})
    spec = read_pod({"spec": {"nodeSelector": {"zone": "a"}, **terms}}).spec
    assert is_node_selected(spec, read_node(node("n", zone="a", big="")))
    assert not is_node_selected(spec, read_node(node("n", zone="a")))
    assert not is_node_selected(spec, read_node(node("n", big="")))


def test_groups_that_may_use_different_nodes_have_each_their_own() -> None:
    job = read(job_set(a=template(nodeSelector={"zone": "a"}), b=template(nodeSelector={"zone": "b"})))
    nodes = [node("n-a", zone="a"), node("n-b", zone="b"), node("n-c", zone="c")]
    sites = {
        where: read_site(nodes, [], rule=team.need.rule) for where, team in groups_by_trays(job, {}).items()
    }
    seen = combine_sites(sites)
    assert [(tray.shut, dict(tray.closed)) for tray in seen.trays] == [
        (None, {"b": "not zone=b"}),
        (None, {"a": "not zone=a"}),
        ("not zone=a", {}),
    ]
    assert plan_gang(seen, gang(job)).trays == ("n-a", "n-b")


def test_members_that_keep_apart_from_their_like_are_on_a_tray_each() -> None:
    apart = pods("podAntiAffinity", **like(app="m"))
    job = read(mpi(template(1, {"app": "m"}, **apart)))
    assert terms_of_groups(job, {}) == {"worker": PlacementTerms(likeness="worker", apart=("worker",))}
    assert len(plan_gang(trays(6), gang(job)).trays) == 4
    others = read(mpi(template(1, {"app": "m"}, **pods("podAntiAffinity", **like(app="other")))))
    assert terms_of_groups(others, {}) == {}


def test_members_are_known_by_the_labels_that_their_controller_makes() -> None:
    apart = pods("podAntiAffinity", **like(**{"training.kubeflow.org/job-name": "m"}))
    assert terms_of_groups(read(mpi(template(1, **apart))), {}) == {
        "worker": PlacementTerms(likeness="worker", apart=("worker",))
    }


def test_groups_keep_apart_whichever_of_them_says_so() -> None:
    apart = pods("podAntiAffinity", **like(app="b"))
    job = read(job_set(a=template(1, {"app": "a"}, **apart), b=template(1, {"app": "b"}), c=template(1)))
    assert terms_of_groups(job, {}) == {
        "a": PlacementTerms(likeness="a", apart=("b",)),
        "b": PlacementTerms(likeness="b", apart=("a",)),
    }
    plan = plan_gang(trays(3), gang(job))
    where = {seat.group: seat.tray for seat in plan.seats}
    assert where["a"] != where["b"]


def test_pods_of_other_jobs_keep_a_node_to_themselves() -> None:
    def running(name: str, on: str, **spec: Any) -> dict[str, Any]:
        pod = template(1, {"app": name}, nodeName=on, **spec)
        return {**pod, "metadata": {"name": name, **pod["metadata"]}}

    job = read(mpi(template(1, {"app": "m"}, **pods("podAntiAffinity", **like(app="x")))))
    there = [
        running("x", "n0"),
        running("y", "n1"),
        running("z", "n2", **pods("podAntiAffinity", **like(app="m"))),
        {**running("x", "n3"), "status": {"phase": "Succeeded"}},
    ]
    avoided = BoundNeighbours(read_state((), there, labels=LABELS)).avoided_by(job)
    assert avoided == {"worker": {"n0": "kept apart from pod x", "n2": "kept apart from pod z"}}
    off = avoided["worker"]
    seen = read_site([node("n0"), node("n1")], [], avoided=off)
    assert [tray.shut for tray in seen.trays] == ["kept apart from pod x", None]


@pytest.mark.parametrize(
    ("key", "term", "shut"),
    [
        (HOST, {"matchLabelKeys": ["app"]}, {"n1"}),
        (HOST, {"namespaceSelector": {"matchLabels": {"team": "ml"}}}, {"n1"}),
        (HOST, {"namespaces": ["other"]}, set()),
        ("zone", {}, {"n1", "n2"}),
        ("rack", {}, set()),
    ],
)
def test_all_that_a_running_pod_requires_holds_for_those_that_come(
    key: str, term: dict[str, Any], shut: set[str]
) -> None:
    spec = pods("podAntiAffinity", key, **like(app="m"), **term)
    foe = {**template(0, nodeName="n1", **spec), "metadata": {"name": "foe"}}
    nodes = [node("n1", zone="a"), node("n2", zone="a"), node("n3", zone="b")]
    state = read_state(nodes, [foe], labels=LABELS)
    avoided = BoundNeighbours(state).avoided_by(read(mpi(template(1, {"app": "m"}))))
    assert set(avoided.get("worker", {})) == shut


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [need("In", "1", key="a")]}, True),
        ({"matchExpressions": [need("NotIn", "1", key="b")]}, True),
        ({"matchExpressions": [need("Exists", key="b")]}, False),
        ({"matchExpressions": [need("DoesNotExist", key="b")]}, True),
    ],
)
def test_a_label_selector_selects_as_the_api_says(selector: dict[str, Any] | None, selected: bool) -> None:
    read = None if selector is None else msgspec.convert(selector, LabelSelector)
    assert selector_matches(read, {"a": "1"}) is selected


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {
                "topologySpreadConstraints": [
                    {"topologyKey": HOST, "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
                ]
            },
            "topologySpreadConstraints of worker by kubernetes.io/hostname (maxSkew 1) are not honoured",
        ),
        (
            pods("podAntiAffinity", CLIQUE, **like(app="m")),
            "required pod anti-affinity of worker by nvidia.com/gpu.clique is not honoured",
        ),
        (
            pods("podAntiAffinity", **like(app="m"), namespaceSelector={"matchLabels": {"team": "ml"}}),
            "required pod anti-affinity of worker by kubernetes.io/hostname is not honoured",
        ),
        (
            pods("podAffinity", HOST, **like(app="m")),
            "required pod affinity of worker by kubernetes.io/hostname is not",
        ),
        (
            pods("podAffinity", CLIQUE, **like(team="ml")),
            "is not honoured: it asks for pods of others (team=ml)",
        ),
        (
            pods("podAffinity", CLIQUE, **like(app="m-ish", tier="x")) | {},
            "it asks for pods of others (app=m-ish and tier=x)",
        ),
        (
            pods("podAffinity", CLIQUE, **like(team="ours")),
            "two jobs with team=ours would have to share a clique",
        ),
        ({"nodeName": "n1"}, "nodeName n1 of worker is not honoured"),
    ],
)
def test_what_is_required_and_not_kept_is_said(spec: dict[str, Any], expected: str) -> None:
    job = read(mpi(template(1, {"app": "m", "team": "ours"}, **spec)))
    (note,) = unsupported_constraints(job, plan_gang(trays(4), gang(job)), LABELS)
    assert expected in note


@pytest.mark.parametrize(
    "spec",
    [
        pods("podAffinity", CLIQUE, **like(app="m")),
        pods("podAffinity", CLIQUE, **like(**{"training.kubeflow.org/job-name": "m"})),
        pods("podAntiAffinity", **like(app="m")),
        {
            "topologySpreadConstraints": [
                {"topologyKey": HOST, "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
            ]
        },
    ],
)
def test_nothing_is_said_of_what_is_kept_or_only_preferred(spec: dict[str, Any]) -> None:
    job = read(mpi(template(1, {"app": "m"}, **spec)))
    assert list(unsupported_constraints(job, plan_gang(trays(4), gang(job)), LABELS)) == []


def test_a_launcher_that_keeps_off_the_workers_is_beside_one_all_the_same_and_that_is_said() -> None:
    launcher = template(0, **pods("podAntiAffinity", **like(app="m")))
    job = read(mpi(template(1, {"app": "m"}), launcher))
    (note,) = unsupported_constraints(job, plan_gang(trays(4), gang(job)), LABELS)
    assert note == "required pod anti-affinity of launcher is not honoured: it is beside worker on n0"


def test_a_member_with_nothing_but_a_channel_takes_that_of_a_tray() -> None:
    domain = compute_domain("cd", "ch")
    claims = {"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "ch"}]}
    job = read(
        domain, *({**template(0, **claims), "kind": "Pod", "metadata": {"name": f"p{at}"}} for at in range(3))
    )
    assert gang(job).groups[0].has_channel
    assert plan_gang(trays(4), gang(job)).trays == ("n0", "n1", "n2")


def test_the_channel_of_a_compute_domain_is_had_in_its_namespace_only() -> None:
    claims = {"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "ch"}]}
    job = read(
        compute_domain("cd", "ch", "other"),
        {**template(1, **claims), "kind": "Pod", "metadata": {"name": "p"}},
    )
    assert job.name == "p"
    assert not gang(job).groups[0].has_channel


def test_a_launcher_that_is_a_worker_of_a_compute_domain_has_a_tray_of_its_own() -> None:
    claims = {"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "ch"}]}
    obj = mpi(template(1, **claims), template(1, **claims))
    obj["spec"]["runLauncherAsWorker"] = True
    found = gang(read(compute_domain("cd", "ch"), obj))
    assert [group.has_channel for group in found.groups] == [True, True]
    assert len(plan_gang(site(1, 6), found).trays) == 5, "GPUs for four of them are on each tray"


def compute_domain(name: str, made: str, namespace: str = "default") -> dict[str, Any]:
    spec = {"channel": {"resourceClaimTemplate": {"name": made}}}
    return {"kind": "ComputeDomain", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def test_a_job_without_a_name_is_called_by_what_its_name_begins_with() -> None:
    obj = mpi(template(1))
    assert read(obj | {"metadata": {"generateName": "x-"}}).name == "x-"
    pod = template(1) | {"kind": "Pod", "metadata": {"generateName": "p-"}}
    assert read(pod).name == "p-"


def test_kinds_that_only_look_like_what_is_read_are_refused() -> None:
    with pytest.raises(Refused, match=r"MPIJob m is of kubeflow.org/v1, which is not read") as no:
        read(mpi(template(1)) | {"apiVersion": "kubeflow.org/v1"})
    assert no.value.nearest_fix == "write it for kubeflow.org/v2beta1"
    two = mpi(template(1))
    two["spec"]["mpiReplicaSpecs"]["Launcher"]["replicas"] = 2
    with pytest.raises(Refused, match="MPIJob m has 2 launchers"):
        read(two)
    uncounted = mpi(template(1))
    del uncounted["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    with pytest.raises(Refused, match="MPIJob m does not say how many workers it has"):
        read(uncounted)


def test_a_replicated_job_of_none_is_left_out() -> None:
    obj = job_set(a=template(1), b=template(2))
    obj["spec"]["replicatedJobs"][0]["replicas"] = 0
    assert [group.name for group in read(obj).groups] == ["b"]


@pytest.mark.parametrize(
    "key", ["disk-pressure", "memory-pressure", "pid-pressure", "network-unavailable", "out-of-service"]
)
def test_a_taint_of_the_node_controller_closes_the_tray(key: str) -> None:
    taint = {"key": f"node.kubernetes.io/{key}", "effect": "NoSchedule"}
    (tray,) = read_site([node("n") | {"spec": {"taints": [taint]}}], []).trays
    assert tray.shut == f"taint node.kubernetes.io/{key}"


@pytest.mark.parametrize(
    ("key", "reason"),
    [("unschedulable", "cordoned"), ("not-ready", "not ready"), ("unreachable", "not ready")],
)
def test_what_a_taint_repeats_is_told_once_and_as_it_is(key: str, reason: str) -> None:
    taint = {"key": f"node.kubernetes.io/{key}", "effect": "NoExecute"}
    (tray,) = read_site([node("n") | {"spec": {"taints": [taint]}}], []).trays
    assert tray.shut == reason


def gang(job: Job) -> Gang:
    return gang_of_job(job, {}, priorities={})


def trays(count: int) -> PlacementSite:
    return PlacementSite(tuple(PlacementTray(name=f"n{at}", clique="c", gpus=4) for at in range(count)))
