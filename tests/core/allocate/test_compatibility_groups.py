"""Compatibility groups: the partitions of a counter set that can be allocated together."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rackloom.core.allocate import search
from rackloom.core.allocate.checker import AllocationChecker
from rackloom.core.allocate.explanation import explain, render_explanation
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import DeviceId, Features, InUse
from rackloom.core.allocate.objects import Node, ResourceSlice
from rackloom.core.allocate.outcome import Allocation, Fault, FaultScope, Outcome, Refusal

Fields = dict[str, Any]


def part(name: str, groups: Sequence[str] = (), counter_set: str = "x", **more: Any) -> Fields:
    """A partition that draws 1 of a counter set."""
    use = {"counterSet": counter_set, "counters": {"m": {"value": "1"}}, "compatibilityGroups": list(groups)}
    return {"name": name, "consumesCounters": [use], **more}


def gpu(cluster: Any, *parts: Fields, node: str = "n", sets: str = "xy") -> list[ResourceSlice]:
    """A pool of partitions, and its counter sets with room for eight partitions each."""
    counters = [{"name": name, "counters": {"m": {"value": "8"}}} for name in sets]
    pool = {"name": node if node != "n" else "p", "resourceSliceCount": 2}
    return [
        cluster.slice([], name=f"{node}-counters", pool=pool, sharedCounters=counters, nodeName=node),
        cluster.slice(parts, name=f"{node}-parts", pool=pool, nodeName=node),
    ]


def names(outcome: Outcome) -> list[str]:
    assert isinstance(outcome, Allocation), outcome
    return [device.device for result in outcome.results for device in result.devices.results]


@pytest.mark.parametrize("mode", ["exact", "best"])
@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([part("a", "g"), part("b", "h"), part("c", "g")], ["a", "c"]),
        ([part("a", "gh"), part("b", "h"), part("c", "g")], ["a", "b"]),
        ([part("a"), part("b", "g"), part("c")], ["a", "c"]),
        ([part("a", "g"), part("b"), part("c", "gh")], ["a", "c"]),
        ([part("a", "g"), part("b", "h", "y")], ["a", "b"]),
        ([part("a", "g"), part("b", "h")], None),
        ([part("a"), part("b", "g")], None),
    ],
    ids=["one group", "one in common", "none with none", "some with some", "other set", "apart", "none"],
)
def test_two_of_a_counter_set_have_a_group_in_common(
    cluster: Any, mode: str, parts: list[Fields], wanted: list[str] | None
) -> None:
    outcome = cluster.allocate(gpu(cluster, *parts), cluster.claim(cluster.request(count=2)), mode=mode)
    if wanted is None:
        assert isinstance(outcome, Refusal)
    else:
        assert names(outcome) == wanted


def test_the_group_is_one_that_all_have_and_not_one_per_pair(cluster: Any) -> None:
    """Any two of the three have a group in common."""
    slices = gpu(cluster, part("a", "gh"), part("b", "hi"), part("c", "gi"))
    assert isinstance(cluster.allocate(slices, cluster.claim(cluster.request(count=3))), Refusal)
    assert names(cluster.allocate(slices, cluster.claim(cluster.request(count=2)))) == ["a", "b"]


def test_going_back_restores_the_groups(cluster: Any) -> None:
    """With b beside a, only h is left. c needs g, so the search goes back and takes a and c, then d."""
    slices = gpu(cluster, part("a", "gh"), part("b", "h"), part("c", "g"), part("d", "g"))
    assert names(cluster.allocate(slices, cluster.claim(cluster.request(count=3)))) == ["a", "c", "d"]


def test_devices_in_use_count_as_they_are_published_now(cluster: Any) -> None:
    slices = gpu(cluster, part("held", "g"), part("a", "h"), part("b"), part("c", "gh"))
    claim, state = cluster.claim(cluster.request()), cluster.in_use("held")
    assert names(cluster.allocate(slices, claim, state=state)) == ["c"]
    changed = gpu(cluster, part("held", "h"), part("a", "h"), part("b"), part("c", "gh"))
    assert names(cluster.allocate(changed, claim, state=state)) == ["a"]
    gone = gpu(cluster, part("a", "h"), part("b"), part("c", "gh"))
    assert names(cluster.allocate(gone, claim, state=state)) == ["a"]


def test_where_those_in_use_have_nothing_in_common_nothing_comes_beside_them(cluster: Any) -> None:
    slices = gpu(
        cluster, part("held", "g"), part("too", "h"), part("a", "gh"), part("b"), part("c", "g", "y")
    )
    state = cluster.in_use("held", "too")
    assert names(cluster.allocate(slices, cluster.claim(cluster.request()), state=state)) == ["c"]


@pytest.mark.parametrize(("first", "wanted"), [("", "b"), ("g", "a")])
def test_of_those_in_use_with_and_without_groups_the_first_one_decides(
    cluster: Any, first: str, wanted: str
) -> None:
    held = [part("held", first), part("too", "g" if not first else "")]
    slices = gpu(cluster, *held, part("a", "g"), part("b"))
    state = cluster.in_use("held", "too")
    assert names(cluster.allocate(slices, cluster.claim(cluster.request()), state=state)) == [wanted]


def shared(name: str, groups: str) -> Fields:
    return part(name, groups, allowMultipleAllocations=True, capacity={"mem": {"value": "4"}})


def test_a_further_share_of_a_device_in_use_is_not_compared(cluster: Any) -> None:
    """The devices in use have no group in common, so none is added. A device in use can still be shared."""
    slices = gpu(cluster, shared("s", "g"), part("held", "h"), part("a", "g"))
    device = DeviceId("d.example.com", "p", "s")
    held = cluster.in_use("held").dedicated
    state = InUse(dedicated=held, shared=frozenset([device]), consumed={device: {"mem": "1"}})
    share = cluster.request(capacity={"requests": {"mem": "1"}})
    assert names(cluster.allocate(slices, cluster.claim(share), state=state)) == ["s"]
    alone = InUse(dedicated=held)
    assert isinstance(cluster.allocate(slices, cluster.claim(share), state=alone), Refusal)


def test_a_second_share_in_one_claim_is_not_compared_and_both_are_undone(cluster: Any) -> None:
    slices = gpu(cluster, shared("s", "g"), part("b", "h"), part("c", "h"))
    share = cluster.ask(capacity={"requests": {"mem": "1"}})
    two = cluster.claim({"name": "r", "exactly": share}, {"name": "t", "exactly": share})
    assert names(cluster.allocate(slices, two)) == ["s", "s"]
    # b and c fit only if there is no share of s, so the first alternative is undone.
    either = cluster.first_of("r", share, cluster.ask(1, "device.driver != ''"))
    claim = cluster.claim(either, cluster.request("t", count=1, select="!device.allowMultipleAllocations"))
    assert names(cluster.allocate(slices, claim)) == ["b", "c"]


def test_admin_access_is_compared_as_it_is_charged(cluster: Any) -> None:
    slices = gpu(cluster, part("held", "g"), part("a", "h"), part("b", "g"))
    claim = cluster.claim(cluster.request(adminAccess=True, count=2))
    outcome = cluster.allocate(slices, claim, state=cluster.in_use("held"))
    assert names(outcome) == ["held", "b"]


def test_mode_all_wants_devices_that_go_together(cluster: Any) -> None:
    everything = cluster.claim(cluster.request(allocationMode="All"))
    assert isinstance(cluster.allocate(gpu(cluster, part("a", "g"), part("b", "h")), everything), Refusal)
    assert names(cluster.allocate(gpu(cluster, part("a", "g"), part("b", "gh")), everything)) == ["a", "b"]


def test_an_alternative_that_goes_with_the_rest_is_taken(cluster: Any) -> None:
    def kind(name: str) -> str:
        return f"device.attributes['d.example.com'].kind == '{name}'"

    def typed(name: str, groups: str) -> Fields:
        return part(name, groups, attributes={"kind": {"string": name[0]}})

    slices = gpu(cluster, typed("a0", "g"), typed("b0", "h"), typed("c0", "h"))
    either = cluster.first_of("r", cluster.ask(1, kind("a")), cluster.ask(1, kind("b")))
    assert names(cluster.allocate(slices, cluster.claim(either, cluster.request("s", select=kind("c"))))) == [
        "b0",
        "c0",
    ]


def test_without_the_feature_slices_that_name_groups_are_left_out(cluster: Any) -> None:
    off = Features(compatibility_groups=False)
    slices = gpu(cluster, part("a"), part("b", "g"))
    claim = cluster.claim(cluster.request())
    assert isinstance(cluster.allocate(slices, claim, features=off), Refusal)
    account = explain(cluster.node, cluster.classes, slices, [claim], features=off)
    (pool,) = account.unusable_pools
    assert (pool.trouble, "feature is off" in pool.reason) == ("incomplete", True)
    everything = cluster.claim(cluster.request(allocationMode="All"))
    outcome = cluster.allocate(slices, everything, features=off)
    assert isinstance(outcome, Fault)
    assert outcome.scope is FaultScope.NODE
    assert names(cluster.allocate(gpu(cluster, part("a")), claim, features=off)) == ["a"]


def test_a_refusal_names_the_groups(cluster: Any) -> None:
    slices = gpu(cluster, part("held", "g"), part("a", "h"), part("b"), part("c"))
    state = cluster.in_use("held")
    text = render_explanation(
        explain(cluster.node, cluster.classes, slices, [cluster.claim(cluster.request())], state=state)
    )
    assert "1 compatibility groups: x: names h, those in use have g in common" in text
    assert "2 compatibility groups: x: names no group, those in use have g in common" in text
    other = cluster.in_use("b")
    text = render_explanation(
        explain(cluster.node, cluster.classes, slices, [cluster.claim(cluster.request())], state=other)
    )
    assert "compatibility groups: x: names h, those in use name no group" in text


def fleet_of(cluster: Any, *machines: Sequence[Fields]) -> Fleet:
    found = [(f"n{number}", parts) for number, parts in enumerate(machines)]
    slices = [of for name, parts in found for of in gpu(cluster, *parts, node=name)]
    nodes = [msgspec.convert({"metadata": {"name": name}}, Node) for name, _ in found]
    return Fleet(nodes, cluster.classes, slices)


def place(fleet: Fleet, cluster: Any, **ask: Any) -> str:
    outcome = fleet.place([cluster.claim(cluster.request(**ask))])
    if not isinstance(outcome, Allocation):
        return "refused"
    return f"{outcome.node} {' '.join(names(outcome))}"


def test_a_fleet_keeps_apart_what_does_not_go_together(cluster: Any) -> None:
    fleet = fleet_of(cluster, [part("a", "g"), part("b", "h"), part("c", "g")])
    assert [place(fleet, cluster) for _ in range(3)] == ["n0 a", "n0 c", "refused"]


def test_nodes_that_differ_in_groups_alone_are_of_different_kinds(cluster: Any) -> None:
    fleet = fleet_of(
        cluster,
        [part("a", "g"), part("b", "h")],
        [part("a", "g"), part("b")],
        [part("a", "g"), part("b", "gh")],
    )
    assert place(fleet, cluster, count=2) == "n2 a b"
    assert place(fleet, cluster, count=2) == "refused"


def test_a_fleet_serves_again_when_a_device_comes_back(cluster: Any) -> None:
    fleet = fleet_of(cluster, [part("a", "g"), part("b", "h")])
    first = fleet.place([cluster.claim(cluster.request())])
    assert isinstance(first, Allocation)
    second = cluster.claim(cluster.request(select="device.driver != 'x'"))
    assert isinstance(fleet.find([second]), Refusal)
    fleet.release(first.results)
    assert names(fleet.find([second])) == ["a"]


def test_equal_gpus_are_still_tried_once(cluster: Any) -> None:
    """Eight GPUs of four partitions in two groups: three of one GPU never go together."""
    sets = "abcdefgh"
    parts = [
        part(f"{name}{number}", "gh"[number % 2], name, attributes={"gpu": {"string": name}})
        for name in sets
        for number in range(4)
    ]
    slices = gpu(cluster, *parts, sets=sets)
    claim = cluster.claim(cluster.request(count=3), constraints=[{"matchAttribute": "d.example.com/gpu"}])
    left = iter(range(2000))
    outcome = cluster.allocate(slices, claim, proceed=lambda: next(left, None) is not None)
    assert isinstance(outcome, Refusal)


def test_what_failed_with_one_group_is_tried_with_the_other(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a and b fail alike: their groups do not go with the last device's. z is no copy of them."""
    monkeypatch.setattr(search, "_DEAD_ENDS", 1)
    kind: Fields = {"attributes": {"kind": {"string": "last"}}}
    slices = gpu(cluster, part("a", "g"), part("b", "g"), part("z", "h"), part("last", "h", **kind))
    last = cluster.request("t", select="device.attributes['d.example.com'].?kind.orValue('') == 'last'")
    assert names(cluster.allocate(slices, cluster.claim(cluster.request(), last))) == ["z", "last"]


def test_for_mode_best_devices_of_other_groups_are_no_copies(cluster: Any) -> None:
    kind: Fields = {"attributes": {"kind": {"string": "last"}}}
    slices = gpu(cluster, part("a", "g"), part("b", "g"), part("z", "h"), part("last", "h", **kind))
    last = cluster.ask(1, "device.attributes['d.example.com'].?kind.orValue('') == 'last'")
    claim = cluster.claim(
        cluster.request(select="!('kind' in device.attributes['d.example.com'])"),
        cluster.first_of("t", last, cluster.ask(1)),
    )
    outcome = cluster.allocate(slices, claim, mode="best")
    assert names(outcome) == ["z", "last"]


@pytest.mark.parametrize(
    ("given", "valid"),
    [(["a", "c"], True), (["a", "b"], False), (["a", "d"], False), (["d"], True), (["b", "e"], True)],
)
def test_the_checker_judges_groups(cluster: Any, given: list[str], valid: bool) -> None:
    slices = gpu(cluster, part("a", "g"), part("b", "h"), part("c", "gh"), part("d"), part("e", "g", "y"))
    claim = cluster.claim(cluster.request(count=len(given)))
    everything = cluster.allocate(slices, cluster.claim(cluster.request(count=1)), features=cluster.features)
    assert isinstance(everything, Allocation)
    (result,) = everything.results
    devices = tuple(msgspec.structs.replace(result.devices.results[0], device=name) for name in given)
    answer = msgspec.structs.replace(result, devices=msgspec.structs.replace(result.devices, results=devices))
    checker = AllocationChecker(cluster.node, cluster.classes, slices)
    assert (not list(checker.violations([claim], [answer]))) is valid
