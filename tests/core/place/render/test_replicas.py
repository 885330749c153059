"""Replicas of a LeaderWorkerSet, which share their templates and not their cliques."""

from typing import Any

import pytest
from tests.core.place.place_sites import site

from rackloom.core.cluster.jobs import read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_planner import try_gang
from rackloom.core.place.gang_requests import gang_of_job
from rackloom.core.place.rendering import RenderedJob, render_job
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused

LABELS = SchedulerLabels()
POD = {"spec": {"containers": [{"name": "main", "resources": {"limits": {LABELS.gpu: 4}}}]}}


def render(target: str, replicas: int, segment: int | None = None, **more: Any) -> RenderedJob:
    spec = {"replicas": replicas, "leaderWorkerTemplate": {"size": 3, "workerTemplate": POD, **more}}
    (job,) = read_jobs([{"kind": "LeaderWorkerSet", "metadata": {"name": "l"}, "spec": spec}], LABELS)
    gang = gang_of_job(job, {}, priorities={}, segment=segment)
    where = site(2, 6)
    plan = try_gang(where, gang, SearchBudget(), apart=True) if target == "lws" else plan_gang(where, gang)
    assert plan is not None
    return render_job(target, job, gang, plan, where, LABELS)


def test_a_template_names_one_pod_group_so_replicas_cannot_have_one_each() -> None:
    first = render("podgroup", 1).objects[0]
    assert first["metadata"]["name"] == "l"
    with pytest.raises(Refused, match="one template") as refused:
        render("podgroup", 2)
    assert refused.value.nearest_fix.startswith("use --render lws")
    assert render("lws", 2).objects


@pytest.mark.parametrize("replicas", [1, 2])
def test_kueue_keeps_the_leader_of_each_replica_with_its_workers(replicas: int) -> None:
    spec = render("kueue", replicas, leaderTemplate=POD).objects[-1]["spec"]["leaderWorkerTemplate"]
    for role in ("leaderTemplate", "workerTemplate"):
        assert spec[role]["metadata"]["annotations"] == {
            "kueue.x-k8s.io/podset-required-topology": LABELS.clique,
            "kueue.x-k8s.io/podset-group-name": "one-clique",
        }


def test_workers_alone_need_no_group() -> None:
    spec = render("kueue", 2).objects[-1]["spec"]["leaderWorkerTemplate"]
    assert list(spec["workerTemplate"]["metadata"]["annotations"]) == [
        "kueue.x-k8s.io/podset-required-topology"
    ]


def trays_of(template: dict[str, Any]) -> list[str]:
    required = template["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return required["nodeSelectorTerms"][0]["matchExpressions"][0]["values"]  # type: ignore[no-any-return]


def test_by_exclusive_topology_no_two_replicas_are_in_one_clique() -> None:
    spec = render("lws", 2).objects[0]["spec"]["leaderWorkerTemplate"]
    assert trays_of(spec["workerTemplate"]) == ["n0-0", "n0-1", "n0-2", "n1-0", "n1-1", "n1-2"]
    inside = {"size": 3, "workerTemplate": POD}
    lws = {"kind": "LeaderWorkerSet", "metadata": {"name": "l"}}
    (job,) = read_jobs([{**lws, "spec": {"replicas": 2, "leaderWorkerTemplate": inside}}], LABELS)
    gang = gang_of_job(job, {}, priorities={})
    packed = plan_gang(site(2, 6), gang)
    assert len(packed.cliques) == 1
    with pytest.raises(Refused, match="two replicas in one clique") as refused:
        render_job("lws", job, gang, packed, site(2, 6), LABELS)
    assert refused.value.nearest_fix


def test_the_leader_of_each_replica_stands_beside_its_own_workers() -> None:
    idle = {"spec": {"containers": [{"name": "main"}]}}
    spec = render("lws", 2, leaderTemplate=idle).objects[0]["spec"]["leaderWorkerTemplate"]
    assert trays_of(spec["leaderTemplate"]) == ["n0-0", "n1-0"]


def test_subgroups_of_a_leader_worker_set_are_alike() -> None:
    with pytest.raises(Refused, match="3 replica-0-worker are no whole segments of 2"):
        render("lws", 1, segment=2)


def test_affinity_cannot_keep_replicas_together_that_are_in_two_cliques() -> None:
    assert render("affinity", 2).objects, "one clique has both"
    with pytest.raises(Refused, match="4 replicas have one pod template and 2 cliques") as refused:
        render("affinity", 4)
    assert refused.value.nearest_fix == "use --render lws"
    with pytest.raises(Refused, match="segments of 1 have one pod template and 2 cliques"):
        render("affinity", 4, segment=1)
