"""The output for each scheduler, its companion objects, and the plan's assumptions on stderr."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.place_objects import job, node, pod, ran, saved

from rackloom.errors import Refused

RACK = ["--profile", "gb200-nvl72", "--racks"]
LWS = "leaderworkerset.sigs.k8s.io"


def leader_worker_set(name: str, replicas: int, size: int) -> dict[str, Any]:
    inside = {"size": size, "workerTemplate": {"spec": pod("x", None)["spec"]}}
    spec = {"replicas": replicas, "leaderWorkerTemplate": inside}
    return {"kind": "LeaderWorkerSet", "metadata": {"name": name}, "spec": spec}


def test_moves_notes_and_price_are_told_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node(f"r{rack}-{tray}", f"clique-{rack}") for rack in (0, 1) for tray in range(8)]
    pods = [pod("a", "r0-0", labels={"rackloom.dev/movable": "true"}), pod("b", "r1-0")]
    assert ran(saved(tmp_path, *nodes, *pods, job("whole", 8)), "--defrag", "--render", "kueue") == 0
    out, err = capsys.readouterr()
    assert [obj["kind"] for obj in yaml.safe_load_all(out)] == ["Topology", "Job"]
    assert err.startswith("first move pod a from r0-0 to r1-1 (4 GPUs restart): holes of 8 trays 0 -> 1")
    assert "\nprice: 1 fewer of 8 trays (1 -> 0)" in err
    assert "\nnote: it takes all 8 trays of clique clique-0" in err


def test_what_else_the_files_have_goes_with_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = {"resourceClaimTemplate": {"name": "channel"}}
    domain = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": {"name": "d"},
        "spec": {"numNodes": 0, "channel": channel},
    }
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "s"}, "data": {"a": "1"}}
    linked = job("train", 2)
    linked["spec"]["template"]["spec"]["resourceClaims"] = [
        {"name": "channel", "resourceClaimTemplateName": "channel"}
    ]
    nodes = [node(f"r0-{tray}", "c") for tray in range(2)]
    assert ran(saved(tmp_path, domain, settings, linked, *nodes), "--render", "affinity") == 0
    first, second, third = yaml.safe_load_all(capsys.readouterr().out)
    assert (first, second, third["kind"]) == (domain, settings, "Job")


def test_what_several_jobs_need_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(tmp_path, job("a", 4), job("b", 4))
    assert ran(file, *RACK, "1", "--render", "slurm") == 0
    out = capsys.readouterr().out
    assert out.count("#SBATCH --nodes=4") == 2
    assert out.count("topology: nvlink") == 1
    assert ran(file, *RACK, "1", "--render", "kueue") == 0
    assert [obj["kind"] for obj in yaml.safe_load_all(capsys.readouterr().out)] == ["Topology", "Job", "Job"]


def cliques_of(out: str) -> list[set[str]]:
    """By object, the racks of the trays that it names."""
    found = []
    for obj in yaml.safe_load_all(out):
        spec = obj["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["affinity"]["nodeAffinity"]
        term = spec["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
        found.append({tray.rpartition("-tray-")[0] for tray in term["matchExpressions"][0]["values"]})
    return found


@pytest.mark.parametrize(
    ("replicas", "size", "more"), [(2, 8, []), (1, 16, ["--segment", "8"])], ids=["replicas", "segments"]
)
def test_with_exclusive_topology_each_share_has_a_clique_to_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], replicas: int, size: int, more: list[str]
) -> None:
    file = saved(tmp_path, leader_worker_set("l", replicas, size))
    assert ran(file, *RACK, "2", *more, "--render", "lws") == 0
    assert cliques_of(capsys.readouterr().out) == [{"rack-0", "rack-1"}]
    assert ran(file, *RACK, "1", *more, "--render", "lws") == 1
    assert "has a clique to itself, and only domain-0.32766 can be had" in capsys.readouterr().out


def test_two_exclusive_jobs_share_no_clique_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path, leader_worker_set("l", 1, 8), leader_worker_set("m", 1, 8))
    assert ran(file, *RACK, "2", "--render", "lws") == 0
    assert cliques_of(capsys.readouterr().out) == [{"rack-0"}, {"rack-1"}]


def test_a_clique_where_another_leader_worker_set_runs_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node(f"r{rack}-{tray}", f"clique-{rack}") for rack in (0, 1) for tray in range(4)]
    other = pod("other-0", "r0-0", labels={f"{LWS}/group-key": "k"})
    elsewhere = pod("far-0", "r1-0", namespace="far", labels={f"{LWS}/group-key": "k"})
    file = saved(tmp_path, leader_worker_set("l", 1, 3), *nodes, other, elsewhere)
    assert ran(file, "--render", "lws") == 0
    assert "clique clique-1" in capsys.readouterr().err
    file = saved(tmp_path, leader_worker_set("l", 2, 3), *nodes, other, elsewhere)
    assert ran(file, "--render", "lws") == 1
    assert "only clique-1 can be had" in capsys.readouterr().out


def test_the_price_of_every_segment_size_is_printed_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ran(*RACK, "1", "--down", "0.02") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["SEGMENT", "OUTSIDE", "USABLE"]
    assert [row.split() for row in (rows[0], rows[8], rows[15], rows[17])] == [
        ["1", "0", "98.0%"],
        ["9", "0", "84.8%"],
        ["16", "2", "88.4%"],
        ["18", "0", "69.5%"],
    ]
    assert len(rows) == 18


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        ("99", "a segment of 99 members, and pod has 30"),
        ("20", "the largest clique takes 18 when it is empty"),
    ],
)
def test_a_segment_that_cannot_be_filled_is_refused(tmp_path: Path, segment: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as refused:
        ran(saved(tmp_path, job("j", 30)), *RACK, "2", "--segment", segment)
    assert refused.value.nearest_fix


def test_a_compute_domain_of_the_site_serves_a_job_whose_file_lacks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = {"resourceClaimTemplate": {"name": "channel"}}
    domain = {"kind": "ComputeDomain", "metadata": {"name": "d"}, "spec": {"channel": channel}}
    nodes = [node(f"r0-{tray}", "c") for tray in range(2)]
    where = saved(tmp_path, domain, *nodes)
    (tmp_path / "job").mkdir()
    linked = job("train", 2)
    linked["spec"]["template"]["spec"]["resourceClaims"] = [
        {"name": "channel", "resourceClaimTemplateName": "channel"}
    ]
    assert ran(saved(tmp_path / "job", linked), "--site", where, "--render", "affinity") == 0
    (only,) = yaml.safe_load_all(capsys.readouterr().out)
    assert only["kind"] == "Job", "what the site has already is not printed"


KUEUE = "kueue.x-k8s.io"


def with_topology(value: dict[str, Any], **annotations: str) -> dict[str, Any]:
    named = {f"{KUEUE}/podset-{key.replace('_', '-')}": text for key, text in annotations.items()}
    value["metadata"]["labels"] = {f"{KUEUE}/queue-name": "mine"}
    value["spec"]["template"]["metadata"] = {"annotations": named}
    return value


def test_a_job_of_kueue_keeps_its_queue_and_topology_and_is_planned_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [node(f"r{rack}-{tray}", f"clique-{rack}") for rack in (0, 1) for tray in range(2)]
    level = "nvidia.com/gpu.clique"
    preferred = with_topology(job("wide", 4), preferred_topology=level)
    assert ran(saved(tmp_path, *nodes, preferred), "--render", "kueue") == 0
    out, err = capsys.readouterr()
    _, rendered = yaml.safe_load_all(out)
    assert rendered["metadata"]["labels"] == {f"{KUEUE}/queue-name": "mine"}
    assert rendered["spec"]["template"]["metadata"] == preferred["spec"]["template"]["metadata"]
    assert f"note: no domain of {level} has room for it: preferred, so it is spread" in err

    required = with_topology(job("wide", 4), required_topology=level)
    assert ran(saved(tmp_path, *nodes, required)) == 1
    assert "refused: wide asks for 4" in capsys.readouterr().out
    sliced = with_topology(job("wide", 4), slice_required_topology=level, slice_size="2")
    assert ran(saved(tmp_path, *nodes, sliced)) == 0


def test_an_unknown_level_is_named(tmp_path: Path) -> None:
    row = with_topology(job("wide", 1), required_topology="example.com/row")
    with pytest.raises(Refused, match=r"no node carries the label example\.com/row"):
        ran(saved(tmp_path, node("r0-0", "c"), row))


def test_a_workload_of_kueue_is_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod_set = {"name": "main", "count": 2, "template": pod("x", None)}
    workload = {"kind": "Workload", "metadata": {"name": "w"}, "spec": {"podSets": [pod_set]}}
    nodes = [node(f"r0-{tray}", "c") for tray in range(2)]
    assert ran(saved(tmp_path, *nodes, workload)) == 0
    assert "w: 2 trays of clique c" in capsys.readouterr().out
