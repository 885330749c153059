"""Moves respect the node requirements of the moved jobs, and state their gain."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.place_objects import job, node, pod, ran, saved

from rackloom.errors import Refused

ZONE = {"key": "zone", "operator": "In", "values": ["a"]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
BINDING: dict[str, dict[str, Any]] = {
    "selector": {"nodeSelector": {"zone": "a"}},
    "affinity": {
        "affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [ZONE]}]}}}
    },
}


def two_zones(folder: Path, taint: dict[str, str] | None = None, **small: Any) -> str:
    """Two zones of 4 trays: a movable job in zone a and a pinned one in zone b."""
    nodes = [node(f"{zone}{tray}", f"clique-{zone}") for zone in "ab" for tray in range(4)]
    for item in nodes:
        item["metadata"]["labels"]["zone"] = item["metadata"]["name"][0]
        item["spec"]["taints"] = [taint] if taint and item["metadata"]["labels"]["zone"] == "b" else []
    mover = pod("small", "a0", labels={"rackloom.dev/movable": "true"})
    mover["spec"] |= small
    return saved(folder, *nodes, mover, pod("pinned", "b0"))


@pytest.mark.parametrize("rule", BINDING)
def test_a_job_is_not_moved_to_where_it_may_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    where = two_zones(tmp_path, **BINDING[rule])
    (tmp_path / "job").mkdir()
    whole = saved(tmp_path / "job", job("whole", 4))
    assert ran(whole, "--site", where) == 1
    assert "move pod small" not in capsys.readouterr().out
    assert ran("--site", where, "--defrag") == 0
    assert capsys.readouterr().out == "nothing has to move\n"
    with pytest.raises(Refused, match="no other clique that it may use has room") as refused:
        ran("--site", where, *(word for tray in range(4) for word in ("--drain", f"a{tray}")))
    assert refused.value.nearest_fix


def test_a_job_is_moved_to_a_tainted_tray_only_if_it_tolerates_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taint = {"key": "nvidia.com/gpu", "value": "yes", "effect": "NoSchedule"}
    intolerant, tolerant = tmp_path / "intolerant", tmp_path / "tolerant"
    intolerant.mkdir()
    tolerant.mkdir()
    assert ran("--site", two_zones(intolerant, taint), "--defrag") == 0
    assert capsys.readouterr().out == "nothing has to move\n"
    tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert ran("--site", two_zones(tolerant, taint, tolerations=tolerations), "--defrag", "-o", "json") == 0
    (move,) = json.loads(capsys.readouterr().out)["moves"]
    assert move["to_trays"] == ["b1"]


def test_a_move_says_what_it_costs_and_what_it_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran("--site", two_zones(tmp_path), "--defrag") == 0
    assert capsys.readouterr().out == (
        "first move pod small from a0 to b1 (4 GPUs restart):"
        " holes of 4 trays 0 -> 1, holes of 2 trays 2 -> 3\n"
    )


def apart(key: str = "kubernetes.io/hostname", **labels: str) -> dict[str, Any]:
    term = {"topologyKey": key, "labelSelector": {"matchLabels": labels}}
    return {"affinity": {"podAntiAffinity": {REQUIRED: [term]}}}


def mover(name: str, on: str, spec: dict[str, Any], **labels: str) -> dict[str, Any]:
    obj = pod(name, on, 2, labels={"rackloom.dev/movable": "true", **labels})
    obj["spec"] |= spec
    return obj


def on_two_cliques(folder: Path, there: int, *pods: dict[str, Any]) -> str:
    return saved(
        folder, node("n1", "a"), node("n2", "a"), *(node(f"m{at}", "b") for at in range(there)), *pods
    )


@pytest.mark.parametrize(("there", "is_moved"), [(1, False), (2, True)])
def test_pods_that_are_never_on_one_node_are_moved_to_one_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: int, is_moved: bool
) -> None:
    pods = [mover(f"p{at}", f"n{at}", apart(app="x"), app="x", **{"job-name": "small"}) for at in (1, 2)]
    pinned = pod("pinned", "m1", 2) if there > 1 else node("other", "z")
    where = on_two_cliques(tmp_path, there, *pods, pinned)
    (tmp_path / "job").mkdir()
    assert ran(saved(tmp_path / "job", job("whole", 2)), "--site", where) == 1
    output = capsys.readouterr().out
    assert ("move Job small from n1, n2 to" in output) is is_moved
    assert "to m0 (" not in output


@pytest.mark.parametrize("key", ["kubernetes.io/hostname", "nvidia.com/gpu.clique"])
def test_a_pod_is_not_moved_to_one_that_it_is_never_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    foe = pod("foe", "m0", 0, labels={"app": "y"})
    where = on_two_cliques(tmp_path, 1, mover("small", "n1", apart(key, app="y")), foe)
    (tmp_path / "job").mkdir()
    assert ran(saved(tmp_path / "job", job("whole", 2)), "--site", where) == 1
    assert "move pod small" not in capsys.readouterr().out


def test_what_was_moved_keeps_others_off_where_it_is_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = [mover("one", "n1", apart(app="y")), mover("other", "n2", {}, app="y")]
    drain = ("--drain", "n1", "--drain", "n2", "-o", "json")
    (tmp_path / "roomy").mkdir()
    assert ran("--site", on_two_cliques(tmp_path / "roomy", 2, *pods), *drain) == 0
    moves = json.loads(capsys.readouterr().out)["moves"]
    assert {move["owner"]: move["to_trays"] for move in moves} == {"pod one": ["m0"], "pod other": ["m1"]}
    with pytest.raises(Refused, match="other cannot leave n2"):
        ran("--site", on_two_cliques(tmp_path, 1, *pods), *drain)


def test_a_job_stays_that_may_share_no_clique_with_another_that_may_move(tmp_path: Path) -> None:
    clique = "nvidia.com/gpu.clique"
    pods = [mover("one", "n1", apart(clique, app="y")), mover("other", "m0", {}, app="y")]
    with pytest.raises(Refused, match="one cannot leave n1: no other clique that it may use"):
        ran("--site", on_two_cliques(tmp_path, 1, *pods), "--drain", "n1")
