import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rackloom.core.allocate.cel import compiler, environment, errors
from rackloom.core.allocate.objects import DeviceAttribute

RDMA = 'device.attributes["dra.net"].rdma'
NUMA = 'device.attributes["dra.net"].numaNode'


def nic(**attributes: dict[str, object]) -> environment.DeviceView:
    return environment.DeviceView.of(
        "dra.net", attributes, {"bandwidth": "400G", "other.example.com/slots": 2}
    )


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
    assert compiler.compile_selector(expression).matches(NIC) is truth


def test_a_missing_attribute_is_an_error_with_advice() -> None:
    with pytest.raises(errors.EvaluationError, match=r"no such key: model .*orValue.*has\(\)"):
        compiler.compile_selector('device.attributes["dra.net"].model == "x"').matches(NIC)


def test_an_error_is_absorbed_where_the_other_side_decides() -> None:
    assert compiler.compile_selector(f'device.attributes["dra.net"].model == "x" || {RDMA}').matches(NIC)


def test_a_compile_error_shows_the_place() -> None:
    with pytest.raises(errors.CompileError) as caught:
        compiler.compile_selector('device.driver == "a" &&\n  device.nmae == "b"')
    assert (caught.value.line, caught.value.column) == (2, 9)
    assert "undefined field 'nmae'" in str(caught.value)
    assert str(caught.value).splitlines()[1:3] == [' |   device.nmae == "b"', " | ........^"]
    assert "driver, attributes, capacity" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "expression",
    ["", "1", "device.driver ==", '"a".matches("(?=a)")', "1 == 1.0", "math.abs(1) == 1", '[1, "a"] == []'],
)
def test_refused_before_any_device(expression: str) -> None:
    with pytest.raises(errors.CompileError):
        compiler.compile_selector(expression)


def test_an_expression_may_have_ten_kibibytes() -> None:
    assert compiler.compile_selector('"' + "a" * 10_000 + '" != ""').matches(NIC)
    with pytest.raises(errors.CompileError, match="longer than 10240 bytes"):
        compiler.compile_selector('"' + "a" * 10_240 + '" != ""')


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    with pytest.raises(errors.CompileError, match="nested too deeply"):
        compiler.compile_selector("[" * 4000 + "]" * 4000 + " == []")


def test_new_expressions_need_the_features_to_be_on() -> None:
    shared = "device.allowMultipleAllocations"
    assert not compiler.compile_selector(shared, environment="new").matches(NIC)
    with pytest.raises(errors.CompileError, match="undefined field"):
        compiler.compile_selector(shared, environment="new", consumable_capacity=False)
    with pytest.raises(errors.CompileError, match="undeclared reference to 'includes'"):
        compiler.compile_selector(f"{NUMA}.includes(0)", environment="new", list_type_attributes=False)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [({}, "unsupported attribute value"), ({"version": "1.2"}, "parse semantic version")],
)
def test_a_malformed_device_fails_every_selector(attribute: dict[str, object], message: str) -> None:
    with pytest.raises(errors.EvaluationError, match=f"attribute odd: {message}"):
        compiler.compile_selector("true").matches(nic(odd=attribute))


def test_running_over_the_cost_limit_is_not_absorbed() -> None:
    costly = "lists.range(1000).all(x, lists.range(1000).all(y, x + y >= 0))"
    with pytest.raises(errors.EvaluationError, match="cost limit exceeded"):
        compiler.compile_selector(f"{costly} || true").matches(NIC)


def test_patterns_that_defeat_backtracking_take_no_time() -> None:
    hostile = environment.DeviceView.of("d", {"name": {"string": "a" * 60 + "!"}}, {})
    assert not compiler.compile_selector('device.attributes["d"].name.matches("^(a|aa)+$")').matches(hostile)


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
    assert compiler.compile_selector(expression).reads == reads


def test_keys_tell_apart_what_python_takes_for_equal() -> None:
    program = compiler.compile_selector(f"{NUMA} == 1")
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
    lambda values, amount: environment.DeviceView.of("d", values, {"m": amount}),
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


def settled(program: compiler.Program, view: environment.DeviceView) -> object:
    try:
        return program.matches(view)
    except errors.EvaluationError as error:
        return str(error)


def check_agreement(expression: str, view: environment.DeviceView, other: environment.DeviceView) -> None:
    """Both evaluators give one answer, and devices of one key as well."""
    try:
        program = compiler.compile_selector(expression)
    except errors.CompileError:
        return
    exact = program.evaluate(view)
    assert settled(program, view) == (exact.value if exact.error is None else str(exact.error))
    if program.key(view) == program.key(other):
        assert settled(program, view) == settled(program, other)


@given(selectors, devices, devices)
def test_fast_path_and_exact_evaluation_agree(
    expression: str, view: environment.DeviceView, other: environment.DeviceView
) -> None:
    check_agreement(expression, view, other)


attribute_names = st.sampled_from(["x", "y", "z", "d/x", "d/y", "e/x", "e/y/z"])
api_devices = st.builds(
    lambda values, amount: environment.DeviceView.of("d", values, {"m": amount, "e/m": "2"}),
    st.dictionaries(attribute_names, st.one_of(scalars, st.just({"strings": ["a", "b"]})), max_size=7),
    st.sampled_from(["1", "1Ki", "500m"]),
)
NAMES = ["v", "w"]
operands = st.one_of(
    fields,
    st.sampled_from(
        [
            *NAMES,
            *('"a"', '"x"', "1", "2u", "1.5", "[1, 2]", 'semver("1.0.0")', "device.driver"),
            *('device.attributes["e"].x', 'device.capacity["d"].m', 'device.attributes["d"]'),
            'device.attributes["e"].?x.orValue("a")',
        ]
    ),
)
ranges = st.sampled_from(
    [
        *('["a", "b", "x"]', "[1, 2, 3]", "[1, true]", "[]", 'device.attributes["d"]'),
        *("device.attributes", 'device.attributes["d"].x', 'device.attributes["e"].x', "v", "w"),
        *('["x", "y"].filter(v, v in device.attributes["d"])', "[3, 4].map(w, w * 2)"),
    ]
)
leaves = st.one_of(
    st.builds("{} == {}".format, operands, operands),
    st.builds("{} != {}".format, operands, operands),
    st.builds("{} {} {}".format, operands, st.sampled_from(["<", ">=", "<"]), operands),
    st.builds("{} + 1 > {} % 2".format, operands, operands),
    st.builds("{}.startsWith({})".format, operands, operands),
    st.builds("{}.matches('^[a-x]$')".format, operands),
    st.builds("{}.contains({}.lowerAscii())".format, operands, operands),
    st.builds("{}.compareTo({}) > 0".format, operands, operands),
    st.builds("{} in {}".format, operands, st.one_of(ranges, operands)),
    st.builds("size({}) > 1".format, operands),
    st.builds("{}[0] == {}".format, operands, operands),
    st.builds("9223372036854775807 + {} > 0".format, operands),
    st.sampled_from(
        ['has(device.attributes["e"].x)', '"e" in device.attributes', "v", "w.x == v", "has(v.x)"]
    ),
)
names = st.sampled_from([*NAMES, "device"])
comprehensions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["&&", "||"]), inner),
        st.builds("!({})".format, inner),
        st.builds("({} ? {} : {})".format, inner, inner, inner),
        st.builds(
            "{}.{}({}, {})".format, ranges, st.sampled_from(["all", "exists", "exists_one"]), names, inner
        ),
        st.builds("{}.exists(v, w, {})".format, ranges, inner),
        st.builds("cel.bind({}, {}, {})".format, names, st.one_of(operands, ranges, inner), inner),
        st.builds("{}.filter(v, {}).size() == {}".format, ranges, inner, st.integers(0, 2)),
        st.builds("{}.map({}, {}, {}).exists(w, {})".format, ranges, names, inner, operands, inner),
    ),
    max_leaves=5,
)
closed = st.builds(
    "cel.bind(v, {}, cel.bind(w, {}, {}))".format,
    operands.filter(lambda text: text not in NAMES),
    fields,
    comprehensions,
)


@given(closed, api_devices, api_devices)
def test_compiled_comprehensions_agree_with_exact_evaluation(
    expression: str, view: environment.DeviceView, other: environment.DeviceView
) -> None:
    check_agreement(expression, view, other)


texts = st.sampled_from(["", "d", "e", "x", "d/x", "e/x", "d/x/y", "/x", "x/", "e/"])


@given(st.sampled_from(["d", "e", "", "d/x"]), st.dictionaries(texts, st.integers()), texts, texts)
def test_fields_read_one_by_one_are_those_of_the_whole(
    driver: str, written: dict[str, int], domain: str, identifier: str
) -> None:
    """Each field is read alone. The map of all fields is built separately."""
    raw = {name: DeviceAttribute(int_=value) for name, value in written.items()}
    view = environment.DeviceView(driver, raw, {})
    assume("/" not in domain)
    key = f"{domain}/{identifier}"
    of_domain = environment.DeviceView(driver, raw, {}).attributes.by_domain.get(domain, {})
    assert view.attributes.has(key) is (identifier in of_domain)
    assert view.attributes.value_or(key, None) == of_domain.get(identifier)
    assert view.attributes.has(key) is (identifier in of_domain)
    assert view.attributes.identifiers(domain) == list(of_domain)
