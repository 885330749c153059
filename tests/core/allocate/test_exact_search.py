"""The search against a reference that tries everything, and against the independent checker."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.checker import AllocationChecker
from rackloom.core.allocate.inputs import DeviceId, Features, InUse
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceAllocationResult,
    DeviceClass,
    DeviceResult,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Refusal

NODE = msgspec.convert({"metadata": {"name": "n"}}, Node)
CLASSES = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])
FEATURES = Features(list_type_attributes=True)
SELECTORS = ["device.attributes['d'].kind == 'a'", "device.attributes['d'].kind == 'b'"]

DERIVED = ["device.attributes['d'].kind", "[1, 2]", "device.attributes['d'].?group.orValue(0)"]
"""Expressions that fail on no device: a search stops at an error, but the reference does not."""

kinds = st.sampled_from(["a", "b"])
groups = st.one_of(
    st.none(),
    st.builds(lambda v: {"int": v}, st.integers(0, 2)),
    st.builds(lambda v: {"ints": sorted(v)}, st.sets(st.integers(0, 2), min_size=1)),
)
draws = st.one_of(
    st.just([]),
    st.builds(
        lambda counter_set, amount, together: [
            {
                "counterSet": counter_set,
                "counters": {"m": {"value": str(amount)}},
                "compatibilityGroups": list(together),
            }
        ],
        st.sampled_from(["x", "y"]),
        st.integers(1, 2),
        st.sampled_from(["", "", "", "g", "h", "gh"]),
    ),
)
taints = st.sampled_from([[], [], [{"key": "t", "effect": "NoSchedule"}], [{"key": "t", "effect": "None"}]])


@st.composite
def devices(draw: st.DrawFn) -> list[dict[str, Any]]:
    made = []
    for number in range(draw(st.integers(0, 4))):
        attributes: dict[str, Any] = {"kind": {"string": draw(kinds)}}
        group = draw(groups)
        if group is not None:
            attributes["group"] = group
        shared = draw(st.booleans()) and draw(st.booleans())
        made.append(
            {
                "name": f"d{number}",
                "attributes": attributes,
                "consumesCounters": draw(draws),
                "taints": draw(taints),
                "capacity": {"m": {"value": "2"}} if draw(st.booleans()) or shared else {},
                **({"allowMultipleAllocations": True} if shared else {}),
            }
        )
    return made


asks = st.builds(
    lambda mode, count, selector, tolerant, amount, derived: {
        "deviceClassName": "any",
        "allocationMode": mode,
        **({"count": count} if mode == "ExactCount" else {}),
        "selectors": [{"cel": {"expression": selector}}] if selector else [],
        "tolerations": [{"key": "t", "operator": "Exists"}] if tolerant else [],
        **({"capacity": {"requests": {"m": str(amount)}}} if amount else {}),
        "derivedAttributes": [{"name": "d/group", "expression": derived}] if derived else [],
    },
    st.sampled_from(["ExactCount"] * 4 + ["All"]),
    st.integers(1, 3),
    st.sampled_from([None, None, *SELECTORS]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from([None, None, *DERIVED]),
)


@st.composite
def claim_fields(draw: st.DrawFn, name: str) -> dict[str, Any]:
    requests: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 2))):
        alternatives = draw(st.lists(asks, min_size=1, max_size=2))
        if len(alternatives) == 1:
            requests.append({"name": f"r{number}", "exactly": alternatives[0]})
        else:
            named = [{"name": f"a{index}", **alternative} for index, alternative in enumerate(alternatives)]
            requests.append({"name": f"r{number}", "firstAvailable": named})
    exact_only = all(request.get("exactly", {}).get("allocationMode") == "ExactCount" for request in requests)
    constraints: list[dict[str, Any]] = []
    if exact_only and draw(st.booleans()):
        kind = draw(st.sampled_from(["matchAttribute", "distinctAttribute"]))
        covered = draw(st.sampled_from([[], ["r0"]]))
        constraints.append({kind: "d/group", "requests": covered})
    return {
        "metadata": {"name": name},
        "spec": {"devices": {"requests": requests, "constraints": constraints}},
    }


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[ResourceSlice], list[ResourceClaim], InUse]:
    found = draw(devices())
    counters = [{"name": name, "counters": {"m": {"value": "3"}}} for name in ("x", "y")]
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 2}
    specs = [
        {"driver": "d", "pool": pool, "nodeName": "n", "sharedCounters": counters},
        {"driver": "d", "pool": pool, "nodeName": "n", "devices": found},
    ]
    slices = [
        msgspec.convert({"metadata": {"name": f"s{number}"}, "spec": spec}, ResourceSlice)
        for number, spec in enumerate(specs)
    ]
    claims = [
        msgspec.convert(draw(claim_fields(name)), ResourceClaim)
        for name in draw(st.sampled_from([["c"], ["c", "e"]]))
    ]
    whole = [device["name"] for device in found if not device.get("allowMultipleAllocations")]
    taken = draw(st.sets(st.sampled_from(whole), max_size=1)) if whole else set()
    return slices, claims, InUse(dedicated=frozenset(DeviceId("d", "p", name) for name in taken))


def every_answer(
    slices: Sequence[ResourceSlice], claims: Sequence[ResourceClaim]
) -> Iterator[list[AllocationResult]]:
    """All ways to give devices to requests, in the order of the first-fit search, valid or not."""
    known = list(slices[1].spec.devices)

    def ways(claim: ResourceClaim) -> list[list[list[DeviceResult]]]:
        per_request = []
        for request in claim.spec.devices.requests:
            named = (
                [(request.name, request.exactly)]
                if request.exactly
                else [
                    (f"{request.name}/{alternative.name}", alternative)
                    for alternative in request.first_available
                ]
            )
            choices: list[list[DeviceResult]] = []
            for name, ask in named:
                sizes = range(1, len(known) + 1)[::-1] if ask.allocation_mode == "All" else [ask.count]
                amounts = ask.capacity.requests if ask.capacity else {}
                for size in sizes:
                    choices += [
                        [_given(name, device, amounts) for device in some]
                        for some in combinations(known, size)
                        if all(set(amounts) <= set(device.capacity) for device in some)
                    ]
            per_request.append(choices)
        return per_request

    spaces = [choices for claim in claims for choices in ways(claim)]
    for combination in product(*spaces):
        rest = list(combination)
        answer = []
        for claim in claims:
            mine, rest = rest[: len(claim.spec.devices.requests)], rest[len(claim.spec.devices.requests) :]
            results = tuple(device for choice in mine for device in choice)
            answer.append(AllocationResult(devices=DeviceAllocationResult(results=results)))
        yield answer


def _given(request: str, device: Any, amounts: Any) -> DeviceResult:
    share: dict[str, Any] = {}
    if device.allow_multiple_allocations:
        taken = {name: amounts.get(name, capacity.value) for name, capacity in device.capacity.items()}
        share = {"share_id": "any", "consumed_capacity": taken}
    return DeviceResult(request=request, driver="d", pool="p", device=device.name, **share)


def chosen(results: Sequence[AllocationResult]) -> list[list[tuple[str, str]]]:
    return [[(device.request, device.device) for device in result.devices.results] for result in results]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_answer_is_the_first_valid_one_of_an_exhaustive_search(
    problem: tuple[list[ResourceSlice], list[ResourceClaim], InUse],
) -> None:
    slices, claims, state = problem
    note(f"{slices[1].spec.devices}\n{[claim.spec for claim in claims]}\n{state}")
    outcome = allocate(NODE, CLASSES, slices, claims, state=state, features=FEATURES)
    checker = AllocationChecker(NODE, CLASSES, slices, state=state, features=FEATURES)
    valid = (answer for answer in every_answer(slices, claims) if not any(checker.violations(claims, answer)))
    first = next(valid, None)
    if first is None:
        assert isinstance(outcome, Refusal)
    else:
        assert isinstance(outcome, Allocation)
        assert chosen(outcome.results) == chosen(first)
        assert not list(checker.violations(claims, outcome.results))


@pytest.mark.parametrize("wrong", ["swap", "drop", "twice"])
def test_the_checker_sees_a_wrong_answer(wrong: str) -> None:
    slices = [
        msgspec.convert(
            {
                "metadata": {"name": "s"},
                "spec": {
                    "driver": "d",
                    "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1},
                    "nodeName": "n",
                    "devices": [
                        {"name": f"d{number}", "attributes": {"kind": {"string": kind}}}
                        for number, kind in enumerate("aab")
                    ],
                },
            },
            ResourceSlice,
        )
    ]
    ask = {"deviceClassName": "any", "allocationMode": "ExactCount", "count": 2}
    request = {"name": "r", "exactly": {**ask, "selectors": [{"cel": {"expression": SELECTORS[0]}}]}}
    claims = [
        msgspec.convert(
            {"metadata": {"name": "c"}, "spec": {"devices": {"requests": [request]}}}, ResourceClaim
        )
    ]
    names = {"swap": ["d0", "d2"], "drop": ["d0"], "twice": ["d0", "d0"]}[wrong]
    results = [
        AllocationResult(
            devices=DeviceAllocationResult(
                results=tuple(DeviceResult(request="r", driver="d", pool="p", device=name) for name in names)
            )
        )
    ]
    assert list(AllocationChecker(NODE, CLASSES, slices).violations(claims, results))
