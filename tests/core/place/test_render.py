"""One plan for many schedulers: the output for each one, and the parts that it cannot express."""

from typing import Any

import pytest
from tests.core.cluster.views import read_site
from tests.core.place.place_sites import site

from rackloom.core.cluster.jobs import read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.pods import REQUIRED
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_planner import try_gang
from rackloom.core.place.gang_requests import gang_of_job
from rackloom.core.place.plan_notes import segment_note, usable_share
from rackloom.core.place.rendering import RenderedJob, render_job
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused

LABELS = SchedulerLabels()
CLIQUE = "nvidia.com/gpu.clique"


def pod(gpus: int) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": gpus}}}]}}


def mpi_job(workers: int = 3) -> dict[str, Any]:
    specs = {"Launcher": {"template": pod(0)}, "Worker": {"replicas": workers, "template": pod(4)}}
    return {"kind": "MPIJob", "metadata": {"name": "m"}, "spec": {"mpiReplicaSpecs": specs}}


def render(target: str, value: dict[str, Any], **asked: Any) -> RenderedJob:
    (job,) = read_jobs([value], LABELS)
    gang = gang_of_job(job, {}, priorities={}, **asked)
    where = site(2, 6)
    plan = try_gang(where, gang, SearchBudget(), apart=True) if target == "lws" else plan_gang(where, gang)
    assert plan is not None
    return render_job(target, job, gang, plan, where, LABELS)


def worker(found: RenderedJob) -> dict[str, Any]:
    return found.objects[-1]["spec"]["mpiReplicaSpecs"]["Worker"]["template"]  # type: ignore[no-any-return]


def test_affinity_names_the_trays_and_keeps_the_job_to_itself() -> None:
    job = mpi_job()
    spec = worker(render("affinity", job))["spec"]["affinity"]
    (term,) = spec["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n0-0", "n0-1", "n0-2"]}
    ]
    (rule,) = spec["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule == {"topologyKey": CLIQUE, "labelSelector": {"matchLabels": {"rackloom.dev/job": "m"}}}
    assert job == mpi_job(), "the manifest that was read is not changed"


def test_a_template_whose_metadata_are_null_is_marked() -> None:
    job = mpi_job()
    job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["metadata"] = None
    assert worker(render("affinity", job))["metadata"] == {"labels": {"rackloom.dev/job": "m"}}


def test_affinity_calls_a_tray_as_its_label_does() -> None:
    (job,) = read_jobs([mpi_job(1)], LABELS)
    marks = {CLIQUE: "c", LABELS.host: "ip-10-0-0-1"}
    node = {
        "metadata": {"name": "i-1", "labels": marks},
        "status": {"allocatable": {"nvidia.com/gpu": "4"}},
    }
    where, gang = read_site([node], [], LABELS), gang_of_job(job, {}, priorities={})
    plan = plan_gang(where, gang)
    assert plan is not None
    assert plan.trays == ("i-1",)
    spec = worker(render_job("affinity", job, gang, plan, where, LABELS))["spec"]
    (term,) = spec["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": LABELS.host, "operator": "In", "values": ["ip-10-0-0-1"]}]


def test_affinity_adds_to_what_the_job_requires_already() -> None:
    job = mpi_job()
    rule = {"key": "zone", "operator": "In", "values": ["a"]}
    node = {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [rule]}]
        }
    }
    job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"] = {"nodeAffinity": node}
    required = worker(render("affinity", job))["spec"]["affinity"]["nodeAffinity"]
    (term,) = required["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [expression["key"] for expression in term["matchExpressions"]] == [
        "zone",
        "kubernetes.io/hostname",
    ]


def test_each_pod_is_pinned_to_its_own_tray() -> None:
    pods = [
        {"kind": "Pod", "metadata": {"name": f"p{n}", "labels": {LABELS.gang: "g"}}} | pod(4) for n in (0, 1)
    ]
    (job,) = read_jobs(pods, LABELS)
    gang = gang_of_job(job, {}, priorities={})
    found = render_job("affinity", job, gang, plan_gang(site(1), gang), site(1), LABELS)
    trays = [
        obj["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ][0]["matchExpressions"][0]["values"]
        for obj in found.objects
    ]
    assert trays == [["n0-0"], ["n0-1"]]


def test_kueue_is_told_the_level_and_that_launcher_and_workers_share_it() -> None:
    found = render("kueue", mpi_job())
    assert found.objects[0]["spec"]["levels"] == [
        {"nodeLabel": CLIQUE},
        {"nodeLabel": "kubernetes.io/hostname"},
    ]
    assert worker(found)["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-required-topology": CLIQUE,
        "kueue.x-k8s.io/podset-group-name": "one-clique",
    }
    sliced = worker(render("kueue", mpi_job(8), segment=4))["metadata"]["annotations"]
    assert sliced == {
        "kueue.x-k8s.io/podset-slice-required-topology": CLIQUE,
        "kueue.x-k8s.io/podset-slice-size": "4",
    }


def job_set(*members: int) -> dict[str, Any]:
    replicated = [
        {"name": f"g{number}", "template": {"spec": {"parallelism": pods, "template": pod(4)}}}
        for number, pods in enumerate(members)
    ]
    return {"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": replicated}}


def test_kueue_is_told_no_more_than_its_webhooks_let_pass() -> None:
    launcher = render("kueue", mpi_job(8), segment=4).objects[-1]["spec"]["mpiReplicaSpecs"]["Launcher"]
    assert "annotations" not in launcher["template"].get("metadata", {})
    with pytest.raises(Refused, match="no slices of 4 from 2 g1"):
        render("kueue", job_set(4, 2), segment=4)
    with pytest.raises(Refused, match="one of them a single pod"):
        render("kueue", job_set(2, 3))
    assert render("kueue", job_set(1, 3)).objects
    apart = render("kueue", job_set(2, 3), apart=True).objects[-1]["spec"]["replicatedJobs"]
    marks = apart[0]["template"]["spec"]["template"]["metadata"]["annotations"]
    assert marks == {"kueue.x-k8s.io/podset-required-topology": CLIQUE}


@pytest.mark.parametrize(
    ("annotations", "levels"),
    [
        ({"podset-preferred-topology": CLIQUE}, [CLIQUE]),
        ({"podset-slice-required-topology": CLIQUE, "podset-slice-size": "2"}, [CLIQUE]),
        ({"podset-required-topology": "example.com/block"}, ["example.com/block", CLIQUE]),
        ({"podset-required-topology": "kubernetes.io/hostname"}, [CLIQUE]),
    ],
)
def test_a_job_keeps_the_queue_and_the_topology_that_it_names(
    annotations: dict[str, str], levels: list[str]
) -> None:
    own = {f"kueue.x-k8s.io/{key}": value for key, value in annotations.items()}
    value = {"kind": "Job", "metadata": {"name": "j", "labels": {"kueue.x-k8s.io/queue-name": "mine"}}}
    value["spec"] = {"parallelism": 2, "template": {"metadata": {"annotations": own}, **pod(4)}}
    topology, job = render("kueue", value).objects
    assert job == value
    assert [level["nodeLabel"] for level in topology["spec"]["levels"]] == [*levels, LABELS.host]


def test_a_job_that_names_no_queue_gets_that_of_the_option() -> None:
    assert render("kueue", mpi_job()).objects[-1]["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "default"
    }


def test_kai_is_told_the_level_and_refuses_segments() -> None:
    found = render("kai", mpi_job())
    assert found.objects[-1]["metadata"]["annotations"] == {
        "kai.scheduler/topology": "nvlink",
        "kai.scheduler/topology-required-placement": CLIQUE,
    }
    assert worker(found)["spec"]["schedulerName"] == "kai-scheduler"
    with pytest.raises(Refused, match="no segments"):
        render("kai", mpi_job(8), segment=4)


def test_kai_is_told_how_many_pods_of_a_job_belong_together() -> None:
    """Its pod grouper reads the annotation of a Job. Without it, the grouper requires one pod."""
    job = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": 4, "template": pod(4)}}
    assert render("kai", job).objects[-1]["metadata"]["annotations"]["kai.scheduler/batch-min-member"] == "4"


def test_a_leader_worker_set_gets_exclusive_topology_on_the_trays_of_the_plan() -> None:
    value = {"kind": "LeaderWorkerSet", "metadata": {"name": "l"}, "spec": {"replicas": 2}}
    value["spec"]["leaderWorkerTemplate"] = {"size": 4, "workerTemplate": pod(4)}  # type: ignore[index]
    found = render("lws", value).objects[0]
    assert found["metadata"]["annotations"] == {"leaderworkerset.sigs.k8s.io/exclusive-topology": CLIQUE}
    spec = found["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["affinity"]
    required = spec["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (trays,) = required["nodeSelectorTerms"][0]["matchExpressions"]
    assert trays["values"] == [f"n{clique}-{tray}" for clique in (0, 1) for tray in range(4)]
    assert "podAffinity" not in spec, "LWS adds its own"
    value["spec"]["replicas"] = 1  # type: ignore[index]
    cut = render("lws", value, segment=2).objects[0]
    assert cut["spec"]["leaderWorkerTemplate"]["subGroupPolicy"] == {"subGroupSize": 2}
    with pytest.raises(Refused, match="MPIJob"):
        render("lws", mpi_job())


def test_a_pod_group_counts_the_workers_only() -> None:
    found = render("podgroup", mpi_job())
    assert found.objects[0] == {
        "apiVersion": "scheduling.k8s.io/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": "m"},
        "spec": {
            "schedulingPolicy": {"gang": {"minCount": 3}},
            "schedulingConstraints": {"topology": [{"key": CLIQUE}]},
        },
    }
    assert worker(found)["spec"]["schedulingGroup"] == {"podGroupName": "m"}
    launcher = found.objects[-1]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    assert "schedulingGroup" not in launcher
    with pytest.raises(Refused, match="cannot tell segments"):
        render("podgroup", mpi_job(8), segment=4)


def test_groups_of_two_gangs_never_share_a_pod_group() -> None:
    made = []
    for gang, groups in (("run", ("a-b", "c")), ("run-a", ("b", "c"))):
        value = job_set(1, 2)
        value["metadata"]["name"] = gang
        for job, name in zip(value["spec"]["replicatedJobs"], groups, strict=True):
            job["name"] = name
        *pod_groups, changed = render("podgroup", value, apart=True).objects
        made += [group["metadata"]["name"] for group in pod_groups]
        named = [job["template"]["spec"]["template"] for job in changed["spec"]["replicatedJobs"]]
        assert [pod["spec"]["schedulingGroup"]["podGroupName"] for pod in named] == made[-2:]
    assert len(set(made)) == 4


def test_slurm_gets_a_segment_and_the_blocks_it_rests_on() -> None:
    found = render("slurm", mpi_job(8), segment=4)
    assert "#SBATCH --nodes=8\n" in found.script
    assert "#SBATCH --segment=4\n" in found.script
    (first,) = found.objects[0]
    block = first["block"]
    assert block["block_sizes"] == [6]
    assert block["blocks"][0] == {"block": "c0", "nodes": "n0-0,n0-1,n0-2,n0-3,n0-4,n0-5"}


@pytest.mark.parametrize(
    ("segment", "down", "percent"),
    [
        (1, 0.005, 99.5),
        (16, 0.01, 88.8),
        (17, 0.01, 93.1),
        (18, 0.01, 83.5),
        (9, 0.02, 84.8),
        (6, 0.05, 79.9),
    ],
)
def test_the_price_of_a_segment_is_the_expected_share_of_trays(
    segment: int, down: float, percent: float
) -> None:
    assert round(100 * usable_share(18, segment, down), 1) == percent


def test_the_price_is_told_beside_that_of_the_whole_clique() -> None:
    assert segment_note(18, 16, 0.01) == (
        "segments of 16 in cliques of 18: 2 trays stay outside; 88.8% usable with 1.0% of trays down"
        " (segments of 18: 83.5%)"
    )


def leader_worker_set(replicas: int, size: int) -> dict[str, Any]:
    inside = {"size": size, "workerTemplate": pod(4)}
    spec = {"replicas": replicas, "leaderWorkerTemplate": inside}
    return {"kind": "LeaderWorkerSet", "metadata": {"name": "l"}, "spec": spec}


def test_a_slurm_segment_is_what_shares_a_clique() -> None:
    script = render("slurm", leader_worker_set(2, 6)).script
    assert "--nodes=12\n" in script
    assert "--segment=6\n" in script
    with pytest.raises(Refused, match="1 and 3 members share a clique"):
        render("slurm", mpi_job(7), segment=3)


def test_a_long_name_is_shortened_for_the_label_and_told_apart() -> None:
    values = []
    for end in "ab":
        job = {**mpi_job(), "metadata": {"name": "n" * 62 + end, "namespace": "lab"}}
        values.append(worker(render("affinity", job))["metadata"]["labels"]["rackloom.dev/job"])
    assert [len(value) for value in values] == [63, 63]
    assert values[0] != values[1]


def test_kueue_takes_no_slices_that_leave_pods_over() -> None:
    with pytest.raises(Refused, match="no slices of 3 from 7 worker"):
        render("kueue", mpi_job(7), segment=3)


def test_segments_that_begin_with_a_launcher_are_rendered_for_slurm_alone() -> None:
    """A launcher that is a worker is a separate pod set in Kueue, and the first node in Slurm."""
    job = mpi_job(5)
    job["spec"]["runLauncherAsWorker"] = True
    job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"] = pod(4)
    script = render("slurm", job, segment=3).script
    assert "--nodes=6\n" in script
    assert "--segment=3\n" in script
    with pytest.raises(Refused, match="no slices of 3 across launcher and worker") as no:
        render("kueue", job, segment=3)
    assert no.value.nearest_fix == "use --render slurm, or leave --segment out"
    with pytest.raises(Refused, match="2 and 4 members share a clique") as no:
        render("slurm", job, segment=4)
    assert no.value.nearest_fix == "use a --segment that divides 6"
