"""Macros that the parser leaves as calls: two-variable comprehensions and sortBy.

They are expanded on the tree, where each argument is already one node, so that no text is ever rewritten.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from rackloom.claim.allocate.cel.errors import CompileError
from rackloom.claim.allocate.cel.nodes import (
    RESULT,
    Call,
    Const,
    Entry,
    Fold,
    Ident,
    ListNode,
    MapNode,
    Node,
    Parsed,
    Select,
)

MAP_INSERT = "cel.@mapInsert"
SORT_BY_KEYS = "@sortByAssociatedKeys"
_SORT_INPUT = "@__sortBy_input__"


def expand(parsed: Parsed) -> Parsed:
    """The same expression with every remaining macro call replaced by the fold it stands for."""
    expander = _Expander(parsed)
    return replace(parsed, root=expander.node(parsed.root))


class _Expander:
    """Walks the tree from the leaves up; nodes that it makes are filed at the place of their macro."""

    def __init__(self, parsed: Parsed) -> None:
        self.parsed = parsed
        self.ids: Iterator[int] = itertools.count(max(parsed.positions, default=0) + 1)

    def node(self, node: Node) -> Node:
        match node:
            case Select():
                return replace(node, operand=self.node(node.operand))
            case Call():
                return self.call(node)
            case ListNode():
                return replace(node, elements=tuple(map(self.node, node.elements)))
            case MapNode():
                return replace(node, entries=tuple(map(self.entry, node.entries)))
            case Fold():
                return self.fold(node)
            case _:
                return node

    def entry(self, entry: Entry) -> Entry:
        return replace(entry, key=self.node(entry.key), value=self.node(entry.value))

    def fold(self, fold: Fold) -> Fold:
        return replace(
            fold,
            iter_range=self.node(fold.iter_range),
            accu_init=self.node(fold.accu_init),
            condition=self.node(fold.condition),
            step=self.node(fold.step),
            result=self.node(fold.result),
        )

    def call(self, call: Call) -> Node:
        target = None if call.target is None else self.node(call.target)
        call = replace(call, target=target, args=tuple(map(self.node, call.args)))
        if target is None:
            return call
        if (call.function, len(call.args)) == ("sortBy", 2):
            return _Macro(self, call, target).sort_by()
        builder = _TWO_VARIABLE.get((call.function, len(call.args)))
        return call if builder is None else builder(_Macro(self, call, target))


class _Macro:
    """One macro call under expansion."""

    def __init__(self, expander: _Expander, call: Call, target: Node) -> None:
        self.expander = expander
        self.call = call
        self.target = target

    def new(self) -> int:
        fresh = next(self.expander.ids)
        self.expander.parsed.positions[fresh] = self.expander.parsed.positions.get(self.call.id, 0)
        return fresh

    def apply(self, function: str, *args: Node) -> Call:
        return Call(self.new(), None, function, args)

    def accumulator(self) -> Ident:
        return Ident(self.new(), RESULT)

    def const(self, value: bool | int) -> Const:
        return Const(self.new(), value)

    def fail(self, node: Node, message: str) -> CompileError:
        line, column = self.expander.parsed.place(node.id)
        return CompileError(message, line=line, column=column, source=self.expander.parsed.source)

    def variable(self, node: Node) -> str:
        if not isinstance(node, Ident):
            raise self.fail(node, f"{self.call.function}() variable name must be a simple identifier")
        if node.name in (RESULT, "__result__"):
            raise self.fail(node, f"{self.call.function}() variable name cannot be {node.name}")
        return node.name

    def fold(self, init: Node, condition: Node, step: Node, result: Node | None = None) -> Fold:
        one, two = self.variable(self.call.args[0]), self.variable(self.call.args[1])
        if one == two:
            raise self.fail(self.call.args[1], f"duplicate variable name: {one}")
        end = result or self.accumulator()
        return Fold(self.call.id, one, two, self.target, RESULT, init, condition, step, end)

    def all(self) -> Node:
        running = self.apply("@not_strictly_false", self.accumulator())
        step = self.apply("_&&_", self.accumulator(), self.call.args[2])
        return self.fold(self.const(True), running, step)

    def exists(self) -> Node:
        running = self.apply("@not_strictly_false", self.apply("!_", self.accumulator()))
        step = self.apply("_||_", self.accumulator(), self.call.args[2])
        return self.fold(self.const(False), running, step)

    def exists_one(self) -> Node:
        more = self.apply("_+_", self.accumulator(), self.const(1))
        step = self.apply("_?_:_", self.call.args[2], more, self.accumulator())
        result = self.apply("_==_", self.accumulator(), self.const(1))
        return self.fold(self.const(0), self.const(True), step, result)

    def filtered(self, init: Node, step: Node) -> Node:
        """A fold that keeps every entry, or with four arguments those that the third lets through."""
        if len(self.call.args) == 4:
            step = self.apply("_?_:_", self.call.args[2], step, self.accumulator())
        return self.fold(init, self.const(True), step)

    def transform_list(self) -> Node:
        item = ListNode(self.new(), (self.call.args[-1],))
        return self.filtered(ListNode(self.new(), ()), self.apply("_+_", self.accumulator(), item))

    def transform_map(self) -> Node:
        key = Ident(self.new(), self.variable(self.call.args[0]))
        insert = self.apply(MAP_INSERT, self.accumulator(), key, self.call.args[-1])
        return self.filtered(MapNode(self.new(), ()), insert)

    def transform_map_entry(self) -> Node:
        insert = self.apply(MAP_INSERT, self.accumulator(), self.call.args[-1])
        return self.filtered(MapNode(self.new(), ()), insert)

    def sort_by(self) -> Node:
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


_TWO_VARIABLE: dict[tuple[str, int], Callable[[_Macro], Node]] = {
    ("all", 3): _Macro.all,
    ("exists", 3): _Macro.exists,
    ("existsOne", 3): _Macro.exists_one,
    ("exists_one", 3): _Macro.exists_one,
    ("transformList", 3): _Macro.transform_list,
    ("transformList", 4): _Macro.transform_list,
    ("transformMap", 3): _Macro.transform_map,
    ("transformMap", 4): _Macro.transform_map,
    ("transformMapEntry", 3): _Macro.transform_map_entry,
    ("transformMapEntry", 4): _Macro.transform_map_entry,
}
