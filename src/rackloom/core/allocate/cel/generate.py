"""The fast path: a simple selector compiled to one Python expression over a device view.

It covers what cannot go wrong on a well-formed device: comparisons of fields, and calls without
iteration, whose cost the static estimate bounds. Generated code either gives the answer of the exact
evaluator or raises, and then the exact evaluator decides. Errors, their absorption and their texts
therefore have one implementation.

Comparisons with a literal check the class of the other side first: Python compares bool, int, float and
str as CEL does only when both sides have the same class. Names and literals reach the generated source
through `repr` or as bound values, so no text of the expression is executed.
"""

from collections.abc import Callable
from typing import Any

from rackloom.core.allocate.cel import check, types
from rackloom.core.allocate.cel.check import CheckedExpression
from rackloom.core.allocate.cel.environment import DeviceView
from rackloom.core.allocate.cel.errors import EvaluationError
from rackloom.core.allocate.cel.syntax import Call, CelNode, Const, Ident, Select
from rackloom.core.allocate.cel.types import dispatch
from rackloom.core.allocate.cel.values import equal, same_value

FastFunction = Callable[[DeviceView], bool]

_COMPARED = (bool, int, float, str)
"""Classes that Python compares as CEL does when both sides are of one of them."""
_ORDERS = {"_<_": "<", "_<=_": "<=", "_>_": ">", "_>=_": ">="}
_PURE_LITERALS = ("quantity", "semver", "ip", "cidr", "duration", "timestamp")


class NotCompilable(Exception):
    """The expression, or the device at hand, needs the exact evaluator."""


def fast_path(checked: CheckedExpression) -> FastFunction | None:
    """The generated function, or None if the expression is not simple."""
    writer = _PythonWriter(checked)
    try:
        body = writer.truth(checked.root)
    except (NotCompilable, EvaluationError):
        return None
    source = f"def fast(view):\n    a = view.attributes\n    c = view.capacity\n    return {body}\n"
    exec(compile(source, "<selector>", "exec"), writer.names)  # noqa: S102 - only code written below
    return writer.names["fast"]  # type: ignore[no-any-return]


def _raise_not_compilable(value: Any) -> Any:
    raise NotCompilable(value)


class _PythonWriter:
    """Writes nodes as Python expressions; `names` are the values that they refer to."""

    def __init__(self, checked: CheckedExpression) -> None:
        self.checked = checked
        self.names: dict[str, Any] = {
            "unsuited": _raise_not_compilable,
            "equal": equal,
            "same": same_value,
            "dispatch": dispatch,
        }
        self.temporaries = 0

    def name(self, value: Any) -> str:
        chosen = f"k{len(self.names)}"
        self.names[chosen] = value
        return chosen

    def temporary(self) -> str:
        self.temporaries += 1
        return f"t{self.temporaries}"

    def constant(self, node: CelNode) -> Any:
        """The value of a node that no device changes, or UNKNOWN."""
        value = check.constant_value(node, self.checked)
        if value is check.NOT_CONSTANT and isinstance(node, Call) and node.function in _PURE_LITERALS:
            args = tuple(map(self.constant, node.operands))
            if check.NOT_CONSTANT not in args:
                return dispatch(self.checked.overloads[node.id], args)
        return value

    def truth(self, node: CelNode) -> str:
        """A node as a bool; what is only dynamically one is tested."""
        code = self.value(node)
        if self.checked.types[node.id] == types.BOOL:
            return code
        temporary = self.temporary()
        return f"({temporary} if ({temporary} := {code}).__class__ is bool else unsuited({temporary}))"

    def value(self, node: CelNode) -> str:
        known = self.constant(node)
        if known is not check.NOT_CONSTANT:
            return self.literal(known)
        match node:
            case Select():
                return self.presence(node) if node.test_only else self.path(node)
            case Call():
                return self.call(node)
        raise NotCompilable

    def literal(self, value: Any) -> str:
        return repr(value) if type(value) in (bool, int, str) else self.name(value)

    def path(self, node: CelNode) -> str:
        """`device.attributes["d"].x` and its like, with names known beforehand."""
        match node:
            case Select(operand=Ident(name="device"), field="attributes"):
                return "a"
            case Select(operand=Ident(name="device"), field="capacity"):
                return "c"
            case Select(operand=Ident(name="device")):
                return f"view.variable[{node.field!r}]"
            case Select(operand=operand, field=key, test_only=False):
                return f"{self.container(operand)}[{key!r}]"
            case Call(function="_[_]", args=(operand, Const(value=str(key)))):
                return f"{self.container(operand)}[{key!r}]"
        raise NotCompilable

    def container(self, node: CelNode) -> str:
        """A path that leads to a map, whatever the device."""
        if self.checked.types[node.id].kind != "map":
            raise NotCompilable
        return self.path(node)

    def presence(self, node: Select) -> str:
        container = self.container(node.operand)
        if container in "ac":
            raise NotCompilable
        return f"({node.field!r} in {container})"

    def call(self, node: Call) -> str:
        match node.function, node.operands:
            case "_&&_", (first, second):
                return f"({self.truth(first)} and {self.truth(second)})"
            case "_||_", (first, second):
                return f"({self.truth(first)} or {self.truth(second)})"
            case "!_", (first,):
                return f"(not {self.truth(first)})"
            case "_?_:_", (condition, first, second):
                return f"({self.value(first)} if {self.truth(condition)} else {self.value(second)})"
            case "_[_]", _:
                return self.path(node)
            case "_==_", (first, second):
                return self.compared(first, second, "==", "equal({}, {})")
            case "_!=_", (first, second):
                return self.compared(first, second, "!=", "(not same({}, {}))")
            case "@in", (first, second):
                return self.membership(first, second)
            case "orValue", (Call(function="_?._" | "_[?_]", args=(operand, Const(value=str(key)))), other):
                return self.or_value(operand, key, other)
        return self.dispatched(node)

    def dispatched(self, node: Call) -> str:
        overloads = self.name(self.checked.overloads[node.id])
        args = "".join(f"{self.value(arg)}, " for arg in node.operands)
        general = f"dispatch({overloads}, ({args}))"
        if node.function in _ORDERS:
            first, second = node.operands
            return self.compared(
                first, second, _ORDERS[node.function], f"dispatch({overloads}, ({{}}, {{}}))"
            )
        return general

    def compared(self, first: CelNode, second: CelNode, operator: str, general: str) -> str:
        """Compare directly where one side is a literal and the other turns out to be of its class."""
        for position, side in enumerate((first, second)):
            known = self.constant(side)
            if type(known) in _COMPARED:
                kind, other = type(known).__name__, self.value((second, first)[position])
                temporary, literal = self.temporary(), self.literal(known)
                pair = (literal, temporary) if position == 0 else (temporary, literal)
                direct = f"({pair[0]} {operator} {pair[1]})"
                return (
                    f"({direct} if ({temporary} := {other}).__class__ is {kind} else {general.format(*pair)})"
                )
        return general.format(self.value(first), self.value(second))

    def membership(self, item: CelNode, container: CelNode) -> str:
        known = self.constant(container)
        if known is check.NOT_CONSTANT:
            key = self.constant(item)
            if not isinstance(key, str) or self.checked.types[container.id].kind != "map":
                raise NotCompilable
            return f"({key!r} in {self.path(container)})"
        kinds = {type(item) for item in known} if isinstance(known, list) else set()
        if len(kinds) != 1 or not kinds <= {str, int}:
            raise NotCompilable
        temporary = self.temporary()
        return (
            f"({temporary} in {self.name(frozenset(known))} if ({temporary} := {self.value(item)}).__class__"
            f" is {kinds.pop().__name__} else unsuited({temporary}))"
        )

    def or_value(self, operand: CelNode, key: str, other: CelNode) -> str:
        container = self.container(operand)
        if container in "ac" or self.constant(other) is check.NOT_CONSTANT:
            raise NotCompilable
        return f"{container}.get({key!r}, {self.value(other)})"
