"""Kinds that make pods on GPU racks: their groups, sizes, and the groups that need one clique."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster.jobs import Job, read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.pods import pod_owner, read_pod
from rackloom.core.place.gang_requests import gang_of_job
from rackloom.core.place.pod_templates import ManifestDraft
from rackloom.errors import Refused

LABELS = SchedulerLabels()
Sizes = list[tuple[str, int, int, str]]


def pod_spec(gpus: int) -> dict[str, Any]:
    limits = {"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}
    return {"containers": [{"name": "main", **limits}]}


def template(gpus: int = 4) -> dict[str, Any]:
    return {"spec": pod_spec(gpus)}


def workload(kind: str, spec: dict[str, Any], api: str = "") -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": "w"}, "spec": spec}


def job(kind: str, spec: dict[str, Any], api: str = "") -> Job:
    (found,) = read_jobs([workload(kind, spec, api)], LABELS)
    return found


def sizes(found: Job) -> Sizes:
    gang = gang_of_job(found, {}, priorities={})
    return [(group.name, group.members, group.gpus, group.share) for group in gang.groups]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "ReplicaSet"])
def test_what_keeps_replicas_running(kind: str) -> None:
    assert sizes(job(kind, {"replicas": 3, "template": template()})) == [("pod", 3, 4, "")]
    assert sizes(job(kind, {"template": template()})) == [("pod", 1, 4, "")]


def test_a_deployment_without_devices_is_no_job() -> None:
    assert read_jobs([workload("Deployment", {"template": template(0)})], LABELS) == []
    assert read_jobs([workload("Deployment", {"replicas": 0, "template": template()})], LABELS) == []


def test_a_cron_job_is_one_run_of_it() -> None:
    run = {"spec": {"parallelism": 5, "completions": 2, "template": template()}}
    assert sizes(job("CronJob", {"schedule": "@daily", "jobTemplate": run})) == [("pod", 2, 4, "")]


def test_a_pytorch_job() -> None:
    specs = {"Worker": {"replicas": 7, "template": template()}, "Master": {"template": template()}}
    found = job("PyTorchJob", {"pytorchReplicaSpecs": specs})
    assert sizes(found) == [("master", 1, 4, ""), ("worker", 7, 4, "")]
    assert found.groups[0].identity.labels["training.kubeflow.org/job-name"] == "w"


def test_a_train_job_names_what_to_place_instead() -> None:
    with pytest.raises(Refused, match="no pod template") as refused:
        job("TrainJob", {"runtimeRef": {"name": "torch-distributed"}})
    assert "kubectl get jobset w" in str(refused.value.nearest_fix)


def test_a_volcano_job_is_distinguished_by_its_version() -> None:
    tasks = [
        {"name": "head", "template": template(0)},
        {"name": "work", "replicas": 3, "template": template()},
    ]
    found = job("Job", {"tasks": tasks}, "batch.volcano.sh/v1alpha1")
    assert sizes(found) == [("head", 1, 0, ""), ("work", 3, 4, "")]


@pytest.mark.parametrize(("kind", "inside"), [("RayCluster", ()), ("RayJob", ("rayClusterSpec",))])
def test_ray(kind: str, inside: tuple[str, ...]) -> None:
    spec: dict[str, Any] = {
        "headGroupSpec": {"template": template(0)},
        "workerGroupSpecs": [
            {"groupName": "a", "replicas": 2, "numOfHosts": 4, "template": template()},
            {"groupName": "b", "minReplicas": 1, "template": template(2)},
            {"groupName": "none", "template": template()},
        ],
    }
    for key in inside:
        spec = {key: spec}
    assert sizes(job(kind, spec)) == [("head", 1, 0, ""), ("a", 8, 4, ""), ("b", 1, 2, "")]


def lws(size: int) -> dict[str, Any]:
    return {"replicas": 1, "leaderWorkerTemplate": {"size": size, "workerTemplate": template()}}


@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        ("ExclusiveSlice", ["slice-0", "slice-0", "slice-1", "slice-1"]),
        (
            "None",
            [f"slice-{n}-{role}-replica-0" for n in range(2) for role in ("prefill", "decode")],
        ),
    ],
)
def test_a_disaggregated_set(policy: str, shares: list[str]) -> None:
    roles = [{"name": "prefill", "spec": lws(1)}, {"name": "decode", "spec": lws(2)}]
    spec = {"slices": 2, "roles": roles, "placementPolicy": {"type": policy}}
    found = sizes(job("DisaggregatedSet", spec))
    assert [(members, share) for _, members, _, share in found] == list(
        zip([1, 2, 1, 2], shares, strict=True)
    )


def clique(name: str, replicas: int, gpus: int = 4) -> dict[str, Any]:
    return {"name": name, "spec": {"replicas": replicas, "podSpec": pod_spec(gpus)}}


def clique_set(**more: Any) -> dict[str, Any]:
    group = {"name": "decode", "cliqueNames": ["leader", "worker"], "replicas": 2, **more.pop("group", {})}
    cliques = [clique("router", 1, 0), clique("leader", 1), clique("worker", 3)]
    return {"replicas": 1, "template": {"cliques": cliques, "podCliqueScalingGroups": [group], **more}}


def test_a_pod_clique_set_repeats_its_scaling_groups() -> None:
    assert sizes(job("PodCliqueSet", clique_set())) == [
        ("replica-0-router", 1, 0, "replica-0"),
        ("replica-0-decode-0-leader", 1, 4, "replica-0"),
        ("replica-0-decode-1-leader", 1, 4, "replica-0"),
        ("replica-0-decode-0-worker", 3, 4, "replica-0"),
        ("replica-0-decode-1-worker", 3, 4, "replica-0"),
    ]


def test_a_scaling_group_with_its_own_constraint_is_packed_by_itself() -> None:
    packed = {"topologyConstraint": {"pack": {"required": "rack"}}}
    apart = sizes(job("PodCliqueSet", clique_set(group=packed)))
    assert {share for *_, share in apart} == {"replica-0", "replica-0-decode-0", "replica-0-decode-1"}
    whole = sizes(job("PodCliqueSet", clique_set(group=packed, **packed)))
    assert {share for *_, share in whole} == {"replica-0"}


def test_pod_specs_without_templates_are_planned_and_not_written() -> None:
    draft = ManifestDraft(job("PodCliqueSet", clique_set()))
    with pytest.raises(Refused, match="pod specs without pod templates"):
        list(draft.templates())


def test_a_dynamo_graph() -> None:
    components = [
        {"name": "Frontend", "type": "frontend"},
        {"name": "prefill", "replicas": 2, "podTemplate": template()},
        {"name": "decode", "replicas": 2, "multinode": {"nodeCount": 3}, "podTemplate": template()},
    ]
    spec: dict[str, Any] = {"components": components}
    assert sizes(job("DynamoGraphDeployment", spec, "nvidia.com/v1beta1")) == [
        ("prefill", 2, 4, ""),
        ("decode", 6, 4, ""),
    ]
    components[2]["topologyConstraint"] = {"packDomain": "rack"}
    assert sizes(job("DynamoGraphDeployment", spec, "nvidia.com/v1beta1")) == [
        ("prefill", 2, 4, ""),
        ("decode-0", 3, 4, "decode-0"),
        ("decode-1", 3, 4, "decode-1"),
    ]
    with pytest.raises(Refused, match="not read") as refused:
        job("DynamoGraphDeployment", spec, "nvidia.com/v1alpha1")
    assert "v1beta1" in str(refused.value.nearest_fix)


def test_a_kind_that_is_not_known_is_a_guess() -> None:
    groups = [{"name": "a", "replicas": 2, "pod": template()}, {"name": "b", "pod": template(2)}]
    found = job("TensorFlowThing", {"replicas": 3, "groups": groups})
    assert found.is_guess
    assert sizes(found) == [("a", 2, 4, ""), ("b", 3, 2, "")]
    assert not job("Deployment", {"template": template()}).is_guess


def test_what_runs_on_every_node_or_makes_no_pods_is_no_job() -> None:
    for kind in ("DaemonSet", "PodTemplate", "ClusterTrainingRuntime"):
        assert read_jobs([workload(kind, {"template": template()})], LABELS) == []
    assert read_jobs([{"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "b"}}], LABELS) == []


@pytest.mark.parametrize("kind", [["Deployment"], {"a": 1}, 7, None])
def test_a_kind_that_is_no_text_is_no_job(kind: object) -> None:
    assert (
        read_jobs([{"kind": kind, "metadata": {"name": "w"}, "spec": {"template": template()}}], LABELS) == []
    )


def test_pods_of_an_outer_object_belong_to_it() -> None:
    outer = {"nvidia.com/dynamo-graph-deployment-name": "graph", "grove.io/podgang": "graph-0"}
    assert (
        pod_owner(read_pod({"metadata": {"name": "p", "labels": outer}}), LABELS.gang).text
        == "DynamoGraphDeployment graph"
    )


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["spec", "containers", "replicas", "template", "name", "roles", "cliques", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KINDS = st.sampled_from(
    ["Unknown", "Deployment", "CronJob", "DisaggregatedSet", "PyTorchJob", "RayCluster", "PodCliqueSet"]
)


@given(KINDS, ANYTHING)
def test_any_shape_is_read_or_refused(kind: str, spec: Any) -> None:
    try:
        found = read_jobs([{"kind": kind, "metadata": {"name": "w"}, "spec": spec}], LABELS)
    except Refused:
        return
    assert all(group.members >= 1 for each in found for group in each.groups)
