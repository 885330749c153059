"""The order of jobs: priority classes of the files, of the site and of Kubernetes itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.place_objects import job, mpi_job, node, pod, ran, saved

from rackloom.errors import Refused

HIGH = {
    "apiVersion": "scheduling.k8s.io/v1",
    "kind": "PriorityClass",
    "metadata": {"name": "high"},
    "value": 90,
}
DEFAULT = {**HIGH, "metadata": {"name": "usual"}, "value": 50, "globalDefault": True}
NOT_SERVED = """echo "error: the server doesn't have a resource type" >&2"""
"""kubectl's output for a resource that the server does not serve."""


def site(folder: Path, *more: dict[str, Any]) -> str:
    """Two trays, one of which a pod with priority 40 has."""
    holder = pod("holder", "r0-0")
    holder["spec"]["priority"] = 40
    (folder / "site").mkdir()
    return saved(folder / "site", node("r0-0", "c"), node("r0-1", "c"), holder, *more)


def fixes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    (answer,) = json.loads(capsys.readouterr().out)["jobs"]
    return answer["fixes"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value", "classes"),
    [
        (mpi_job(2, priorityClassName="high"), [HIGH]),
        (mpi_job(2, priorityClassName="system-node-critical"), [HIGH]),
        (mpi_job(2), [DEFAULT]),
        (mpi_job(2, priority=41), []),
        (
            {
                **mpi_job(2),
                "spec": {
                    **mpi_job(2)["spec"],
                    "runPolicy": {"schedulingPolicy": {"priorityClass": "high"}},
                },
            },
            [HIGH],
        ),
    ],
    ids=["of the site", "built in", "global default", "number", "of the gang"],
)
def test_a_job_of_higher_priority_may_preempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: dict[str, Any], classes: list[dict[str, Any]]
) -> None:
    assert ran(saved(tmp_path, value), "--site", site(tmp_path, *classes), "-o", "json") == 1
    assert "preempt pod holder (lower priority, 4 GPUs)" in fixes(capsys)


def test_the_class_of_a_launcher_without_devices_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low = mpi_job(2, launcher={"priorityClassName": "high"}, priorityClassName="low")
    low_class = {**HIGH, "metadata": {"name": "low"}, "value": -5}
    assert ran(saved(tmp_path, low), "--site", site(tmp_path, HIGH, low_class), "-o", "json") == 1
    assert not any("preempt" in fix for fix in fixes(capsys))


def test_a_misspelt_class_is_refused_where_the_classes_are_known_and_noted_where_they_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path, mpi_job(1, priorityClassName="hihg"))
    known, unknown = tmp_path / "known", tmp_path / "unknown"
    known.mkdir()
    unknown.mkdir()
    with pytest.raises(Refused, match="m names the PriorityClass hihg") as refused:
        ran(file, "--site", site(known, HIGH))
    assert "high" in str(refused.value.nearest_fix)
    assert ran(file, "--site", site(unknown)) == 0
    assert "nothing is known of the PriorityClass hihg" in capsys.readouterr().out


def test_a_cluster_is_asked_for_its_classes_and_for_templates_that_the_file_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in that answers as kubectl does, also for a resource that the cluster lacks."""
    exact = {"deviceClassName": "gpu.nvidia.com", "count": 4}
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "gpus", "namespace": "default"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exact}]}}},
    }
    devices = [{"name": f"gpu-{number}", "attributes": {"type": {"string": "gpu"}}} for number in range(4)]
    published = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "r0-0"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "r0-0",
            "pool": {"name": "r0-0", "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }
    answers = {
        "nodes": [node("r0-0", "c"), published],
        "priorityclasses": [HIGH],
        "resourceclaimtemplates": [template],
    }
    lines = []
    for name, items in answers.items():
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        )
        lines.append(f'  {name}*) exec cat "{tmp_path}/{name}.json" ;;')
    program = tmp_path / "kubectl"
    program.write_text("\n".join(["#!/bin/sh", 'case "$2" in', *lines, "esac", NOT_SERVED, "exit 1"]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    claimed = job("train", 1, 0)
    claimed["spec"]["template"]["spec"]["resourceClaims"] = [
        {"name": "gpus", "resourceClaimTemplateName": "gpus"}
    ]
    claimed["spec"]["template"]["spec"]["priorityClassName"] = "high"
    assert ran(saved(tmp_path, claimed), "--cluster", "-o", "json") == 0
    (answer,) = json.loads(capsys.readouterr().out)["jobs"]
    assert [seat["tray"] for seat in answer["plan"]["seats"]] == ["r0-0"]
    assert not any("PriorityClass" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("worker", "classes"),
    [
        ({"priorityClassName": "high"}, [{**HIGH, "preemptionPolicy": "Never"}]),
        ({"priority": 90, "preemptionPolicy": "Never"}, []),
        ({}, [{**DEFAULT, "preemptionPolicy": "Never"}]),
        ({}, [DEFAULT, {**DEFAULT, "metadata": {"name": "lower"}, "value": 7}]),
        ({}, [{**DEFAULT, "metadata": {"name": "lower"}, "value": 7}, DEFAULT]),
    ],
    ids=["of its class", "of the pod", "of the default", "lower default last", "lower default first"],
)
def test_what_cannot_preempt_is_not_told_to(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    worker: dict[str, Any],
    classes: list[dict[str, Any]],
) -> None:
    assert ran(saved(tmp_path, mpi_job(2, **worker)), "--site", site(tmp_path, *classes), "-o", "json") == 1
    found = fixes(capsys)
    assert "wait until pod holder ends (4 GPUs)" in found
    assert not any("preempt" in fix for fix in found)


@pytest.mark.parametrize("value", [1_000_000_001, -(2**31) - 1, 10**12])
def test_a_value_that_no_class_may_have_is_refused(tmp_path: Path, value: int) -> None:
    with pytest.raises(Refused, match=f"the PriorityClass high has the value {value}"):
        ran(saved(tmp_path, mpi_job(2)), "--site", site(tmp_path, {**HIGH, "value": value}))
