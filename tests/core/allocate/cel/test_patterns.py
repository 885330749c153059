r"""Patterns mean the same as in Go. tests/cluster/test_go_regexp.py compares both on random patterns."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    ("pattern", "message"),
    [
        ("(", "missing closing ): `(`"),
        (")", "unexpected ): `)`"),
        ("a**", "invalid nested repetition operator: `**`"),
        ("a++", "invalid nested repetition operator: `++`"),
        ("*a", "missing argument to repetition operator: `*`"),
        ("[a", "missing closing ]: `[a`"),
        ("[z-a]", "invalid character class range: `z-a`"),
        ("(?=a)", "invalid or unsupported Perl syntax: `(?=`"),
        ("(?<!a)", "invalid or unsupported Perl syntax: `(?<!`"),
        (r"\1", r"invalid escape sequence: `\1`"),
        ("a{1001}", "invalid repeat count: `{1001}`"),
        ("(?:a{32}){32}", "invalid repeat count: `{32}`"),
        ("a{99999999999}", "invalid repeat count: `{99999999999}`"),
        (r"\p{Nope}", r"invalid character class range: `\p{Nope}`"),
        (r"\p{Old_Italic}", r"invalid character class range: `\p{Olditalic}`"),
        (r"\C", r"invalid escape sequence: `\C`"),
        (r"a\E", r"invalid escape sequence: `\E`"),
        (r"\Qa\E\E", r"invalid escape sequence: `\E`"),
        (r"[\C]", r"invalid escape sequence: `\C`"),
        ("(?P<é>a)", "invalid named capture: `(?P<é>`"),
        ("a\\", "trailing backslash at end of expression: ``"),
    ],
)
def test_refuses_what_go_refuses(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Regex(pattern)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("foo|foobar", "foobar", ["foo"]),
        ("a*", "baac", ["", "aa", ""]),
        (r"\B", "aéb", []),
        (r"\B", "aéé", ["", ""]),
        (r"\Qa.\C\E+", r"a.\CC", [r"a.\CC"]),
        (r"[[:alpha:]\]]+", "1a]b", ["a]b"]),
        ("(?<first>a)(?P<second>b)", "cab", ["ab"]),
        ("(?P<n>a)(?P<n>b)", "cab", ["ab"]),
        ("(?i)kß", "\u212aẞ", ["\u212aẞ"]),
        (r"\p{greek}+", "aΣσb", ["Σσ"]),
        (r"\p{Uppercase_Letter}", "aB", ["B"]),
        (r"\pn+", "a12", ["12"]),
        (r"[\P{ASCII}x]+", "axéb", ["xé"]),
        (r"\p{LC}+", "1aBª", ["aB"]),
        (r"\P{^Assigned}\PC", "ab\n", ["ab"]),
        (r"\p{Cn}|\p{C}", "\u0378\n", ["\u0378", "\n"]),
        (r"(?:\pL{1000})?", "é", ["", ""]),
    ],
)
def test_finds_what_go_finds(pattern: str, text: str, matches: list[str]) -> None:
    assert list(Regex(pattern).find_all(text)) == matches
    assert Regex(pattern).search(text) is bool(matches)


def test_a_match_inside_a_character_is_none() -> None:
    assert not Regex(r"\B").search("aéb")
    assert list(Regex(r"\B").spans("aé".encode())) == [(3, 3)]
    assert not Regex(r"^\Bé|a\B").search("aéb")


@given(patterns, st.text("ab ", max_size=8))
def test_agrees_with_python_where_the_syntaxes_do(pattern: str, text: str) -> None:
    assert Regex(pattern).search(text) == (re.search(pattern, text) is not None)
