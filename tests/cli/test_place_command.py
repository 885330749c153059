"""`rackloom place`: the full-rack job of the examples, its blockers, and each scheduler's rendering."""

import json
from pathlib import Path

import pytest
import yaml
from inline_snapshot import snapshot
from tests.cli.place_objects import job, node, pod, ran, saved

from rackloom.errors import Refused

MPI_JOB = str(Path(__file__).parents[2] / "examples" / "imex-mpijob" / "mpijob.yaml")
RACKS = ["--profile", "gb200-nvl72", "--racks"]


def test_the_full_rack_job_is_refused_beside_a_small_one_with_a_move_as_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node(f"r{rack}-{tray}", f"clique-{rack}") for rack in (0, 1) for tray in range(18)]
    movable = {"rackloom.dev/movable": "true"}
    pods = [pod("small", "r0-4", labels=movable), pod("pinned", "r1-0"), pod("pinned-2", "r1-1")]
    assert ran(MPI_JOB, "--site", saved(tmp_path, *nodes, *pods)) == 1
    assert capsys.readouterr().out == snapshot("""\
refused: rack-bandwidth asks for 18 worker with 4 GPUs each in one clique; the nearest, clique clique-0, has room for 17 of 18 worker: r0-4 (in use by pod small)
nearest fix: move pod small from r0-4 to r1-2 (4 GPUs restart)
or: cut it into segments of 16: GPUs of different segments share no memory
or: ask for 17 worker instead of 18
or: wait until pod small ends (4 GPUs)
""")  # noqa: E501


def test_where_the_job_goes_is_printed_with_its_price_and_what_to_object_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node(f"r0-{tray}", "clique-0") for tray in range(4)]
    assert ran(saved(tmp_path, *nodes, job("train", 4))) == 0
    assert capsys.readouterr().out == snapshot("""\
train: 4 trays of clique clique-0 (0 empty trays left): fewest cliques, then fewest holes closed, then tightest fit
GROUP  MEMBERS  TRAY
pod    0        r0-0
pod    1        r0-1
pod    2        r0-2
pod    3        r0-3
price: 1 fewer of 4 trays (1 -> 0), 2 fewer of 2 trays (2 -> 0), 4 fewer of 1 trays (4 -> 0)
note: it takes all 4 trays of clique clique-0: when one is lost, no other can stand in for it
""")  # noqa: E501


def test_a_segment_is_printed_with_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(MPI_JOB, *RACKS, "2", "--segment", "16", "--spares", "1", "-o", "json") == 0
    (answer,) = json.loads(capsys.readouterr().out)["jobs"]
    assert len(answer["plan"]["cliques"]) == 2
    assert len(answer["plan"]["spares"]) == 2
    assert answer["notes"][0].startswith("segments of 16 in cliques of 18: 2 trays stay outside; 88.8%")


def test_without_a_tray_the_other_rack_takes_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(MPI_JOB, *RACKS, "2", "--without-tray", "rack-0-tray-3", "-o", "yaml") == 0
    (answer,) = yaml.safe_load(capsys.readouterr().out)["jobs"]
    assert answer["plan"]["cliques"] == ["domain-1.32766"]
    assert ran(MPI_JOB, *RACKS, "1", "--without-tray", "rack-0-tray-3") == 1
    assert "rack-0-tray-3 (left out)" in capsys.readouterr().out


def test_a_drain_says_what_moves_and_the_job_avoids_the_tray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node(f"r{rack}-{tray}", f"clique-{rack}") for rack in (0, 1) for tray in range(3)]
    pods = [pod("a", "r0-0", annotations={"rackloom.dev/movable": "true"}), pod("b", "r1-0")]
    where = saved(tmp_path, *nodes, *pods)
    assert ran("--site", where, "--drain", "r0-0") == 0
    assert capsys.readouterr().out == (
        "first move pod a from r0-0 to r0-1 (4 GPUs restart):"
        " holes of 2 trays 2 -> 1, holes of 1 trays 4 -> 3\n"
    )
    with pytest.raises(Refused, match="b cannot leave r1-0: it is not marked as movable"):
        ran("--site", where, "--drain", "r1-0")


def test_defragmentation_makes_room_for_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node(f"r{rack}-{tray}", f"clique-{rack}") for rack in (0, 1) for tray in range(8)]
    pods = [pod("a", "r0-0", annotations={"rackloom.dev/movable": "true"}), pod("b", "r1-0")]
    where = saved(tmp_path, *nodes, *pods, job("whole", 8))
    assert ran(where) == 1
    capsys.readouterr()
    assert ran(where, "--defrag") == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "first move pod a from r0-0 to r1-1 (4 GPUs restart): holes of 8 trays 0 -> 1,"
        " holes of 4 trays 2 -> 3, holes of 2 trays 6 -> 7\n\nwhole: 8 trays of clique clique-0"
    )


def test_jobs_are_placed_beside_each_other_highest_priority_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urgent = job("urgent", 3)
    urgent["spec"]["template"]["spec"]["priorityClassName"] = "high"
    high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}}
    nodes = [node(f"r0-{tray}", "clique-0") for tray in range(4)]
    assert ran(saved(tmp_path, job("late", 2), urgent, {**high, "value": 10}, *nodes), "-o", "json") == 1
    answers = json.loads(capsys.readouterr().out)["jobs"]
    assert [(answer["job"], answer["plan"] is not None) for answer in answers] == [
        ("urgent", True),
        ("late", False),
    ]
    assert answers[1]["fixes"] == ["ask for 1 pod instead of 2", "wait until urgent ends (12 GPUs)"]


def test_several_jobs_are_packed_together_where_one_after_another_leaves_one_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node(f"r{rack}-{tray}", f"clique-{rack}") for rack in (0, 1) for tray in range(6 - rack)]
    jobs = [job(name, members) for name, members in (("four", 4), ("three", 3), ("two", 2), ("duo", 2))]
    assert ran(saved(tmp_path, *jobs, *nodes)) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 jobs fit together\n\nfour: 4 trays of clique clique-0")
    assert ran(saved(tmp_path, *jobs, job("five", 5), *nodes)) == 1
    assert capsys.readouterr().out.startswith("4 of 5 jobs fit together; refused: five\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "saved.yaml:2: not YAML"),
        ("- 1", "an object is a mapping"),
        ("kind: TFJob", r"there is no job in the files \(TFJob\)"),
        ("kind: Job\nmetadata: {name: j}\nspec: {parallelism: many, template: {}}", "pod has 'many' members"),
        ("kind: Job\nmetadata: {name: j}\nspec: {parallelism: -2, template: {}}", "pod has -2 members"),
    ],
)
def test_a_file_that_is_no_job_is_said_to_be_none(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "saved.yaml").write_text(text)
    with pytest.raises(Refused, match=reason):
        ran(str(tmp_path / "saved.yaml"), *RACKS, "1")


def test_claims_are_served_by_the_machines_of_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = {"deviceClassName": "gpu.nvidia.com", "count": 2}
    requests = [
        {"name": "gpu", "exactly": exact},
        {"name": "nic", "exactly": {**exact, "deviceClassName": "dranet.net"}},
    ]
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "pair"},
        "spec": {"spec": {"devices": {"requests": requests}}},
    }
    claimed = job("transfer", 4, 0)
    claimed["spec"]["template"]["spec"]["resourceClaims"] = [
        {"name": "pair", "resourceClaimTemplateName": "pair"}
    ]
    assert ran(saved(tmp_path, template, claimed), *RACKS, "1", "-o", "json") == 0
    (answer,) = json.loads(capsys.readouterr().out)["jobs"]
    assert len({seat["tray"] for seat in answer["plan"]["seats"]}) == 2


def test_a_launcher_that_may_not_go_where_its_workers_do_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    worker = pod("x", None)["spec"] | {"tolerations": [{"key": "gpu", "operator": "Exists"}]}
    specs = {
        "Launcher": {"template": {"spec": {"containers": [{"name": "main"}]}}},
        "Worker": {"replicas": 2, "template": {"spec": worker}},
    }
    mpi = {"kind": "MPIJob", "metadata": {"name": "m"}, "spec": {"mpiReplicaSpecs": specs}}
    mpi["apiVersion"] = "kubeflow.org/v2beta1"
    nodes = [node(f"r0-{tray}", "clique-0", taints=[taint]) for tray in range(3)]
    assert ran(saved(tmp_path, mpi, *nodes), "-o", "json") == 0
    (answer,) = json.loads(capsys.readouterr().out)["jobs"]
    assert answer["notes"] == ["launcher may not run beside the first member on r0-0 (taint gpu=yes)"]


@pytest.mark.parametrize("target", ["affinity", "kueue", "kai", "podgroup", "slurm"])
def test_the_job_is_rendered_for_a_scheduler(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(MPI_JOB, *RACKS, "1", "--render", target) == 0
    out = capsys.readouterr().out
    objects = list(yaml.safe_load_all(out))
    assert objects
    if target == "slurm":
        assert out.startswith("#SBATCH --job-name=rack-bandwidth\n#SBATCH --nodes=18\n")
    else:
        assert objects[-1]["kind"] == "MPIJob"
        assert "nvidia.com/gpu.clique" in out


def test_labels_of_another_vendor_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node(f"r0-{tray}", "clique-0") for tray in range(2)]
    for item in nodes:
        item["metadata"]["labels"] = {"accelerator.topograph.run/domain": "d"}
    label = "clique=accelerator.topograph.run/domain"
    assert ran(saved(tmp_path, *nodes, job("train", 2)), "--label", label, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["plan"]["cliques"] == ["d"]


def test_a_cluster_is_asked_through_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in that answers as kubectl does: one List of all kinds."""
    items = [node(f"r0-{tray}", "clique-0") for tray in range(2)]
    (tmp_path / "list.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    program = tmp_path / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {tmp_path}/list.json\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert ran(saved(tmp_path, job("train", 2)), "--cluster", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["plan"]["cliques"] == ["clique-0"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].startswith("get nodes,pods,")
    assert ran(saved(tmp_path, job("train", 2)), "--kubeconfig", "theirs", "--context", "lab", "-v") == 0
    assert "kubectl --kubeconfig theirs --context lab get nodes,pods," in capsys.readouterr().err
    assert (
        (tmp_path / "asked")
        .read_text()
        .splitlines()[len(asked)]
        .startswith("--kubeconfig theirs --context lab get nodes,pods,")
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([MPI_JOB], "there is no node to place on"),
        ([*RACKS, "1"], "no file with a job is named"),
        ([MPI_JOB, *RACKS, "1", "--label", "nope=1"], "no such label"),
        ([MPI_JOB, *RACKS, "0"], "do not make whole domains"),
        ([MPI_JOB, *RACKS, "1", "--down", "3"], "is no share of trays"),
        ([MPI_JOB, *RACKS, "1", "--without-tray", "nope"], "no tray is called nope"),
        ([MPI_JOB, *RACKS, "1", "--site", MPI_JOB], "not both"),
        ([MPI_JOB, MPI_JOB, *RACKS, "2"], "2 jobs are called rack-bandwidth"),
    ],
)
def test_what_is_missing_is_said(words: list[str], reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        ran(*words)
    assert refused.value.nearest_fix


def test_a_priority_class_without_a_number_is_refused(tmp_path: Path) -> None:
    urgent = {"kind": "PriorityClass", "metadata": {"name": "urgent"}, "value": "high"}
    with pytest.raises(Refused, match="PriorityClass has the name 'urgent' and the value 'high'") as refused:
        ran(saved(tmp_path, node("n0", "c"), urgent, job("train", 1)))
    assert refused.value.nearest_fix
