"""The syntax tree of an expression. Every node has the id under which types and positions are filed."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Const:
    """A literal."""

    id: int
    value: Any


@dataclass(frozen=True, slots=True)
class Ident:
    """A variable or type name."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class Select:
    """`operand.field`, or with `test_only` the presence test `has(operand.field)`."""

    id: int
    operand: "Node"
    field: str
    test_only: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A function or operator; `target` is what stands before the dot, if anything does."""

    id: int
    target: "Node | None"
    function: str
    args: tuple["Node", ...]

    @property
    def operands(self) -> tuple["Node", ...]:
        """Target, if any, and arguments."""
        return self.args if self.target is None else (self.target, *self.args)


@dataclass(frozen=True, slots=True)
class ListNode:
    """`[a, ?b]`; `optional` holds the indices marked with a question mark."""

    id: int
    elements: tuple["Node", ...]
    optional: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of a map literal."""

    id: int
    key: "Node"
    value: "Node"
    optional: bool = False


@dataclass(frozen=True, slots=True)
class MapNode:
    """`{key: value}`."""

    id: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class StructNode:
    """`type.name{field: value}`; no message type can be built in selectors, so only the name is kept."""

    id: int
    type_name: str


@dataclass(frozen=True, slots=True)
class Fold:
    """A comprehension: every macro over lists and maps ends up as one."""

    id: int
    iter_var: str
    iter_var2: str
    iter_range: "Node"
    accu_var: str
    accu_init: "Node"
    condition: "Node"
    step: "Node"
    result: "Node"

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


Node = Const | Ident | Select | Call | ListNode | MapNode | StructNode | Fold


def children(node: Node) -> tuple[Node, ...]:
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
        case Fold():
            return node.iter_range, node.accu_init, node.condition, node.step, node.result
    return ()


RESULT = "@result"
"""The accumulator of a comprehension."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed expression: its root, and where each node begins as an offset in characters."""

    source: str
    root: Node
    positions: dict[int, int]

    def place(self, node_id: int) -> tuple[int, int]:
        """Line and column, from 1."""
        before = self.source[: self.positions.get(node_id, 0)]
        return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
