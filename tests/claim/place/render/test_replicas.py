"""Replicas of a LeaderWorkerSet, which share their templates and not their cliques."""

from typing import Any

import pytest
from tests.claim.place.place_sites import site

from rackloom.claim.place.gang import plan_gang
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.asks import gang_of
from rackloom.claim.place.reading.jobs import jobs_of
from rackloom.claim.place.render.targets import Rendered, rendered
from rackloom.errors import Refused

LABELS = Labels()
POD = {"spec": {"containers": [{"name": "main", "resources": {"limits": {LABELS.gpu: 4}}}]}}


def render(target: str, replicas: int, **more: Any) -> Rendered:
    spec = {"replicas": replicas, "leaderWorkerTemplate": {"size": 3, "workerTemplate": POD, **more}}
    (job,) = jobs_of([{"kind": "LeaderWorkerSet", "metadata": {"name": "l"}, "spec": spec}], LABELS)
    gang = gang_of(job, {}, priorities={})
    where = site(2, 6)
    return rendered(target, job, gang, plan_gang(where, gang), where, LABELS)


def test_a_template_names_one_pod_group_so_replicas_cannot_have_one_each() -> None:
    first = render("podgroup", 1).objects[0]
    assert first["metadata"]["name"] == "l"
    with pytest.raises(Refused, match="one template") as told:
        render("podgroup", 2)
    assert told.value.nearest_fix.startswith("use --render lws")
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
