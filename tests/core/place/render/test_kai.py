"""The kinds and groups that KAI's annotations can express."""

from typing import Any

import pytest
from tests.core.place.place_sites import site

from rackloom.core.cluster.jobs import read_jobs
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_requests import gang_of_job
from rackloom.core.place.rendering import RenderedJob, render_job
from rackloom.errors import Refused

LABELS = SchedulerLabels()
POD = {"spec": {"containers": [{"name": "main", "resources": {"limits": {LABELS.gpu: 4}}}]}}


def render(value: dict[str, Any], **asked: Any) -> RenderedJob:
    (job,) = read_jobs([value], LABELS)
    gang = gang_of_job(job, {}, priorities={}, **asked)
    where = site(2, 6)
    return render_job("kai", job, gang, plan_gang(where, gang), where, LABELS)


def test_each_replica_of_a_leader_worker_set_is_a_group_that_shares_a_clique() -> None:
    spec = {"replicas": 2, "leaderWorkerTemplate": {"size": 4, "workerTemplate": POD}}
    found = render({"kind": "LeaderWorkerSet", "metadata": {"name": "l"}, "spec": spec}).objects[-1]
    assert found["metadata"]["annotations"] == {
        "kai.scheduler/topology": "nvlink",
        "kai.scheduler/topology-required-placement": LABELS.clique,
    }


def job_set(order: str | None, **more: Any) -> dict[str, Any]:
    """A driver without devices and two workers."""
    driver = {"spec": {"containers": [{"name": "main"}]}}
    spec: dict[str, Any] = {
        "replicatedJobs": [
            {"name": "driver", "template": {"spec": {"template": driver}}},
            {"name": "worker", "template": {"spec": {"parallelism": 2, "template": POD}}, **more},
        ]
    }
    if order is not None:
        spec["startupPolicy"] = {"startupPolicyOrder": order}
    return {"kind": "JobSet", "metadata": {"name": "s"}, "spec": spec}


def test_all_pods_of_a_job_set_are_counted_where_its_jobs_start_in_any_order() -> None:
    marks = render(job_set("AnyOrder")).objects[-1]["metadata"]["annotations"]
    assert marks["kai.scheduler/batch-min-member"] == "3"


@pytest.mark.parametrize(
    ("order", "more"),
    [("InOrder", {}), (None, {}), ("AnyOrder", {"dependsOn": [{"name": "driver", "status": "Ready"}]})],
)
def test_jobs_that_start_one_after_the_other_are_refused(order: str | None, more: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="only if they may start in any order") as refused:
        render(job_set(order, **more))
    assert "spec.startupPolicy.startupPolicyOrder to AnyOrder" in str(refused.value.nearest_fix)


def test_a_job_set_of_one_replicated_job_is_one_group_in_any_case() -> None:
    jobs = [{"name": "a", "replicas": 2, "template": {"spec": {"parallelism": 2, "template": POD}}}]
    found = render({"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": jobs}})
    assert found.objects[-1]["metadata"]["annotations"]["kai.scheduler/batch-min-member"] == "4"


def test_groups_apart_are_refused_with_a_fix_that_was_asked_for() -> None:
    jobs = [{"name": name, "template": {"spec": {"parallelism": 2, "template": POD}}} for name in ("a", "b")]
    value = {"kind": "JobSet", "metadata": {"name": "s"}, "spec": {"replicatedJobs": jobs}}
    value["spec"]["startupPolicy"] = {"startupPolicyOrder": "AnyOrder"}  # type: ignore[index]
    assert render(value).objects
    with pytest.raises(Refused, match="no groups apart") as refused:
        render(value, apart=True)
    assert refused.value.nearest_fix == "use --render kueue, or leave --apart out"
