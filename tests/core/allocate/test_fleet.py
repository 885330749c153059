"""A fleet gives the answers of a search over every node in order, and keeps its books."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from rackloom.cli.claim import allocate_claims
from rackloom.core.allocate.allocator import allocate
from rackloom.core.allocate.driver_slices import device_classes
from rackloom.core.allocate.driver_slices import slices_of as slices_of_machine
from rackloom.core.allocate.explanation import explain
from rackloom.core.allocate.fleet import KEPT_BYTES, Fleet
from rackloom.core.allocate.inputs import Features, in_use_by
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Fault, FaultScope, Outcome, Refusal
from rackloom.core.allocate.planning import PlacedClaim, allocate_each
from rackloom.core.allocate.pools import SliceIndex
from rackloom.topology import profiles

CLASSES = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])
FEATURES = Features()
SELECTORS = [
    None,
    "device.attributes['d'].kind == 'a'",
    "device.attributes['d'].rare == 'x'",
    "device.attributes['d'].uuid == 'n1-d0'",
    "device.capacity['d'].memory.isGreaterThan(quantity('80Gi'))",
    "!('rare' in device.attributes['d'])",
]

DERIVED = ["device.attributes['d'].kind", "device.attributes['d'].rare", "device.attributes['d'].uuid"]


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
        if not draw(st.integers(0, 30)):
            attributes["firmware"] = {"version": "not a version"}
        memory = {"value": draw(st.sampled_from(["80Gi", "141Gi"]))}
        device: dict[str, Any] = {
            "name": f"d{number}",
            "attributes": attributes,
            "capacity": {"memory": memory},
        }
        fate = draw(st.sampled_from(["plain", "partition", "shared", "tainted"]))
        if fate == "partition":
            use = {"counterSet": "x", "counters": {"m": {"value": str(draw(st.integers(1, 2)))}}}
            together = list(draw(st.sampled_from(["", "", "", "g", "h", "gh"])))
            device["consumesCounters"] = [{**use, "compatibilityGroups": together}]
        if fate == "shared":
            device |= {"allowMultipleAllocations": True, "capacity": {"memory": memory, "m": {"value": "2"}}}
        if fate == "tainted":
            device["taints"] = [{"key": "t", "effect": "NoSchedule"}]
        made.append(device)
    return made


def slices_of(node: str, devices: list[dict[str, Any]], pool_name: str) -> list[ResourceSlice]:
    pool = {"name": pool_name, "generation": 1, "resourceSliceCount": 2}
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


def common_slices(devices: list[dict[str, Any]], **reach: Any) -> list[ResourceSlice]:
    """A pool that is not tied to one node. Its devices draw from shared counters."""
    pool = {"name": "common", "generation": 1, "resourceSliceCount": 2}
    counters = [{"name": "x", "counters": {"m": {"value": "2"}}}]
    specs = [{"sharedCounters": counters}, {"devices": devices}]
    return [
        msgspec.convert(
            {
                "metadata": {"name": f"common-{number}"},
                "spec": {"driver": "d", "pool": pool, **reach, **spec},
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
        labels = {"zone": draw(st.sampled_from("ab"))}
        nodes.append(msgspec.convert({"metadata": {"name": name, "labels": labels}}, Node))
        slices += slices_of(name, draw(st.sampled_from(types)), name)
    common = draw(st.sampled_from(["none", "none", "all", "zone", "each"]))
    devices = draw(machines())
    if common == "all":
        slices += common_slices(devices, allNodes=True)
    if common == "zone":
        need = {"key": "zone", "operator": "In", "values": ["a"]}
        slices += common_slices(devices, nodeSelector={"nodeSelectorTerms": [{"matchExpressions": [need]}]})
    if common == "each":
        placed = [
            {**device, "nodeName": draw(st.sampled_from([node.metadata.name for node in nodes]))}
            for device in devices
        ]
        slices += common_slices(placed, perDeviceNodeSelection=True)
    return nodes, slices


class Shape(NamedTuple):
    """The request of a claim."""

    count: int
    selector: str | None
    matched: bool
    kind: str
    derived: str | None


def claim(name: str, shape: Shape) -> ResourceClaim:
    mode = "All" if shape.kind == "everything" else "ExactCount"
    ask: dict[str, Any] = {"deviceClassName": "any", "allocationMode": mode}
    if mode == "ExactCount":
        ask["count"] = shape.count
    if shape.selector:
        ask["selectors"] = [{"cel": {"expression": shape.selector}}]
    if shape.derived:
        ask["derivedAttributes"] = [{"name": "d/root", "expression": shape.derived}]
    if shape.kind == "amount":
        ask["capacity"] = {"requests": {"memory": "40Gi"}}
    if shape.kind == "tolerant":
        ask["tolerations"] = [{"key": "t", "operator": "Exists"}]
    request: dict[str, Any] = {"name": "r", "exactly": ask}
    if shape.kind == "admin":
        ask["adminAccess"] = True
    if shape.kind == "preferred":
        other = {"name": "b", "deviceClassName": "any", "allocationMode": "ExactCount", "count": 1}
        request = {"name": "r", "firstAvailable": [{"name": "a", **ask}, other]}
    second = {"name": "s", "exactly": {"deviceClassName": "any", "allocationMode": "ExactCount", "count": 1}}
    requests = [request, second] if shape.kind == "two" else [request]
    constraints = [{"matchAttribute": "d/root"}] if shape.matched else []
    devices = {"requests": requests, "constraints": constraints}
    return msgspec.convert({"metadata": {"name": name}, "spec": {"devices": devices}}, ResourceClaim)


shapes = st.builds(
    Shape,
    st.integers(1, 2),
    st.sampled_from(SELECTORS),
    st.booleans(),
    st.sampled_from(["", "", "", "amount", "tolerant", "preferred", "everything", "admin", "two"]),
    st.sampled_from([None, None, *DERIVED]),
)


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
@settings(max_examples=300, deadline=None)
@given(cluster=clusters(), wanted=st.lists(shapes, min_size=1, max_size=8), data=st.data())
def test_the_fleet_answers_as_if_every_node_were_asked(
    cluster: tuple[list[Node], list[ResourceSlice]],
    wanted: list[Shape],
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
            fleet.release([gone])
        if alone := data.draw(st.sampled_from([None, *nodes])):
            # One node alone gives the same answer as within the order of all nodes.
            name = alone.metadata.name
            asked = allocate(
                alone,
                CLASSES,
                slices,
                [resource_claim],
                state=in_use_by(held.values()),
                features=FEATURES,
            )
            assert summary_of(fleet.answer_on(name, [resource_claim])) == summary_of(asked)
            in_use = in_use_by(held.values())
            account = explain(alone, CLASSES, slices, [resource_claim], state=in_use, features=FEATURES)
            assert fleet.explain_on(name, [resource_claim], holders=in_use.holders) == account
            among = fleet.find([resource_claim], among=[name])
            if isinstance(asked, Allocation):
                assert summary_of(among) == summary_of(asked)


def test_what_was_allocated_elsewhere_counts(cluster: Any) -> None:
    slices = [cluster.slice([{"name": "d0"}])]
    first = cluster.allocate(slices, cluster.claim(cluster.request()))
    fleet = Fleet([cluster.node], cluster.classes, slices)
    fleet.occupy(first.results)
    assert isinstance(fleet.place([cluster.claim(cluster.request())]), Refusal)
    fleet.release(first.results)
    assert isinstance(fleet.place([cluster.claim(cluster.request())]), Allocation)


def named_nodes(count: int) -> list[Node]:
    return [msgspec.convert({"metadata": {"name": f"n{number}"}}, Node) for number in range(count)]


def test_a_device_that_several_nodes_reach_is_given_once(cluster: Any) -> None:
    shared = cluster.slice([{"name": "d0"}], allNodes=True)
    fleet = Fleet(named_nodes(2), cluster.classes, [shared])
    first = fleet.place([cluster.claim(cluster.request())])
    assert isinstance(first, Allocation)
    assert isinstance(fleet.place([cluster.claim(cluster.request())]), Refusal)
    fleet.release(first.results)
    again = fleet.find([cluster.claim(cluster.request())], among=["n1", "n0"])
    assert isinstance(again, Allocation)
    assert again.node == "n1"


def test_counters_of_a_pool_over_two_nodes_are_shared(cluster: Any) -> None:
    draws = [{"counterSet": "x", "counters": {"m": {"value": "1"}}}]
    pool = {"name": "p", "resourceSliceCount": 3}
    slices = [
        cluster.slice([], "c", sharedCounters=[{"name": "x", "counters": {"m": {"value": "1"}}}], pool=pool),
        *(
            cluster.slice(
                [{"name": f"d{at}", "consumesCounters": draws}], f"s{at}", nodeName=f"n{at}", pool=pool
            )
            for at in range(2)
        ),
    ]
    fleet = Fleet(named_nodes(2), cluster.classes, slices)
    assert isinstance(fleet.place([cluster.claim(cluster.request())]), Allocation)
    assert isinstance(fleet.place([cluster.claim(cluster.request())]), Refusal)


def test_an_error_of_one_node_passes_it_over(cluster: Any) -> None:
    broken = cluster.slice([{"name": "d0"}, {"name": "d0"}])
    other = msgspec.convert({"metadata": {"name": "m"}}, Node)
    sound = cluster.slice([{"name": "d0"}], "t", nodeName="m", pool={"name": "q"})
    fleet = Fleet([cluster.node, other], cluster.classes, [broken, sound])
    outcome = fleet.place([cluster.claim(cluster.request())])
    assert isinstance(outcome, Allocation)
    assert outcome.node == "m"


def test_of_two_nodes_of_one_name_there_is_one(cluster: Any) -> None:
    """Joined dumps of a cluster have every node twice."""
    fleet = Fleet(
        [cluster.node, cluster.node], cluster.classes, [cluster.slice([{"name": "d0"}, {"name": "d1"}])]
    )
    given = [fleet.place([cluster.claim(cluster.request())]) for _ in range(3)]
    assert [summary_of(outcome)[1][0][1] for outcome in given[:2]] == ["d0", "d1"]  # type: ignore[index]
    assert isinstance(given[2], Refusal)


def test_configuration_may_hold_what_json_cannot_say(cluster: Any) -> None:
    ask = {"deviceClassName": "any", "allocationMode": "ExactCount", "count": 1}
    devices = {
        "requests": [{"name": "r", "exactly": ask}],
        "config": [{"opaque": {"driver": "d", "parameters": {True: 5}}}],
    }
    wanted = msgspec.convert({"metadata": {"name": "c"}, "spec": {"devices": devices}}, ResourceClaim)
    fleet = Fleet([cluster.node], CLASSES, [cluster.slice([{"name": "d0"}])])
    assert isinstance(fleet.place([wanted]), Allocation)


@pytest.mark.parametrize(
    "broken",
    [
        {"consumesCounters": [{"counterSet": "x", "counters": {"m": {"value": "1 Gi"}}}]},
        {"capacity": {"memory": {"value": "garb"}}, "allowMultipleAllocations": True},
    ],
)
def test_what_cannot_be_read_is_answered_as_by_one_node(cluster: Any, broken: dict[str, Any]) -> None:
    bad_version = {"attributes": {"firmware": {"version": "none"}}, "capacity": {"memory": {"value": "1"}}}
    counters = [{"name": "x", "counters": {"m": {"value": "1Gi"}}}]
    slices = []
    for at, device in enumerate((bad_version, broken, {})):
        where = {"nodeName": f"n{at}", "pool": {"name": f"p{at}", "resourceSliceCount": 2}}
        slices.append(cluster.slice([{"name": "d0"} | device], f"s{at}", **where))
        slices.append(cluster.slice([], f"c{at}", sharedCounters=counters, **where))
    nodes, wanted = named_nodes(3), cluster.claim(cluster.request())
    fleet = Fleet(nodes, cluster.classes, slices)
    for node in nodes:
        alone = allocate(node, cluster.classes, slices, [wanted])
        passed_over = isinstance(alone, Fault) and alone.scope is FaultScope.NODE
        found = fleet.find([wanted], among=[node.metadata.name])
        assert summary_of(found) == ("refused" if passed_over else summary_of(alone))


def test_a_device_that_two_hold_is_free_when_both_have_returned_it(cluster: Any) -> None:
    slices = [cluster.slice([{"name": "d0"}])]
    held = cluster.allocate(slices, cluster.claim(cluster.request())).results
    fleet = Fleet([cluster.node], cluster.classes, slices)
    for _ in range(2):
        fleet.occupy(held)
    fleet.release(held)
    assert isinstance(fleet.find([cluster.claim(cluster.request())]), Refusal)
    fleet.release(held)
    assert isinstance(fleet.find([cluster.claim(cluster.request())]), Allocation)


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


def test_eight_hundred_claims_cost_nine_searches() -> None:
    # One for each number of GPUs in use on a node, since the hundred nodes are copies of each other.
    machine = profiles.load_machine("azure-nd96isr-h100-v5")
    nodes = named_nodes(100)
    slices = [slice_ for node in nodes for slice_ in slices_of_machine(machine, node.metadata.name)]
    ask = {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 1}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": ask}]}}
    claims = [
        msgspec.convert({"metadata": {"name": f"c{number}"}, "spec": spec}, ResourceClaim)
        for number in range(800)
    ]
    steps = 0

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return True

    answers = allocate_each(nodes, device_classes(), slices, claims, proceed=counted)
    assert [answer.node for answer in answers if isinstance(answer, PlacedClaim)] == [
        f"n{number // 8}" for number in range(800)
    ]
    assert steps <= 9 * 4


def test_a_new_specification_visits_nodes_until_it_fits(cluster: Any) -> None:
    nodes = named_nodes(50)
    slices = [
        cluster.slice(
            [{"name": "d0", "attributes": {"serial": {"int": number}}}],
            f"s{number}",
            nodeName=f"n{number}",
            pool={"name": f"n{number}"},
        )
        for number in range(50)
    ]
    asked = set()

    class CountingIndex(SliceIndex):
        def near(self, node: str) -> list[ResourceSlice]:
            asked.add(node)
            return super().near(node)

    fleet = Fleet(nodes, cluster.classes, CountingIndex(slices))
    select = "int(device.attributes['d.example.com'].serial) >= {}".format
    for number in range(10):
        answer = fleet.place([cluster.claim(cluster.request(select=select(number)))])
        assert isinstance(answer, Allocation)
        assert answer.node == f"n{number}"
    assert len(asked) == 10


def test_what_no_claim_reads_tells_no_nodes_apart(cluster: Any) -> None:
    nodes = named_nodes(50)
    slices = [
        cluster.slice(
            [
                {
                    "name": "d0",
                    "attributes": {"uuid": {"string": f"u{number}"}},
                    "capacity": {"memory": {"value": f"{number}Gi"}},
                }
            ],
            f"s{number}",
            nodeName=f"n{number}",
            pool={"name": f"n{number}"},
        )
        for number in range(50)
    ]
    fleet = Fleet(nodes, cluster.classes, slices)
    steps = 0

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return True

    for _ in nodes:
        assert isinstance(fleet.place([cluster.claim(cluster.request())], proceed=counted), Allocation)
    assert steps < 10


def test_what_best_took_is_in_use(cluster: Any) -> None:
    taken = {"numa": {"int": 0}}
    devices = [{"name": f"d{at}", "attributes": taken} for at in range(4)]
    fleet = Fleet([cluster.node], cluster.classes, [cluster.slice(devices)])
    best = fleet.place([cluster.claim(cluster.request(count=2))], mode="best")
    assert isinstance(best, Allocation)
    assert best.optimality is not None
    assert best.optimality.proved
    assert isinstance(fleet.place([cluster.claim(cluster.request(count=3))]), Refusal)


def test_counters_that_others_overdraw_give_nothing_until_they_recover(cluster: Any) -> None:
    counters = [{"name": name, "counters": {"m": {"value": "2"}}} for name in ("x", "y")]
    devices = [
        {"name": name, "consumesCounters": [{"counterSet": name[0], "counters": {"m": {"value": amount}}}]}
        for name, amount in [("x0", "2"), ("x1", "1"), ("y0", "1"), ("y1", "1")]
    ]
    pool = {"resourceSliceCount": 2}
    slices = [
        cluster.slice([], "counters", pool=pool, sharedCounters=counters),
        cluster.slice(devices, "devices", pool=pool),
    ]
    fleet = Fleet([cluster.node], cluster.classes, slices)

    def given() -> str | None:
        wanted = [cluster.claim(cluster.request())]
        answer, asked = fleet.find(wanted), fleet.answer_on(cluster.node.metadata.name, wanted)
        assert type(answer) is type(asked)
        if not isinstance(answer, Allocation) or not isinstance(asked, Allocation):
            return None
        assert answer.results == asked.results
        return answer.results[0].devices.results[0].device

    taken = fleet.place([cluster.claim(cluster.request())])
    assert isinstance(taken, Allocation)
    assert given() == "y0"
    also = msgspec.convert(
        {"devices": {"results": [{"request": "r", "driver": "d.example.com", "pool": "p", "device": "x1"}]}},
        AllocationResult,
    )
    fleet.occupy([also])
    assert given() is None
    fleet.release(taken.results)
    assert given() == "y0"
    fleet.release([also])
    assert given() == "x0"


def test_what_a_fleet_remembers_stays_within_its_bound(cluster: Any) -> None:
    nodes = named_nodes(40)
    slices = [
        cluster.slice(
            [{"name": "d0", "attributes": {"serial": {"int": number}}}],
            f"s{number}",
            nodeName=f"n{number}",
            pool={"name": f"n{number}"},
        )
        for number in range(40)
    ]
    bounded = Fleet(nodes, cluster.classes, slices, kept_bytes=100_000)
    free = Fleet(nodes, cluster.classes, slices)
    for number in [*range(40), *range(40)]:
        wanted = cluster.claim(
            cluster.request(select=f"device.attributes['d.example.com'].serial != {number}")
        )
        assert summary_of(bounded.find([wanted])) == summary_of(free.find([wanted]))
        assert bounded.kept_bytes <= 100_000
    assert free.kept_bytes > 200_000


def test_nodes_of_one_kind_and_use_are_explained_like_each_alone(cluster: Any) -> None:
    nodes = named_nodes(6)
    devices = [{"name": f"d{number}"} for number in range(2)]
    slices = [
        cluster.slice(
            devices, node.metadata.name, nodeName=node.metadata.name, pool={"name": node.metadata.name}
        )
        for node in nodes
    ]
    fleet = Fleet(nodes, cluster.classes, slices)
    for _ in range(3):
        assert isinstance(fleet.place([cluster.claim(cluster.request())]), Allocation)
    steps = 0

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return True

    asked = [cluster.claim(cluster.request("a", 2), cluster.request("b", 1), name="too-many")]
    accounts = [fleet.explain_on(node.metadata.name, asked, proceed=counted) for node in nodes]
    searched = steps
    again = [fleet.explain_on(node.metadata.name, asked, proceed=counted) for node in nodes]
    assert accounts == again
    assert steps == searched
    assert [account.conflict for account in accounts] == [
        ("too-many/b",),
        ("too-many/a",),
        *[("too-many/a", "too-many/b")] * 4,
    ]


def test_help_names_the_bound_on_memory() -> None:
    assert f"{KEPT_BYTES >> 20} MiB" in (allocate_claims.__doc__ or "")
