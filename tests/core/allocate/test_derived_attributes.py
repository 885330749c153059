"""Derived attributes: constraints compare the value of a request's expression for each device."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from rackloom.core.allocate import search
from rackloom.core.allocate.cel import derived
from rackloom.core.allocate.cel.environment import DeviceView
from rackloom.core.allocate.cel.errors import CompileError, EvaluationError
from rackloom.core.allocate.checker import AllocationChecker
from rackloom.core.allocate.explanation import explain, render_explanation
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import Features
from rackloom.core.allocate.objects import DeviceAttribute, Node, ResourceSlice
from rackloom.core.allocate.outcome import Allocation, Fault, FaultScope, Outcome, Refusal

Fields = dict[str, Any]
NAME = "derived/place"
DRIVER = "d.example.com"


def device(name: str, **attributes: Any) -> Fields:
    kinds = {str: "string", int: "int", bool: "bool", list: "ints"}
    return {
        "name": name,
        "attributes": {key: {kinds[type(value)]: value} for key, value in attributes.items()},
    }


def of(attribute: str) -> str:
    return f"device.attributes['{DRIVER}'].{attribute}"


def kind(name: str) -> str:
    return f"{of('kind')} == '{name}'"


def derive(expression: str, name: str = NAME) -> Fields:
    return {"derivedAttributes": [{"name": name, "expression": expression}]}


def match(*requests: str, name: str = NAME) -> Fields:
    return {"matchAttribute": name, "requests": list(requests)}


def distinct(*requests: str, name: str = NAME) -> Fields:
    return {"distinctAttribute": name, "requests": list(requests)}


def names(outcome: Outcome) -> list[str]:
    assert isinstance(outcome, Allocation), outcome
    return [device.device for result in outcome.results for device in result.devices.results]


def gpu_and_nic(cluster: Any, gpu: str, nic: str, *constraints: Fields) -> Any:
    return cluster.claim(
        cluster.request("gpu", select=kind("gpu"), **derive(gpu)),
        cluster.request("nic", select=kind("nic"), **derive(nic)),
        constraints=list(constraints or [match()]),
    )


@pytest.mark.parametrize("mode", ["exact", "best"])
def test_two_drivers_texts_are_made_one_value(cluster: Any, mode: str) -> None:
    """GPUs publish "numa-1/pci-3", NICs a number."""
    slices = [
        cluster.slice(
            [
                device("gpu0", kind="gpu", path="numa-2/pci-3"),
                device("gpu1", kind="gpu", path="numa-1/pci-3"),
                device("nic0", kind="nic", numa=0),
                device("nic1", kind="nic", numa=1),
            ]
        )
    ]
    claim = gpu_and_nic(cluster, f"int({of('path')}.split('/')[0].substring(5))", of("numa"))
    assert names(cluster.allocate(slices, claim, mode=mode)) == ["gpu1", "nic1"]
    apart = gpu_and_nic(cluster, f"int({of('path')}.split('/')[0].substring(5))", of("numa"), distinct())
    assert names(cluster.allocate(slices, apart)) == ["gpu0", "nic0"]


def test_the_expression_counts_and_not_what_is_published(cluster: Any) -> None:
    """A derived attribute shadows a published one of its name, for the request that derives it."""
    slices = [cluster.slice([device("a", x=1, y=7), device("b", x=2, y=8), device("c", x=8, y=1)])]
    name = f"{DRIVER}/x"
    both = [cluster.request("r", **derive(of("y"), name)), cluster.request("s")]
    claim = cluster.claim(*both, constraints=[match(name=name)])
    # y of r is x of s.
    assert names(cluster.allocate(slices, claim)) == ["b", "c"]
    published = cluster.claim(cluster.request("r"), cluster.request("s"), constraints=[match(name=name)])
    assert isinstance(cluster.allocate(slices, published), Refusal)


def test_a_list_matches_where_a_value_is_common(cluster: Any) -> None:
    slices = [
        cluster.slice([device("a", links=[1, 2]), device("b", links=[3, 4]), device("c", links=[2, 3])])
    ]
    two = cluster.claim(cluster.request(count=2, **derive(of("links"))), constraints=[match()])
    assert names(cluster.allocate(slices, two)) == ["a", "c"]
    apart = cluster.claim(cluster.request(count=2, **derive(of("links"))), constraints=[distinct()])
    assert names(cluster.allocate(slices, apart)) == ["a", "b"]
    made = f"[{of('links')}[0] % 2 == 1 ? 'odd' : 'even']"
    odd = cluster.claim(cluster.request(count=2, **derive(made)), constraints=[match()])
    assert names(cluster.allocate(slices, odd)) == ["a", "b"]


@pytest.mark.parametrize("constraint", [match, distinct])
@pytest.mark.parametrize("feature", [True, False])
def test_an_empty_list_has_nothing_in_common(cluster: Any, constraint: Any, feature: bool) -> None:
    """Without list attributes, a first device is not checked, as in upstream."""
    slices = [cluster.slice([device("a"), device("b")])]
    features = Features(list_type_attributes=feature)
    claim = cluster.claim(cluster.request(count=1, **derive("[]")), constraints=[constraint()])
    outcome = cluster.allocate(slices, claim, features=features)
    if feature:
        assert isinstance(outcome, Refusal)
    else:
        assert names(outcome) == ["a"]
    two = cluster.claim(cluster.request(count=2, **derive("[]")), constraints=[constraint()])
    assert isinstance(cluster.allocate(slices, two, features=features), Refusal)


@pytest.mark.parametrize("mode", ["exact", "best"])
def test_an_error_stops_the_attempt_where_the_search_gets_to_it(cluster: Any, mode: str) -> None:
    slices = [cluster.slice([device("a", x=1), device("b"), device("c", x=1)])]
    claim = cluster.claim(cluster.request(count=2, **derive(of("x"))), constraints=[match()])
    outcome = cluster.allocate(slices, claim, mode=mode)
    assert isinstance(outcome, Fault)
    assert outcome.scope is FaultScope.ATTEMPT
    assert "claim c, request r: the derived attribute derived/place fails on device d.example.com/p/b" in (
        outcome.reason
    )
    assert "no such key: x" in outcome.reason
    # One device is met by a: the search does not get to b.
    single = cluster.claim(cluster.request(**derive(of("x"))), constraints=[match()])
    assert names(cluster.allocate(slices, single, mode=mode)) == ["a"]
    # b is in use, or the selector leaves it out.
    assert names(cluster.allocate(slices, claim, state=cluster.in_use("b"), mode=mode)) == ["a", "c"]
    guarded = cluster.request(count=2, select=f"has({of('x')})", **derive(of("x")))
    assert names(cluster.allocate(slices, cluster.claim(guarded, constraints=[match()]), mode=mode)) == [
        "a",
        "c",
    ]


def test_an_earlier_constraint_or_taint_keeps_the_search_from_the_expression(cluster: Any) -> None:
    slices = [cluster.slice([device("a", x=1, y=1), device("b", y=2), device("c", x=1, y=1)])]
    both = [match(name=f"{DRIVER}/y"), match()]
    claim = cluster.claim(cluster.request(count=2, **derive(of("x"))), constraints=both)
    assert names(cluster.allocate(slices, claim)) == ["a", "c"]
    claim = cluster.claim(cluster.request(count=2, **derive(of("x"))), constraints=both[::-1])
    assert isinstance(cluster.allocate(slices, claim), Fault)
    tainted = device("b") | {"taints": [{"key": "t", "effect": "NoSchedule"}]}
    slices = [cluster.slice([device("a", x=1), tainted, device("c", x=1)])]
    claim = cluster.claim(cluster.request(count=2, **derive(of("x"))), constraints=[match()])
    assert names(cluster.allocate(slices, claim)) == ["a", "c"]


def test_what_no_constraint_compares_is_not_evaluated(cluster: Any) -> None:
    slices = [cluster.slice([device("a")])]
    broken = derive(of("x"))
    assert names(cluster.allocate(slices, cluster.claim(cluster.request(**broken)))) == ["a"]
    other = cluster.claim(cluster.request(**broken), cluster.request("s", count=0), constraints=[match("s")])
    assert names(cluster.allocate(slices, other)) == ["a"]


@pytest.mark.parametrize("expression", ["1.5", "device", "{'a': 1}", "1 +", "device.nothing", "[1.5]"])
def test_an_expression_that_gives_no_value_does_not_compile(cluster: Any, expression: str) -> None:
    slices = [cluster.slice([device("a")])]
    claim = cluster.claim(cluster.request(**derive(expression)), constraints=[match()])
    outcome = cluster.allocate(slices, claim)
    assert isinstance(outcome, Fault)
    assert "derived/place does not compile" in outcome.reason


def test_each_alternative_derives_its_own(cluster: Any) -> None:
    slices = [cluster.slice([device("a", kind="gpu", x=1), device("n", kind="nic", y=5, z=1)])]
    either = cluster.first_of(
        "r", cluster.ask(1, kind("nic"), **derive(of("y"))), cluster.ask(1, kind("nic"), **derive(of("z")))
    )
    gpu = cluster.request("gpu", select=kind("gpu"), **derive(of("x")))
    outcome = cluster.allocate(slices, cluster.claim(gpu, either, constraints=[match()]))
    assert isinstance(outcome, Allocation)
    assert [given.request for given in outcome.results[0].devices.results] == ["gpu", "r/a1"]
    first = cluster.claim(gpu, either, constraints=[match("gpu", "r/a0")])
    assert isinstance(cluster.allocate(slices, first), Allocation)


@pytest.mark.parametrize("mode", ["exact", "best"])
def test_mode_all_compares_derived_values_and_admin_access_too(cluster: Any, mode: str) -> None:
    slices = [cluster.slice([device("a", x=1), device("b", x=11), device("c", x=2)])]
    last = f"{of('x')} % 10"
    everything = cluster.claim(
        cluster.request(select=f"{of('x')} != 2", allocationMode="All", count=0, **derive(last)),
        constraints=[match()],
    )
    assert names(cluster.allocate(slices, everything, mode=mode)) == ["a", "b"]
    broken = cluster.claim(
        cluster.request(allocationMode="All", count=0, **derive(last)), constraints=[match()]
    )
    outcome = cluster.allocate(slices, broken, mode=mode)
    assert isinstance(outcome, Fault)
    assert "would break a constraint" in outcome.reason
    admin = cluster.claim(cluster.request(adminAccess=True, count=2, **derive(last)), constraints=[match()])
    assert names(cluster.allocate(slices, admin, state=cluster.in_use("a"), mode=mode)) == ["a", "b"]


def test_without_the_feature_the_claim_is_an_error(cluster: Any) -> None:
    claim = cluster.claim(cluster.request(**derive("1")), constraints=[match()])
    off = Features(derived_attributes=False)
    outcome = cluster.allocate([cluster.slice([device("a")])], claim, features=off)
    assert isinstance(outcome, Fault)
    assert "the feature DerivedAttributes is off" in outcome.reason


def test_one_expression_is_evaluated_once_a_device(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DeviceView] = []
    evaluate = derived.DerivedProgram.evaluate

    def counted(program: derived.DerivedProgram, view: DeviceView) -> DeviceAttribute:
        seen.append(view)
        return evaluate(program, view)

    monkeypatch.setattr(derived.DerivedProgram, "evaluate", counted)
    slices = [cluster.slice([device(f"d{number}", x=number % 2, u=number) for number in range(4)])]
    ask = derive(f"{of('x')} + {of('u')} * 0")
    claim = cluster.claim(
        cluster.request("r", count=2, **ask),
        cluster.request("s", **ask),
        constraints=[match("r"), match("s")],
    )
    assert names(cluster.allocate(slices, claim)) == ["d0", "d2", "d1"]
    assert len(seen) == 3


def test_the_account_names_the_values_and_what_fails(cluster: Any) -> None:
    slices = [cluster.slice([device("a", x=1), device("b"), device("c", x=12)])]
    claim = cluster.claim(cluster.request(count=3, **derive(f"{of('x')} % 10")), constraints=[match()])
    text = render_explanation(explain(cluster.node, cluster.classes, slices, [claim]))
    assert "1 derived attribute fails: claim c, request r: the derived attribute derived/place fails" in text
    assert "matchAttribute derived/place" in text
    assert "    1: r 1" in text
    assert "    2: r 1" in text


def place(fleet: Fleet, claim: Any) -> str:
    outcome = fleet.place([claim])
    if isinstance(outcome, Fault):
        return outcome.reason
    return f"{outcome.node} {' '.join(names(outcome))}" if isinstance(outcome, Allocation) else "refused"


def fleet_of(cluster: Any, *machines: Sequence[Fields]) -> Fleet:
    nodes = [msgspec.convert({"metadata": {"name": f"n{number}"}}, Node) for number in range(len(machines))]
    slices: list[ResourceSlice] = [
        cluster.slice(devices, name=f"n{number}", pool={"name": f"n{number}"}, nodeName=f"n{number}")
        for number, devices in enumerate(machines)
    ]
    return Fleet(nodes, cluster.classes, slices)


def test_a_fleet_tells_nodes_apart_by_what_is_derived(cluster: Any) -> None:
    fleet = fleet_of(
        cluster,
        [device("a", x="p-0"), device("b", x="p-1")],
        [device("a", x="p-2"), device("b", x="q-2")],
        [device("a", x="p-3"), device("b", x="p-4")],
    )
    claim = cluster.claim(
        cluster.request(count=2, **derive(f"{of('x')}.substring(2)")), constraints=[match()]
    )
    assert [place(fleet, claim), place(fleet, claim)] == ["n1 a b", "refused"]


def test_a_fleet_stops_where_an_expression_fails_though_there_are_too_few_devices(cluster: Any) -> None:
    """The search takes a, which fails, before it knows that there is no second device."""
    fleet = fleet_of(cluster, [device("a")], [device("a", x=1), device("b", x=1)])
    claim = cluster.claim(cluster.request(count=2, **derive(of("x"))), constraints=[match()])
    assert "derived/place fails on device d.example.com/n0/a" in place(fleet, claim)


def test_equal_devices_are_no_copies_where_what_is_derived_differs(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_DEAD_ENDS", 1)
    gpus = [device(name, kind="gpu", x=place) for name, place in (("a", "0"), ("b", "0"), ("c", "1"))]
    slices = [cluster.slice([*gpus, device("n", kind="nic", y="1")])]
    claim = gpu_and_nic(cluster, of("x"), of("y"))
    assert names(cluster.allocate(slices, claim)) == ["c", "n"]


@pytest.mark.parametrize("pairs", [8, 16])
def test_pairs_by_a_derived_value_are_refused_soon(cluster: Any, pairs: int) -> None:
    """One place is short of a NIC. A plain search would try every way to pair the others."""
    gpus = [device(f"gpu{n:02}", kind="gpu", path=f"numa-{n}") for n in range(pairs)]
    nics = [device(f"nic{n:02}", kind="nic", numa=n or 99) for n in range(pairs)]
    slices = [cluster.slice(gpus + nics)]
    asks = {"gpu": derive(f"int({of('path')}.substring(5))"), "nic": derive(of("numa"))}
    requests = [
        cluster.request(f"{what}{n}", select=kind(what), **asks[what])
        for n in range(pairs)
        for what in ("gpu", "nic")
    ]
    constraints = [match(f"gpu{n}", f"nic{n}") for n in range(pairs)]
    left = iter(range(1000))
    outcome = cluster.allocate(
        slices,
        cluster.claim(*requests, constraints=constraints),
        proceed=lambda: next(left, None) is not None,
    )
    assert isinstance(outcome, Refusal)


@pytest.mark.parametrize(
    ("given", "valid"),
    [(["a", "c"], True), (["a", "b"], False), (["c", "a"], True), (["a", "d"], False)],
)
def test_the_checker_judges_derived_values(cluster: Any, given: list[str], valid: bool) -> None:
    slices = [cluster.slice([device("a", x=1), device("b", x=2), device("c", x=11), device("d")])]
    claim = cluster.claim(cluster.request(count=2, **derive(f"{of('x')} % 10")), constraints=[match()])
    outcome = cluster.allocate(slices, claim)
    assert isinstance(outcome, Allocation)
    (result,) = outcome.results
    devices = tuple(msgspec.structs.replace(result.devices.results[0], device=name) for name in given)
    answer = msgspec.structs.replace(result, devices=msgspec.structs.replace(result.devices, results=devices))
    checker = AllocationChecker(cluster.node, cluster.classes, slices)
    assert (not list(checker.violations([claim], [answer]))) is valid


VIEW = DeviceView.of(
    "d", {"text": {"string": "a"}, "v": {"version": "1.2.3"}, "list": {"ints": [1, 2]}}, {"mem": "8Gi"}
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("'x'", DeviceAttribute(string="x")),
        ("7", DeviceAttribute(int_=7)),
        ("device.capacity['d'].mem.isGreaterThan(quantity('4Gi'))", DeviceAttribute(bool_=True)),
        ("device.attributes['d'].v", DeviceAttribute(version="1.2.3")),
        ("[semver('1.0.0'), semver('2.0.0')]", DeviceAttribute(versions=("1.0.0", "2.0.0"))),
        ("[true, false]", DeviceAttribute(bools=(True, False))),
        ("device.attributes['d'].list.map(x, x + 1)", DeviceAttribute(ints=(2, 3))),
        ("[]", DeviceAttribute(strings=())),
        ("dyn(optional.of('a'))", DeviceAttribute(string="a")),
        ("device.attributes['d'].?none.orValue('other')", DeviceAttribute(string="other")),
    ],
)
def test_values_of_expressions(expression: str, value: DeviceAttribute) -> None:
    assert derived.compile_derived(expression).evaluate(VIEW) == value


@pytest.mark.parametrize(
    "expression",
    ["dyn(1.5)", "dyn(null)", "dyn([[1]])", "[dyn(1), dyn('a')]", "dyn(device)", "device.attributes['d'].no"],
)
def test_expressions_without_a_value(expression: str) -> None:
    with pytest.raises(EvaluationError):
        derived.compile_derived(expression).evaluate(VIEW)


@pytest.mark.parametrize(
    "expression", ["1u", "1.5", "null", "device.attributes", "device.attributes['d'].?v"]
)
def test_types_that_no_attribute_has(expression: str) -> None:
    with pytest.raises(CompileError, match="must evaluate to a string, integer, boolean or semver"):
        derived.compile_derived(expression)


def test_a_malformed_device_fails_every_expression() -> None:
    broken = DeviceView.of("d", {"v": {"version": "not one"}}, {})
    with pytest.raises(EvaluationError, match="attribute v"):
        derived.compile_derived("1").evaluate(broken)
