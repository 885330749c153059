"""Every device of the node is accounted for, under the first rule that takes it away."""

from typing import Any

from rackloom.core.allocate.explanation import Explanation, explain, render_explanation
from rackloom.core.allocate.inputs import InUse
from rackloom.core.allocate.outcome import CauseKind

COUNTERS = [{"name": "x", "counters": {"m": {"value": "40Gi"}}}]
BOTH = {"resourceSliceCount": 2}


def explained(cluster: Any, slices: list[Any], *claims: Any, state: InUse | None = None) -> Explanation:
    return explain(
        cluster.node, cluster.classes, slices, claims, state=state or InUse(), features=cluster.features
    )


def test_each_cause_is_named_with_its_detail(cluster: Any) -> None:
    def device(name: str, **more: Any) -> dict[str, Any]:
        attributes = {"model": {"string": "h100"}, "root": {"int": 0}} | more.pop("attributes", {})
        return {"name": name, "attributes": attributes, "capacity": {"mem": {"value": "80Gi"}}, **more}

    draws = [{"counterSet": "x", "counters": {"m": {"value": "60Gi"}}}]
    rootless = device("rootless")
    del rootless["attributes"]["root"]
    devices = [
        device("held"),
        device("old", attributes={"model": {"string": "a100"}}),
        device("small", capacity={"mem": {"value": "10Gi"}}),
        device("carved", consumesCounters=draws),
        device("sick", taints=[{"key": "xid", "value": "79", "effect": "NoExecute"}]),
        rootless,
        device("good"),
    ]
    slices = [cluster.slice([], "c", sharedCounters=COUNTERS, pool=BOTH), cluster.slice(devices, pool=BOTH)]
    select = "device.attributes['d.example.com'].model == 'h100'"
    request = cluster.request("gpu", 2, select, capacity={"requests": {"mem": "20Gi"}})
    claim = cluster.claim(request, constraints=[{"matchAttribute": "d.example.com/root"}])
    explanation = explained(cluster, slices, claim, state=cluster.in_use("held"))
    account = explanation.requests[0]
    removed = {
        removed.devices[0].rpartition("/")[2]: (removed.cause, removed.detail) for removed in account.removed
    }
    assert removed == {
        "held": (CauseKind.IN_USE, ""),
        "old": (CauseKind.REQUEST_SELECTOR, select),
        "small": (CauseKind.CAPACITY, "mem short by 10Gi"),
        "carved": (CauseKind.COUNTERS, "x/m short by 20Gi"),
        "sick": (CauseKind.TAINT, "xid=79:NoExecute"),
        "rootless": (CauseKind.ATTRIBUTE_MISSING, "d.example.com/root"),
    }
    assert [device.rpartition("/")[2] for device in account.left] == ["good"]
    assert explanation.conflict == ("c/gpu",)
    assert "x/m short by 20Gi" in render_explanation(explanation)


def test_nothing_is_lost(cluster: Any) -> None:
    slices = [cluster.slice([{"name": f"d{number}"} for number in range(5)])]
    for count in (1, 9):
        account = explained(cluster, slices, cluster.claim(cluster.request(count=count))).requests[0]
        assert (
            account.devices
            == len(account.left) + sum(len(removed.devices) for removed in account.removed)
            == 5
        )


def test_a_constraint_shows_what_each_value_has(cluster: Any) -> None:
    def device(kind: str, number: int, root: int) -> dict[str, Any]:
        attributes = {"kind": {"string": kind}, "root": {"int": root}}
        return {"name": f"{kind}{number}", "attributes": attributes}

    def select(kind: str) -> str:
        return f"device.attributes['d.example.com'].kind == '{kind}'"

    slices = [cluster.slice([device("gpu", 0, 0), device("gpu", 1, 0), device("nic", 0, 1)])]
    match = {"matchAttribute": "d.example.com/root"}
    claim = cluster.claim(
        cluster.request("gpu", 1, select("gpu")),
        cluster.request("nic", 1, select("nic")),
        constraints=[match],
    )
    explanation = explained(cluster, slices, claim)
    assert explanation.conflict == ("c/gpu", "c/nic")
    assert [(value.value, value.devices) for value in explanation.constraints[0].values] == [
        ("0", {"gpu": 2, "nic": 0}),
        ("1", {"gpu": 0, "nic": 1}),
    ]


def test_the_conflict_leaves_out_what_could_be_met(cluster: Any) -> None:
    slices = [cluster.slice([{"name": "d0"}, {"name": "d1"}])]
    claim = cluster.claim(cluster.request("a"), cluster.request("b", 3), cluster.request("c"))
    assert explained(cluster, slices, claim).conflict == ("c/b",)


def test_a_claim_that_can_be_met_has_no_conflict(cluster: Any) -> None:
    explanation = explained(cluster, [cluster.slice([{"name": "d0"}])], cluster.claim(cluster.request()))
    assert explanation.conflict == ()
    assert explanation.fault is None


def test_a_failing_selector_is_a_cause_and_not_an_end(cluster: Any) -> None:
    request = cluster.request(select="device.attributes['d.example.com'].nothing == 1")
    account = explained(cluster, [cluster.slice([{"name": "d0"}])], cluster.claim(request)).requests[0]
    assert account.removed[0].cause is CauseKind.SELECTOR_FAILS
    assert "no such key" in account.removed[0].detail


def test_pools_that_are_not_used_are_named(cluster: Any) -> None:
    slices = [cluster.slice([{"name": "d0"}], pool={"resourceSliceCount": 3})]
    explanation = explained(cluster, slices, cluster.claim(cluster.request()))
    assert [(pool.pool, pool.trouble, pool.reason) for pool in explanation.unusable_pools] == [
        ("d.example.com/p", "incomplete", "1 of 3 slices are there")
    ]


def test_a_claim_that_cannot_be_read_says_why(cluster: Any) -> None:
    claim = cluster.claim(cluster.request(deviceClassName="absent"))
    explanation = explained(cluster, [], claim)
    assert explanation.fault is not None
    assert "absent" in explanation.fault
    assert "absent" in render_explanation(explanation)
