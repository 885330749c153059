"""What upstream refuses in a well-typed expression: literals that can never work, and mixed collections."""

from collections.abc import Iterator

from rackloom.claim.allocate.cel import constants
from rackloom.claim.allocate.cel import types as t
from rackloom.claim.allocate.cel.check import Checked
from rackloom.claim.allocate.cel.errors import CompileError, EvaluationError
from rackloom.claim.allocate.cel.library.formatting import CLAUSE, VERB_TYPES, not_formattable, verb_of
from rackloom.claim.allocate.cel.library.patterns import regex
from rackloom.claim.allocate.cel.library.times import parse_duration, parse_timestamp
from rackloom.claim.allocate.cel.nodes import Call, Const, ListNode, MapNode, Node, children
from rackloom.claim.allocate.cel.types import Type

_PATTERN_FUNCTIONS = ("matches", "find", "findAll")
_LITERALS = {"duration": parse_duration, "timestamp": parse_timestamp}


def validate(checked: Checked) -> None:
    """Raise CompileError for the first part that upstream would refuse."""
    for node, formatted in _walk(checked.root):
        try:
            match node:
                case Call():
                    _call(node, checked)
                case ListNode() if not formatted:
                    _homogeneous(checked, _unwrapped_items(node))
                case MapNode() if not formatted:
                    _homogeneous(checked, [(entry.key, False) for entry in node.entries])
                    _homogeneous(checked, [(entry.value, entry.optional) for entry in node.entries])
        except EvaluationError as error:
            raise _refused(checked, node, error.message) from None


def _walk(node: Node, formatted: bool = False) -> Iterator[tuple[Node, bool]]:
    """The node and everything below it, and whether that is an argument of format, where types may mix."""
    yield node, formatted
    formatted = formatted or (isinstance(node, Call) and node.function == "format")
    for child in children(node):
        yield from _walk(child, formatted)


def _refused(checked: Checked, node: Node, message: str) -> CompileError:
    line, column = checked.parsed.place(node.id)
    return CompileError(message, line=line, column=column, source=checked.parsed.source)


def _call(call: Call, checked: Checked) -> None:
    operands = call.operands
    if call.function in _PATTERN_FUNCTIONS and len(operands) > 1:
        pattern = constants.value_of(operands[1], checked)
        if isinstance(pattern, str):
            regex(pattern)
    if call.function in _LITERALS and isinstance(operands[0], Const):
        _time_literal(call.function, operands[0].value)
    if call.function == "format" and isinstance(call.target, Const) and isinstance(call.args[0], ListNode):
        _format(str(call.target.value), call.args[0], checked)


def _time_literal(function: str, value: object) -> None:
    """Timestamps may also be seconds; upstream refuses a number as duration, though it has the overload."""
    if isinstance(value, str):
        _LITERALS[function](value)
    elif function == "duration":
        raise EvaluationError("invalid duration argument")


def _format(template: str, args: ListNode, checked: Checked) -> None:
    """Every clause has an argument that it can show, and every argument a clause."""
    used = 0
    for clause in CLAUSE.finditer(template):
        if clause[1]:
            continue
        verb = verb_of(clause, used, len(args.elements))
        if (wrong := _unshowable(verb, args.elements[used], checked)) is not None:
            raise not_formattable(verb, checked.types[wrong.id].name)
        used += 1
    if used < len(args.elements):
        raise EvaluationError(
            f"too many arguments supplied to string.format (expected {used}, got {len(args.elements)})"
        )


def _unshowable(verb: str, node: Node, checked: Checked) -> Node | None:
    """The first part of an argument whose static type the verb does not take."""
    type_ = checked.types[node.id]
    if type_ != t.DYN and type_.name not in VERB_TYPES[verb]:
        return node
    if isinstance(node, ListNode | MapNode):
        return next(
            (one for part in children(node) if (one := _unshowable("s", part, checked)) is not None), None
        )
    return None


def _unwrapped_items(node: ListNode) -> list[tuple[Node, bool]]:
    return [(item, position in node.optional) for position, item in enumerate(node.elements)]


def _homogeneous(checked: Checked, items: list[tuple[Node, bool]]) -> None:
    """All items have one type; dyn is a type of its own here."""
    wanted: Type | None = None
    for node, optional in items:
        found = t.unwrapped(checked.types[node.id]) if optional else checked.types[node.id]
        if wanted is not None and found != wanted:
            raise _refused(checked, node, f"expected type '{wanted}' but found '{found}'")
        wanted = found
