"""The syntax tree of an expression, and the macros that are expanded on it.

Every node has an id under which positions, types and overloads are filed. All macros over lists and
maps end up as one kind of node, `Fold` (a comprehension): a range, an accumulator, a condition, a step
and a result. `cel.bind` is a `Fold` that does not iterate.

The parser leaves two-variable comprehensions (`all`, `exists`, `existsOne`, `transformList`,
`transformMap`, `transformMapEntry`) and `sortBy` as plain calls. `expand_macros` replaces them from the
leaves up. Each argument is already one node, so no text is rewritten. New nodes take the position of
their macro.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.cel.errors import CompileError

# The tree.


class Const(msgspec.Struct, frozen=True):
    """A literal."""

    id: int
    value: Any


class Ident(msgspec.Struct, frozen=True):
    """A variable or type name."""

    id: int
    name: str


class Select(msgspec.Struct, frozen=True):
    """`operand.field`, or with `test_only` the presence test `has(operand.field)`."""

    id: int
    operand: "CelNode"
    field: str
    test_only: bool = False


class Call(msgspec.Struct, frozen=True):
    """A function or operator. `target` is the node before the dot, if there is one."""

    id: int
    target: "CelNode | None"
    function: str
    args: tuple["CelNode", ...]

    @property
    def operands(self) -> tuple["CelNode", ...]:
        """Target, if any, and arguments."""
        return self.args if self.target is None else (self.target, *self.args)


class ListNode(msgspec.Struct, frozen=True):
    """`[a, ?b]`. `optional` holds the indices marked with a question mark."""

    id: int
    elements: tuple["CelNode", ...]
    optional: frozenset[int] = frozenset()


class MapEntry(msgspec.Struct, frozen=True):
    """One `key: value` of a map literal."""

    id: int
    key: "CelNode"
    value: "CelNode"
    optional: bool = False


class MapNode(msgspec.Struct, frozen=True):
    """`{key: value}`."""

    id: int
    entries: tuple[MapEntry, ...]


class MessageField(msgspec.Struct, frozen=True):
    """One `name: value` of a message."""

    id: int
    name: str
    value: "CelNode"
    optional: bool = False


class MessageNode(msgspec.Struct, frozen=True):
    """`type.name{field: value}`. The checker makes it a call of the message's builder."""

    id: int
    type_name: str
    fields: tuple[MessageField, ...]


class Fold(msgspec.Struct, frozen=True):
    """A comprehension: every macro over lists and maps ends up as one."""

    id: int
    iter_var: str
    iter_var2: str
    iter_range: "CelNode"
    accu_var: str
    accu_init: "CelNode"
    condition: "CelNode"
    step: "CelNode"
    result: "CelNode"

    @property
    def is_bind(self) -> bool:
        """Whether this only names a value: no iteration, the condition is false."""
        return (
            isinstance(self.iter_range, ListNode)
            and not self.iter_range.elements
            and isinstance(self.condition, Const)
            and self.condition.value is False
            and self.accu_var != RESULT
        )


CelNode = Const | Ident | Select | Call | ListNode | MapNode | MessageNode | Fold


def children(node: CelNode) -> tuple[CelNode, ...]:
    """The parts of a node, in order."""
    match node:
        case Select():
            return (node.operand,)
        case Call():
            return node.operands
        case ListNode():
            return node.elements
        case MapNode():
            return tuple(part for entry in node.entries for part in (entry.key, entry.value))
        case MessageNode():
            return tuple(field.value for field in node.fields)
        case Fold():
            return node.iter_range, node.accu_init, node.condition, node.step, node.result
    return ()


def with_children(node: CelNode, parts: Iterable[CelNode]) -> CelNode:
    """The node with other parts, in the order of `children`."""
    new = iter(parts)
    match node:
        case Select():
            return replace(node, operand=next(new))
        case Call():
            target = None if node.target is None else next(new)
            return replace(node, target=target, args=tuple(new))
        case ListNode():
            return replace(node, elements=tuple(new))
        case MapNode():
            entries = (replace(entry, key=next(new), value=next(new)) for entry in node.entries)
            return replace(node, entries=tuple(entries))
        case MessageNode():
            return replace(node, fields=tuple(replace(field, value=next(new)) for field in node.fields))
        case Fold():
            names = ("iter_range", "accu_init", "condition", "step", "result")
            return replace(node, **dict(zip(names, new, strict=True)))
    return node


RESULT = "@result"
"""The accumulator of a comprehension."""


class ParsedExpression(msgspec.Struct, frozen=True):
    """A parsed expression: its root, and the start of each node as an offset in characters."""

    source: str
    root: CelNode
    read_positions: Callable[[], dict[int, int]]
    """Gives the same positions each time. Only macros and messages need them."""

    @property
    def positions(self) -> dict[int, int]:
        """The offset at which each node begins."""
        return self.read_positions()

    def place(self, node_id: int) -> tuple[int, int]:
        """Line and column, from 1."""
        before = self.source[: self.positions.get(node_id, 0)]
        return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


# Macro expansion.


MAP_INSERT = "cel.@mapInsert"
SORT_BY_KEYS = "@sortByAssociatedKeys"
_SORT_INPUT = "@__sortBy_input__"


def expand_macros(parsed: ParsedExpression) -> ParsedExpression:
    """The same expression with every remaining macro call replaced by the fold it stands for."""
    if not any(name in parsed.source for name in _MACRO_NAMES):
        return parsed
    expander = _MacroExpander(parsed)
    return replace(parsed, root=expander.node(parsed.root))


class _MacroExpander:
    """Walks the tree from the leaves up. New nodes have the position of their macro."""

    def __init__(self, parsed: ParsedExpression) -> None:
        self.parsed = parsed
        self.ids: Iterator[int] = itertools.count(max(parsed.positions, default=0) + 1)

    def node(self, node: CelNode) -> CelNode:
        expanded = with_children(node, map(self.node, children(node)))
        if not isinstance(expanded, Call) or expanded.target is None:
            return expanded
        builder = _MACROS.get((expanded.function, len(expanded.args)))
        return expanded if builder is None else builder(_MacroCall(self, expanded, expanded.target))


class _MacroCall:
    """One macro call under expansion."""

    def __init__(self, expander: _MacroExpander, call: Call, target: CelNode) -> None:
        self.expander = expander
        self.call = call
        self.target = target

    def new(self) -> int:
        fresh = next(self.expander.ids)
        self.expander.parsed.positions[fresh] = self.expander.parsed.positions.get(self.call.id, 0)
        return fresh

    def apply(self, function: str, *args: CelNode) -> Call:
        return Call(self.new(), None, function, args)

    def accumulator(self) -> Ident:
        return Ident(self.new(), RESULT)

    def const(self, value: bool | int) -> Const:
        return Const(self.new(), value)

    def fail(self, node: CelNode, message: str) -> CompileError:
        line, column = self.expander.parsed.place(node.id)
        return CompileError(message, line=line, column=column, source=self.expander.parsed.source)

    def variable(self, node: CelNode) -> str:
        if not isinstance(node, Ident):
            raise self.fail(node, f"{self.call.function}() variable name must be a simple identifier")
        if node.name in (RESULT, "__result__"):
            raise self.fail(node, f"{self.call.function}() variable name cannot be {node.name}")
        return node.name

    def fold(self, init: CelNode, condition: CelNode, step: CelNode, result: CelNode | None = None) -> Fold:
        first, second = self.variable(self.call.args[0]), self.variable(self.call.args[1])
        if first == second:
            raise self.fail(self.call.args[1], f"duplicate variable name: {first}")
        end = result or self.accumulator()
        return Fold(self.call.id, first, second, self.target, RESULT, init, condition, step, end)

    def all(self) -> CelNode:
        running = self.apply("@not_strictly_false", self.accumulator())
        step = self.apply("_&&_", self.accumulator(), self.call.args[2])
        return self.fold(self.const(True), running, step)

    def exists(self) -> CelNode:
        running = self.apply("@not_strictly_false", self.apply("!_", self.accumulator()))
        step = self.apply("_||_", self.accumulator(), self.call.args[2])
        return self.fold(self.const(False), running, step)

    def exists_one(self) -> CelNode:
        more = self.apply("_+_", self.accumulator(), self.const(1))
        step = self.apply("_?_:_", self.call.args[2], more, self.accumulator())
        result = self.apply("_==_", self.accumulator(), self.const(1))
        return self.fold(self.const(0), self.const(True), step, result)

    def filtered(self, init: CelNode, step: CelNode) -> CelNode:
        """A fold that keeps every entry, or with four arguments those that the third lets through."""
        if len(self.call.args) == 4:
            step = self.apply("_?_:_", self.call.args[2], step, self.accumulator())
        return self.fold(init, self.const(True), step)

    def transform_list(self) -> CelNode:
        item = ListNode(self.new(), (self.call.args[-1],))
        return self.filtered(ListNode(self.new(), ()), self.apply("_+_", self.accumulator(), item))

    def transform_map(self) -> CelNode:
        key = Ident(self.new(), self.variable(self.call.args[0]))
        insert = self.apply(MAP_INSERT, self.accumulator(), key, self.call.args[-1])
        return self.filtered(MapNode(self.new(), ()), insert)

    def transform_map_entry(self) -> CelNode:
        insert = self.apply(MAP_INSERT, self.accumulator(), self.call.args[-1])
        return self.filtered(MapNode(self.new(), ()), insert)

    def sort_by(self) -> CelNode:
        """`l.sortBy(x, key)`: name the list, map it to its keys, sort it by them."""
        name, key = self.variable(self.call.args[0]), self.call.args[1]
        if isinstance(self.target, Const | MapNode):
            raise self.fail(self.target, "sortBy can only be applied to a list")
        keys = Fold(
            self.new(),
            name,
            "",
            Ident(self.new(), _SORT_INPUT),
            RESULT,
            ListNode(self.new(), ()),
            self.const(True),
            self.apply("_+_", self.accumulator(), ListNode(self.new(), (key,))),
            self.accumulator(),
        )
        ordered = Call(self.new(), Ident(self.new(), _SORT_INPUT), SORT_BY_KEYS, (keys,))
        return Fold(
            self.call.id,
            "#unused",
            "",
            ListNode(self.new(), ()),
            _SORT_INPUT,
            self.target,
            self.const(False),
            Ident(self.new(), _SORT_INPUT),
            ordered,
        )


_MACROS: dict[tuple[str, int], Callable[[_MacroCall], CelNode]] = {
    ("sortBy", 2): _MacroCall.sort_by,
    ("all", 3): _MacroCall.all,
    ("exists", 3): _MacroCall.exists,
    ("existsOne", 3): _MacroCall.exists_one,
    ("exists_one", 3): _MacroCall.exists_one,
    ("transformList", 3): _MacroCall.transform_list,
    ("transformList", 4): _MacroCall.transform_list,
    ("transformMap", 3): _MacroCall.transform_map,
    ("transformMap", 4): _MacroCall.transform_map,
    ("transformMapEntry", 3): _MacroCall.transform_map_entry,
    ("transformMapEntry", 4): _MacroCall.transform_map_entry,
}
_MACRO_NAMES = sorted({name for name, _ in _MACROS})
