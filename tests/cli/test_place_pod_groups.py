"""The version of the PodGroups that `rackloom place --render podgroup` prints."""

import json
from pathlib import Path

import pytest
import yaml
from tests.cli.place_objects import job, node, ran, saved

from rackloom.errors import Refused

GROUP = "scheduling.k8s.io"
NOT_SERVED = "Error from server (NotFound): the server could not find the requested resource"
NO_ANSWER = "Unable to connect to the server: dial tcp 127.0.0.1:6443: connect: connection refused"
PROFILE = ("--profile", "gb200-nvl72", "--racks", "1")
NEWEST = f"{GROUP}/v1beta1"


def serve(folder: Path, versions: dict[str, tuple[str, ...]], otherwise: str = NOT_SERVED) -> str:
    """A PATH with a kubectl of a cluster that serves these kinds in these versions, by their discovery."""
    items = [node(f"r0-{tray}", "clique-0") for tray in range(2)]
    (folder / "list.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    cases = ""
    for version, kinds in versions.items():
        resources = [{"name": f"{kind.lower()}s", "kind": kind} for kind in kinds]
        answer = {"kind": "APIResourceList", "groupVersion": f"{GROUP}/{version}", "resources": resources}
        (folder / version).write_text(json.dumps(answer))
        cases += f'*"get --raw /apis/{GROUP}/{version}") cat {folder}/{version} ;;\n'
    (folder / "kubectl").write_text(
        f'#!/bin/sh\ncase "$*" in\n{cases}'
        f'*"get --raw "*) echo "{otherwise}" >&2; exit 1 ;;\n'
        f"*) cat {folder}/list.json ;;\nesac\n"
    )
    (folder / "kubectl").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("served", "chosen"),
    [
        ({"v1beta1": ("PodGroup", "Workload"), "v1alpha3": ("PodGroup",)}, NEWEST),
        # v1beta1 may be there for other kinds alone.
        ({"v1beta1": ("PriorityClass",), "v1alpha3": ("PodGroup", "Workload")}, f"{GROUP}/v1alpha3"),
        ({"v1": ("PriorityClass",), "v1alpha2": ("PodGroup", "Workload")}, f"{GROUP}/v1alpha2"),
        ({"v1": ("PriorityClass",), "v1alpha1": ("Workload",)}, None),
    ],
)
def test_the_version_is_one_that_the_cluster_serves(
    served: dict[str, tuple[str, ...]],
    chosen: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", serve(tmp_path, served))
    assert ran(saved(tmp_path, job("train", 2)), "--cluster", "--render", "podgroup") == 0
    printed = capsys.readouterr()
    assert next(yaml.safe_load_all(printed.out))["apiVersion"] == (chosen or NEWEST)
    assert ("serves no PodGroup" in printed.err) == (chosen is None)


def test_a_cluster_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", serve(tmp_path, {}, NO_ANSWER))
    words = (saved(tmp_path, job("train", 2)), "--cluster", "--render", "podgroup")
    with pytest.raises(Refused, match="connection refused"):
        ran(*words)
    assert ran(*words, "--label", f"pod_group_version={GROUP}/v1alpha2") == 0, "the cluster is not read then"


@pytest.mark.parametrize(
    ("words", "version"),
    [((), NEWEST), (("--label", f"pod_group_version={GROUP}/v1alpha2"), f"{GROUP}/v1alpha2")],
)
def test_without_a_cluster_it_is_the_newest_or_the_one_that_is_named(
    words: tuple[str, ...], version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(saved(tmp_path, job("train", 2)), *PROFILE, "--render", "podgroup", *words) == 0
    assert next(yaml.safe_load_all(capsys.readouterr().out))["apiVersion"] == version
