"""Text of other systems is read, or refused with its source. No input ends a process."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import (
    MAX_DEPTH,
    MEASURED_BYTES,
    clean_line,
    decode_json,
    decode_msgpack,
    decode_toml,
    decode_yaml,
    nests_too_deeply,
)

MANY = 1_000_000
FEW = 10_000
"""Levels of a text that is short enough to be measured first."""


class Known(msgspec.Struct):
    x: int = 0


def lists(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def objects(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


DEEP: dict[str, Callable[[], object]] = {
    "lists": lambda: decode_json(lists(MANY), "it"),
    "objects": lambda: decode_json(objects(MANY), "it"),
    "never closed": lambda: decode_json(b"[" * MANY, "it"),
    "strings that look like ends": lambda: decode_json(b'["]",' * MANY, "it"),
    "escaped quotes": lambda: decode_json(b'["\\"]\\\\",' * MANY, "it"),
    "ends of another kind": lambda: decode_json(b'["a]b}",{"]":' * MANY, "it"),
    "a field that is not declared": lambda: decode_json(b'{"y":' + lists(MANY) + b"}", "it", Known),
    "raw": lambda: decode_json(lists(MANY), "it", msgspec.Raw),
    "text": lambda: decode_json(lists(MANY).decode(), "it"),
    "short lists": lambda: decode_json(lists(FEW), "it"),
    "short objects": lambda: decode_json(objects(FEW), "it"),
    "short strings that look like ends": lambda: decode_json(b'["]",' * FEW, "it"),
    "101 levels": lambda: decode_json(lists(MAX_DEPTH + 1), "it"),
    "toml lists": lambda: decode_toml(b"a=" + lists(MANY), "it"),
    "toml tables": lambda: decode_toml(b"a=" + b"{a=" * MANY, "it"),
    "yaml lists": lambda: decode_yaml(lists(MANY), "it"),
    "yaml objects": lambda: decode_yaml(b"{a: " * MANY, "it"),
    "yaml dashes": lambda: decode_yaml(b"- " * MANY + b"1", "it"),
}
PACKS: dict[str, Callable[[], object]] = {
    "packed lists": lambda: decode_msgpack(b"\x91" * MANY + b"\x01", "it", Known),
    "packed objects": lambda: decode_msgpack(b"\x81\xa1y" * MANY + b"\x01", "it", Known),
}


def refusal(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("kind", DEEP | PACKS)
def test_a_million_levels_are_refused(kind: str) -> None:
    found = refusal((DEEP | PACKS)[kind])
    assert isinstance(found, Undecodable)
    assert found.source == "it"
    assert str(found).startswith("it: ")


def test_small_stacks_end_no_process() -> None:
    # In another process, because a stack that overflows ends it.
    code = f"""
import sys, threading
sys.path.insert(0, {str(__file__.rpartition("/")[0])!r})
from test_foreign_text import DEEP, PACKS, refusal
from rackloom.errors import Undecodable
def run(kinds):
    for kind, call in kinds.items():
        assert isinstance(refusal(call), Undecodable), kind
    done.append(kinds)
done = []
for size, kinds in (128, DEEP), (512, PACKS):
    threading.stack_size(size << 10)
    thread = threading.Thread(target=run, args=(kinds,))
    thread.start()
    thread.join()
assert len(done) == 2
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


nested: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='[]{}"\\a:,\n/', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}"\\', max_size=3), inner, max_size=3)
    ),
)


def levels(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if parts is None else 1 + max(map(levels, parts), default=0)


@given(nested, st.integers(0, 5), st.integers(1, 130), st.none() | st.integers(1, 2))
def test_the_depth_of_valid_json_is_exact(value: Any, width: int, around: int, indent: int | None) -> None:
    inside = [value] * width
    depth = around + levels(inside)
    text = "[" * around + json.dumps(inside, indent=indent, ensure_ascii=False) + "]" * around
    # Enough brackets that the text isn't flat, at a depth that counts for nothing.
    text = text.replace("[", "[" + "[]," * 51, 1)
    assert nests_too_deeply(text.encode()) == (depth > MAX_DEPTH)


@given(
    st.lists(st.sampled_from([b"[", b"{", b"]", b"}", b'"', b"\\", b"a", b"[" * 60, b"]" * 60, b'""', b","]))
)
def test_nothing_reaches_a_parser_deeper_than_the_bound(parts: list[bytes]) -> None:
    content = b"".join(parts)
    depth = deepest = 0
    in_text = escaped = False
    for byte in content.decode():
        if in_text:
            in_text, escaped = (byte != '"' or escaped), byte == "\\" and not escaped
        elif byte == "\\":
            break  # No parser reads on.
        else:
            in_text = byte == '"'
            depth = max(0, depth + (byte in "[{") - (byte in "]}"))
            deepest = max(deepest, depth)
    assert nests_too_deeply(content) or deepest <= MAX_DEPTH


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"x": "a"}', b'"\xff"', b"\xff", b"1" * 20 + b"x", b'{"x": NaN}']
)
def test_what_is_no_answer_names_its_source(content: bytes) -> None:
    found = refusal(lambda: decode_json(content, "NMX-M of rack-04", Known))
    assert isinstance(found, Undecodable)
    assert str(found).startswith("NMX-M of rack-04: ")


def test_a_long_text_that_nests_little_is_read_on_a_deep_stack() -> None:
    text = lists(MAX_DEPTH - 1) + b"," + b"1," * MEASURED_BYTES + b"1"

    def call(more: int) -> Any:
        return call(more - 1) if more else decode_json(b"[" + text + b"]", "it")

    assert len(call(0)) == len(call(300)) == MEASURED_BYTES + 2


def test_a_text_beyond_its_size_is_not_parsed() -> None:
    assert decode_json(b"[1]", "it", max_bytes=3) == [1]
    for decode in (decode_json, decode_yaml, decode_toml):
        with pytest.raises(Undecodable, match="it has 4 bytes, the limit is 3"):
            decode(b"1234", "it", max_bytes=3)  # type: ignore[operator]


def test_every_kind_of_buffer_is_read() -> None:
    raw = msgspec.json.decode(b'{"x":{"x":1}}', type=dict[str, msgspec.Raw])["x"]
    for content in (raw, bytearray(b'{"x":1}'), b'{"x":1}', '{"x":1}'):
        assert decode_json(content, "it", Known) == Known(1)


def test_text_with_half_a_surrogate_pair_is_refused() -> None:
    for decode in (decode_json, decode_yaml, decode_toml):
        with pytest.raises(Undecodable, match="it is not text"):
            decode("'\ud800'", "it")  # type: ignore[operator]


def test_aliases_that_multiply_are_refused() -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopqrs", "bcdefghijklmnopqrst", strict=True)
    )
    with pytest.raises(Undecodable, match="aliases repeat more than"):
        decode_yaml(bomb, "it")


@given(st.binary(max_size=40) | st.text('[]{}"=&*:-\n a1', max_size=30).map(str.encode))
def test_every_text_is_read_or_refused(content: bytes) -> None:
    for decode in (decode_json, decode_yaml, decode_toml):
        found = refusal(lambda decode=decode: decode(content, "it"))  # type: ignore[misc]
        assert found is None or isinstance(found, Undecodable)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("as it is", "as it is"),
        ("ten chars.", "ten chars."),
        ("eleven char", "eleven ..."),
        ("a\x1b[1mb\nc", "a [1mb c"),
        ("  a \t\r\n b  ", "a b"),
        ("\n" * 39 + "x", "x"),
        ("\n" * 40 + "x", ""),
    ],
)
def test_untrusted_text_becomes_one_short_line(text: str, line: str) -> None:
    assert clean_line(text, 10) == line


@given(st.text(), st.integers(4, 40))
def test_a_clean_line_can_be_shown_and_is_not_too_long(text: str, most: int) -> None:
    line = clean_line(text, most)
    assert line.isprintable()
    assert len(line) <= most
    assert clean_line(line, most) == line
