"""Mode best over nodes takes the answer that adds the least cost, as if it searched each node separately."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.driver_slices import NUMA_NODE, PCIE_ROOT
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import in_use_by
from rackloom.core.allocate.objects import (
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Cost, Fault, Refusal

CLASSES = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])


def nodes_of(count: int) -> list[Node]:
    return msgspec.convert([{"metadata": {"name": f"n{at}"}} for at in range(count)], list[Node])


def slices_of(machines: Sequence[Sequence[tuple[int, int]]]) -> list[ResourceSlice]:
    """Each machine has devices with a NUMA node and a PCIe root."""
    return [
        msgspec.convert(
            {
                "metadata": {"name": f"s{at}"},
                "spec": {
                    "driver": "d",
                    "nodeName": f"n{at}",
                    "pool": {"name": f"n{at}", "generation": 1, "resourceSliceCount": 1},
                    "devices": [
                        {
                            "name": f"d{number}",
                            "attributes": {
                                NUMA_NODE: {"int": numa},
                                PCIE_ROOT: {"string": f"r{root}"},
                                "uuid": {"string": f"{at}-{number}"},
                            },
                        }
                        for number, (numa, root) in enumerate(devices)
                    ],
                },
            },
            ResourceSlice,
        )
        for at, devices in enumerate(machines)
    ]


def claim(number: int, count: int = 1, constraints: Sequence[dict[str, Any]] = ()) -> ResourceClaim:
    request = {"name": "r", "exactly": {"deviceClassName": "any", "allocationMode": "ExactCount"}}
    request["exactly"]["count"] = count  # type: ignore[index]
    spec = {"devices": {"requests": [request], "constraints": list(constraints)}}
    return msgspec.convert({"metadata": {"name": f"c{number}"}, "spec": spec}, ResourceClaim)


def allowed(steps: int) -> Callable[[], bool]:
    """Lets a search go on for `steps` steps."""
    left = iter(range(steps))
    return lambda: next(left, None) is not None


def added(outcome: Allocation) -> Cost:
    assert outcome.optimality is not None
    cost = outcome.optimality.cost
    return msgspec.structs.replace(cost, broken=cost.broken - outcome.optimality.broken_before)


def test_a_numa_node_that_is_in_use_elsewhere_is_filled_first() -> None:
    slices = slices_of([[(0, 0), (0, 1), (1, 2), (1, 3)]] * 2)
    fleet = Fleet(nodes_of(2), CLASSES, slices)
    first = fleet.find([claim(0)], among=["n1"])
    assert isinstance(first, Allocation)
    fleet.occupy(first.results)
    exact, best = fleet.find([claim(1)]), fleet.find([claim(1)], mode="best")
    assert isinstance(exact, Allocation)
    assert isinstance(best, Allocation)
    assert (exact.node, best.node) == ("n0", "n1")
    assert best.optimality is not None
    assert best.optimality.proved
    assert added(best).broken == -1


def test_a_search_that_is_stopped_between_nodes_knows_no_bound() -> None:
    fleet = Fleet(nodes_of(2), CLASSES, slices_of([[(0, 0), (0, 1)], [(0, 0), (1, 1)]]))
    asked = iter(range(100))
    whole = fleet.find([claim(0)], mode="best", proceed=lambda: next(asked) >= 0)
    assert isinstance(whole, Allocation)
    for most in range(next(asked)):
        fleet = Fleet(nodes_of(2), CLASSES, slices_of([[(0, 0), (0, 1)], [(0, 0), (1, 1)]]))
        part = fleet.find([claim(0)], mode="best", proceed=allowed(most))
        if isinstance(part, Fault):
            assert part.undecided
            continue
        assert isinstance(part, Allocation)
        assert part.optimality is not None
        assert added(part) >= added(whole)
        least = part.optimality.at_least
        assert part.optimality.proved is (least == part.optimality.cost)
        assert not part.optimality.proved or added(part) == added(whole)


devices = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=4)
asks = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from([(), ({"requests": ["r"], "matchAttribute": NUMA_NODE},)])),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=50)
@given(st.lists(devices, min_size=1, max_size=2), st.lists(st.integers(0, 1), min_size=1, max_size=4), asks)
def test_each_node_alone_gives_no_better_answer(
    kinds: list[list[tuple[int, int]]], order: list[int], wanted: list[tuple[int, Any]]
) -> None:
    slices = slices_of([kinds[kind % len(kinds)] for kind in order])
    nodes = nodes_of(len(order))
    fleet = Fleet(nodes, CLASSES, slices)
    holding: list[ResourceClaim] = []
    for number, (count, constraints) in enumerate(wanted):
        asked = claim(number, count, constraints)
        state = in_use_by(holding, shares=True)
        alone = [allocate(node, CLASSES, slices, [asked], state=state, mode="best") for node in nodes]
        costs = [(added(answer), answer.node) for answer in alone if isinstance(answer, Allocation)]
        given = fleet.place([asked], mode="best")
        if not costs:
            assert isinstance(given, Refusal)
            continue
        assert isinstance(given, Allocation)
        assert given.optimality is not None
        assert (added(given), given.node) == min(costs, key=lambda found: (found[0], int(found[1][1:])))
        assert given.optimality.proved
        assert given.optimality.at_least == given.optimality.cost
        holding.append(
            msgspec.structs.replace(asked, status=ResourceClaimStatus(allocation=given.results[0]))
        )
