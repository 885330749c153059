import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.allocate.cel import regex
from rackloom.core.allocate.cel.regex import Regex

atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "^", "$", r"\b", "(?:)", r"\w"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "*?", "{1,2}", "{2}"])),
    ),
    max_leaves=5,
)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a**",
        "a++",
        "*a",
        "[a",
        "[z-a]",
        "(?=a)",
        "(?<!a)",
        r"\1",
        "(?P<n>a)(?P<n>b)",
        "a{1001}",
        r"\p{Nope}",
    ],
)
def test_refuses_what_re2_refuses(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Regex(pattern)


@given(patterns, st.text("ab \n", max_size=8))
def test_both_engines_find_the_same(pattern: str, text: str) -> None:
    native = list(Regex(pattern).spans(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regex, "_MAX_BACKTRACKING", -1)
        simulated = list(Regex(pattern).spans(text))
    assert simulated == native


@given(patterns, st.text("ab ", max_size=8))
def test_agrees_with_python_where_the_syntaxes_do(pattern: str, text: str) -> None:
    assert Regex(pattern).search(text) == (re.search(pattern, text) is not None)


def test_prefers_the_leftmost_first_alternative() -> None:
    assert list(Regex("foo|foobar").spans("foobar")) == [(0, 3)]
    assert list(Regex("a*").spans("baac")) == [(0, 0), (1, 3), (4, 4)]
