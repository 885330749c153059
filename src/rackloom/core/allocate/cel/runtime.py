"""The parts of exact evaluation: frame, run-time cost, and the steps from which evaluators are built.

An `EvaluationFrame` holds the device, local variables and the cost so far. `charge` raises
`CostExceeded` above the limit of 1,000,000 units (resource.k8s.io CELSelectorExpressionMaxCost).

`call_cost` prices one call by upstream's tables. Most calls cost one unit; string functions grow with
the text, regular expressions with text and pattern, list functions with the elements they visit.

Steps return closures over a frame. An error is a value: `&&` and `||` absorb it when the other side
decides, and `orValue` and `or` evaluate their right side only if needed. `LazyValue` computes the value
of `cel.bind` when it is first read, and at most once. The accumulator of a running fold has no other
reference, so `append_step` grows it in place. Membership in a list of constants costs nothing, because
upstream looks it up in a set that it built beforehand.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rackloom.core.allocate.cel import check
from rackloom.core.allocate.cel.errors import CostExceeded, EvaluationError, no_such_overload
from rackloom.core.allocate.cel.library.networks import CIDR, IP
from rackloom.core.allocate.cel.library.operators import index_container, optional_index
from rackloom.core.allocate.cel.syntax import RESULT, CelNode, Ident
from rackloom.core.allocate.cel.values import (
    NONE,
    TYPE_NAMES,
    OptionalValue,
    SemanticVersion,
    find_entry,
    map_keys,
    type_name,
)

# Run-time cost of calls.


_STRING = 0.1
"""Cost of one character that is walked over."""
_REGEX = 0.25
_LIST_CALL = 11
"""A call that builds a list: one for the call, ten for the list."""
FORMAT_REGEX_SIZE = 128

CallValues = Sequence[Any]


def size_of_value(value: Any) -> int:
    """Length of strings, lists, maps and addresses; one for everything else."""
    if isinstance(value, str | bytes | list | dict):
        return len(value)
    if isinstance(value, IP | CIDR):
        return value.size()
    return 1


def call_cost(function: str, overload: str, args: CallValues, result: Any) -> int:
    """Cost of calling `function` with these values; `overload` is its id, or empty if left to run time."""
    cost = _BY_OVERLOAD.get(overload) or _BY_FUNCTION.get(function)
    return 1 if cost is None else cost(args, result)


def _walk_cost(factor: float, *, of_result: bool = False) -> Callable[[CallValues, Any], int]:
    return lambda args, result: math.ceil(size_of_value(result if of_result else args[0]) * factor)


def _comparison_cost(args: CallValues, result: Any) -> int:
    """Comparison goes as far as the shorter operand."""
    return math.ceil(min(map(_optional_size, args)) * _STRING)


def _optional_size(value: Any) -> int:
    present = isinstance(value, OptionalValue) and value.present
    return size_of_value(value.value if present else value)


_ONE_UNIT_TYPES = {f"kubernetes.{name}" for name in ("Quantity", "Semver", "URL", "NamedFormat")}
_ONE_UNIT_TYPES |= {"net.IP", "net.CIDR"}


def _equality_cost(args: CallValues, result: Any) -> int:
    return 1 if TYPE_NAMES.get(type(args[0])) in _ONE_UNIT_TYPES else _comparison_cost(args, result)


def _concatenation_cost(args: CallValues, result: Any) -> int:
    return math.ceil(sum(map(_optional_size, args)) * _STRING)


def _regex_cost(args: CallValues, result: Any) -> int:
    return math.ceil((1 + size_of_value(args[0])) * _STRING) * math.ceil(size_of_value(args[1]) * _REGEX)


def _tree_cost(value: Any) -> int:
    if isinstance(value, str):
        return int(len(value.encode()) * _STRING)
    if isinstance(value, bytes):
        return int(len(value) * _STRING)
    if isinstance(value, list):
        return sum(map(_tree_cost, value))
    if isinstance(value, dict):
        return sum(_tree_cost(key) + _tree_cost(item) for key, item in value.items())
    return 1


def _contains_ip_cost(args: CallValues, result: Any) -> int:
    return math.ceil(2 * size_of_value(args[0]) * _STRING)


def _with_parsing_cost(contains: Callable[[CallValues, Any], int]) -> Callable[[CallValues, Any], int]:
    """The same with a string to read first; upstream counts that only if the overload is known."""
    return lambda args, result: contains(args, result) + math.ceil(size_of_value(args[1]) * _STRING)


def _contains_cidr_cost(args: CallValues, result: Any) -> int:
    return _contains_ip_cost(args, result) + math.ceil(size_of_value(args[0]) * _STRING) + 1


def _validate_cost(args: CallValues, result: Any) -> int:
    limit = getattr(args[0], "max_regex_size", FORMAT_REGEX_SIZE)
    return math.ceil((1 + size_of_value(args[1])) * _STRING) * math.ceil(limit * _REGEX)


def _list_result_cost(args: CallValues, result: Any) -> int:
    return size_of_value(result) + _LIST_CALL


def _flatten_cost(args: CallValues, result: Any) -> int:
    depth = args[1] if len(args) == 2 and isinstance(args[1], int) else 1
    return int(size_of_value(args[0]) * depth) + _LIST_CALL


def _pairwise_cost(position: int) -> Callable[[CallValues, Any], int]:
    def cost(args: CallValues, result: Any) -> int:
        items = args[position] if isinstance(args[position], list) else []
        factor = 2 + (_STRING if items and isinstance(items[0], str | bytes) else 0)
        return int(len(items) ** 2 * factor) + _LIST_CALL

    return cost


def _product_cost(factor: int) -> Callable[[CallValues, Any], int]:
    return lambda args, result: 1 + size_of_value(args[0]) * size_of_value(args[1]) * factor


_SORTED = ["int", "uint", "double", "bool", "string", "bytes"]
_SORTED += ["google.protobuf.Duration", "google.protobuf.Timestamp"]
_ORDERS = ("less", "less_equals", "greater", "greater_equals")

_BY_OVERLOAD: dict[str, Callable[[CallValues, Any], int]] = {
    **dict.fromkeys(("starts_with_string", "ends_with_string", "string_format"), _walk_cost(_STRING)),
    **dict.fromkeys(("string_to_bytes", "bytes_to_string", "strings_quote"), _walk_cost(_STRING)),
    **{f"{order}_{kind}": _comparison_cost for order in _ORDERS for kind in ("string", "bytes")},
    "in_list": lambda args, result: size_of_value(args[1]),
    **dict.fromkeys(("add_string", "add_bytes"), _concatenation_cost),
    "matches_string": _regex_cost,
    "contains_string": lambda args, result: math.prod(
        math.ceil(size_of_value(arg) * _STRING) for arg in args
    ),
    **dict.fromkeys(("list_slice", "lists_range", "list_reverse"), _list_result_cost),
    **dict.fromkeys(("list_flatten", "list_flatten_int"), _flatten_cost),
    "list_distinct": _pairwise_cost(0),
    "cidr_contains_ip_string": _with_parsing_cost(_contains_ip_cost),
    "cidr_contains_cidr_string": _with_parsing_cost(_contains_cidr_cost),
    "cidr_ip": lambda args, result: 1,
    **{f"list_{kind}_sort": _pairwise_cost(0) for kind in _SORTED},
    **{f"list_{kind}_sortByAssociatedKeys": _pairwise_cost(1) for kind in _SORTED},
    "list_sets_contains_list": _product_cost(1),
    "list_sets_intersects_list": _product_cost(1),
    "list_sets_equivalent_list": _product_cost(2),
}

_BY_FUNCTION: dict[str, Callable[[CallValues, Any], int]] = {
    "_==_": _equality_cost,
    "_!=_": _comparison_cost,
    **dict.fromkeys(
        ("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"), lambda args, result: _tree_cost(args[0])
    ),
    **dict.fromkeys(("url", "lowerAscii", "upperAscii", "substring", "trim"), _walk_cost(_STRING)),
    **dict.fromkeys(("replace", "split", "ip.isCanonical"), _walk_cost(2 * _STRING)),
    "join": _walk_cost(2 * _STRING, of_result=True),
    **dict.fromkeys(("find", "findAll"), _regex_cost),
    **dict.fromkeys(
        ("ip", "cidr", "isIP", "isCIDR", "quantity", "isQuantity", "semver", "isSemver"), _walk_cost(_STRING)
    ),
    "containsIP": _contains_ip_cost,
    "containsCIDR": _contains_cidr_cost,
    "validate": _validate_cost,
}


# Steps of evaluation.


COST_LIMIT = 1_000_000
"""What one evaluation may cost (resource.k8s.io CELSelectorExpressionMaxCost)."""

_UNHASHABLE = (bytes, SemanticVersion)
"""What upstream cannot look up in a set of constants."""


class EvaluationFrame:
    """One evaluation: the device, local variables, and the cost so far."""

    __slots__ = ("cost", "limit", "scope")

    def __init__(self, device: Mapping[str, Any], limit: int) -> None:
        self.cost = 0
        self.limit = limit
        self.scope: dict[str, Any] = {"device": device}

    def charge(self, cost: int) -> None:
        """Add to the cost. Raises CostExceeded above the limit."""
        self.cost += cost
        if self.cost > self.limit:
            raise CostExceeded


class LazyValue:
    """The value of cel.bind: computed when first read, and at most once."""

    __slots__ = ("code", "done", "scope", "value")

    def __init__(self, code: "Evaluator", scope: dict[str, Any]) -> None:
        self.code = code
        self.scope = scope
        self.done = False
        self.value: Any = None

    def read(self, frame: EvaluationFrame) -> Any:
        """The value, or the error that computing it came to."""
        if not self.done:
            inner, frame.scope = frame.scope, self.scope
            self.value = self.code(frame)
            frame.scope = inner
            self.done = True
        return self.value


Evaluator = Callable[[EvaluationFrame], Any]


def read_variable(name: str) -> Evaluator:
    """A variable, or the value that cel.bind gave the name."""
    bare = name.removeprefix(".")

    def run(frame: EvaluationFrame) -> Any:
        value = frame.scope[bare]
        return value.read(frame) if type(value) is LazyValue else value

    return run


def select_step(operand: Evaluator, key: Evaluator, *, optional: bool) -> Evaluator:
    """One step of a path. After an optional step, what is missing is absent and not an error."""

    def run(frame: EvaluationFrame) -> Any:
        container = operand(frame)
        if isinstance(container, EvaluationError):
            return container
        wanted = key(frame)
        if isinstance(wanted, EvaluationError):
            return wanted
        tolerant = optional
        if type(container) is OptionalValue:
            if not container.present:
                return NONE
            container, tolerant = container.value, True
        try:
            found = optional_index(container, wanted) if tolerant else index_container(container, wanted)
        except EvaluationError as error:
            frame.charge(1)
            return error
        if not tolerant or found.present:
            frame.charge(1)
        return found

    return run


def has_field(operand: Evaluator, field: str) -> Evaluator:
    """`has(operand.field)`."""

    def run(frame: EvaluationFrame) -> Any:
        container = operand(frame)
        if isinstance(container, EvaluationError):
            return container
        if type(container) is OptionalValue:
            if not container.present:
                return False
            container = container.value
        if type(container) is list:
            return EvaluationError("unsupported index type 'string' in list")
        return isinstance(container, dict) and find_entry(container, field).present

    return run


def logical_step(left: Evaluator, right: Evaluator, *, decides: bool) -> Evaluator:
    """`&&` (decided by false) or `||` (decided by true); the deciding value outweighs an error."""

    def run(frame: EvaluationFrame) -> Any:
        first = left(frame)
        if first is decides:
            return decides
        second = right(frame)
        if second is decides:
            return decides
        if type(first) is bool and type(second) is bool:
            return not decides
        return next(
            (side for side in (first, second) if isinstance(side, EvaluationError)), no_such_overload()
        )

    return run


def not_strictly_false_step(operand: Evaluator) -> Evaluator:
    """The condition of all() and exists(): an error does not end the loop."""

    def run(frame: EvaluationFrame) -> Any:
        value = operand(frame)
        frame.charge(1)
        return value is not False

    return run


def append_step(item: Evaluator) -> Evaluator:
    """`@result + [item]`: the accumulator of a running fold belongs to nobody else and grows in place."""

    def run(frame: EvaluationFrame) -> Any:
        grown = frame.scope[RESULT]
        frame.charge(1)
        added = item(frame)
        frame.charge(1)
        if isinstance(grown, EvaluationError) or isinstance(added, EvaluationError):
            return grown if isinstance(grown, EvaluationError) else added
        grown.extend(added)
        return grown

    return run


def or_step(left: Evaluator, right: Evaluator, function: str) -> Evaluator:
    """`left.or(right)` or `left.orValue(right)`; the right side is evaluated only if needed."""

    def run(frame: EvaluationFrame) -> Any:
        value = left(frame)
        if isinstance(value, EvaluationError):
            return value
        if type(value) is not OptionalValue:
            return no_such_overload(function)
        if not value.present:
            return right(frame)
        return value if function == "or" else value.value

    return run


def constant_membership(item: Evaluator, items: list[Any]) -> Evaluator:
    """`x in [constants]`: upstream looks it up in a set that it built beforehand, free of charge."""

    def run(frame: EvaluationFrame) -> Any:
        value = item(frame)
        if isinstance(value, EvaluationError):
            return value
        if isinstance(value, _UNHASHABLE):
            return EvaluationError(f"hash of unhashable type {_GO_NAMES[type_name(value)]}")
        return any(check.same_primitive(value, constant) for constant in items)

    return run


def is_constant_list(value: Any) -> bool:
    """Whether a value is a list that upstream makes a lookup set of."""
    return type(value) is list and all(check.is_primitive(item) for item in value)


def is_accumulator(node: CelNode) -> bool:
    """Whether a node is the accumulator of the fold around it."""
    return isinstance(node, Ident) and node.name == RESULT


def one_variable_range(items: Any) -> Iterable[tuple[Any, Any]] | EvaluationError:
    """What a one-variable loop runs over: elements or keys."""
    if type(items) is list:
        return [(item, None) for item in items]
    if isinstance(items, dict):
        return [(key, None) for key in map_keys(items)]
    return EvaluationError(f"got '{_GO_NAMES.get(type_name(items), 'ref.Val')}', expected iterable type")


def two_variable_range(items: Any) -> Iterable[tuple[Any, Any]] | EvaluationError:
    """What a two-variable loop runs over: index and element, or key and value."""
    if type(items) is list:
        return enumerate(items)
    if isinstance(items, dict):
        return list(zip(map_keys(items), items.values(), strict=True))
    shown = _GO_NAMES.get(type_name(items), "ref.Val")
    return EvaluationError(f"unsupported comprehension range type: {shown}")


_GO_NAMES = {
    "bool": "types.Bool",
    "int": "types.Int",
    "uint": "types.Uint",
    "double": "types.Double",
    "string": "types.String",
    "bytes": "types.Bytes",
    "null_type": "types.Null",
    "google.protobuf.Timestamp": "types.Timestamp",
    "google.protobuf.Duration": "types.Duration",
    "kubernetes.Semver": "cel.Semver",
    "kubernetes.Quantity": "cel.Quantity",
}
"""How upstream's messages name what cannot be iterated."""
