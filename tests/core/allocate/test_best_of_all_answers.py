"""Mode best: valid, never worse than the first fit, and the best of all answers if it is marked as proved."""

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
    Device,
    DeviceAllocationResult,
    DeviceClass,
    DeviceResult,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Cost, Fault

NODE = msgspec.convert({"metadata": {"name": "n"}}, Node)
CLASSES = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])
FEATURES = Features(list_type_attributes=True)
ROOT, NUMA = "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode"
TOTAL = 4
"""The value of the counter in each of the two sets."""

numbers = st.integers(0, 2)
cliques = st.one_of(
    st.none(),
    st.builds(lambda v: {"int": v}, numbers),
    st.builds(lambda v: {"ints": sorted(v)}, st.sets(numbers, min_size=1)),
)


@st.composite
def devices(draw: st.DrawFn) -> list[dict[str, Any]]:
    made = []
    groups = draw(st.sampled_from([[""], ["", "g", "h", "gh"]]))
    for number in range(draw(st.integers(2, 6))):
        attributes: dict[str, Any] = {"kind": {"string": draw(st.sampled_from("ab"))}}
        root, clique = draw(st.one_of(st.none(), numbers)), draw(cliques)
        numa = draw(st.sampled_from(["follows", "own", None]))
        if root is not None:
            attributes[ROOT] = {"string": f"pci{root}"}
        if numa is not None:
            value = (root or 0) // 2 if numa == "follows" else draw(numbers)
            name = draw(st.sampled_from([NUMA, NUMA, "dra.net/numaNode"]))
            attributes[name] = draw(st.sampled_from([{"int": value}, {"ints": [value, value + 1]}]))
        if clique is not None:
            attributes["clique"] = clique
        device: dict[str, Any] = {"name": f"d{number}", "attributes": attributes}
        fate = draw(st.sampled_from(["whole", "whole", "part", "part", "shared"]))
        if fate == "part":
            device["consumesCounters"] = [
                {
                    "counterSet": name,
                    "counters": {"m": {"value": str(draw(st.integers(1, 3)))}},
                    "compatibilityGroups": list(draw(st.sampled_from(groups))),
                }
                for name in draw(st.sampled_from(["x", "x", "y", "xy"]))
            ]
        if fate == "shared":
            device |= {"allowMultipleAllocations": True, "capacity": {"m": {"value": "2"}}}
        made.append(device)
    return made


@st.composite
def claim_fields(draw: st.DrawFn, name: str) -> dict[str, Any]:
    requests: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 3))):
        alternatives = []
        for index in range(draw(st.sampled_from([1, 1, 2]))):
            ask: dict[str, Any] = {"deviceClassName": "any", "allocationMode": "ExactCount"}
            ask["count"] = draw(st.sampled_from([1, 1, 2]))
            select = draw(st.sampled_from([None, None, "a", "b"]))
            if select:
                expression = f"device.attributes['d'].kind == '{select}'"
                ask["selectors"] = [{"cel": {"expression": expression}}]
            derived = draw(st.sampled_from([None, None, None, "device.attributes['d'].kind", "['a', 'c']"]))
            if derived:
                ask["derivedAttributes"] = [{"name": ROOT, "expression": derived}]
            alternatives.append({"name": f"a{index}", **ask})
        if len(alternatives) == 1:
            exact = {key: value for key, value in alternatives[0].items() if key != "name"}
            requests.append({"name": f"r{number}", "exactly": exact})
        else:
            requests.append({"name": f"r{number}", "firstAvailable": alternatives})
    constraints: list[dict[str, Any]] = []
    if draw(st.integers(0, 2)) == 0:
        kind = draw(st.sampled_from(["matchAttribute", "distinctAttribute"]))
        attribute = draw(st.sampled_from([ROOT, "d/kind"]))
        constraints.append({kind: attribute, "requests": draw(st.sampled_from([[], ["r0"]]))})
    return {
        "metadata": {"name": name},
        "spec": {"devices": {"requests": requests, "constraints": constraints}},
    }


Problem = tuple[list[ResourceSlice], list[ResourceClaim], InUse]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    found = draw(devices())
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 2}
    counters = [{"name": name, "counters": {"m": {"value": str(TOTAL)}}} for name in "xy"]
    specs = [
        {"driver": "d", "pool": pool, "nodeName": "n", "sharedCounters": counters},
        {"driver": "d", "pool": pool, "nodeName": "n", "devices": found},
    ]
    slices = [
        msgspec.convert({"metadata": {"name": f"s{number}"}, "spec": spec}, ResourceSlice)
        for number, spec in enumerate(specs)
    ]
    names = draw(st.sampled_from([["c"], ["c"], ["c", "e"]]))
    claims = [msgspec.convert(draw(claim_fields(name)), ResourceClaim) for name in names]
    whole = [device["name"] for device in found if not device.get("allowMultipleAllocations")]
    taken = draw(st.sets(st.sampled_from(whole), max_size=2)) if whole else set()
    return slices, claims, InUse(dedicated=frozenset(DeviceId("d", "p", name) for name in taken))


def every_answer(
    known: Sequence[Device], claims: Sequence[ResourceClaim]
) -> Iterator[list[AllocationResult]]:
    """All ways to give devices to the requests, valid or not."""
    spaces = [_ways(known, request) for claim in claims for request in claim.spec.devices.requests]
    for combination in product(*spaces):
        rest = iter(combination)
        yield [
            AllocationResult(
                devices=DeviceAllocationResult(
                    results=tuple(device for _ in claim.spec.devices.requests for device in next(rest))
                )
            )
            for claim in claims
        ]


def _ways(known: Sequence[Device], request: Any) -> list[list[DeviceResult]]:
    named = [(f"{request.name}/{alternative.name}", alternative) for alternative in request.first_available]
    asks = [(request.name, request.exactly)] if request.exactly else named
    return [
        [_given(name, device) for device in some]
        for name, ask in asks
        for some in combinations(known, ask.count)
    ]


def _given(request: str, device: Device) -> DeviceResult:
    share: dict[str, Any] = {}
    if device.allow_multiple_allocations:
        share = {
            "share_id": "any",
            "consumed_capacity": {key: of.value for key, of in device.capacity.items()},
        }
    return DeviceResult(request=request, driver="d", pool="p", device=device.name, **share)


def value_sets(device: Device, *names: str) -> set[Any]:
    """All values of the first of the attributes that the device has."""
    for name in names:
        found = device.attributes.get(name)
        if found is not None:
            single = [value for value in (found.string, found.int_) if value is not None]
            return {*single, *(found.ints or ())}
    return set()


def numa(device: Device) -> set[Any]:
    found = device.attributes.get(NUMA) or device.attributes.get("dra.net/numaNode")
    return set() if found is None else {found.ints[0] if found.ints else found.int_}


def units(device: Device) -> set[str]:
    return {use.counter_set for use in device.consumes_counters} or {device.name}


def naive_cost(problem: Problem, results: Sequence[AllocationResult]) -> Cost:
    """The cost by its definition, from the published answer alone."""
    slices, _, state = problem
    known = {device.name: device for device in slices[1].spec.devices}
    before = {unit for holder in state.dedicated for unit in units(known[holder.device])}
    given = [(number, device) for number, result in enumerate(results) for device in result.devices.results]
    after = before | {unit for _, device in given for unit in units(known[device.device])}
    groups: dict[Any, set[str]] = {}
    for device in known.values():
        for kind, values in (
            ("numa", numa(device)),
            ("root", value_sets(device, ROOT)),
            ("clique", value_sets(device, "clique")),
        ):
            for value in values:
                groups.setdefault((kind, value), set()).update(units(device))
    left = dict.fromkeys("xy", TOTAL)
    for holder in state.dedicated:
        for use in known[holder.device].consumes_counters:
            left[use.counter_set] -= int(use.counters["m"].value)
    pairs = [
        (known[a.device], known[b.device], a.request.split("/")[0] != b.request.split("/")[0])
        for (i, a), (j, b) in combinations(given, 2)
        if i == j
    ]
    drawn = {use.counter_set for _, device in given for use in known[device.device].consumes_counters}
    return Cost(
        alternatives=sum(
            int(name[-1]) for _, name in {(i, device.request) for i, device in given} if "/" in name
        ),
        broken=sum(bool(members & after) and bool(members - after) for members in groups.values()),
        room=sum(int(1000 * left[name] / TOTAL) for name in drawn),
        apart=sum(distance(a, b) for a, b, across in pairs if across),
        unlinked=sum(
            bool(value_sets(a, "clique"))
            and bool(value_sets(b, "clique"))
            and not value_sets(a, "clique") & value_sets(b, "clique")
            for a, b, _ in pairs
        ),
    )


def distance(a: Device, b: Device) -> int:
    if value_sets(a, ROOT) & value_sets(b, ROOT):
        return 0
    return 1 if numa(a) & numa(b) else 2


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(problem=problems())
def test_the_answer_is_valid_and_costs_as_little_as_any(problem: Problem) -> None:
    slices, claims, state = problem
    note(f"{slices[1].spec.devices}\n{[claim.spec for claim in claims]}\n{state}")
    exact = allocate(NODE, CLASSES, slices, claims, state=state, features=FEATURES)
    best = allocate(NODE, CLASSES, slices, claims, state=state, features=FEATURES, mode="best")
    if not isinstance(exact, Allocation):
        assert type(best) is type(exact)
        return
    assert isinstance(best, Allocation)
    checker = AllocationChecker(NODE, CLASSES, slices, state=state, features=FEATURES)
    assert not list(checker.violations(claims, best.results))
    assert best.optimality is not None
    assert best.optimality.cost == naive_cost(problem, best.results) <= naive_cost(problem, exact.results)
    valid = (
        answer
        for answer in every_answer(slices[1].spec.devices, claims)
        if not any(checker.violations(claims, answer))
    )
    assert best.optimality.proved
    assert best.optimality.cost == min(naive_cost(problem, answer) for answer in valid)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(problem=problems(), steps=st.integers(0, 60))
def test_whoever_cuts_the_search_short_gets_the_best_answer_so_far(problem: Problem, steps: int) -> None:
    slices, claims, state = problem
    exact = allocate(NODE, CLASSES, slices, claims, state=state, features=FEATURES)
    left = iter(range(steps))
    best = allocate(
        NODE,
        CLASSES,
        slices,
        claims,
        state=state,
        features=FEATURES,
        mode="best",
        proceed=lambda: next(left, None) is not None,
    )
    if isinstance(best, Fault):
        assert best.undecided == (steps < exact.steps)
        return
    assert type(best) is type(exact)
    if isinstance(best, Allocation) and isinstance(exact, Allocation):
        checker = AllocationChecker(NODE, CLASSES, slices, state=state, features=FEATURES)
        assert not list(checker.violations(claims, best.results))
        assert best.optimality is not None
        assert best.optimality.cost == naive_cost(problem, best.results) <= naive_cost(problem, exact.results)
        whole = allocate(NODE, CLASSES, slices, claims, state=state, features=FEATURES, mode="best")
        assert isinstance(whole, Allocation)
        assert whole.optimality is not None
        assert best.optimality.at_least is not None
        assert best.optimality.at_least <= whole.optimality.cost <= best.optimality.cost
        assert best.optimality.proved is (best.optimality.at_least == best.optimality.cost)
