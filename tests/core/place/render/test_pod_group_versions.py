"""A PodGroup has only fields that its API version has, with the values that this version takes.

The fields are those of k8s.io/api 0.36.6 (v1alpha2) and 0.37.2 (v1alpha3 and v1beta1).
"""

from typing import Any

import pytest
from tests.core.place.place_sites import site

from rackloom.core.cluster.jobs import read_jobs
from rackloom.core.cluster.names import POD_GROUP_VERSIONS, SchedulerLabels
from rackloom.core.place.gang_fixes import plan_gang
from rackloom.core.place.gang_requests import gang_of_job
from rackloom.core.place.rendering import render_job
from rackloom.errors import Refused

SHARED = {
    "schedulingPolicy": {"basic": {}, "gang": {"minCount": int}},
    "schedulingConstraints": {"topology": [{"key": str}]},
    "resourceClaims": [{"name": str, "resourceClaimName": str, "resourceClaimTemplateName": str}],
    "priorityClassName": str,
    "priority": int,
}
OF_1_36 = SHARED | {
    "podGroupTemplateRef": {"workload": {"workloadName": str, "podGroupTemplateName": str}},
    "disruptionMode": str,
}
OF_1_37 = SHARED | {
    "parentCompositePodGroupName": str,
    "workloadRef": {"workloadName": str, "templateName": str},
    "disruptionMode": {"single": {}, "all": {}},
    "preemptionPolicy": str,
}
SPECS = {
    "scheduling.k8s.io/v1alpha2": OF_1_36,
    "scheduling.k8s.io/v1alpha3": OF_1_37,
    "scheduling.k8s.io/v1beta1": OF_1_37,
}


def rendered(version: str) -> list[dict[str, Any]]:
    template = {
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 4}}}]},
    }
    value = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": 3, "template": template}}
    labels = SchedulerLabels(pod_group_version=version)
    (job,) = read_jobs([value], labels)
    gang = gang_of_job(job, {}, priorities={})
    where = site(2, 6)
    return list(render_job("podgroup", job, gang, plan_gang(where, gang), where, labels).objects)


def check(value: Any, schema: Any, path: str) -> None:
    """Checks like a server with strict field validation."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        assert value.keys() <= schema.keys(), f"{path}: {value.keys() - schema.keys()}"
        for key, inside in value.items():
            check(inside, schema[key], f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for number, inside in enumerate(value):
            check(inside, schema[0], f"{path}[{number}]")
    else:
        assert type(value) is schema, path


@pytest.mark.parametrize("version", SPECS)
def test_a_pod_group_is_one_that_its_version_takes(version: str) -> None:
    group, job = rendered(version)
    assert (group["apiVersion"], group["kind"]) == (version, "PodGroup")
    check(group["spec"], SPECS[version], "spec")
    # Exactly one policy, at least one pod, and one topology key at most.
    (policy,) = group["spec"]["schedulingPolicy"].values()
    assert policy["minCount"] == 3
    assert len(group["spec"]["schedulingConstraints"]["topology"]) == 1
    # Pods of all these versions name their group in the same field, and only the group.
    assert job["spec"]["template"]["spec"]["schedulingGroup"] == {"podGroupName": group["metadata"]["name"]}


def test_every_version_that_is_rendered_is_a_known_one() -> None:
    assert set(POD_GROUP_VERSIONS) == set(SPECS)


@pytest.mark.parametrize(
    "version", ["scheduling.k8s.io/v1alpha1", "scheduling.k8s.io/v1", "v1beta1", "scheduling.run.ai/v2alpha2"]
)
def test_a_version_without_these_fields_is_refused(version: str) -> None:
    with pytest.raises(Refused, match=f"no PodGroup of {version}") as refused:
        rendered(version)
    assert "pod_group_version=scheduling.k8s.io/v1beta1" in str(refused.value.nearest_fix)
