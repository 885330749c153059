"""Requests of a job to Kueue's topology-aware scheduling, planned with Kueue's meaning."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.cluster.views import as_ready

from rackloom.core.cluster.jobs import PriorityClasses, read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import read_node
from rackloom.core.cluster.reader import read_state
from rackloom.core.cluster.trays import DraDevices, GangPlan
from rackloom.core.place.kueue_topology import (
    GROUP_NAME,
    PREFERRED,
    REQUIRED,
    SLICE_CONSTRAINTS,
    SLICE_LEVEL,
    SLICE_SIZE,
    UNCONSTRAINED,
    TopologyAttempt,
    first_that_fits,
    job_topology,
    shared_topology,
    topology_attempts,
)
from rackloom.core.place.site_planner import PlacementReport, PlanRequest, SiteObjects, SitePlanner
from rackloom.errors import Refused

CLIQUE, HOST, BLOCK = "nvidia.com/gpu.clique", "kubernetes.io/hostname", "example.com/block"
LABELS = SchedulerLabels()


def node(name: str, clique: str, block: str, gpus: int = 4) -> dict[str, Any]:
    labels = {CLIQUE: clique, HOST: name, BLOCK: block}
    status = {"allocatable": {"nvidia.com/gpu": str(gpus)}}
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def nodes(*cliques: int, per_block: int = 2) -> list[dict[str, Any]]:
    """Cliques of these numbers of trays, with `per_block` cliques in a block."""
    return [
        node(f"c{clique}-t{tray}", f"c{clique}", f"b{clique // per_block}")
        for clique, trays in enumerate(cliques)
        for tray in range(trays)
    ]


def job(members: int, annotations: dict[str, str], gpus: int = 4) -> dict[str, Any]:
    pod = {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": gpus}}}]}
    template = {"metadata": {"annotations": annotations}, "spec": pod}
    spec = {"parallelism": members, "completions": members, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": spec}


def job_set(annotations: dict[str, dict[str, str]], members: int = 2) -> dict[str, Any]:
    jobs = [
        {"name": name, "replicas": 1, "template": {"spec": job(members, found)["spec"]}}
        for name, found in annotations.items()
    ]
    return {"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": jobs}}


def workload(members: int, topology: dict[str, Any]) -> dict[str, Any]:
    template = job(members, {})["spec"]["template"]
    pod_set = {"name": "main", "count": members, "template": template, "topologyRequest": topology}
    return {"kind": "Workload", "metadata": {"name": "j"}, "spec": {"podSets": [pod_set]}}


def plan(value: dict[str, Any], found: list[dict[str, Any]]) -> tuple[GangPlan | None, str]:
    """The plan of the first attempt that has one, and its note."""
    (read,) = read_jobs([value], LABELS)
    request = PlanRequest(labels=LABELS)

    def planned(attempt: TopologyAttempt) -> tuple[SitePlanner, PlacementReport]:
        site = SiteObjects(
            state=read_state(as_ready(obj) for obj in found if attempt.takes(read_node(obj))),
            devices=DraDevices(nodes=(), classes=(), slices=()),
        )
        classes = PriorityClasses((), are_all_known=False)
        planner = SitePlanner(site, (), (), classes, attempt.request)
        return planner, planner.report([read])

    attempts = topology_attempts(job_topology(read), request, [read_node(obj) for obj in found])
    attempt, _, report = first_that_fits(attempts, planned)
    (answer,) = report.jobs
    return answer.plan, "" if answer.plan is None else attempt.note


def domains(found: GangPlan | None, level: str, of: list[dict[str, Any]]) -> set[str]:
    assert found is not None
    labels = {obj["metadata"]["name"]: obj["metadata"]["labels"] for obj in of}
    return {labels[tray][level] for tray in found.trays}


def test_a_job_that_says_nothing_has_no_request() -> None:
    (read,) = read_jobs([job(2, {})], LABELS)
    assert job_topology(read) is None


@pytest.mark.parametrize("level", [CLIQUE, BLOCK])
def test_required_is_within_one_domain_of_the_level(level: str) -> None:
    found = nodes(3, 3, 3, 3)
    members = {CLIQUE: 3, BLOCK: 6}[level]
    assert len(domains(plan(job(members, {REQUIRED: level}), found)[0], level, found)) == 1
    assert plan(job(members + 1, {REQUIRED: level}), found)[0] is None


def test_required_on_a_host_is_one_tray() -> None:
    found = nodes(3)
    assert plan(job(4, {REQUIRED: HOST}, gpus=1), found)[0] is not None
    assert plan(job(5, {REQUIRED: HOST}, gpus=1), found)[0] is None


def test_preferred_is_within_one_domain_if_it_can_be_and_says_if_not() -> None:
    found = nodes(3, 3)
    together, note = plan(job(3, {PREFERRED: CLIQUE}), found)
    assert len(domains(together, CLIQUE, found)) == 1
    assert note == ""
    spread, note = plan(job(6, {PREFERRED: CLIQUE}), found)
    assert len(domains(spread, CLIQUE, found)) == 2
    assert note.startswith(f"no domain of {CLIQUE} has room")


def test_unconstrained_goes_wherever_there_is_room() -> None:
    found = nodes(1, 1, 1)
    assert plan(job(3, {UNCONSTRAINED: "true"}), found)[0] is not None


def test_each_slice_is_within_a_domain() -> None:
    found, asked = nodes(3, 3, 3), {SLICE_LEVEL: CLIQUE, SLICE_SIZE: "2"}
    sliced, _ = plan(job(6, asked), found)
    assert sliced is not None
    labels = {obj["metadata"]["name"]: obj["metadata"]["labels"][CLIQUE] for obj in found}
    for first in range(0, 6, 2):
        assert len({labels[seat.tray] for seat in sliced.seats[first : first + 2]}) == 1
    assert plan(job(8, asked), found)[0] is None, "three cliques of three take three slices of two"


def test_slices_of_a_set_that_requires_a_wider_level_are_all_in_one_domain_of_it() -> None:
    found = nodes(2, 2, 3, 3)
    asked = {REQUIRED: BLOCK, SLICE_LEVEL: CLIQUE, SLICE_SIZE: "3"}
    assert domains(plan(job(6, asked), found)[0], BLOCK, found) == {"b1"}
    assert plan(job(9, asked), found)[0] is None


def test_a_workload_asks_for_the_same() -> None:
    found = nodes(3, 3)
    assert plan(workload(4, {"required": CLIQUE}), found)[0] is None
    assert plan(workload(4, {"preferred": CLIQUE}), found)[0] is not None
    assert (
        plan(workload(4, {"podSetSliceRequiredTopology": CLIQUE, "podSetSliceSize": 2}), found)[0] is not None
    )


def test_two_pod_sets_share_a_domain_only_where_a_group_says_so() -> None:
    found = nodes(3, 3)
    apart = {name: {REQUIRED: CLIQUE} for name in ("a", "b")}
    assert plan(job_set(apart), found)[0] is not None
    together = {name: {REQUIRED: CLIQUE, GROUP_NAME: "g"} for name in ("a", "b")}
    assert plan(job_set(together), found)[0] is None


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({REQUIRED: "example.com/row"}, "no node carries the label example.com/row"),
        ({SLICE_LEVEL: CLIQUE}, "slices have a level and a size"),
        ({SLICE_LEVEL: CLIQUE, SLICE_SIZE: "two"}, "is 'two'"),
        ({SLICE_LEVEL: CLIQUE, SLICE_SIZE: "3"}, "cuts no slices of 3 from 4"),
        ({REQUIRED: CLIQUE, PREFERRED: CLIQUE}, "both requires and prefers"),
        ({SLICE_CONSTRAINTS: "[]"}, "is not read"),
    ],
)
def test_what_cannot_be_planned_is_refused_plainly(annotations: dict[str, str], words: str) -> None:
    with pytest.raises(Refused, match=re.escape(words)):
        plan(job(4, annotations), nodes(4))


def test_pod_sets_that_ask_for_different_things_are_refused() -> None:
    with pytest.raises(Refused, match="a and b ask for different topologies"):
        plan(job_set({"a": {REQUIRED: CLIQUE}, "b": {PREFERRED: CLIQUE}}), nodes(4))


def test_jobs_of_different_topologies_and_a_second_segment_are_refused() -> None:
    jobs = read_jobs([job(2, {REQUIRED: CLIQUE}), job(2, {})], LABELS)
    with pytest.raises(Refused, match="place them one by one"):
        shared_topology(jobs, PlanRequest())
    with pytest.raises(Refused, match="--segment names another"):
        shared_topology(jobs[:1], PlanRequest(segment=1))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 12))
def test_preferred_fits_where_required_does_and_required_where_a_clique_is_large_enough(
    cliques: list[int], members: int
) -> None:
    found = nodes(*cliques)
    required, _ = plan(job(members, {REQUIRED: CLIQUE}), found)
    preferred, note = plan(job(members, {PREFERRED: CLIQUE}), found)
    assert (required is not None) == (members <= max(cliques))
    assert (preferred is not None) == (members <= sum(cliques))
    assert (note == "") == (required is not None or preferred is None)
