"""Manifests of every kind that people submit, read as gangs. Nodes and pods are read as a site."""

from typing import Any

import msgspec
import pytest
from tests.core.cluster.views import read_site

from rackloom.core.allocate.objects import ResourceClaim
from rackloom.core.cluster.jobs import Job, read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import blocking_taints, read_node
from rackloom.core.cluster.pods import Toleration
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.scheduling import NodeRule
from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import Gang
from rackloom.core.place.gang_requests import claims_by_kind, gang_of_job
from rackloom.errors import Refused

LABELS = SchedulerLabels()


def template(gpus: int | str = 0, **spec: Any) -> dict[str, Any]:
    limits = {"resources": {"limits": {"nvidia.com/gpu": gpus}}} if gpus else {}
    return {"spec": {"containers": [{"name": "main", **limits}], **spec}}


def gang(*objects: dict[str, Any]) -> Gang:
    (job,) = read_jobs(objects, LABELS)
    return gang_of_job(job, {}, priorities={"urgent": 7})


def sizes(found: Gang) -> list[tuple[str, int, int, str]]:
    return [(group.name, group.members, group.gpus, group.share) for group in found.groups]


def test_an_mpi_job_is_a_launcher_and_workers() -> None:
    specs = {"Launcher": {"template": template()}, "Worker": {"replicas": 18, "template": template(4)}}
    job = {
        "kind": "MPIJob",
        "metadata": {"name": "m", "namespace": "lab"},
        "spec": {"mpiReplicaSpecs": specs},
    }
    assert gang(job).name == "lab/m"
    assert sizes(gang(job)) == [("launcher", 1, 0, ""), ("worker", 18, 4, "")]


def test_a_launcher_that_is_a_worker_stays_with_the_workers() -> None:
    """Its ranks come before theirs. --apart is for groups that share no memory."""
    specs = {"Launcher": {"template": template(4)}, "Worker": {"replicas": 17, "template": template(4)}}
    spec = {"mpiReplicaSpecs": specs, "runLauncherAsWorker": True}
    (job,) = read_jobs([{"kind": "MPIJob", "metadata": {"name": "m"}, "spec": spec}], LABELS)
    groups = gang_of_job(job, {}, priorities={}, apart=True).groups
    assert [(group.name, group.members, group.share, group.follows) for group in groups] == [
        ("launcher", 1, "launcher", False),
        ("worker", 17, "launcher", True),
    ]


def test_a_job_has_as_many_members_as_run_at_a_time() -> None:
    pod = template("2", priorityClassName="urgent")
    job = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": 6, "template": pod}}
    assert sizes(gang(job)) == [("pod", 6, 2, "")]
    assert gang(job).priority == 7


def test_a_job_runs_no_more_members_than_it_has_completions() -> None:
    spec = {"parallelism": 36, "completions": 18, "template": template(4)}
    assert sizes(gang({"kind": "Job", "metadata": {"name": "j"}, "spec": spec})) == [("pod", 18, 4, "")]
    replicated = [{"name": "w", "replicas": 2, "template": {"spec": {**spec, "completions": 9}}}]
    job = {"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": replicated}}
    assert sizes(gang(job)) == [("w", 18, 4, "")]


def test_a_job_set_has_a_group_for_each_replicated_job() -> None:
    replicated = [
        {"name": name, "replicas": 2, "template": {"spec": {"parallelism": 3, "template": template(4)}}}
        for name in ("prefill", "decode")
    ]
    job = {"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": replicated}}
    assert sizes(gang(job)) == [("prefill", 6, 4, ""), ("decode", 6, 4, "")]


def test_replicas_of_a_leader_worker_set_have_a_clique_each() -> None:
    inside = {"size": 3, "leaderTemplate": template(2), "workerTemplate": template(4)}
    job = {"kind": "LeaderWorkerSet", "metadata": {"name": "l"}, "spec": {"replicas": 2}}
    job["spec"]["leaderWorkerTemplate"] = inside  # type: ignore[index]
    assert sizes(gang(job)) == [
        ("replica-0-leader", 1, 2, "replica-0"),
        ("replica-0-worker", 2, 4, "replica-0"),
        ("replica-1-leader", 1, 2, "replica-1"),
        ("replica-1-worker", 2, 4, "replica-1"),
    ]


def test_pods_with_the_channel_of_one_compute_domain_run_together() -> None:
    domain = {
        "kind": "ComputeDomain",
        "metadata": {"name": "d"},
        "spec": {"channel": {"resourceClaimTemplate": {"name": "channel"}}},
    }
    claims = [{"name": "imex", "resourceClaimTemplateName": "channel"}]
    pods = [
        {"kind": "Pod", "metadata": {"name": name}} | template(4, resourceClaims=claims)
        for name in ("one", "two")
    ]
    assert sizes(gang(domain, *pods)) == [("pod", 2, 4, "")]
    assert gang(domain, *pods).name == "channel"


def test_a_pod_on_its_own_is_a_gang_of_one_and_a_bound_pod_is_none() -> None:
    alone = {"kind": "Pod", "metadata": {"name": "alone"}} | template(1)
    bound = {"kind": "Pod", "metadata": {"name": "bound"}} | template(1, nodeName="n0")
    assert sizes(gang(alone, bound)) == [("pod", 1, 1, "")]


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"kind": "Job", "metadata": {"name": "j"}, "spec": {}}, "no pod template at spec.template"),
        ({"kind": "MPIJob", "metadata": {"name": "m"}, "spec": {}}, "no replicas"),
        (
            {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template("half")}},
            "nvidia.com/gpu is 'half'",
        ),
        (
            {"kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": -1, "template": template(1)}},
            "-1 members",
        ),
        (
            {"kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": 0, "template": template(1)}},
            "0 members",
        ),
        (
            {
                "kind": "Job",
                "metadata": {"name": "j"},
                "spec": {"parallelism": 10**9, "template": template(1)},
            },
            "1000000000 members",
        ),
        (
            {
                "kind": "LeaderWorkerSet",
                "metadata": {"name": "l"},
                "spec": {"replicas": 10**9, "leaderWorkerTemplate": {"workerTemplate": template(1)}},
            },
            "4096 stand before it",
        ),
        (
            {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template("1.5")}},
            "is '1.5', and not",
        ),
        (
            {
                "kind": "Job",
                "metadata": {"name": "j"},
                "spec": {
                    "template": {
                        "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 1.5}}}]},
                    }
                },
            },
            "is 1.5",
        ),
        (
            {"kind": "Job", "metadata": {"name": {"x": 1}}, "spec": {"template": template(1)}},
            "metadata.name: expected text, got a map",
        ),
        ({"kind": "Pod", "metadata": {"name": {"x": 1}}, **template(1)}, "metadata.name: expected text"),
        (
            {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template(1, nodeSelector="x")}},
            "Job j: spec.template.spec.nodeSelector: expected a map, got text",
        ),
        ({"kind": "Pod", "metadata": {"name": "p"}, **template(1, nodeSelector="x")}, "p: spec.nodeSelector"),
        ({"kind": "Pod", "metadata": {"name": "p"}, **template(1, priority="high")}, "p: spec.priority: "),
        ({"kind": "Pod", "metadata": {"name": "p"}, **template(1, resourceClaims=["x"])}, "resourceClaims"),
        ({"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": ["x"]}}, "not shaped"),
        (
            {
                "kind": "LeaderWorkerSet",
                "metadata": {"name": "l"},
                "spec": {"replicas": 2**31 - 1, "leaderWorkerTemplate": {"size": 0, "workerTemplate": {}}},
            },
            "each replica has 0 members",
        ),
        (
            {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template(1, tolerations=["x"])}},
            "tolerations",
        ),
    ],
)
def test_a_malformed_job_is_refused(job: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        read_jobs([job], LABELS)
    assert refused.value.nearest_fix


def test_a_claim_of_which_nothing_is_known_is_refused() -> None:
    pod = template(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "nope"}])
    (job,) = read_jobs([{"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": pod}}], LABELS)
    with pytest.raises(Refused, match="claims nope"):
        claims_by_kind(job, {}, ())
    assert claims_by_kind(job, {}, {("default", "nope")}) == {}


def test_templates_of_other_namespaces_are_others() -> None:
    def job(namespace: str) -> Job:
        pod = template(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "t"}])
        metadata = {"name": "j", "namespace": namespace}
        (found,) = read_jobs([{"kind": "Job", "metadata": metadata, "spec": {"template": pod}}], LABELS)
        return found

    def asking(count: int) -> ResourceClaim:
        asked = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": count}
        requests = [{"name": "gpu", "exactly": asked}]
        return msgspec.convert({"spec": {"devices": {"requests": requests}}}, ResourceClaim)

    known = {("a", "t"): asking(1), ("b", "t"): asking(4), ("c", "t"): ResourceClaim()}
    assert claims_by_kind(job("a"), known, ()) == {"a/t": (asking(1),)}
    assert claims_by_kind(job("b"), known, ()) == {"b/t": (asking(4),)}
    assert claims_by_kind(job("c"), known, ()) == {}, "it takes nothing"
    with pytest.raises(Refused, match="nothing is known"):
        claims_by_kind(job("default"), known, ())


def node(name: str, **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"nvidia.com/gpu.clique": "u.1", "kind": "gb200"}}
    return {"metadata": metadata, "status": {"allocatable": {"nvidia.com/gpu": "4"}}, **more}


def test_a_node_is_shut_for_pods_that_may_not_go_there() -> None:
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    nodes = [
        node("open"),
        node("cordoned", spec={"unschedulable": True, "taints": [cordon]}),
        node("tainted", spec={"taints": [taint, {"key": "soft", "effect": "PreferNoSchedule"}]}),
        node("down", status={"conditions": [{"type": "Ready", "status": "Unknown"}]}),
    ]
    found = read_site(nodes, [], LABELS, rule=NodeRule({"kind": "gb200"}))
    assert [tray.shut for tray in found.trays] == [None, "cordoned", "taint team=a", "not ready"]
    assert [tray.gpus for tray in found.trays] == [4, 4, 4, 0]
    tolerant = read_site(nodes, [], LABELS, tolerations=(Toleration(key="team", value="a"),))
    assert tolerant.trays[2].shut is None
    assert read_site(nodes, [], LABELS, rule=NodeRule({"kind": "h100"})).trays[0].shut == "not kind=h100"


@pytest.mark.parametrize(
    ("toleration", "covers"),
    [
        (Toleration(operator="Exists"), True),
        (Toleration(key="team", operator="Exists", effect="NoSchedule"), True),
        (Toleration(key="team", operator="Exists", effect="NoExecute"), False),
        (Toleration(key="team", value="b"), False),
        (Toleration(key="other", operator="Exists"), False),
    ],
)
def test_a_toleration_covers_the_taints_that_the_scheduler_says(toleration: Toleration, covers: bool) -> None:
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    tainted = read_node({"metadata": {"name": "n"}, "spec": {"taints": [taint]}})
    assert list(blocking_taints(tainted, (toleration,))) == ([] if covers else ["team=a"])


def test_running_pods_hold_their_gpus_under_the_name_of_their_job() -> None:
    def pod(phase: str, **metadata: Any) -> dict[str, Any]:
        return {"metadata": {"name": "p", **metadata}, "status": {"phase": phase}} | template(
            2, nodeName="n0", priority=5
        )

    pods = [
        pod("Running", labels={"training.kubeflow.org/job-name": "mpi", "rackloom.dev/movable": "true"}),
        pod("Pending", ownerReferences=[{"kind": "Set", "name": "set", "controller": True}], namespace="lab"),
        pod("Succeeded"),
    ]
    assert read_site([node("n0")], pods, LABELS).holds == (
        TrayHold(owner="training job mpi", tray="n0", gpus=2, priority=5, movable=True),
        TrayHold(owner="lab/Set set", tray="n0", gpus=2, priority=5),
    )


def test_counts_are_quantities() -> None:
    running = {"metadata": {"name": "p"}, **template("1k", nodeName="n0")}
    few = node("n1", status={"allocatable": {"nvidia.com/gpu": "few"}})
    half = {"metadata": {"name": "q"}, **template("half", nodeName="n0")}
    state = read_state([node("n0"), few], [running, half], labels=LABELS)
    assert [hold.gpus for hold in state.holds] == [1000]
    assert [str(unreadable) for unreadable in state.unreadable] == [
        "Node n1 is left out: nvidia.com/gpu is 'few', and not a quantity",
        "Pod q is left out: nvidia.com/gpu is 'half', and not a quantity",
    ]


def test_labels_are_a_map_that_can_be_changed() -> None:
    assert LABELS.changed(["clique=accelerator.topograph.run/domain"]).clique.startswith("accelerator")
    with pytest.raises(Refused, match="no such label"):
        LABELS.changed(["rack=x"])
