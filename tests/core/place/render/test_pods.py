"""Pods without an owner: no controller counts them, so annotations make them one workload."""

from typing import Any

import pytest
from tests.core.place.place_sites import site

from rackloom.core.cluster.jobs import read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_requests import gang_of_job
from rackloom.core.place.rendering import render_job
from rackloom.errors import Refused

LABELS = SchedulerLabels()
CLIQUE = LABELS.clique
GROUP = "kueue.x-k8s.io/pod-group-name"


def pod(number: int, gang: str, gpus: int = 4) -> dict[str, Any]:
    containers = [{"name": "main", "resources": {"limits": {LABELS.gpu: gpus}}}]
    metadata = {"name": f"p{number}", "namespace": "lab", "labels": {LABELS.gang: gang}}
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}


def render(target: str, pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (job,) = read_jobs(pods, LABELS)
    gang = gang_of_job(job, {}, priorities={})
    where = site(2, 6)
    return list(render_job(target, job, gang, plan_gang(where, gang), where, LABELS).objects)


def test_kueue_is_told_whose_pods_they_are_and_how_many_and_in_which_order() -> None:
    _, *found = render("kueue", [pod(number, "train") for number in range(3)])
    for index, obj in enumerate(found):
        assert obj["metadata"]["labels"] == {
            LABELS.gang: "train",
            "kueue.x-k8s.io/queue-name": "default",
            GROUP: "train",
            "kueue.x-k8s.io/pod-group-pod-index": str(index),
        }
        assert obj["metadata"]["annotations"] == {
            "kueue.x-k8s.io/pod-group-total-count": "3",
            "kueue.x-k8s.io/podset-required-topology": CLIQUE,
        }


def test_one_pod_is_no_group() -> None:
    _, only = render("kueue", [pod(0, "train")])
    assert GROUP not in only["metadata"]["labels"]
    assert only["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "default"


@pytest.mark.parametrize("gang", ["My_Run", "n" * 63, "a.-"])
def test_the_name_of_a_group_is_one_that_objects_may_have(gang: str) -> None:
    first, second = (
        render("kueue", [pod(number, name) for number in range(2)])[1]["metadata"]["labels"][GROUP]
        for name in (gang, f"{gang[:-1]}z")
    )
    assert first == first.lower()
    assert "_" not in first
    assert len(first) <= 63
    assert first != second


def test_kueue_keeps_no_more_than_two_kinds_of_pods_together() -> None:
    with pytest.raises(Refused, match="two together at most") as refused:
        render("kueue", [pod(0, "train", gpus=0), pod(1, "train"), pod(2, "train")])
    assert refused.value.nearest_fix == "make the pods alike, or use --render affinity"


def test_kai_gets_a_pod_group_that_all_pods_name() -> None:
    _, group, *found = render("kai", [pod(number, "train") for number in range(3)])
    assert group == {
        "apiVersion": "scheduling.run.ai/v2alpha2",
        "kind": "PodGroup",
        "metadata": {"name": "train", "namespace": "lab"},
        "spec": {
            "minMember": 3,
            "queue": "default",
            "topologyConstraint": {"topology": "nvlink", "requiredTopologyLevel": CLIQUE},
        },
    }
    assert [obj["metadata"]["annotations"] for obj in found] == [{"pod-group-name": "train"}] * 3
    assert {obj["spec"]["schedulerName"] for obj in found} == {"kai-scheduler"}
