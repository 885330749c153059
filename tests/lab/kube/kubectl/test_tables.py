"""The rows of `kubectl get`. An API server of 1.36.4 printed the same cells for the same objects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.kube.api import Rejected
from rackloom.core.cluster import objects
from rackloom.core.domains.crds import domain_crds
from rackloom.core.gangs.crd import gang_crd
from rackloom.lab.kube.kubectl.tables import epoch_seconds as at
from rackloom.lab.kube.kubectl.tables import human_duration, table_of, wants_table
from rackloom.lab.kube.objects import TYPE_SCHEMAS

BORN = "2026-11-22T12:00:00Z"
NOW = at("2026-11-22T12:34:05Z")


def named(name="x", /, **body):
    metadata = {"name": name, "creationTimestamp": BORN, **body.pop("metadata", {})}
    return {"metadata": metadata, **body}


def cells(kind, obj, *, wide=False):
    table = table_of(kind, [obj], {}, NOW)
    shown = [wide or column["priority"] == 0 for column in table["columnDefinitions"]]
    return [cell for cell, is_shown in zip(table["rows"][0]["cells"], shown, strict=True) if is_shown]


def pod(*states, spec=None, **status):
    statuses = [{"name": str(n), "ready": "running" in s, "state": s} for n, s in enumerate(states)]
    containers = [{"name": "c"}] * max(1, len(states))
    return named(
        spec={"containers": containers, **(spec or {})}, status={**status, "containerStatuses": statuses}
    )


RUNS, DONE = {"running": {}}, {"terminated": {"exitCode": 0, "reason": "Completed"}}


@pytest.mark.parametrize(
    ("given_pod", "ready", "status"),
    [
        (pod(RUNS, RUNS, phase="Running"), "2/2", "Running"),
        (pod(RUNS, DONE, phase="Running"), "1/2", "NotReady"),
        (pod({"waiting": {"reason": "ContainerCreating"}}, phase="Pending"), "0/1", "ContainerCreating"),
        (pod({"terminated": {"exitCode": 137, "signal": 9}}, phase="Failed"), "0/1", "Signal:9"),
        (pod({"terminated": {"exitCode": 3}}, phase="Failed"), "0/1", "ExitCode:3"),
        (pod(phase="Failed", reason="Evicted"), "0/1", "Evicted"),
        (pod(phase="Pending"), "0/1", "Pending"),
    ],
)
def test_a_pod_says_how_it_is(given_pod, ready, status):
    assert cells(objects.POD, given_pod) == ["x", ready, status, "0", "34m"]


def test_a_pod_that_waits_for_a_gate_or_is_leaving_says_so():
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    assert cells(objects.POD, pod(phase="Pending", conditions=[gated]))[2] == "SchedulingGated"
    leaving = pod(RUNS, phase="Running")
    leaving["metadata"]["deletionTimestamp"] = BORN
    assert cells(objects.POD, leaving)[2] == "Terminating"


def test_where_a_pod_runs_and_how_often_it_was_restarted():
    restarted = pod(RUNS, spec={"nodeName": "n"}, phase="Running", podIP="10.0.0.1")
    restarted["status"]["containerStatuses"][0] |= {
        "restartCount": 2,
        "lastState": {"terminated": {"finishedAt": "2026-11-22T12:33:05Z"}},
    }
    assert cells(objects.POD, restarted, wide=True)[3:] == [
        "2 (60s ago)", "34m", "10.0.0.1", "n", "<none>", "<none>"
    ]  # fmt: skip


def test_a_node_says_whether_it_is_ready_and_takes_pods():
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "nodeInfo": {"kubeletVersion": "v1"}}
    labels = {"labels": {"node-role.kubernetes.io/b": "", "node-role.kubernetes.io/a": ""}}
    cordoned = named(metadata=labels, spec={"unschedulable": True}, status=ready)
    assert cells(objects.NODE, cordoned) == ["x", "Ready,SchedulingDisabled", "a,b", "34m", "v1"]
    lost = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    assert cells(objects.NODE, named(status=lost))[1:3] == ["NotReady", "<none>"]
    assert cells(objects.NODE, named())[1] == "Unknown"


@pytest.mark.parametrize(
    ("metadata", "status", "state"),
    [
        ({}, {}, "pending"),
        ({}, {"allocation": {"devices": {}}}, "allocated"),
        ({}, {"allocation": {"devices": {}}, "reservedFor": [{"uid": "u"}]}, "allocated,reserved"),
        (
            {"deletionTimestamp": BORN},
            {"allocation": {"devices": {}}, "reservedFor": [{"uid": "u"}]},
            "deleted,allocated,reserved",
        ),
        ({"deletionTimestamp": BORN}, {}, "deleted"),
    ],
)
def test_a_claim_says_what_became_of_it(metadata, status, state):
    assert cells(objects.RESOURCE_CLAIM, named(metadata=metadata, status=status)) == ["x", state, "34m"]


def test_a_job_says_how_far_it_is():
    template = {"template": {"spec": {"containers": [{"name": "c", "image": "i"}]}}}
    running = named(spec=template, status={"startTime": BORN})
    assert cells(objects.JOB, running, wide=True) == ["x", "Running", "0/1", "34m", "34m", "c", "i", "<none>"]
    over = {
        "startTime": BORN,
        "completionTime": "2026-11-22T12:02:05Z",
        "succeeded": 2,
        "conditions": [{"type": "Complete", "status": "True"}],
    }
    ended = named(spec={**template, "completions": 2}, status=over)
    assert cells(objects.JOB, ended) == ["x", "Complete", "2/2", "2m5s", "34m"]


def test_a_custom_resource_is_printed_as_its_definition_says():
    ready = {"type": "Ready", "status": "False", "reason": "Waiting", "message": "for 2"}
    domain = named(
        spec={"channel": {"resourceClaimTemplate": {"name": "t"}}},
        status={"status": "NotReady", "conditions": [ready, {"type": "SpansCliques", "status": "True"}]},
    )
    shown = ["x", "NotReady", "Waiting", None, "t", "34m"]
    assert cells(objects.COMPUTE_DOMAIN, domain) == shown
    assert cells(objects.COMPUTE_DOMAIN, domain, wide=True) == [*shown[:-1], "True", "for 2", "34m"]
    labels = {"resource.nvidia.com/computeDomain": "u", "resource.nvidia.com/computeDomain.cliqueID": "a.1"}
    clique = named(metadata={"labels": labels})
    assert cells(objects.COMPUTE_DOMAIN_CLIQUE, clique) == ["x", "u", "a.1", "34m"]


def test_the_columns_of_custom_resources_are_those_of_their_definitions():
    for crd in (*domain_crds(), gang_crd()):
        kind = next(kind for kind in TYPE_SCHEMAS if kind.kind == crd["spec"]["names"]["kind"])
        shown = table_of(kind, [], {}, NOW)["columnDefinitions"][1:]
        declared = crd["spec"]["versions"][0]["additionalPrinterColumns"]
        assert [column["name"] for column in shown] == [column["name"] for column in declared]


@pytest.mark.parametrize("kind", TYPE_SCHEMAS, ids=lambda kind: kind.kind)
def test_an_object_that_says_hardly_anything_has_its_row(kind):
    template = {"template": {"spec": {"containers": []}}}
    table = table_of(kind, [named(spec={"containers": [], **template})], {"resourceVersion": "1"}, NOW)
    assert (table["kind"], table["metadata"]) == ("Table", {"resourceVersion": "1"})
    row = table["rows"][0]
    assert len(row["cells"]) == len(table["columnDefinitions"])
    assert "x" in row["cells"]
    assert row["object"] == {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"name": "x", "creationTimestamp": BORN},
    }


def test_what_stands_beside_a_row_can_be_asked_for():
    assert table_of(objects.NODE, [named()], {}, NOW, "Object")["rows"][0]["object"] == named()
    assert "object" not in table_of(objects.NODE, [named()], {}, NOW, "None")["rows"][0]
    with pytest.raises(Rejected, match="includeObject"):
        table_of(objects.NODE, [named()], {}, NOW, "Everything")


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/json;as=Table;v=v1;g=meta.k8s.io,application/json", True),
        ("application/json;as=Table;v=v1beta1;g=meta.k8s.io", False),
        ("application/json,application/json;as=Table;v=v1;g=meta.k8s.io", False),
        ("application/vnd.kubernetes.protobuf,application/json", False),
        ("", False),
    ],
)
def test_a_table_is_for_who_wants_one_most(accept, wanted):
    assert wants_table(accept) is wanted


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"), (0, "0s"), (119, "119s"), (120, "2m"), (599, "9m59s"), (600, "10m"), (10_799, "179m"),
        (10_800, "3h"), (11_000, "3h3m"), (28_800, "8h"), (172_799, "47h"), (176_400, "2d1h"),
        (691_200, "8d"), (63_072_000, "2y"), (63_200_000, "2y1d"), (252_288_000, "8y"), (283_000_000, "8y"),
    ],
)  # fmt: skip
def test_how_long_ago_is_told_in_two_units_at_most(seconds, text):
    assert human_duration(seconds) == text


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "y": 31_536_000}


@given(st.integers(0, 400_000_000))
def test_a_duration_is_never_longer_than_it_was_and_off_by_less_than_its_last_unit(seconds):
    total, digits, unit = 0, "", ""
    for letter in human_duration(seconds):
        if letter in UNITS:
            total, digits, unit = total + int(digits) * UNITS[letter], "", letter
        else:
            digits += letter
    assert 0 <= seconds - total < UNITS[unit] * (UNITS["d"] if unit == "y" else 60)
