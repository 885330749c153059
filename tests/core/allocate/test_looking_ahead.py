"""Looking ahead makes the search short but must not change its answers."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from rackloom.core.allocate.eligibility import SelectorCache
from rackloom.core.allocate.inputs import Features, InUse
from rackloom.core.allocate.objects import DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.allocate.outcome import Allocation, AllocationStopped, Fault, Refusal
from rackloom.core.allocate.pools import SliceIndex
from rackloom.core.allocate.problem import AllocationProblem, devices_on_node
from rackloom.core.allocate.search import FirstFitSearch

NODE = msgspec.convert({"metadata": {"name": "n"}}, Node)
CLASSES = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])
FEATURES = Features(list_type_attributes=True)
LIMIT = 4000
SELECTORS = [
    "device.attributes['d'].kind == 'a'",
    "device.attributes['d'].kind == 'b'",
    "device.attributes['d'].rare == 'x'",
]

DERIVED = [
    "device.attributes['d'].root % 2",
    "[device.attributes['d'].root, 1]",
    "device.attributes['d'].rare",
]


@st.composite
def devices(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Up to ten devices on three GPUs with few differences, so that many are alike."""
    made = []
    groups = draw(st.sampled_from([[""], ["", "g", "h", "gh"]]))
    for number in range(draw(st.integers(2, 10))):
        attributes: dict[str, Any] = {
            "kind": {"string": draw(st.sampled_from("ab"))},
            "root": {"int": draw(st.integers(0, 3))},
        }
        if draw(st.integers(0, 9)):
            attributes["rare"] = {"string": "x"}
        device: dict[str, Any] = {"name": f"d{number}", "attributes": attributes}
        fate = draw(st.sampled_from(["plain", "plain", "partition", "shared"]))
        if fate == "partition":
            device["consumesCounters"] = [
                {
                    "counterSet": counter_set,
                    "compatibilityGroups": list(draw(st.sampled_from(groups))),
                    "counters": {
                        name: {"value": str(draw(st.integers(0, 3)))}
                        for name in draw(st.sampled_from(["m", "k", "mk"]))
                    },
                }
                for counter_set in draw(st.sampled_from(["x", "x", "y", "z", "xy"]))
            ]
        if fate == "shared":
            device |= {"allowMultipleAllocations": True, "capacity": {"m": {"value": "2"}}}
        made.append(device)
    return made


@st.composite
def requests(draw: st.DrawFn) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 4))):
        alternatives = []
        for index in range(draw(st.sampled_from([1, 1, 1, 2]))):
            mode = draw(st.sampled_from(["ExactCount"] * 7 + ["All"]))
            ask: dict[str, Any] = {"deviceClassName": "any", "allocationMode": mode}
            if mode == "ExactCount":
                ask["count"] = draw(st.integers(1, 4))
            selector = draw(st.sampled_from([None, *SELECTORS]))
            if selector:
                ask["selectors"] = [{"cel": {"expression": selector}}]
            derived = draw(st.sampled_from([None, None, None, *DERIVED]))
            if derived:
                ask["derivedAttributes"] = [{"name": "d/root", "expression": derived}]
            if draw(st.integers(0, 4)) == 0:
                ask["capacity"] = {"requests": {"m": "1"}}
            alternatives.append({"name": f"a{index}", **ask})
        if len(alternatives) == 1:
            exact = {name: value for name, value in alternatives[0].items() if name != "name"}
            made.append({"name": f"r{number}", "exactly": exact})
        else:
            made.append({"name": f"r{number}", "firstAvailable": alternatives})
    return made


constraints = st.lists(
    st.builds(
        lambda kind, attribute, covered: {kind: f"d/{attribute}", "requests": covered},
        st.sampled_from(["matchAttribute", "matchAttribute", "distinctAttribute"]),
        st.sampled_from(["root", "kind"]),
        st.sampled_from([[], ["r0"], ["r0", "r1"], ["r2", "r3"]]),
    ),
    max_size=2,
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[ResourceSlice], list[ResourceClaim]]:
    counters = [{"name": name, "counters": {"m": {"value": "4"}, "k": {"value": "3"}}} for name in "xyz"]
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 2}
    specs = [
        {"driver": "d", "pool": pool, "nodeName": "n", "sharedCounters": counters},
        {"driver": "d", "pool": pool, "nodeName": "n", "devices": draw(devices())},
    ]
    slices = [
        msgspec.convert({"metadata": {"name": f"s{number}"}, "spec": spec}, ResourceSlice)
        for number, spec in enumerate(specs)
    ]
    claims = [
        msgspec.convert(
            {
                "metadata": {"name": name},
                "spec": {"devices": {"requests": draw(requests()), "constraints": draw(constraints)}},
            },
            ResourceClaim,
        )
        for name in draw(st.sampled_from([["c"], ["c"], ["c", "e"]]))
    ]
    return slices, claims


Answer = tuple[str, list[tuple[str, str]]]


def answer(slices: Sequence[ResourceSlice], claims: Sequence[ResourceClaim]) -> tuple[Answer, int]:
    """The result with its devices, and the number of steps that it took."""
    steps = 0

    def proceed() -> bool:
        nonlocal steps
        steps += 1
        return steps <= LIMIT

    try:
        reached = devices_on_node(NODE, SliceIndex(slices), FEATURES)
        named = {klass.metadata.name: klass for klass in CLASSES}
        problem = AllocationProblem(reached, named, claims, InUse(), FEATURES, SelectorCache())
        found = FirstFitSearch(problem, proceed).run()
    except AllocationStopped as stop:
        return ("undecided" if stop.undecided else "error", []), steps
    given = [(entry.ask.name, entry.candidate.id.device) for entry in problem.ledger.entries]
    return ("found" if found else "refused", given), steps


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(problem=problems())
def test_looking_ahead_changes_no_answer(
    problem: tuple[list[ResourceSlice], list[ResourceClaim]],
) -> None:
    slices, claims = problem
    note(f"{slices[1].spec.devices}\n{[claim.spec for claim in claims]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FirstFitSearch, "_look_ahead", lambda self: None)
        plain, plain_steps = answer(slices, claims)
    assume(plain[0] != "undecided")
    ahead, steps = answer(slices, claims)
    assert ahead == plain
    assert steps <= plain_steps


def test_whether_all_ends_in_an_error_depends_on_the_order_of_its_devices(cluster: Any) -> None:
    """d0 taken: d0 of the list is in use, a refusal. d1 taken: d0 breaks the constraint, an error."""
    devices = [{"name": f"d{n}", "attributes": {"root": {"int": n}}} for n in range(2)]
    claim = cluster.claim(
        cluster.request("r0"),
        cluster.request("r1", allocationMode="All"),
        constraints=[{"matchAttribute": "d.example.com/root"}],
    )
    assert isinstance(cluster.allocate([cluster.slice(devices)], claim), Fault)


def partitions(gpus: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """MIG-like partitions of 7 slices per GPU, each with a unique uuid."""
    sizes = {"4g": (4, 1), "3g": (3, 2), "2g": (2, 3), "1g": (1, 7)}
    sets = [{"name": f"gpu{gpu}", "counters": {"sm": {"value": "7"}}} for gpu in range(gpus)]
    made = [
        {
            "name": f"gpu{gpu}-{size}-{number}",
            "attributes": {"kind": {"string": size}, "uuid": {"string": f"{gpu}-{size}-{number}"}},
            "consumesCounters": [{"counterSet": f"gpu{gpu}", "counters": {"sm": {"value": str(slots)}}}],
        }
        for gpu in range(gpus)
        for size, (slots, count) in sizes.items()
        for number in range(count)
    ]
    return made, sets


def kind(name: str) -> str:
    return f"device.attributes['d.example.com'].kind == '{name}'"


HOPELESS_BOUND = 1000
"""Steps. Plain searches of these problems take millions, or do not end."""


def bounded(limit: int) -> Any:
    left = iter(range(limit))
    return lambda: next(left, None) is not None


@pytest.mark.parametrize("size", [24, 128])
def test_one_more_than_there_are(cluster: Any, size: int) -> None:
    slices = [cluster.slice([{"name": f"d{number}"} for number in range(size)])]
    wanted = min(size, 31) + 1
    state = cluster.in_use(*(f"d{number}" for number in range(wanted - 1, size)))
    outcome = cluster.allocate(
        slices, cluster.claim(cluster.request(count=wanted)), state=state, proceed=bounded(HOPELESS_BOUND)
    )
    assert isinstance(outcome, Refusal)


@pytest.mark.parametrize("size", [24, 64, 128])
def test_a_choice_followed_by_an_impossible_request(cluster: Any, size: int) -> None:
    slices = [cluster.slice([{"name": f"d{n}", "attributes": {"kind": {"int": n}}} for n in range(size)])]
    impossible = cluster.request("x", select="device.driver == 'none'")
    claim = cluster.claim(cluster.request("r", count=min(size // 2, 31)), impossible)
    assert isinstance(cluster.allocate(slices, claim, proceed=bounded(HOPELESS_BOUND)), Refusal)


def test_one_request_more_than_devices(cluster: Any) -> None:
    slices = [cluster.slice([{"name": f"d{number}"} for number in range(31)])]
    claim = cluster.claim(*(cluster.request(f"r{number}") for number in range(32)))
    assert isinstance(cluster.allocate(slices, claim, proceed=bounded(HOPELESS_BOUND)), Refusal)


@pytest.mark.parametrize("devices", [32, 128])
def test_pairs_of_gpu_and_nic_when_one_root_is_short_of_a_nic(cluster: Any, devices: int) -> None:
    """15 roots have both. Each of the 16 pairs fits if it comes first."""

    def device(what: str, number: int, root: int) -> dict[str, Any]:
        attributes = {"kind": {"string": what}, "root": {"int": root}, "uuid": {"string": f"{what}{number}"}}
        return {"name": f"{what}{number}", "attributes": attributes}

    pairs = 16
    each = devices // 2
    made = [device("gpu", n, n) for n in range(each)]
    made += [device("nic", n, n if n < pairs - 1 else each + n) for n in range(each)]
    wanted = [
        cluster.request(f"{what}{n}", select=kind(what)) for n in range(pairs) for what in ("gpu", "nic")
    ]
    same_root = [
        {"matchAttribute": "d.example.com/root", "requests": [f"gpu{n}", f"nic{n}"]} for n in range(pairs)
    ]
    claim = cluster.claim(*wanted, constraints=same_root)
    outcome = cluster.allocate([cluster.slice(made)], claim, proceed=bounded(HOPELESS_BOUND))
    assert isinstance(outcome, Refusal)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"3g": 17}, False),
        ({"3g": 8, "2g": 17}, False),
        ({"1g": 8, "4g": 8, "3g": 8}, False),
        ({"1g": 8, "3g": 16}, True),
        ({"4g": 8, "2g": 8, "1g": 8}, True),
    ],
)
def test_partitions_that_must_be_packed(cluster: Any, wanted: dict[str, int], fits: bool) -> None:
    made, sets = partitions(8)
    pool = {"resourceSliceCount": 2}
    slices = [
        cluster.slice([], "counters", sharedCounters=sets, pool=pool),
        cluster.slice(made, "devices", pool=pool),
    ]
    asked = [cluster.request(f"r{size}", count, kind(size)) for size, count in wanted.items()]
    outcome = cluster.allocate(slices, cluster.claim(*asked), proceed=bounded(HOPELESS_BOUND))
    assert isinstance(outcome, Allocation if fits else Refusal)


def test_a_search_that_is_stopped_says_so(cluster: Any) -> None:
    slices = [cluster.slice([{"name": "d0"}])]
    outcome = cluster.allocate(slices, cluster.claim(cluster.request()), proceed=lambda: False)
    assert outcome.undecided
