"""Answers stay sound in cases in which upstream's search leaked or forgot state when it went back."""

from typing import Any

import pytest

from rackloom.core.allocate.inputs import DeviceId, Features, InUse
from rackloom.core.allocate.outcome import Allocation, Fault, FaultScope, Outcome, Refusal

NO_LISTS = Features()


def names(outcome: Outcome) -> list[str]:
    assert isinstance(outcome, Allocation), outcome
    return [device.device for result in outcome.results for device in result.devices.results]


def partition(name: str, amount: int, counter_set: str = "x", **more: Any) -> dict[str, Any]:
    use = {"counterSet": counter_set, "counters": {"m": {"value": str(amount)}}}
    return {"name": name, "consumesCounters": [use], **more}


def with_counters(cluster: Any, devices: list[dict[str, Any]], total: int = 2, **pool: Any) -> list[Any]:
    counters = [{"name": "x", "counters": {"m": {"value": str(total)}}}]
    both = {"resourceSliceCount": 2, **pool}
    owner = pool.get("name", "p")
    return [
        cluster.slice([], f"{owner}-0", sharedCounters=counters, pool=both),
        cluster.slice(devices, f"{owner}-1", pool=both),
    ]


def root(value: Any, kind: str = "int") -> dict[str, Any]:
    return {"attributes": {"root": {kind: value}}}


MATCH = [{"matchAttribute": "d.example.com/root"}]
DISTINCT = [{"distinctAttribute": "d.example.com/root"}]


def test_counters_of_a_tainted_candidate_are_given_back(cluster: Any) -> None:
    taint = {"taints": [{"key": "t", "effect": "NoSchedule"}]}
    slices = with_counters(cluster, [partition("d0", 2, **taint), partition("d1", 2)])
    assert names(cluster.allocate(slices, cluster.claim(cluster.request()))) == ["d1"]


def test_counters_of_a_candidate_that_breaks_a_constraint_are_given_back(cluster: Any) -> None:
    devices = [partition("d0", 1, **root(0)), partition("d1", 1, **root(1)), partition("d2", 1, **root(0))]
    claim = cluster.claim(cluster.request(count=2), constraints=MATCH)
    assert names(cluster.allocate(with_counters(cluster, devices), claim)) == ["d0", "d2"]


def test_counters_of_a_share_are_given_back_when_the_search_goes_back(cluster: Any) -> None:
    shared = {"allowMultipleAllocations": True, "capacity": {"c": {"value": "1"}}}
    devices = [partition("d0", 2, **shared), partition("d1", 1, **root(0)), partition("d2", 1, **root(0))]
    claim = cluster.claim(
        cluster.first_of("r", cluster.ask(select="device.allowMultipleAllocations"), cluster.ask()),
        cluster.request("two", count=1, select="!device.allowMultipleAllocations"),
    )
    assert names(cluster.allocate(with_counters(cluster, devices), claim)) == ["d1", "d2"]


def test_going_back_restores_the_values_that_are_still_possible(cluster: Any) -> None:
    devices = [
        {"name": "d0", **root([0, 1], "ints")},
        {"name": "d1", **root([0], "ints")},
        {"name": "d2", **root([1], "ints")},
        {"name": "d3", **root([1], "ints")},
    ]
    claim = cluster.claim(cluster.request(count=3), constraints=MATCH)
    assert names(cluster.allocate([cluster.slice(devices)], claim)) == ["d0", "d2", "d3"]


@pytest.mark.parametrize("features", [Features(list_type_attributes=True), NO_LISTS])
def test_no_value_repeats_among_three_distinct_devices(cluster: Any, features: Features) -> None:
    devices = [{"name": f"d{number}", **root(value)} for number, value in enumerate([0, 1, 0, 2])]
    claim = cluster.claim(cluster.request(count=3), constraints=DISTINCT)
    outcome = cluster.allocate([cluster.slice(devices)], claim, features=features)
    assert names(outcome) == ["d0", "d1", "d3"]


def test_pools_of_one_name_and_two_drivers_have_their_own_counters(cluster: Any) -> None:
    mine = with_counters(cluster, [partition("d0", 2)])
    counters = [{"name": "x", "counters": {"m": {"value": "2"}}}]
    both = {"resourceSliceCount": 2}
    theirs = [
        cluster.slice([], "o-0", sharedCounters=counters, pool=both, driver="other.example.com"),
        cluster.slice([partition("d0", 2)], "o-1", pool=both, driver="other.example.com"),
    ]
    assert names(cluster.allocate([*mine, *theirs], cluster.claim(cluster.request(count=2)))) == ["d0", "d0"]


def test_slices_that_disagree_on_their_number_make_the_pool_invalid(cluster: Any) -> None:
    for counts in ((1, 2), (2, 1)):
        slices = [
            cluster.slice([{"name": f"d{number}"}], f"s{number}", pool={"resourceSliceCount": count})
            for number, count in enumerate(counts)
        ]
        outcome = cluster.allocate(slices, cluster.claim(cluster.request()))
        assert isinstance(outcome, Fault)
        assert outcome.scope is FaultScope.NODE
        assert "resourceSliceCount" in outcome.reason


def test_all_of_an_incomplete_pool_is_an_error_of_this_node_only(cluster: Any) -> None:
    slices = [cluster.slice([{"name": "d0"}], pool={"resourceSliceCount": 2})]
    claim = cluster.claim(cluster.request(allocationMode="All", count=0))
    outcome = cluster.allocate(slices, claim)
    assert isinstance(outcome, Fault)
    assert outcome.scope is FaultScope.NODE


def test_an_overdrawn_set_blocks_the_counters_of_its_pool_as_upstream_has_it(cluster: Any) -> None:
    slices = with_counters(cluster, [partition("d0", 3), partition("d1", 0)])
    outcome = cluster.allocate(slices, cluster.claim(cluster.request()), state=cluster.in_use("d0"))
    assert isinstance(outcome, Refusal)


def test_a_device_does_not_change_between_dedicated_and_shared_while_it_is_held(cluster: Any) -> None:
    device = DeviceId("d.example.com", "p", "d0")
    held = InUse(shared=frozenset([device]), consumed={device: {"c": "1"}})
    slices = [cluster.slice([{"name": "d0", "capacity": {"c": {"value": "4"}}}])]
    claim = cluster.claim(cluster.request(capacity={"requests": {"c": "1"}}))
    assert isinstance(cluster.allocate(slices, claim, state=held), Refusal)


def test_steps_between_fractions_are_exact(cluster: Any) -> None:
    policy = {"default": "100m", "validRange": {"min": "100m", "step": "100m"}}
    capacity = {"c": {"value": "1", "requestPolicy": policy}}
    slices = [cluster.slice([{"name": "d0", "allowMultipleAllocations": True, "capacity": capacity}])]
    claim = cluster.claim(cluster.request(capacity={"requests": {"c": "250m"}}))
    outcome = cluster.allocate(slices, claim)
    assert isinstance(outcome, Allocation)
    assert outcome.results[0].devices.results[0].consumed_capacity == {"c": "300m"}


def test_an_admin_claim_first_keeps_an_ordinary_claim_of_the_pod_off_the_device(cluster: Any) -> None:
    slices = [cluster.slice([{"name": "d0"}])]
    admin = cluster.claim(cluster.request(adminAccess=True), name="admin")
    plain = cluster.claim(cluster.request(), name="plain")
    assert isinstance(cluster.allocate(slices, admin, plain), Refusal)
    assert names(cluster.allocate(slices, plain, admin)) == ["d0", "d0"]


def test_an_error_surfaces_only_where_the_search_comes_to_it(cluster: Any) -> None:
    devices = [{"name": "d0", "attributes": {"root": {"int": 0}}}, {"name": "d1"}]
    reads = "device.attributes['d.example.com'].root == 0"
    slices = [cluster.slice(devices)]
    assert names(cluster.allocate(slices, cluster.claim(cluster.request(select=reads)))) == ["d0"]
    outcome = cluster.allocate(slices, cluster.claim(cluster.request(select=reads, count=2)))
    assert isinstance(outcome, Fault)
    assert outcome.scope is FaultScope.ATTEMPT
    too_many_first = cluster.claim(cluster.request("a", count=3), cluster.request("b", select="nonsense"))
    assert isinstance(cluster.allocate(slices, too_many_first), Refusal)


def test_a_further_share_of_a_device_without_capacity_draws_no_counters(cluster: Any) -> None:
    """The first share has drawn all that there is. Upstream charged further ones until 1.37."""
    counters = [{"name": "x", "counters": {"m": {"value": "1"}}}]
    use = [{"counterSet": "x", "counters": {"m": {"value": "1"}}}]
    pool = {"resourceSliceCount": 2}
    slices = [
        cluster.slice([], name="counters", pool=pool, sharedCounters=counters),
        cluster.slice(
            [{"name": "d", "allowMultipleAllocations": True, "consumesCounters": use}], name="s", pool=pool
        ),
    ]
    held = InUse(shared=frozenset([DeviceId("d.example.com", "p", "d")]))
    assert isinstance(cluster.allocate(slices, cluster.claim(cluster.request()), state=held), Allocation)
