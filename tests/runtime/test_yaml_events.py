"""YAML as values, within bounds: like `yaml.load`, except for timestamps and other collections."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rackloom.errors import Refused
from rackloom.runtime.yaml_events import YamlReader, _plain_value, line_of_field


class Loader(yaml.CSafeLoader):
    """PyYAML's safe loader without timestamps."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith("timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
WORDS = (
    "0 -1 +7 010 0o7 0x1F 1_000 1:30 1.5 .5 1e3 1.0e+3 .inf -.Inf .nan ~ null Null yes No on true"
    " FALSE y text 2026-01-02 = - a:b"
)
PLAIN = st.sampled_from(WORDS.split(" "))
SCALARS = st.one_of(
    PLAIN,
    PLAIN.map(lambda word: f"'{word}'"),
    PLAIN.map(lambda word: f'"{word}"'),
    PLAIN.map(lambda word: f"!!str {word}"),
    st.just("!!int '3'"),
    st.just("*one"),
)
NODES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(SCALARS.filter(lambda key: key != "*one"), inner, max_size=4).map(
            lambda fields: "{" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"
        ),
        inner.map(lambda value: f"{{<<: {{k: 1, m: {value}}}, k: 2}}"),
        inner.map(lambda value: f"{{k: {value}, <<: [*two, {{k: 1, q: 4}}]}}"),
    ),
    max_leaves=12,
)


def outcome(read, text):
    """The values, or a mark for invalid YAML or an invalid number."""
    try:
        return repr(read(text))
    except yaml.YAMLError:
        return "no YAML"
    except ValueError:
        return "no value"


@given(st.lists(NODES, min_size=1, max_size=3))
def test_values_are_those_of_pyyaml(nodes):
    text = "".join(f"---\na: &one {{x: [1]}}\nb: &two {{q: 3}}\nc: {node}\n" for node in nodes)
    assert outcome(lambda text: list(YamlReader("f").documents(text)), text) == outcome(
        lambda text: list(yaml.load_all(text, Loader=Loader)), text
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_what_pyyaml_writes_is_read_back(value):
    for flow in (True, False):
        text = yaml.safe_dump(value, default_flow_style=flow)
        assert list(YamlReader("f").documents(text)) == [value]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", []),
        ("--- \n--- 1\n", [None, 1]),
        ("# only a comment", []),
        ("a: 2026-01-02", [{"a": "2026-01-02"}]),
        ("? [1]\n: 2", "no YAML"),
        ("a: *b", "no YAML"),
        ("a: &b 1\n---\nc: *b", "no YAML"),
        ("!!set {a, b}", "no YAML"),
        ("!mine 3", "no YAML"),
        ("{<<: 3}", "no YAML"),
        ("a: [", "no YAML"),
    ],
)
def test_texts_at_the_edge(text, values):
    found = outcome(lambda text: list(YamlReader("f").documents(text)), text)
    assert found == (values if isinstance(values, str) else repr(values))


@pytest.mark.parametrize(
    "text",
    [
        "a: 1" + ":59" * 400 + ".5",
        "a: !!bool maybe",
        "a: !!int",
        'a: !!float ""',
        "a: !!timestamp x",
        "a: 0x" + "f" * 6000,
        "a: !!int " + "1" * 6000,
    ],
)
def test_a_value_that_cannot_be_made_is_an_error_of_the_contract(text):
    with pytest.raises((yaml.YAMLError, ValueError)):
        list(YamlReader("f").documents(text))


def test_aliases_do_not_nest_beyond_the_bound():
    lines = ["a0: &a0 " + "[" * 60 + "1" + "]" * 60, "a1: [" * 1 + "[" * 60 + "*a0" + "]" * 60 + "]"]
    with pytest.raises(Refused, match="f:2: more than 100 fields"):
        list(YamlReader("f").documents("\n".join(lines)))


def test_a_merge_key_is_text_where_it_is_named_as_a_value():
    (found,) = YamlReader("f").documents("a: {&m <<: {b: 1}}\nc: *m\n")
    assert found == {"a": {"b": 1}, "c": "<<"}


def test_many_merges_cost_their_keys():
    """In the past each merge copied the whole mapping."""
    text = "".join(f"k{number}: 1\n" for number in range(20_000)) + "<<: {}\n" * 20_000
    (found,) = YamlReader("f").documents(text)
    assert len(found) == 20_000


def test_long_texts_are_not_remembered():
    list(YamlReader("f").documents("a: " + "x" * 10_000))
    before = _plain_value.cache_info().currsize
    list(YamlReader("f").documents("a: " + "y" * 10_000))
    assert _plain_value.cache_info().currsize <= before + 1


def test_a_text_with_an_anchor_twice_has_a_line():
    text = "a: &x 1\nb: &x 2\nc: 3"
    assert list(YamlReader("f").documents(text)) == [{"a": 1, "b": 2, "c": 3}]
    assert line_of_field(text, 0, ("c",)) == 1


def test_a_line_is_that_of_the_field_or_of_the_nearest_around_it():
    text = "# head\na: 1\n---\nb:\n- c: &x {d: 2}\n- c:\n    e: 3\nb:\n- 1\n- f: *x\n"
    assert line_of_field(text, 0, ("a",)) == 2
    assert line_of_field(text, 1, ("b", 1, "f")) == 10
    assert line_of_field(text, 1, ("b", 7, "f")) == 8
    assert line_of_field(text, 1, ("z",)) == 4
