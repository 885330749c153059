"""`rackloom place` on jobs that require more of their nodes than devices, and on files of other shapes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from inline_snapshot import snapshot

from rackloom.cli.main import app

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    app(["place", *map(str, words)], result_action="return_value")
    return capsys.readouterr().out


def node(name: str, clique: str | None = "c", **more: Any) -> dict[str, Any]:
    marks = {"zone": name[0], "kubernetes.io/hostname": name} | (
        {"nvidia.com/gpu.clique": clique} if clique else {}
    )
    status = {
        "allocatable": {"nvidia.com/gpu": "4"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": marks},
        "status": status,
        **more,
    }


def job(members: int = 2, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    containers = [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 2}}}]
    template = {"metadata": {"labels": labels or {}}, "spec": {"containers": containers, **spec}}
    made = {"parallelism": members, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": made}


def saved(path: Path, *objects: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump_all(objects))
    return path


def channel_pod(name: str, **spec: Any) -> dict[str, Any]:
    containers = [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 2}}}]
    claims = [{"name": "ch", "resourceClaimTemplateName": "two"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": containers, "resourceClaims": claims, **spec},
    }


DOMAIN = {
    "apiVersion": "resource.nvidia.com/v1beta1",
    "kind": "ComputeDomain",
    "metadata": {"name": "two"},
    "spec": {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": "two"}}},
}


def test_required_node_affinity_and_anti_affinity_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}]
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "t"}}}
    affinity = {
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}},
        "podAntiAffinity": {REQUIRED: [apart]},
    }
    nodes = [node(name) for name in ("a0", "a1", "b0", "b1")]
    file = saved(tmp_path / "f.yaml", *nodes, job(2, {"app": "t"}, affinity=affinity))
    assert printed(capsys, file) == snapshot("""\
train: 2 trays of clique c (0 empty trays left): fewest cliques, then fewest holes closed, then tightest fit
GROUP  MEMBERS  TRAY
pod    0        b0
pod    1        b1
price: 1 fewer of 2 trays (1 -> 0), 2 fewer of 1 trays (2 -> 0)
""")
    file = saved(tmp_path / "f.yaml", *nodes, job(3, {"app": "t"}, affinity=affinity))
    assert printed(capsys, file) == snapshot("""\
refused: train asks for 3 pod with 2 GPUs each in one clique; the nearest, clique c, has room for 2 of 3 pod: a0, a1 (not zone In b)
nearest fix: ask for 2 pod instead of 3
""")  # noqa: E501


def test_labels_that_no_node_has_are_no_reason_to_return_a_tray_to_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "f.yaml", node("a0"), node("b0"), job(nodeSelector={"zone": "c"}))
    assert printed(capsys, file) == snapshot("""\
refused: train asks for 2 pod with 2 GPUs each in one clique, but it may use none of the 2 nodes (not zone=c)
nearest fix: change its nodeSelector or affinity: no node is what it asks for
""")


def test_trays_without_a_partition_are_named_beside_those_that_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "f.yaml", node("a0"), node("b0", None), node("b1", None), job(3))
    assert printed(capsys, file) == snapshot("""\
refused: train asks for 3 pod with 2 GPUs each in one clique; the nearest, clique c, has room for 2 of 3 pod; no NVLink partition holds b0, b1
nearest fix: cut it into segments of 2: GPUs of different segments share no memory
or: ask for 2 pod instead of 3
""")  # noqa: E501


def test_a_site_without_clique_labels_has_no_partition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "f.yaml", node("a0", None), node("b0", None), job(3))
    assert printed(capsys, file) == snapshot("""\
refused: train asks for 3 pod with 2 GPUs each in one clique; the nearest, clique a0, has room for 2 of 3 pod; no NVLink partition holds these trays: no node carries nvidia.com/gpu.clique
nearest fix: make a partition that holds them: rackloom partition create, vpc create, instance create. Their nodes then carry nvidia.com/gpu.clique; where they carry another label, name it with --label clique=KEY
or: ask for 2 pod instead of 3
""")  # noqa: E501


def test_a_channel_in_use_closes_its_tray_to_members_of_another_compute_domain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"request": "c", "driver": "compute-domain.nvidia.com", "pool": "a0", "device": "channel-0"}
    held = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "old-ch", "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": "c", "exactly": {"deviceClassName": "x"}}]}},
        "status": {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "old", "uid": "u"}],
        },
    }
    old = channel_pod("old", nodeName="a0")
    site = saved(tmp_path / "site.yaml", node("a0"), node("b0"), old, held)
    objects = saved(tmp_path / "one.yaml", DOMAIN, channel_pod("n0"))
    assert printed(capsys, objects, "--site", site).splitlines()[-2:] == snapshot(
        ["pod    0        b0", "price: 1 fewer of 1 trays (1 -> 0)"]
    )
    two = saved(tmp_path / "two.yaml", DOMAIN, channel_pod("n0"), channel_pod("n1"))
    assert printed(capsys, two, "--site", site) == snapshot("""\
refused: two asks for 2 pod with 2 GPUs each in one clique; the nearest, clique c, has room for 1 of 2 pod: a0 (its IMEX channel is in use by pod old)
nearest fix: ask for 1 pod instead of 2
or: wait until pod old ends (2 GPUs)
""")  # noqa: E501


def test_a_job_of_nothing_but_channels_is_placed(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "imex-minimal" / "compute-domain.yaml"
    assert "imex-channel-0: 1 trays of clique" in printed(capsys, example, "--profile", "gb200-nvl72")


def test_what_the_plan_does_not_keep_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"topologyKey": "kubernetes.io/hostname", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    file = saved(tmp_path / "f.yaml", node("a0"), node("b0"), job(topologySpreadConstraints=[spread]))
    notes = [line for line in printed(capsys, file).splitlines() if "honoured" in line]
    assert notes == snapshot(
        [
            "note: topologySpreadConstraints of pod by kubernetes.io/hostname (maxSkew 1) are not honoured: members are not spread"  # noqa: E501
        ]
    )


def test_the_list_of_one_kind_is_read_as_its_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(kind: str, *objects: dict[str, Any]) -> dict[str, Any]:
        # As `kubectl get --raw` has them: the items do not say their kind.
        bare = [
            {key: value for key, value in obj.items() if key not in ("kind", "apiVersion")} for obj in objects
        ]
        return {"apiVersion": objects[0]["apiVersion"], "kind": kind, "items": bare}

    file = saved(tmp_path / "f.yaml", listed("NodeList", node("a0")), listed("JobList", job(1)))
    assert printed(capsys, file).startswith("train: 1 trays of clique c")
