"""What is known of an expression before any device: literals, lists and maps of them, converted literals.

Upstream folds the same things when it builds a program, which decides two visible facts: such parts cost
nothing at run time, and a conversion that must fail is refused at once.
"""

from typing import Any

from rackloom.claim.allocate.cel.check import Checked
from rackloom.claim.allocate.cel.nodes import Call, Const, Ident, ListNode, MapNode, Node
from rackloom.claim.allocate.cel.overloads import dispatch
from rackloom.claim.allocate.cel.values import TypeName, Uint, key_of

UNKNOWN = object()
"""The value of everything that depends on the device."""

_CONVERSIONS = frozenset(
    ("bool", "bytes", "double", "duration", "dyn", "int", "string", "timestamp", "type", "uint")
)
_PRIMITIVES = (bool, int, Uint, float, str)


def value_of(node: Node, checked: Checked) -> Any:
    """The constant value of `node`, or UNKNOWN. Raises EvaluationError for a conversion that fails."""
    match node:
        case Const():
            return node.value
        case Ident() if node.id in checked.constants:
            return TypeName(checked.types[node.id].params[0].name)
        case ListNode():
            return _list(node, checked)
        case MapNode():
            return _map(node, checked)
        case Call(target=None, args=(arg,)) if node.function in _CONVERSIONS:
            value = value_of(arg, checked)
            return UNKNOWN if value is UNKNOWN else dispatch(checked.overloads[node.id], (value,))
    return UNKNOWN


def is_primitive(value: Any) -> bool:
    """Whether upstream would put the value in a membership set."""
    return type(value) in _PRIMITIVES


def same_primitive(value: Any, member: Any) -> bool:
    """Membership in such a set: by type and value, and across numeric types where no digit is lost."""
    if type(value) is bool or type(member) is bool:
        return value is member
    return is_primitive(value) and bool(value == member)


def _list(node: ListNode, checked: Checked) -> Any:
    values = [value_of(item, checked) for item in node.elements]
    if node.optional or any(value is UNKNOWN for value in values):
        return UNKNOWN
    return values


def _map(node: MapNode, checked: Checked) -> Any:
    built: dict[Any, Any] = {}
    for entry in node.entries:
        key, value = value_of(entry.key, checked), value_of(entry.value, checked)
        if entry.optional or key is UNKNOWN or value is UNKNOWN:
            return UNKNOWN
        built[key_of(key)] = value
    return built
