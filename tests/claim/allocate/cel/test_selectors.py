import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.allocate import cel

RDMA = 'device.attributes["dra.net"].rdma'
NUMA = 'device.attributes["dra.net"].numaNode'


def nic(**attributes: dict[str, object]) -> cel.DeviceView:
    return cel.DeviceView.of("dra.net", attributes, {"bandwidth": "400G", "other.example.com/slots": 2})


NIC = nic(rdma={"bool": True}, numaNode={"int": 0}, firmware={"version": "28.43.1"}, ports={"ints": [1, 2]})


@pytest.mark.parametrize(
    ("expression", "truth"),
    [
        (f"{RDMA} == true && {NUMA} == 0", True),
        (f"{RDMA} && {NUMA} in [1, 2]", False),
        ('device.driver == "dra.net"', True),
        ('device.capacity["dra.net"].bandwidth.isGreaterThan(quantity("200G"))', True),
        ('device.capacity["other.example.com"].slots == quantity("2")', True),
        ('device.attributes["dra.net"].ports.exists(i, port, i == 1 && port == 2)', True),
        ('device.attributes["nowhere"].?x.orValue(7) == 7', True),
        ('"x" in device.attributes["nowhere"]', False),
    ],
)
def test_answers(expression: str, truth: bool) -> None:
    assert cel.compile(expression).matches(NIC) is truth


def test_a_missing_attribute_is_an_error_with_advice() -> None:
    with pytest.raises(cel.EvaluationError, match=r"no such key: model .*orValue.*has\(\)"):
        cel.compile('device.attributes["dra.net"].model == "x"').matches(NIC)


def test_an_error_is_absorbed_where_the_other_side_decides() -> None:
    assert cel.compile(f'device.attributes["dra.net"].model == "x" || {RDMA}').matches(NIC)


def test_a_compile_error_shows_the_place() -> None:
    with pytest.raises(cel.CompileError) as caught:
        cel.compile('device.driver == "a" &&\n  device.nmae == "b"')
    assert (caught.value.line, caught.value.column) == (2, 9)
    assert "undefined field 'nmae'" in str(caught.value)
    assert str(caught.value).splitlines()[1:3] == [' |   device.nmae == "b"', " | ........^"]
    assert "driver, attributes, capacity" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "expression",
    ["", "1", "device.driver ==", '"a".matches("(?=a)")', "1 == 1.0", "math.abs(1) == 1", '[1, "a"] == []'],
)
def test_refused_before_any_device(expression: str) -> None:
    with pytest.raises(cel.CompileError):
        cel.compile(expression)


def test_an_expression_may_have_ten_kibibytes() -> None:
    assert cel.compile('"' + "a" * 10_000 + '" != ""').matches(NIC)
    with pytest.raises(cel.CompileError, match="longer than 10240 bytes"):
        cel.compile('"' + "a" * 10_240 + '" != ""')


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    with pytest.raises(cel.CompileError, match="nested too deeply"):
        cel.compile("[" * 4000 + "]" * 4000 + " == []")


def test_new_expressions_need_the_features_to_be_on() -> None:
    shared = "device.allowMultipleAllocations"
    assert not cel.compile(shared, environment="new").matches(NIC)
    with pytest.raises(cel.CompileError, match="undefined field"):
        cel.compile(shared, environment="new", consumable_capacity=False)
    with pytest.raises(cel.CompileError, match="undeclared reference to 'includes'"):
        cel.compile(f"{NUMA}.includes(0)", environment="new", list_type_attributes=False)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [({}, "unsupported attribute value"), ({"version": "1.2"}, "parse semantic version")],
)
def test_a_malformed_device_fails_every_selector(attribute: dict[str, object], message: str) -> None:
    with pytest.raises(cel.EvaluationError, match=f"attribute odd: {message}"):
        cel.compile("true").matches(nic(odd=attribute))


def test_running_over_the_cost_limit_is_not_absorbed() -> None:
    costly = "lists.range(1000).all(x, lists.range(1000).all(y, x + y >= 0))"
    with pytest.raises(cel.EvaluationError, match="cost limit exceeded"):
        cel.compile(f"{costly} || true").matches(NIC)


def test_patterns_that_defeat_backtracking_take_no_time() -> None:
    hostile = cel.DeviceView.of("d", {"name": {"string": "a" * 60 + "!"}}, {})
    assert not cel.compile('device.attributes["d"].name.matches("^(a|aa)+$")').matches(hostile)


@pytest.mark.parametrize(
    ("expression", "reads"),
    [
        (f"{NUMA} == 0", {("attribute", "dra.net", "numaNode")}),
        ("device.driver == device.driver", {("driver", None, None)}),
        ('"rdma" in device.attributes["dra.net"]', {("attribute", "dra.net", "rdma")}),
        ('device.attributes["a"].size() == 0', {("attribute", "a", None)}),
        ("device.attributes[device.driver].x == 1", {("driver", None, None), ("attribute", None, "x")}),
        (
            'cel.bind(a, device.attributes["a"], a.x == a.?y.orValue(1))',
            {("attribute", "a", "x"), ("attribute", "a", "y")},
        ),
        ('device.capacity["a"].m.isInteger()', {("capacity", "a", "m")}),
        ("device.attributes.all(d, d != '')", {("attribute", None, None)}),
        ("true", set()),
    ],
)
def test_reads_name_what_the_answer_depends_on(
    expression: str, reads: set[tuple[str, str | None, str | None]]
) -> None:
    assert cel.compile(expression).reads == reads


def test_keys_tell_apart_what_python_takes_for_equal() -> None:
    program = cel.compile(f"{NUMA} == 1")
    keys = {program.key(nic(numaNode=value)) for value in ({"int": 1}, {"bool": True}, {"string": "1"})}
    assert len(keys | {program.key(nic())}) == 4
    assert program.key(nic(numaNode={"int": 1}, serial={"string": "a"})) in keys


scalars = st.one_of(
    st.builds(lambda value: {"int": value}, st.integers(-2, 2)),
    st.builds(lambda value: {"bool": value}, st.booleans()),
    st.builds(lambda value: {"string": value}, st.sampled_from(["", "a", "b", "1"])),
    st.builds(lambda value: {"version": value}, st.sampled_from(["1.0.0", "2.0.0-rc.1"])),
    st.builds(lambda value: {"ints": value}, st.lists(st.integers(-2, 2), min_size=1, max_size=3)),
)
devices = st.builds(
    lambda values, amount: cel.DeviceView.of("d", values, {"m": amount}),
    st.dictionaries(st.sampled_from("xyz"), scalars),
    st.sampled_from(["1", "1Ki", "500m"]),
)
fields = st.sampled_from([f'device.attributes["d"].{name}' for name in "xyz"])
literals = st.sampled_from(["0", "1", '"a"', "true", "1.0", "[1]", 'semver("1.0.0")'])
terms = st.one_of(
    st.builds("{} == {}".format, fields, literals),
    st.builds("{} != {}".format, literals, fields),
    st.builds("{} < {}".format, fields, st.sampled_from(["1", '"b"', "0.5"])),
    st.builds("{} in [0, 1]".format, fields),
    st.builds("has({})".format, fields),
    st.builds('device.attributes["d"].?{}.orValue(1) == 1'.format, st.sampled_from("xyz")),
    st.just('device.capacity["d"].m.isLessThan(quantity("1k"))'),
    fields,
)
selectors = st.recursive(
    terms,
    lambda inner: st.one_of(
        st.builds("({} && {})".format, inner, inner),
        st.builds("({} || {})".format, inner, inner),
        st.builds("!({})".format, inner),
        st.builds("({} ? {} : {})".format, inner, inner, inner),
    ),
    max_leaves=4,
)


def settled(program: cel.Program, view: cel.DeviceView) -> object:
    try:
        return program.matches(view)
    except cel.EvaluationError as error:
        return str(error)


@given(selectors, devices, devices)
def test_fast_path_and_exact_evaluation_agree(
    expression: str, view: cel.DeviceView, other: cel.DeviceView
) -> None:
    try:
        program = cel.compile(expression)
    except cel.CompileError:
        return
    exact = program.evaluate(view)
    assert settled(program, view) == (exact.value if exact.error is None else str(exact.error))
    if program.key(view) == program.key(other):
        assert settled(program, view) == settled(program, other)
