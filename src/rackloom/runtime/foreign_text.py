"""Text of other systems: bounded in size and depth before any parser works on it.

Parsers take a stack frame for each level of nesting. Some raise RecursionError at a depth that depends on the
version of Python and on the caller's stack, which is no error of decoding. Others end the process. Therefore
no answer of a switch, API server or provider, and no file of a user, reaches a parser unchecked. Its content
is measured first, and each failure is one error that names the source: `Undecodable`.

The depth of JSON is measured without a parser, with a few passes that run in C over all bytes. Escapes are
dropped, then everything but brackets and quotes. A string without brackets leaves two quotes side by side, so
only quotes that stand alone enclose brackets that do not count. Each pass over the remaining brackets removes
the innermost pairs, that is one level. Text that nests within the bound loses a fixed share of its brackets
with every level, so a pass that removes less proves the opposite and ends the work. Long text is parsed at
once, in calls that leave little of the recursion limit, and is measured only if it exceeds that limit.

YAML becomes values from its events, which take no stack (`yaml_events`). TOML is parsed in Python, in which
RecursionError is reliable. Message packs have no cheap measure. Only authenticated peers send them, in
frames of bounded size, and the recursion limit of their parser fits a stack of 512 KiB.
"""

import sys
from contextlib import suppress
from typing import Any, TypeVar, overload

import msgspec

from rackloom.errors import Refused, Undecodable

T = TypeVar("T")

MAX_DEPTH = 100
"""Levels of lists and objects. Schemas of custom resources have about 40, answers of switches 6."""
MAX_BYTES = 64 << 20
"""Of one answer or file. The lists of a switch controller have a few megabytes."""
MEASURED_BYTES = 64 << 10
"""JSON of more bytes is parsed before it is measured, since measuring takes half as long as parsing."""
_RESERVED_CALLS = 700
"""Of Python's 1000. The others bound the depth at some 250 levels, on a stack of 128 KiB."""
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_ALL = bytes(range(256))
_NO_MARK = _ALL.translate(None, b'[]{}"')


# JSON.


@overload
def decode_json(content: bytes | str, source: str, shape: type[T], *, max_bytes: int = MAX_BYTES) -> T: ...
@overload
def decode_json(
    content: bytes | str, source: str, shape: Any = Any, *, max_bytes: int = MAX_BYTES
) -> Any: ...
def decode_json(content: bytes | str, source: str, shape: Any = Any, *, max_bytes: int = MAX_BYTES) -> Any:
    """`content` as `shape`. Raises Undecodable, which names `source`, for anything else."""
    data = _bytes_within(content, source, max_bytes)
    try:
        if len(data) > MEASURED_BYTES and sys.version_info < (3, 12):
            with suppress(RecursionError):
                return _parse(data, shape, _RESERVED_CALLS)
        if not nests_too_deeply(data):
            return _parse(data, shape, 0)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Undecodable(source, str(error)) from error
    raise Undecodable(source, f"it nests more than {MAX_DEPTH} levels")


def _parse(data: bytes, shape: Any, spare: int) -> Any:
    # Before Python 3.12 msgspec counts its levels on top of Python's calls: further calls lower its limit.
    return _parse(data, shape, spare - 1) if spare else msgspec.json.decode(data, type=shape)


def nests_too_deeply(content: bytes) -> bool:
    """Whether a parser of JSON would meet more than `MAX_DEPTH` levels.

    Exact for valid JSON. Invalid JSON may be called too deep, and is never called less deep than it is.
    """
    if content.count(b"[") + content.count(b"{") <= MAX_DEPTH:
        return False
    if b"\\" in content:
        # First the backslashes that are escaped themselves: the quote behind such a pair is a real one.
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = content.translate(_ONE_KIND, _NO_MARK)
    if 2 * marks.count(b'""') != marks.count(b'"'):
        # A string contains brackets. Even parts of the split are outside of strings.
        marks = b"".join(marks.replace(b'""', b"").split(b'"')[::2])
    marks = marks.translate(None, b'"')
    level = 0
    while marks and level <= MAX_DEPTH:
        inner = marks.replace(b"[]", b"")
        if (len(marks) - len(inner)) * MAX_DEPTH < len(marks):
            break
        marks, level = inner, level + 1
    return level + marks.count(b"[") > MAX_DEPTH


def _bytes_within(content: bytes | str, source: str, max_bytes: int) -> bytes:
    try:
        # A slice that msgspec left encoded (Raw) is only a buffer. Bytes are not copied.
        data = content.encode() if isinstance(content, str) else bytes(content)
    except UnicodeError as error:
        raise Undecodable(source, "it is not text (UTF-8)") from error
    if len(data) > max_bytes:
        raise Undecodable(source, f"it has {len(data)} bytes, the limit is {max_bytes}")
    return data


# Message packs.


def decode_msgpack(content: bytes, source: str, shape: type[T]) -> T:
    """`content`, bounded by its caller, as `shape`. Raises Undecodable, which names `source`."""
    try:
        return msgspec.msgpack.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Undecodable(source, str(error)) from error


# TOML.


def decode_toml(content: bytes | str, source: str, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The table in `content`. Raises Undecodable, which names `source`, for anything else."""
    import tomllib

    data = _bytes_within(content, source, max_bytes)
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise Undecodable(source, str(error)) from error


# YAML.


def decode_yaml(content: bytes | str, source: str, *, max_bytes: int = MAX_BYTES) -> list[Any]:
    """The documents in `content`. Raises Undecodable, which names `source` and mostly the line."""
    import yaml

    from rackloom.runtime.yaml_events import YamlReader

    data = _bytes_within(content, source, max_bytes)
    try:
        return list(YamlReader(source).documents(data.decode()))
    except (yaml.YAMLError, ValueError, Refused) as error:
        raise Undecodable(source, str(error)) from error


def decode_yaml_document(content: bytes | str, source: str) -> Any:
    """The only document in `content`, None if it is empty. Raises Undecodable as `decode_yaml`."""
    documents = decode_yaml(content, source)
    if len(documents) > 1:
        raise Undecodable(source, f"it has {len(documents)} documents instead of one")
    return documents[0] if documents else None


# A line to show.


def clean_line(text: str, most: int) -> str:
    """Untrusted text as one line of at most `most` characters, without control characters."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * most])
    line = " ".join(shown.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."
