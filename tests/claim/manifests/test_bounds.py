"""Texts that would exhaust the stack or the memory of their reader are refused with their line."""

import json

import pytest

from rackloom.claim.manifests import documents
from rackloom.claim.manifests.documents import parse_documents
from rackloom.errors import Refused
from rackloom.runtime.foreign_text import MAX_DEPTH

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a:\n  " + "[" * 30_000, 2, "inside each other"),
        ("a: 1\nb: " + "[" * 5_000 + "]" * 5_000, 2, "inside each other"),
        ("- " * 5_000 + "x", 1, "inside each other"),
        ("a: &x [*x]", 1, "inside what it names"),
        ("a: &x\n  b: [{c: *x}]", 2, "inside what it names"),
        (LAUGHS, 5, "aliases repeat"),
        ("---\n".join([f"a: &x [{'1,' * 900}]\nb: [{'*x,' * 60}]\n"] * 2), 5, "aliases repeat"),
        ("a: &x [" + "1," * 60_000 + "]\nb: *x\nc: *x\n", 3, "aliases repeat"),
    ],
)
def test_what_is_too_deep_or_too_wide_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(Refused, match=says) as refused:
        parse_documents(text, "f")
    assert f"f:{line}: " in refused.value.reason
    assert refused.value.nearest_fix


def test_what_is_as_deep_as_may_be_is_read() -> None:
    inside = MAX_DEPTH - 1
    (found,) = parse_documents(f"a:\n  {'[' * inside}{']' * inside}", "f")
    assert found.where(("a", *(0,) * inside)) == "f:2"


def test_aliases_of_each_document_are_its_own() -> None:
    text = "a: &x {q: 1}\nb: {<<: *x, r: 2}\nc: [*x, *x]\n"
    first, second = parse_documents(f"{text}---\n{text}", "f")
    assert first.value == second.value == {"a": {"q": 1}, "b": {"q": 1, "r": 2}, "c": [{"q": 1}, {"q": 1}]}


@pytest.mark.parametrize(
    "note", ["\U0001f680", "é\U0001f680\U0001f681", "\\ud83d\\ude80", "\\\U0001f680", "\\n\n"]
)
def test_json_says_what_it_says_with_escapes_of_any_kind(note: str) -> None:
    (found,) = parse_documents(f"\n{json.dumps({'a': [note]})}", "f")
    assert found.value == {"a": [note]}


@pytest.mark.parametrize("value", ["0x_", "!!int x"])
def test_what_looks_like_a_number_and_is_none_is_refused(value: str) -> None:
    with pytest.raises(Refused, match="a value cannot be read: invalid literal") as refused:
        parse_documents(f"a: {value}", "f")
    assert refused.value.nearest_fix == "put it in quotes"


def test_half_a_character_is_refused_with_its_line() -> None:
    with pytest.raises(Refused, match="f:2: not YAML"):
        parse_documents('{\n"a": "\\ud83d"}', "f")


def test_large_yaml_recommends_json_in_a_line_that_a_second_reading_does_not_repeat(monkeypatch, capsys):
    monkeypatch.setattr(documents, "LARGE_YAML_BYTES", 5)
    for content in ("a: 1\n", '{"a": 12345}', "a: 12345\n", "a: 12345\n"):
        parse_documents(content, "dump.yaml")
    printed = capsys.readouterr()
    assert printed.err == "rackloom: dump.yaml is large for YAML: write it with `kubectl get ... -o json`\n"
    assert printed.out == ""
