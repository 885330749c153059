"""A fleet with changing slices, tainted devices and claims that compare attributes answers as a fresh fleet,
and as nodes that are searched one after another."""

import random
from typing import Any

import msgspec
import pytest

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import in_use_by
from rackloom.core.allocate.objects import (
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Outcome
from rackloom.core.allocate.search import FirstFitSearch

NODES = msgspec.convert([{"metadata": {"name": f"n{at}"}} for at in range(6)], list[Node])
CLASSES = msgspec.convert(
    [
        {"metadata": {"name": "any"}, "spec": {}},
        {"metadata": {"name": "d"}, "spec": {"selectors": [{"cel": {"expression": "device.driver == 'd'"}}]}},
        {
            "metadata": {"name": "may-fail"},
            "spec": {"selectors": [{"cel": {"expression": "device.attributes['d'].a == 'x'"}}]},
        },
    ],
    list[DeviceClass],
)
TOLERATIONS = [
    {"key": "k", "operator": "Equal", "value": "1"},
    {"key": "k", "value": "2", "effect": "NoExecute"},
    {"key": "k", "operator": "Exists"},
    {"operator": "Exists"},
    {"value": "1"},
    {"key": "k", "operator": "Else", "value": "1"},
]
VALUES = [*({"string": text} for text in "xyz"), {"int": 1}, {"bool": True}, {"version": "1.0.0"}, {}]


def slice_of(rng: random.Random, name: str, node: str | None) -> ResourceSlice:
    devices = []
    for at in range(rng.randint(0, 4)):
        device: dict[str, Any] = {"name": f"d{at}", "attributes": {}}
        if rng.random() < 0.95:
            wild = rng.random() < 0.1
            device["attributes"]["a"] = rng.choice(VALUES if wild else VALUES[:3])
        if rng.random() < 0.1:
            device["attributes"]["d/a"] = rng.choice(VALUES)
        if rng.random() < 0.6:
            taint = {"key": rng.choice("kl"), "value": rng.choice("12")}
            device["taints"] = [{**taint, "effect": rng.choice(["NoSchedule", "NoExecute", "None"])}]
        devices.append(device)
    place = {"nodeName": node} if node else {"allNodes": True}
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": rng.choice("dde"), "pool": pool, "devices": devices, **place}
    return msgspec.convert({"metadata": {"name": name}, "spec": spec}, ResourceSlice)


def claim_of(rng: random.Random, number: int) -> ResourceClaim:
    ask: dict[str, Any] = {"deviceClassName": rng.choice(["any", "any", "d", "may-fail"])}
    ask |= {"allocationMode": "ExactCount", "count": rng.choice([1, 1, 2])}
    if rng.random() < 0.4:
        ask["tolerations"] = rng.sample(TOLERATIONS, rng.randint(1, 2))
    if rng.random() < 0.3:
        expression = f"device.attributes['d'].a == '{rng.choice('xyz')}'"
        ask["selectors"] = [{"cel": {"expression": expression}}]
    devices: dict[str, Any] = {"requests": [{"name": "r", "exactly": ask}]}
    if rng.random() < 0.4:
        devices["constraints"] = [{rng.choice(["matchAttribute", "distinctAttribute"]): "d/a"}]
    return msgspec.convert(
        {"metadata": {"name": f"c{number}", "uid": f"c{number}"}, "spec": {"devices": devices}}, ResourceClaim
    )


def given(outcome: Outcome) -> Any:
    """The visible outcome: the node and devices of the claim, or the kind of refusal."""
    if not isinstance(outcome, Allocation):
        return type(outcome)
    return outcome.node, [result.devices.results for result in outcome.results]


def first_of_nodes(slices: list[ResourceSlice], claim: ResourceClaim, held: list[ResourceClaim]) -> Any:
    """The outcome on the first node that does not refuse."""
    found: Any = None
    for node in NODES:
        found = given(allocate(node, CLASSES, slices, [claim], state=in_use_by(held)))
        if found.__class__ is tuple:
            return found
        if found.__name__ == "Fault":
            return found
    return found


@pytest.mark.parametrize("seed", range(60))
def test_a_changed_fleet_answers_as_nodes_asked_in_turn(seed: int) -> None:
    rng = random.Random(seed)
    slices = {f"s{at}": slice_of(rng, f"s{at}", f"n{at}") for at in range(len(NODES))}
    fleet = Fleet(NODES, CLASSES, slices.values())
    claims = [claim_of(rng, number) for number in range(6)]
    held: list[ResourceClaim] = []
    for number in range(24):
        action = rng.random()
        if action < 0.3:
            name = rng.choice([*slices, "common", "more"])
            place = {"common": None, "more": "n0"}.get(name, "n" + name[1:])
            after = slice_of(rng, name, place) if rng.random() < 0.8 else None
            fleet.replace_slice(slices.pop(name, None), after)
            if after is not None:
                slices[name] = after
        elif action < 0.45 and held:
            back = held.pop(rng.randrange(len(held)))
            assert back.status.allocation is not None
            fleet.release([back.status.allocation])
        claim = rng.choice(claims)
        expected = first_of_nodes(list(slices.values()), claim, held)
        outcome = fleet.place([claim])
        assert given(outcome) == expected, number
        if isinstance(outcome, Allocation):
            status = ResourceClaimStatus(allocation=outcome.results[0])
            held.append(msgspec.structs.replace(claim, status=status))


def test_a_device_that_is_gone_stays_in_use_until_its_claim_ends() -> None:
    def gpus(count: int) -> ResourceSlice:
        pool = {"name": "n0", "generation": 1, "resourceSliceCount": 1}
        devices = [{"name": f"d{at}"} for at in range(count)]
        spec = {"driver": "d", "pool": pool, "nodeName": "n0", "devices": devices}
        return msgspec.convert({"metadata": {"name": "s"}, "spec": spec}, ResourceSlice)

    ask = {"deviceClassName": "d", "allocationMode": "ExactCount", "count": 1}
    devices = {"requests": [{"name": "r", "exactly": ask}]}
    claim = msgspec.convert({"metadata": {"name": "c"}, "spec": {"devices": devices}}, ResourceClaim)
    whole, less = gpus(1), gpus(0)
    fleet = Fleet(NODES, CLASSES, [whole])
    taken = fleet.place([claim])
    assert isinstance(taken, Allocation)
    fleet.replace_slice(whole, less)
    fleet.replace_slice(less, whole)
    assert not isinstance(fleet.find([claim]), Allocation)
    fleet.release(taken.results)
    assert isinstance(fleet.find([claim]), Allocation)


def test_a_slice_that_is_not_there_cannot_change() -> None:
    rng = random.Random(1)
    with pytest.raises(ValueError, match="not in list"):
        Fleet(NODES, CLASSES, []).replace_slice(slice_of(rng, "s", "n0"), None)


def equal_pairs(count: int, **more: Any) -> tuple[list[Node], list[ResourceSlice]]:
    """Nodes of four GPUs, two on each root. Every root has a unique name."""
    nodes, slices = [], []
    for number in range(count):
        devices = [
            {"name": f"d{at}", "attributes": {"a": {"string": f"{number}-{at // 2}"}}} for at in range(4)
        ]
        pool = {"name": f"n{number}", "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": "d", "pool": pool, "nodeName": f"n{number}", "devices": devices}
        nodes.append({"metadata": {"name": f"n{number}"}})
        slices.append({"metadata": {"name": f"s{number}"}, "spec": spec})
    return msgspec.convert(nodes, list[Node]), msgspec.convert(slices, list[ResourceSlice])


def test_values_that_constraints_compare_tell_no_nodes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, slices = equal_pairs(20)
    ask = {"deviceClassName": "d", "allocationMode": "ExactCount", "count": 2}
    devices = {
        "requests": [{"name": "r", "exactly": ask}],
        "constraints": [{"matchAttribute": "d/a"}],
    }
    claim = msgspec.convert({"metadata": {"name": "c"}, "spec": {"devices": devices}}, ResourceClaim)
    searches = 0
    run = FirstFitSearch.run

    def counted(search: FirstFitSearch) -> bool:
        nonlocal searches
        searches += 1
        return run(search)

    monkeypatch.setattr(FirstFitSearch, "run", counted)
    fleet = Fleet(nodes, CLASSES, slices)
    taken = [fleet.place([claim]) for _ in range(40)]
    assert all(isinstance(outcome, Allocation) for outcome in taken)
    assert searches == 2


def test_a_request_comes_only_to_nodes_whose_taints_it_tolerates(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, slices = equal_pairs(40)
    tainted = []
    for number, each in enumerate(slices):
        taint = [{"key": "k", "value": str(number), "effect": "NoSchedule"}]
        fields = msgspec.to_builtins(each)
        for device in fields["spec"]["devices"]:
            device["taints"] = taint
        tainted.append(msgspec.convert(fields, ResourceSlice))
    fleet = Fleet(nodes, CLASSES, tainted)
    visited: list[int] = []
    answer = Fleet._answer

    def noted(self: Fleet, view: Any, number: int, *rest: Any) -> Any:
        visited.append(number)
        return answer(self, view, number, *rest)

    monkeypatch.setattr(Fleet, "_answer", noted)
    for wanted in (30, 7, 30):
        ask = {"deviceClassName": "d", "allocationMode": "ExactCount", "count": 1}
        ask |= {"tolerations": [{"key": "k", "operator": "Equal", "value": str(wanted)}]}
        devices = {"requests": [{"name": "r", "exactly": ask}]}
        claim = msgspec.convert({"metadata": {"name": "c"}, "spec": {"devices": devices}}, ResourceClaim)
        outcome = fleet.place([claim])
        assert isinstance(outcome, Allocation)
        assert outcome.node == f"n{wanted}"
    assert visited == [30, 7, 30]
