"""From text to syntax tree: Google's CEL parser reads the text, and this module decodes its result.

The parser (cel-expr-python) hands out a serialised `cel.expr.ParsedExpr`. Its protobuf wire form is
decoded here by field number, without generated code. Macros that the parser does not know arrive as
plain calls and are expanded afterwards.

Three things are refused that the parser would take or report in other words: expressions over 10 KiB
(the API's limit), names in backticks, which Kubernetes does not know, and double literals that
overflow. Syntax errors keep the parser's line and column.
"""

import functools
import math
import re
import struct
from collections.abc import Callable
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_bindings, ext_optional

from rackloom.core.allocate.cel.errors import CompileError
from rackloom.core.allocate.cel.syntax import (
    Call,
    CelNode,
    Const,
    Fold,
    Ident,
    ListNode,
    MapEntry,
    MapNode,
    MessageField,
    MessageNode,
    ParsedExpression,
    Select,
    expand_macros,
)
from rackloom.core.allocate.cel.values import Uint

MAX_LENGTH = 10 * 1024
"""Bytes of an expression that the API accepts."""

_DEPTH_HINT = (
    "the parser reads 32 levels of parentheses, chained calls or sums; split it into several selectors"
)
_FIRST_ERROR = re.compile(r"ERROR: <input>:(\d+):(\d+): (.*)")

_TOKEN = re.compile(
    r"""//[^\n]*|[bB]?[rR][bB]?(\"\"\"|\'\'\'|"|').*?\1|(\"\"\"|\'\'\'|"|')(?:\\.|.)*?\2|(?P<tick>`)""",
    re.DOTALL,
)
"""A backtick, or a token that may hide one: a comment, a raw string, a string."""

Wire = dict[int, list[Any]]


def parse_expression(source: str) -> ParsedExpression:
    """The syntax tree with all macros expanded. Raises CompileError."""
    if len(source.encode()) > MAX_LENGTH:
        raise CompileError(
            f"the expression is longer than {MAX_LENGTH} bytes", hint="split it into several selectors"
        )
    _refuse_escaped_names(source)
    try:
        serialised: bytes = _parser().compile(source, disable_check=True).serialize()
    except RuntimeError as error:
        raise _syntax_error(str(error), source) from None
    # The message holds the expression in field 2. Of that, field 2 is the root and field 3 has the positions.
    parsed = _fields(_fields(serialised)[2][0])
    positions = functools.cache(lambda: dict(map(_position, _fields(parsed[3][0]).get(4, ()))))
    return expand_macros(ParsedExpression(source, _node(parsed[2][0]), positions))


def _refuse_escaped_names(source: str) -> None:
    """Refuse names in backticks: the parser knows them, but Kubernetes does not."""
    tick = next((token for token in _TOKEN.finditer(source) if token["tick"]), None)
    if tick is not None:
        before = source[: tick.start()]
        raise CompileError(
            "unsupported syntax: '`'",
            line=before.count("\n") + 1,
            column=len(before) - before.rfind("\n"),
            hint='write ["name"] for names that are not identifiers',
            source=source,
        )


@functools.cache
def _parser() -> Any:
    return cel.NewEnv(extensions=[ext_bindings.ExtBindings(), ext_optional.ExtOptional()])


def _syntax_error(text: str, source: str) -> CompileError:
    if "recursion depth of" in text or "recursion limit exceeded" in text:
        return CompileError("the expression is nested too deeply", hint=_DEPTH_HINT, source=source)
    found = _FIRST_ERROR.search(text)
    if found is None:
        return CompileError(text, source=source)
    line, column, message = found.groups()
    return CompileError(
        message.removesuffix(" [INVALID_ARGUMENT]"), line=int(line), column=int(column), source=source
    )


def _fields(data: bytes) -> Wire:
    """The values of each field by number: an int for varints, bytes for everything else."""
    fields: Wire = {}
    at, end = 0, len(data)
    value: Any
    while at < end:
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = _varint(data, at - 1)
        if tag & 7 == 1:
            value = data[at : at + 8]
            at += 8
        else:
            value = data[at]
            at += 1
            if value > 0x7F:
                value, at = _varint(data, at - 1)
            if tag & 7:
                start, at = at, at + value
                value = data[start:at]
        known = fields.get(tag >> 3)
        if known is None:
            fields[tag >> 3] = [value]
        else:
            known.append(value)
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _position(entry: bytes) -> tuple[int, int]:
    fields = _fields(entry)
    return fields.get(1, [0])[0], fields.get(2, [0])[0]


def _text(fields: Wire, number: int) -> str:
    return bytes(fields.get(number, [b""])[0]).decode()


def _node(data: bytes) -> CelNode:
    """One cel.expr.Expr."""
    fields = _fields(data)
    node_id = fields.get(2, [0])[0]
    for number, decode in _KINDS.items():
        if number in fields:
            return decode(node_id, _fields(fields[number][0]))
    raise CompileError("the expression has an empty part")


def _const(node_id: int, fields: Wire) -> CelNode:
    (number, values), *_ = fields.items()
    decode = _CONSTANTS.get(number)
    return Const(node_id, None if decode is None else decode(values[0]))


def _double(value: bytes) -> float:
    (number,) = struct.unpack("<d", value)
    if math.isinf(number):
        raise CompileError("invalid double literal: too large")
    return float(number)


_CONSTANTS: dict[int, Callable[[Any], Any]] = {
    2: bool,
    3: _signed,
    4: Uint,
    5: _double,
    6: bytes.decode,
    7: bytes,
}
"""The alternatives of cel.expr.Constant by field number, without null."""


def _ident(node_id: int, fields: Wire) -> CelNode:
    return Ident(node_id, _text(fields, 1))


def _select(node_id: int, fields: Wire) -> CelNode:
    return Select(node_id, _node(fields[1][0]), _text(fields, 2), bool(fields.get(3, [0])[0]))


def _call(node_id: int, fields: Wire) -> CelNode:
    target = _node(fields[1][0]) if 1 in fields else None
    return Call(node_id, target, _text(fields, 2), tuple(map(_node, fields.get(3, ()))))


def _list(node_id: int, fields: Wire) -> CelNode:
    optional: set[int] = set()
    for packed in fields.get(2, ()):
        at = 0
        while at < len(packed):
            index, at = _varint(packed, at)
            optional.add(index)
    return ListNode(node_id, tuple(map(_node, fields.get(1, ()))), frozenset(optional))


def _struct(node_id: int, fields: Wire) -> CelNode:
    name = _text(fields, 1)
    entries = fields.get(2, ())
    # Messages and maps share one form: an entry of a message has a name (2), one of a map a key (3).
    members: list[MessageField] = []
    pairs: list[MapEntry] = []
    for entry in map(_fields, entries):
        entry_id, optional = entry.get(1, [0])[0], bool(entry.get(5, [0])[0])
        if name:
            members.append(MessageField(entry_id, _text(entry, 2), _node(entry[4][0]), optional))
        else:
            pairs.append(MapEntry(entry_id, _node(entry[3][0]), _node(entry[4][0]), optional))
    return MessageNode(node_id, name, tuple(members)) if name else MapNode(node_id, tuple(pairs))


def _fold(node_id: int, fields: Wire) -> CelNode:
    iter_range, accu_init, condition, step, result = (_node(fields[number][0]) for number in (2, 4, 5, 6, 7))
    names = (_text(fields, 1), _text(fields, 8))
    return Fold(node_id, *names, iter_range, _text(fields, 3), accu_init, condition, step, result)


_KINDS = {3: _const, 4: _ident, 5: _select, 6: _call, 7: _list, 8: _struct, 9: _fold}
"""Expr's alternatives by field number."""
