"""Workloads as values: their quota, and the counts, flavors and domains of their reservation."""

from typing import Any

import pytest

from rackloom.core.cluster.kueue_objects import as_admitted, read_workload
from rackloom.core.cluster.objects import Object


def workload(**status: Any) -> Object:
    template = {
        "spec": {"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "own", "operator": "Exists"}]}
    }
    spec = {"podSets": [{"name": "main", "count": 4, "template": template}], "priority": 7}
    meta = {"name": "train", "namespace": "team", "uid": "u1", "resourceVersion": "5"}
    return {"metadata": meta, "spec": spec, "status": status}


def condition(type_: str, status: str = "True", since: str = "") -> Object:
    return {"type": type_, "status": status, "lastTransitionTime": since}


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], False),
        ([condition("QuotaReserved")], True),
        ([condition("QuotaReserved"), condition("Evicted", "False")], True),
        ([condition("QuotaReserved"), condition("Evicted")], False),
        ([condition("QuotaReserved"), condition("Finished")], False),
        ([condition("QuotaReserved", "False")], False),
    ],
)
def test_quota_counts_until_a_workload_ends_or_is_evicted(conditions: list[Object], expected: bool) -> None:
    assert read_workload(workload(conditions=conditions)).has_quota is expected


def test_a_workload_that_is_deleted_or_inactive_has_no_quota() -> None:
    obj = workload(conditions=[condition("QuotaReserved")])
    assert not read_workload({**obj, "spec": {**obj["spec"], "active": False}}).has_quota
    deleted = {**obj["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert not read_workload({**obj, "metadata": deleted}).has_quota


def test_a_workload_starts_with_the_counts_and_flavors_of_its_reservation() -> None:
    assigned = {"name": "main", "count": 3, "flavors": {"nvidia.com/gpu": "trays", "cpu": "trays"}}
    read = read_workload(workload(admission={"podSetAssignments": [assigned]}))
    rules = {"nodeLabels": {"kind": "tray"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
    flavor = {"metadata": {"name": "trays"}, "spec": rules}
    (pod_set,) = as_admitted(read, {"trays": flavor})["spec"]["podSets"]
    assert pod_set["count"] == 3
    assert pod_set["template"]["spec"]["nodeSelector"] == {"zone": "a", "kind": "tray"}
    assert [entry["key"] for entry in pod_set["template"]["spec"]["tolerations"]] == ["own", "gpu"]


def test_names_and_states_may_be_absent() -> None:
    """Kueue's defaults are `main` and Pending. One Workload must not end the pass over all."""
    status = {"admission": {"podSetAssignments": [{"count": 2}]}, "admissionChecks": [{"name": "room"}]}
    read = read_workload({"metadata": {"name": "w"}, "spec": {"podSets": [{}]}, "status": status})
    assert [(pod_set.name, pod_set.count) for pod_set in read.pod_sets] == [("main", 2)]
    assert read.checks["room"].state == "Pending"


def test_the_domains_that_kueue_has_chosen_are_read() -> None:
    parts = [
        {
            "domainCount": 2,
            "valuesPerLevel": [
                {"universal": "c1"},
                {"individual": {"prefix": "node-", "suffix": ".local", "roots": ["1", "2"]}},
            ],
            "podCounts": {"universal": 1},
        },
        {"domainCount": 1, "valuesPerLevel": [{"universal": "c2"}, {"individual": {"roots": ["x"]}}]},
    ]
    assignment = {"name": "main", "topologyAssignment": {"levels": ["clique", "host"], "slices": parts}}
    (placed,) = read_workload(workload(admission={"podSetAssignments": [assignment]})).pod_sets
    assert placed.domains == [
        {"clique": "c1", "host": "node-1.local"},
        {"clique": "c1", "host": "node-2.local"},
        {"clique": "c2", "host": "x"},
    ]
    (anywhere,) = read_workload(workload(admission={"podSetAssignments": [{"name": "main"}]})).pod_sets
    assert anywhere.domains == []


def test_only_plain_numbers_of_containers_are_requested() -> None:
    containers = [
        {"resources": {"requests": {"a": "2", "b": "1k"}}},
        {"resources": {"requests": {"a": 1}}},
        {},
    ]
    pod_sets = [
        {"name": "main", "count": 3, "template": {"spec": {"containers": containers}}},
        {"name": "other", "template": {"spec": {"containers": containers}}},
        {"name": "empty", "template": {}},
    ]
    read = read_workload({**workload(), "spec": {"podSets": pod_sets}})
    assert [read.requested(resource) for resource in "abc"] == [12, 0, 0]
