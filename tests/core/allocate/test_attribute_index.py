"""A selector that pins an attribute visits few nodes and gives the answer of visiting all."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.attribute_index import AttributeIndexes
from rackloom.core.allocate.cel.compiler import compile_selector
from rackloom.core.allocate.eligibility import SelectorCache
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.fleet_nodes import FleetNodes
from rackloom.core.allocate.inputs import Features, alternatives_of, in_use_by
from rackloom.core.allocate.objects import (
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Fault, FaultScope, Outcome, Refusal
from rackloom.core.allocate.pools import SliceIndex

A, B = "device.attributes['d'].a", "device.attributes['d'].b"
PINS = [
    *(f"{A} == 'x'", f"'y' == {A}", f"{A} in ['x', 'z']", f"({A} == 'x' || {A} == 'w')"),
    *(f"{B} == 1", f"{B} in [1, 2]", f"{B} > 1", f"{B} <= 2", f"2 < {B}", f"{B} >= 3", f"1 >= {B}"),
    *(f"({A} == 'x' || {B} == 1)", f"({A} == 'w' || {B} > 2)"),
]
TERMS = [
    *(*PINS, f"{A} == 7", f"{B} == true", f"{B} == 1.0", f"{B} > 1.5", f"{B} in [1, 'x']"),
    *("device.attributes['d']['a'] == 'z'", "device.attributes['e'].a == 'x'", "device.driver == 'd'"),
    *("'a' in device.attributes['d']", "has(device.attributes['d'].b)", f"!({A} == 'x')", f"{A} != 'y'"),
    *(f"{A}.isGreaterThan(semver('1.0.0'))", f"{A} == 'x' || {B} == 1", "device.attributes['f'].c == 'x'"),
    *("device.attributes.d.a == 'y'", "has(device.attributes.f.c)", "false"),
]
VALUES: list[dict[str, Any]] = [
    *({"string": text} for text in "xyzw"),
    *({"int": number} for number in (1, 2, 7)),
    *({"bool": True}, {"version": "1.2.3"}, {"strings": ["x", "y"]}, {"version": "malformed"}, {}),
]
CLASS_SELECTORS = [[], ["device.driver == 'd'"], [f"device.driver == 'd' && {B} in [1, 2]"], [f"{B} > 1"]]


def value(rng: random.Random) -> dict[str, Any]:
    """A usual value, now and then one that no selector expects."""
    return rng.choice(VALUES[:4]) if rng.random() < 0.97 else rng.choice(VALUES)


def device(rng: random.Random, number: int) -> dict[str, Any]:
    names = [name for name in ("a", "b") if rng.random() < 0.99]
    attributes = {name: value(rng) for name in names}
    if "b" in attributes and rng.random() < 0.98:
        attributes["b"] = {"int": rng.randint(1, 3)}
    if rng.random() < 0.05:
        attributes["d/a"] = value(rng)
    if rng.random() < 0.1:
        attributes["f/c"] = {"string": "x"}
    return {"name": f"d{number}", "attributes": attributes}


def beside(rng: random.Random, slice_: dict[str, Any]) -> list[dict[str, Any]]:
    """Makes a node lose a slice or reach it in another way. Returns more slices of its pool."""
    spec, name = slice_["spec"], slice_["metadata"]["name"]
    match rng.choice(["old", "incomplete", "twice", "counters", "per device", "everywhere"]):
        case "old":
            newer = {**spec, "pool": {**spec["pool"], "generation": 2}, "devices": [device(rng, 7)]}
            return [{"metadata": {"name": f"{name}-newer"}, "spec": newer}]
        case "incomplete":
            spec["pool"]["resourceSliceCount"] = 2
        case "twice":
            spec["devices"].append(device(rng, 0))
        case "counters":
            spec["pool"]["resourceSliceCount"] = 2
            for each in spec["devices"]:
                if rng.random() < 0.5:
                    draw = {"counterSet": "s", "counters": {"c": {"value": "1"}}}
                    each["consumesCounters"] = [draw]
            total = {"name": "s", "counters": {"c": {"value": rng.choice(["1", "1", "2", "malformed"])}}}
            counters = {key: of for key, of in spec.items() if key != "devices"} | {"sharedCounters": [total]}
            return [{"metadata": {"name": f"{name}-counters"}, "spec": counters}]
        case "per device":
            spec["perDeviceNodeSelection"] = True
            node = spec.pop("nodeName")
            for each in spec["devices"]:
                each |= rng.choice([{"nodeName": node}, {"nodeName": "n0"}, {"allNodes": True}])
        case "everywhere":
            del spec["nodeName"]
            spec["allNodes"] = True
    return []


def fleet_parts(rng: random.Random) -> tuple[list[Node], list[ResourceSlice], list[DeviceClass]]:
    nodes, slices = [], []
    for number in range(rng.randint(2, 8)):
        name = f"n{number}"
        nodes.append({"metadata": {"name": name}})
        for driver in "de" if rng.random() < 0.4 else "d":
            devices = [device(rng, at) for at in range(rng.randint(1, 3))]
            pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
            spec = {"driver": driver, "nodeName": name, "pool": pool, "devices": devices}
            slices.append({"metadata": {"name": f"{name}-{driver}"}, "spec": spec})
            if rng.random() < 0.2:
                slices += beside(rng, slices[-1])
    if rng.random() < 0.1:
        wrong = {"nodeSelectorTerms": [{"matchFields": [{"key": "x", "operator": "In", "values": ["y"]}]}]}
        pool = {"name": "common", "generation": 1, "resourceSliceCount": 1}
        slices.append(
            {
                "metadata": {"name": "common"},
                "spec": {"driver": "d", "pool": pool, "nodeSelector": wrong, "devices": []},
            }
        )
    selectors = [{"cel": {"expression": text}} for text in rng.choice(CLASS_SELECTORS)]
    classes = [{"metadata": {"name": "any"}, "spec": {"selectors": selectors}}]
    return (
        msgspec.convert(nodes, list[Node]),
        msgspec.convert(slices, list[ResourceSlice]),
        msgspec.convert(classes, list[DeviceClass]),
    )


def random_claim(rng: random.Random, name: str) -> ResourceClaim:
    def asked() -> dict[str, Any]:
        texts = [" && ".join(rng.sample(TERMS, rng.randint(1, 3))) for _ in range(rng.randint(0, 1))]
        texts.append(" && ".join(rng.sample(PINS, rng.randint(1, 2))))
        rng.shuffle(texts)
        selectors = [{"cel": {"expression": text}} for text in texts]
        count = rng.choice([1, 1, 1, 2])
        return {
            "deviceClassName": "any",
            "allocationMode": "ExactCount",
            "count": count,
            "selectors": selectors,
        }

    request: dict[str, Any] = {"name": "r", "exactly": asked()}
    if rng.random() < 0.2:
        request = {"name": "r", "firstAvailable": [{"name": name, **asked()} for name in "ab"]}
    requests = [request]
    if rng.random() < 0.2:
        requests.append({"name": "s", "exactly": asked()})
    spec = {"devices": {"requests": requests}}
    return msgspec.convert({"metadata": {"name": name}, "spec": spec}, ResourceClaim)


def one_by_one(
    nodes: Sequence[Node],
    slices: Sequence[ResourceSlice],
    classes: Sequence[DeviceClass],
    held: Sequence[ResourceClaim],
    claim: ResourceClaim,
) -> Outcome:
    for node in nodes:
        outcome = allocate(node, classes, slices, [claim], state=in_use_by(held))
        passed = isinstance(outcome, Refusal) or (
            isinstance(outcome, Fault) and outcome.scope is FaultScope.NODE
        )
        if not passed:
            return outcome
    return Refusal(node="", steps=0)


def summary_of(outcome: Outcome) -> object:
    if isinstance(outcome, Allocation):
        return outcome.node, [(each.request, each.device) for each in outcome.results[0].devices.results]
    return outcome.reason if isinstance(outcome, Fault) else "refused"


def check_random_fleet(seed: int) -> None:
    rng = random.Random(seed)
    nodes, slices, classes = fleet_parts(rng)
    fleet = Fleet(nodes, classes, slices)
    held: list[ResourceClaim] = []
    for number in range(8):
        claim = random_claim(rng, f"c{number}")
        expected = one_by_one(nodes, slices, classes, held, claim)
        outcome = fleet.place([claim])
        assert summary_of(outcome) == summary_of(expected), (seed, number)
        if isinstance(outcome, Allocation):
            status = ResourceClaimStatus(allocation=outcome.results[0])
            held.append(msgspec.structs.replace(claim, status=status))
        if held and rng.random() < 0.4:
            gone = held.pop(rng.randrange(len(held))).status.allocation
            assert gone is not None
            fleet.release([gone])


def test_the_answer_is_that_of_asking_every_node() -> None:
    for seed in range(12):
        check_random_fleet(seed)


class CountingIndex(SliceIndex):
    """Records the nodes that were queried."""

    def __init__(self, slices: Sequence[ResourceSlice]) -> None:
        super().__init__(slices)
        self.asked: set[str] = set()

    def near(self, node: str) -> list[ResourceSlice]:
        self.asked.add(node)
        return super().near(node)


def one_gpu_each(count: int) -> tuple[list[Node], CountingIndex]:
    """Nodes with one device each, which has the number of its node as a string and as an integer."""
    nodes = [{"metadata": {"name": f"n{number}"}} for number in range(count)]
    slices = [
        {
            "metadata": {"name": f"n{number}"},
            "spec": {
                "driver": "d",
                "nodeName": f"n{number}",
                "pool": {"name": f"n{number}", "generation": 1, "resourceSliceCount": 1},
                "devices": [
                    {"name": "d0", "attributes": {"a": {"string": f"n{number}"}, "b": {"int": number}}}
                ],
            },
        }
        for number in range(count)
    ]
    return msgspec.convert(nodes, list[Node]), CountingIndex(msgspec.convert(slices, list[ResourceSlice]))


ANY = msgspec.convert({"metadata": {"name": "any"}, "spec": {}}, DeviceClass)


def selecting(*expressions: str) -> ResourceClaim:
    """A claim of the first expression that is met."""
    asks = [
        {
            "name": f"a{number}",
            "deviceClassName": "any",
            "allocationMode": "ExactCount",
            "count": 1,
            "selectors": [{"cel": {"expression": expression}}],
        }
        for number, expression in enumerate(expressions)
    ]
    requests = [{"name": "r", "firstAvailable": asks}]
    spec = {"devices": {"requests": requests}}
    return msgspec.convert({"metadata": {"name": "c"}, "spec": spec}, ResourceClaim)


@pytest.mark.parametrize(
    ("expression", "node"),
    [
        (f"{A} == 'n170'", 170),
        (f"{B} > 197", 198),
        (f"{B} > 10 && {A} in ['n3', 'n150', 'n160']", 150),
        (f"{A} == 'n199' || {B} == 80", 80),
        (f"{B} >= 130 && {B} < 131", 130),
    ],
)
def test_nodes_that_a_pin_rules_out_are_not_searched(expression: str, node: int) -> None:
    nodes, index = one_gpu_each(200)
    pins = compile_selector(expression).pins
    fleet = Fleet(nodes, [ANY], index)
    plan = alternatives_of([selecting(expression)], {"any": ANY}, Features())[0]
    indexes = AttributeIndexes(FleetNodes(nodes, index, Features()), SelectorCache())
    first = indexes.nodes_for(plan[0])
    assert pins
    assert first is not None
    assert first(0) == node
    outcome = fleet.place([selecting(expression)])
    assert isinstance(outcome, Allocation)
    assert outcome.node == f"n{node}"


def test_an_alternative_that_is_met_soon_keeps_the_others_from_reading_on() -> None:
    nodes, index = one_gpu_each(200)
    outcome = Fleet(nodes, [ANY], index).place([selecting(f"{A} == 'n190'", f"{A} == 'n5'")])
    assert isinstance(outcome, Allocation)
    assert outcome.node == "n5"
    assert len(index.asked) < 20


@pytest.mark.slow
def test_the_answer_is_that_of_asking_every_node_in_more_fleets() -> None:
    for seed in range(12, 1500):
        check_random_fleet(seed)
