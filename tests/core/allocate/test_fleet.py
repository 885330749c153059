"""A fleet gives the answers that asking every node in order would give, and keeps its books."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import Features, in_use_by
from rackloom.core.allocate.objects import (
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, AllocationStopped, Fault, FaultScope, Outcome, Refusal

CLASSES = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])
FEATURES = Features()
SELECTORS = [None, "device.attributes['d'].kind == 'a'", "device.attributes['d'].rare == 'x'"]


@st.composite
def machines(draw: st.DrawFn) -> list[dict[str, Any]]:
    """The devices of a machine type."""
    made = []
    for number in range(draw(st.integers(1, 4))):
        attributes: dict[str, Any] = {
            "kind": {"string": draw(st.sampled_from("ab"))},
            "root": {"int": number % 2},
        }
        if draw(st.integers(0, 9)):
            attributes["rare"] = {"string": draw(st.sampled_from("xy"))}
        device: dict[str, Any] = {"name": f"d{number}", "attributes": attributes}
        fate = draw(st.sampled_from(["plain", "partition", "shared"]))
        if fate == "partition":
            use = {"counterSet": "x", "counters": {"m": {"value": str(draw(st.integers(1, 2)))}}}
            device["consumesCounters"] = [use]
        if fate == "shared":
            device |= {"allowMultipleAllocations": True, "capacity": {"m": {"value": "2"}}}
        made.append(device)
    return made


def slices_of(node: str, devices: list[dict[str, Any]]) -> list[ResourceSlice]:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 2}
    counters = [{"name": "x", "counters": {"m": {"value": "2"}}}]
    unique = [
        {**device, "attributes": {**device["attributes"], "uuid": {"string": f"{node}-{device['name']}"}}}
        for device in devices
    ]
    specs = [{"sharedCounters": counters}, {"devices": unique}]
    return [
        msgspec.convert(
            {
                "metadata": {"name": f"{node}-{number}"},
                "spec": {"driver": "d", "pool": pool, "nodeName": node, **spec},
            },
            ResourceSlice,
        )
        for number, spec in enumerate(specs)
    ]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Node], list[ResourceSlice]]:
    types = draw(st.lists(machines(), min_size=1, max_size=2))
    nodes, slices = [], []
    for number in range(draw(st.integers(1, 4))):
        name = f"n{number}"
        nodes.append(msgspec.convert({"metadata": {"name": name}}, Node))
        slices += slices_of(name, draw(st.sampled_from(types)))
    return nodes, slices


def claim(name: str, shape: tuple[int, str | None, bool]) -> ResourceClaim:
    count, selector, matched = shape
    ask: dict[str, Any] = {"deviceClassName": "any", "allocationMode": "ExactCount", "count": count}
    if selector:
        ask["selectors"] = [{"cel": {"expression": selector}}]
    constraints = [{"matchAttribute": "d/root"}] if matched else []
    devices = {"requests": [{"name": "r", "exactly": ask}], "constraints": constraints}
    return msgspec.convert({"metadata": {"name": name}, "spec": {"devices": devices}}, ResourceClaim)


shapes = st.tuples(st.integers(1, 2), st.sampled_from(SELECTORS), st.booleans())


def one_by_one(
    nodes: Sequence[Node],
    slices: Sequence[ResourceSlice],
    held: Sequence[ResourceClaim],
    resource_claim: ResourceClaim,
) -> Outcome:
    for node in nodes:
        outcome = allocate(node, CLASSES, slices, [resource_claim], state=in_use_by(held), features=FEATURES)
        if isinstance(outcome, Allocation):
            return outcome
        if isinstance(outcome, Fault) and outcome.scope is FaultScope.ATTEMPT:
            return outcome
    return Refusal(node="", steps=0)


def summary_of(outcome: Outcome) -> object:
    if isinstance(outcome, Allocation):
        return outcome.node, [
            (result.request, result.device) for result in outcome.results[0].devices.results
        ]
    return outcome.reason if isinstance(outcome, Fault) else "refused"


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(cluster=clusters(), wanted=st.lists(shapes, min_size=1, max_size=8), data=st.data())
def test_the_fleet_answers_as_if_every_node_were_asked(
    cluster: tuple[list[Node], list[ResourceSlice]],
    wanted: list[tuple[int, str | None, bool]],
    data: st.DataObject,
) -> None:
    nodes, slices = cluster
    note(str([slice_.spec.devices for slice_ in slices]))
    fleet = Fleet(nodes, CLASSES, slices, features=FEATURES)
    held: dict[str, ResourceClaim] = {}
    for number, shape in enumerate(wanted):
        resource_claim = claim(f"c{number}", shape)
        expected = one_by_one(nodes, slices, list(held.values()), resource_claim)
        outcome = fleet.place([resource_claim])
        assert summary_of(outcome) == summary_of(expected)
        if isinstance(outcome, Allocation):
            status = ResourceClaimStatus(allocation=outcome.results[0])
            held[outcome.node + resource_claim.metadata.name] = msgspec.structs.replace(
                resource_claim, status=status
            )
        if held and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(held)))
            gone = held.pop(key).status.allocation
            assert gone is not None
            fleet.release(key[:2], [gone])


def test_what_was_allocated_elsewhere_counts(cluster: Any) -> None:
    slices = [cluster.slice([{"name": "d0"}])]
    first = cluster.allocate(slices, cluster.claim(cluster.request()))
    fleet = Fleet([cluster.node], cluster.classes, slices)
    fleet.occupy("n", first.results)
    assert isinstance(fleet.place([cluster.claim(cluster.request())]), Refusal)
    fleet.release("n", first.results)
    assert isinstance(fleet.place([cluster.claim(cluster.request())]), Allocation)


def test_slices_that_several_nodes_reach_are_refused(cluster: Any) -> None:
    with pytest.raises(AllocationStopped):
        Fleet([cluster.node], cluster.classes, [cluster.slice([{"name": "d0"}], allNodes=True)])


def test_an_error_of_one_node_passes_it_over(cluster: Any) -> None:
    broken = cluster.slice([{"name": "d0"}, {"name": "d0"}])
    other = msgspec.convert({"metadata": {"name": "m"}}, Node)
    sound = cluster.slice([{"name": "d0"}], "t", nodeName="m", pool={"name": "q"})
    fleet = Fleet([cluster.node, other], cluster.classes, [broken, sound])
    outcome = fleet.place([cluster.claim(cluster.request())])
    assert isinstance(outcome, Allocation)
    assert outcome.node == "m"


def test_full_nodes_are_not_searched_again(cluster: Any) -> None:
    nodes = [msgspec.convert({"metadata": {"name": f"n{number}"}}, Node) for number in range(50)]
    slices = [
        cluster.slice(
            [{"name": f"d{at}"} for at in range(4)],
            node.metadata.name,
            nodeName=node.metadata.name,
            pool={"name": node.metadata.name},
        )
        for node in nodes
    ]
    fleet = Fleet(nodes, cluster.classes, slices)
    steps = 0

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return True

    placed = [fleet.place([cluster.claim(cluster.request())], proceed=counted) for _ in range(201)]
    assert [answer.node for answer in placed[:200]] == [f"n{number // 4}" for number in range(200)]
    assert isinstance(placed[200], Refusal)
    assert steps < 50
