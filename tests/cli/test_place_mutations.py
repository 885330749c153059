"""If any one value of a manifest is replaced, the answer is still a plan or a refusal."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from tests.cli.place_objects import mpi_job, node, pod, ran, saved

from rackloom.errors import Refused

Path_ = tuple[str | int, ...]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
SELECTOR = {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "x", "operator": "In", "values": ["y"]}]}
IN_THE_CLIQUE = {"key": "nvidia.com/gpu.clique", "operator": "In", "values": ["c"]}
SPEC: dict[str, Any] = {
    "affinity": {
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [IN_THE_CLIQUE]}]}},
        "podAffinity": {REQUIRED: [{"topologyKey": "nvidia.com/gpu.clique", "labelSelector": SELECTOR}]},
        "podAntiAffinity": {
            REQUIRED: [
                {"topologyKey": "kubernetes.io/hostname", "namespaces": ["n"], "labelSelector": SELECTOR}
            ]
        },
    },
    "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": SELECTOR}
    ],
    "priorityClassName": "high",
}
OTHERS: tuple[Any, ...] = (None, [], {}, "", 0, -1, 10**30, True, "x", [None], {"x": None}, [1], 1.5, [{}])
SEED, MOST = 1, 25


def objects() -> dict[str, dict[str, Any]]:
    """A job on a site of four trays, one of which another pod has."""
    owners = [{"kind": "Job", "name": "own", "controller": True}]
    running = pod("running", "n3", labels={"rackloom.dev/movable": "true"}, ownerReferences=owners)
    running["spec"] |= deepcopy(SPEC)
    tainted = node("n0", "c", taints=[{"key": "a", "effect": "NoSchedule"}])
    tainted["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    priority = {"kind": "PriorityClass", "metadata": {"name": "high"}, "value": 5, "globalDefault": True}
    job = mpi_job(2, **deepcopy(SPEC))
    return {"job": job, "running": running, "node": tainted, "class": priority}


def paths(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Every place in an object but its kind."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        if (*at, key) != ("kind",):
            yield (*at, key)
            yield from paths(inner, (*at, key))


def changed(value: dict[str, Any], at: Path_, other: Any) -> dict[str, Any]:
    copy: Any = deepcopy(value)
    where = copy
    for key in at[:-1]:
        where = where[key]
    where[at[-1]] = other
    return copy  # type: ignore[no-any-return]


def answered(folder: Path, whole: dict[str, dict[str, Any]], words: tuple[str, ...]) -> object:
    file, rest = folder / "all.json", [node(f"n{number}", "c") for number in (1, 2, 3)]
    file.write_text(json.dumps({"kind": "List", "items": [*whole.values(), *rest]}))
    return ran(str(file), *words)


@pytest.mark.slow
@pytest.mark.parametrize("mutated", objects())
@pytest.mark.parametrize("words", [(), ("--drain", "n3"), ("--render", "affinity")], ids=str)
def test_a_plan_or_a_refusal_is_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mutated: str, words: tuple[str, ...]
) -> None:
    assert answered(tmp_path, objects(), words) == 0
    every = [(at, other) for at in paths(objects()[mutated]) for other in OTHERS]
    for at, other in random.Random(SEED).sample(every, min(MOST, len(every))):
        whole = objects() | {mutated: changed(objects()[mutated], at, other)}
        try:
            assert answered(tmp_path, whole, words) in (0, 1), (at, other)
        except Refused as refused:
            if not refused.nearest_fix:
                pytest.fail(f"{at} as {other!r}: {refused!r} names no fix")
        except Exception as error:
            pytest.fail(f"{at} as {other!r}: {error!r}")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"affinity": {"podAffinity": {REQUIRED: {"topologyKey": "zone"}}}},
            f"MPIJob m: spec.mpiReplicaSpecs.Worker.template.spec.affinity.podAffinity.{REQUIRED}:"
            " expected a list, got a map",
        ),
        (
            {
                "affinity": {
                    "podAffinity": {
                        REQUIRED: [
                            {
                                "topologyKey": "nvidia.com/gpu.clique",
                                "labelSelector": {"matchExpressions": [{"operator": "Exists"}]},
                            }
                        ]
                    }
                }
            },
            "object missing required field key",
        ),
        ({"topologySpreadConstraints": {"topologyKey": "zone"}}, "expected a list, got a map"),
        (
            {
                "affinity": {
                    "podAntiAffinity": {
                        REQUIRED: [
                            {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {"matchExpressions": [{"key": "a", "operator": "Inn"}]},
                            }
                        ]
                    }
                }
            },
            "operator: invalid enum value 'Inn'",
        ),
        ({"tolerations": [{"key": "a", "operator": "Foo"}]}, "operator: invalid enum value 'Foo'"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        ran(saved(tmp_path, mpi_job(1, **spec)), "--profile", "gb200-nvl72")
    assert message in str(refused.value)


def test_a_pod_of_the_site_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = pod("running", "n0")
    running["spec"]["containers"] = {}
    site = tmp_path / "site"
    site.mkdir()
    ran(saved(tmp_path, mpi_job(1)), "--site", saved(site, node("n0", "c"), running))
    text = capsys.readouterr().err
    assert "Pod running is left out: its shape: spec.containers: expected a list, got a map" in text
