"""The rules of single modules: node selectors, taints, capacity, counting."""

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.allocate.bounds import demands_met
from rackloom.core.allocate.capacity import consumption_of
from rackloom.core.allocate.eligibility import blocking_taint
from rackloom.core.allocate.inputs import DeviceId, in_use_by
from rackloom.core.allocate.objects import (
    Device,
    DeviceToleration,
    Node,
    NodeSelector,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    ResourceClaim,
)
from rackloom.core.allocate.outcome import Cause
from rackloom.core.allocate.pools import MalformedNodeSelector, merged_selector, node_selector_matches

NODE = msgspec.convert({"metadata": {"name": "n", "labels": {"zone": "a", "gpus": "8"}}}, Node)


def selector(*terms: list[tuple[str, str, list[str]]], fields: bool = False) -> NodeSelector:
    made = []
    for term in terms:
        needs = tuple(NodeSelectorRequirement(key=k, operator=o, values=tuple(v)) for k, o, v in term)
        made.append(
            NodeSelectorTerm(match_fields=needs) if fields else NodeSelectorTerm(match_expressions=needs)
        )
    return NodeSelector(node_selector_terms=tuple(made))


def selected(node_selector: NodeSelector) -> bool:
    return node_selector_matches(NODE, node_selector)


@pytest.mark.parametrize(
    ("need", "holds"),
    [
        (("zone", "In", ["a", "b"]), True),
        (("zone", "NotIn", ["a"]), False),
        (("absent", "NotIn", ["a"]), True),
        (("absent", "In", ["a"]), False),
        (("zone", "Exists", []), True),
        (("absent", "DoesNotExist", []), True),
        (("gpus", "Gt", ["4"]), True),
        (("gpus", "Lt", ["8"]), False),
        (("zone", "Gt", ["4"]), False),
    ],
)
def test_requirements_on_labels(need: tuple[str, str, list[str]], holds: bool) -> None:
    assert selected(selector([need])) is holds


def test_terms_are_ored_and_requirements_anded() -> None:
    yes, no = ("zone", "Exists", []), ("zone", "DoesNotExist", [])
    assert selected(selector([no], [yes]))
    assert not selected(selector([yes, no]))
    assert not selected(selector([]))
    assert not selected(selector())


def test_fields_know_the_name_only() -> None:
    assert selected(selector([("metadata.name", "In", ["n"])], fields=True))
    assert not selected(selector([("metadata.name", "NotIn", ["n"])], fields=True))


@pytest.mark.parametrize(
    ("need", "fields"),
    [
        (("zone", "Near", ["a"]), False),
        (("zone", "In", []), False),
        (("zone", "Exists", ["a"]), False),
        (("gpus", "Gt", ["many"]), False),
        (("spec.name", "In", ["n"]), True),
    ],
)
def test_malformed_requirements_are_errors(need: tuple[str, str, list[str]], fields: bool) -> None:
    with pytest.raises(MalformedNodeSelector):
        selected(selector([need], fields=fields))


def test_merging_keeps_each_requirement_once_and_knows_one_term_only() -> None:
    a, b = ("zone", "In", ["a", "b"]), ("zone", "In", ["b", "a"])
    together = merged_selector([selector([a]), selector([b, ("gpus", "Exists", [])])])
    assert together is not None
    assert [expression.key for expression in together.node_selector_terms[0].match_expressions] == [
        "zone",
        "gpus",
    ]
    assert merged_selector([]) is None
    with pytest.raises(MalformedNodeSelector):
        merged_selector([selector([a], [b])])


@pytest.mark.parametrize(
    ("toleration", "blocked"),
    [
        ({}, True),
        ({"operator": "Exists"}, False),
        ({"key": "k", "operator": "Exists"}, False),
        ({"key": "other", "operator": "Exists"}, True),
        ({"key": "k", "value": "v"}, False),
        ({"key": "k", "operator": "Equal", "value": "w"}, True),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, True),
        ({"key": "k", "operator": "Near", "value": "v"}, True),
    ],
)
def test_tolerations(toleration: dict[str, str], blocked: bool) -> None:
    taint = {"key": "k", "value": "v", "effect": "NoSchedule"}
    device = msgspec.convert({"name": "d", "taints": [taint]}, Device)
    tolerations = [msgspec.convert(toleration, DeviceToleration)]
    assert (blocking_taint(device, tolerations) is not None) is blocked


@pytest.mark.parametrize("effect", ["None", "", "Later"])
def test_effects_that_do_not_block(effect: str) -> None:
    device = msgspec.convert({"name": "d", "taints": [{"key": "k", "effect": effect}]}, Device)
    assert blocking_taint(device, []) is None


RANGE = {"default": "2", "validRange": {"min": "2", "max": "8", "step": "2"}}
VALUES = {"default": "1", "validValues": ["1", "4"]}


@pytest.mark.parametrize(
    ("policy", "asked", "taken"),
    [
        (None, None, "8"),
        (None, "3", "3"),
        (RANGE, None, "2"),
        (RANGE, "1", "2"),
        (RANGE, "3", "4"),
        (RANGE, "2500m", "4"),
        (RANGE, "9", None),
        (VALUES, "2", "4"),
        (VALUES, "5", None),
        ({"default": "3", "validValues": ["1"]}, None, "3"),
        ({"default": "1Gi", "validRange": {"min": "1Gi", "step": "1Gi"}}, "1500Mi", "2Gi"),
    ],
)
def test_what_a_share_takes(policy: dict[str, Any] | None, asked: str | None, taken: str | None) -> None:
    capacity = {"c": {"value": "8", **({"requestPolicy": policy} if policy else {})}}
    device = msgspec.convert({"name": "d", "capacity": capacity}, Device)
    given = consumption_of({"c": asked} if asked else {}, device)
    assert isinstance(given, Cause) if taken is None else given == {"c": taken}


def test_a_capacity_that_the_device_lacks() -> None:
    assert isinstance(consumption_of({"other": "1"}, Device(name="d")), Cause)


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), max_size=3),
    needs=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    supply=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_the_flow_says_what_trying_everything_says(
    rows: list[list[int]], needs: list[int], supply: list[int]
) -> None:
    demands = [(dict(enumerate(row)), need) for row, need in zip(rows, needs, strict=False)]
    ways = [
        [way for way in product(*(range(most + 1) for most in row)) if sum(way) == need]
        for row, need in zip(rows, needs, strict=False)
    ]
    possible = any(
        all(sum(way[number] for way in choice) <= supply[number] for number in range(3))
        for choice in product(*ways)
    )
    assert demands_met(demands, dict(enumerate(supply)), {}, {}) is possible


def test_a_group_bounds_its_supplies_together() -> None:
    assert demands_met([({0: 1, 1: 1}, 2)], {0: 1, 1: 1}, {0: "g", 1: "g"}, {"g": 2})
    assert not demands_met([({0: 1, 1: 1}, 2)], {0: 1, 1: 1}, {0: "g", 1: "g"}, {"g": 1})


def test_the_books_of_claims_skip_admin_access_and_add_shares() -> None:
    def result(device: str, **more: Any) -> dict[str, Any]:
        return {"request": "r", "driver": "d", "pool": "p", "device": device, **more}

    results = [
        result("whole"),
        result("watched", adminAccess=True),
        result("shared", shareID="1", consumedCapacity={"m": "1Gi"}),
        result("shared", shareID="2", consumedCapacity={"m": "512Mi"}),
    ]
    status = {"allocation": {"devices": {"results": results}}}
    claim = msgspec.convert({"metadata": {"name": "c"}, "status": status}, ResourceClaim)
    books = in_use_by([claim])
    whole, shared = DeviceId("d", "p", "whole"), DeviceId("d", "p", "shared")
    assert (books.dedicated, books.shared) == ({whole}, {shared})
    assert books.consumed == {shared: {"m": "1536Mi"}}
    assert in_use_by([claim], shares=False).dedicated == {whole, shared}
