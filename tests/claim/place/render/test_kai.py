"""What KAI's annotations can tell, and for which kinds."""

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


def render(value: dict[str, Any], **asked: Any) -> Rendered:
    (job,) = jobs_of([value], LABELS)
    gang = gang_of(job, {}, priorities={}, **asked)
    where = site(2, 6)
    return rendered("kai", job, gang, plan_gang(where, gang), where, LABELS)


def test_each_replica_of_a_leader_worker_set_is_a_group_that_shares_a_clique() -> None:
    spec = {"replicas": 2, "leaderWorkerTemplate": {"size": 4, "workerTemplate": POD}}
    found = render({"kind": "LeaderWorkerSet", "metadata": {"name": "l"}, "spec": spec}).objects[-1]
    assert found["metadata"]["annotations"] == {
        "kai.scheduler/topology": "nvlink",
        "kai.scheduler/topology-required-placement": LABELS.clique,
    }


def test_groups_apart_are_refused_with_a_fix_that_was_asked_for() -> None:
    jobs = [{"name": name, "template": {"spec": {"parallelism": 2, "template": POD}}} for name in ("a", "b")]
    job_set = {"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": jobs}}
    assert render(job_set).objects
    with pytest.raises(Refused, match="no groups apart") as told:
        render(job_set, apart=True)
    assert told.value.nearest_fix == "use --render kueue, or leave --apart out"
