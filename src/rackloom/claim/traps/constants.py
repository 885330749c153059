"""Whether a selector depends on the device at all.

Of an expression that only compares attributes with literals, the truth can depend on nothing but how each
attribute stands to each literal: equal, just below, just above, other, or absent. All of these are tried.
Expressions with other functions are left alone: there is no telling which values matter.
"""

from collections.abc import Iterator
from itertools import islice, product

from rackloom.claim.allocate import cel
from rackloom.claim.allocate.cel.nodes import Call, Const, Fold, Node, children
from rackloom.claim.allocate.cel.parse import parse
from rackloom.claim.allocate.cel.reads import Read

_COMPARING = frozenset(
    {"_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_", "_&&_", "_||_", "!_", "@in", "_[_]", "_?._", "_[?_]"}
    | {"orValue", "hasValue", "-_"}
)
_MOST = 4096
"""Combinations that are tried; of expressions with more, nothing is said."""

Value = str | int | bool | None


def constant(program: cel.Program) -> bool | None:
    """The only truth value that a selector can have, errors aside; None where it has both or is unclear."""
    root = parse(program.expression).root
    if not _plain(root) or any(kind not in ("driver", "attribute") for kind, _, _ in program.reads):
        return None
    reads = sorted(program.reads, key=str)
    if any(kind == "attribute" and (domain is None or name is None) for kind, domain, name in reads):
        return None
    # True and 1 are equal in Python and not in CEL.
    values = tuple({(type(value), value): value for value in _values(root)}.values())
    combinations = list(islice(product(*(_choices(read, values) for read in reads)), _MOST + 1))
    if len(combinations) > _MOST:
        return None
    seen = {_truth(program, dict(zip(reads, one, strict=True))) for one in combinations} - {None}
    return seen.pop() if len(seen) == 1 else None


def literals(expression: str) -> Iterator[Value]:
    """The literals of an expression that compiles, keys of attributes included."""
    yield from (node.value for node in _nodes(parse(expression).root) if isinstance(node, Const))


def _plain(root: Node) -> bool:
    return all(
        not isinstance(node, Fold) and (not isinstance(node, Call) or node.function in _COMPARING)
        for node in _nodes(root)
    )


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from _nodes(child)


def _values(root: Node) -> Iterator[Value]:
    yield from (None, True, False, "", 0)
    for node in _nodes(root):
        value = node.value if isinstance(node, Const) else None
        if isinstance(value, str):
            yield from (value, f"{value}0")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield from (value - 1, value, value + 1)


def _choices(read: Read, values: tuple[Value, ...]) -> tuple[Value, ...]:
    if read[0] == "driver":
        return tuple(value for value in values if isinstance(value, str))
    return values


def _truth(program: cel.Program, of: dict[Read, Value]) -> bool | None:
    attributes = {
        f"{domain}/{name}": _wrapped(value)
        for (kind, domain, name), value in of.items()
        if kind == "attribute" and value is not None
    }
    driver = next((str(value) for (kind, _, _), value in of.items() if kind == "driver"), "")
    try:
        return program.matches(cel.DeviceView.of(driver, attributes, {}))
    except cel.EvaluationError:
        return None


def _wrapped(value: Value) -> dict[str, object]:
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "string"
    return {kind: value}
