"""For any slices and claims, both modes end within their bound and answer with one of the outcomes."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from rackloom.core.allocate.allocator import SearchMode, allocate
from rackloom.core.allocate.explanation import Explanation, explain
from rackloom.core.allocate.inputs import Features
from rackloom.core.allocate.objects import DeviceClass, Node, ResourceClaim, ResourceSlice
from rackloom.core.allocate.outcome import Allocation, Fault, Refusal

NODE = msgspec.convert({"metadata": {"name": "n", "labels": {"zone": "a"}}}, Node)
CLASSES = msgspec.convert([{"metadata": {"name": "any"}, "spec": {}}], list[DeviceClass])
BOUND = 300

names = st.sampled_from(["d0", "d1", "d2", "", "Ω", "a" * 70])
attributes = st.sampled_from(
    ["kind", "d/kind", "resource.kubernetes.io/pcieRoot", "dra.net/numaNode", "clique", "/", "a/b/c", ""]
)
quantities = st.sampled_from(["0", "1", "-1", "1Gi", "1e30", "nonsense", "", "0.1n", 3, 2**63])
values = st.one_of(
    st.builds(lambda v: {"int": v}, st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda v: {"string": v}, st.text(max_size=3)),
    st.builds(lambda v: {"version": v}, st.sampled_from(["1.2.3", "one", ""])),
    st.builds(lambda v: {"ints": v}, st.lists(st.integers(0, 2), max_size=2)),
    st.just({}),
    st.just({"bool": True, "int": 1}),
)
draws = st.builds(
    lambda counter_set, name, amount: {"counterSet": counter_set, "counters": {name: {"value": amount}}},
    st.sampled_from(["x", "y"]),
    st.sampled_from(["m", "k"]),
    quantities,
)
selectors = st.sampled_from(
    [
        {"nodeSelectorTerms": []},
        {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]},
        {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Near"}]}]},
    ]
)
taints = st.builds(lambda k, e: {"key": k, "effect": e}, names, st.sampled_from(["NoSchedule", "None", "?"]))


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


devices = st.builds(
    lambda name, rest: {"name": name, **rest},
    names,
    some(
        attributes=st.dictionaries(attributes, values, max_size=4),
        capacity=st.dictionaries(st.sampled_from(["m", "k"]), st.builds(lambda q: {"value": q}, quantities)),
        consumesCounters=st.lists(draws, max_size=2),
        taints=st.lists(taints, max_size=2),
        allowMultipleAllocations=st.booleans(),
        nodeName=st.sampled_from(["n", "other"]),
        nodeSelector=selectors,
        bindsToNode=st.booleans(),
        bindingConditions=st.lists(names, max_size=2),
    ),
)
slices = st.builds(
    lambda name, pool, where, rest: {
        "metadata": {"name": name},
        "spec": {"driver": "d", "pool": pool, **where, **rest},
    },
    names,
    st.builds(
        lambda name, generation, count: {"name": name, "generation": generation, "resourceSliceCount": count},
        st.sampled_from(["p", "q"]),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    st.one_of(
        st.just({"nodeName": "n"}),
        st.just({"allNodes": True}),
        st.just({"perDeviceNodeSelection": True}),
        st.builds(lambda selector: {"nodeSelector": selector}, selectors),
        st.just({}),
    ),
    some(
        devices=st.lists(devices, max_size=8),
        sharedCounters=st.lists(
            st.builds(
                lambda counter_set, amount: {"name": counter_set, "counters": {"m": {"value": amount}}},
                st.sampled_from(["x", "y"]),
                quantities,
            ),
            max_size=2,
        ),
    ),
)
expressions = st.sampled_from(
    [
        "true",
        "1",
        "device.driver == 'd'",
        "device.attributes['d'].kind == 1",
        "))",
        "device.x.y",
        "1/0 == 1",
        "",
    ]
)
asks = st.builds(
    lambda mode, rest: {"deviceClassName": "any", "allocationMode": mode, **rest},
    st.sampled_from(["ExactCount"] * 5 + ["All", "Some"]),
    some(
        count=st.integers(-1, 40),
        selectors=st.lists(
            st.builds(lambda expression: {"cel": {"expression": expression}}, expressions), max_size=2
        ),
        tolerations=st.just([{"operator": "Exists"}]),
        capacity=st.builds(lambda q: {"requests": {"m": q}}, quantities),
    ),
)
requests = st.one_of(
    st.builds(lambda name, ask: {"name": name, "exactly": ask}, st.sampled_from(["r", "s"]), asks),
    st.builds(
        lambda ones: {
            "name": "t",
            "firstAvailable": [{"name": f"a{n}", **alternative} for n, alternative in enumerate(ones)],
        },
        st.lists(asks, min_size=1, max_size=3),
    ),
    st.just({"name": "u"}),
)
constraints = st.builds(
    lambda kind, attribute, covered: {kind: attribute, "requests": covered},
    st.sampled_from(["matchAttribute", "distinctAttribute"]),
    attributes,
    st.sampled_from([[], ["r"], ["t/a0"], ["absent"]]),
)
claims = st.builds(
    lambda wanted, limits: {
        "metadata": {"name": "c"},
        "spec": {"devices": {"requests": wanted, "constraints": limits}},
    },
    st.lists(requests, max_size=4),
    st.lists(constraints, max_size=2),
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "best"])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(given_slices=st.lists(slices, max_size=4), wanted=st.lists(claims, min_size=1, max_size=2))
def test_an_allocation_ends_with_an_outcome(
    mode: SearchMode, given_slices: list[dict[str, Any]], wanted: list[dict[str, Any]]
) -> None:
    note(f"{given_slices}\n{wanted}")
    left = iter(range(BOUND))
    outcome = allocate(
        NODE,
        CLASSES,
        msgspec.convert(given_slices, list[ResourceSlice]),
        msgspec.convert(wanted, list[ResourceClaim]),
        mode=mode,
        features=Features(list_type_attributes=True),
        proceed=lambda: next(left, None) is not None,
    )
    assert isinstance(outcome, Allocation | Refusal | Fault)
    assert outcome.steps <= BOUND + 2


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(given_slices=st.lists(slices, max_size=3), wanted=claims)
def test_an_explanation_ends_too(given_slices: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    note(f"{given_slices}\n{wanted}")
    left = iter(range(BOUND))
    account = explain(
        NODE,
        CLASSES,
        msgspec.convert(given_slices, list[ResourceSlice]),
        [msgspec.convert(wanted, ResourceClaim)],
        proceed=lambda: next(left, None) is not None,
    )
    assert isinstance(account, Explanation)
