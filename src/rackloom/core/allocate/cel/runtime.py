"""The parts of exact evaluation: the frame, and the steps from which evaluators are built.

An `EvaluationFrame` holds the device, local variables and the cost so far. `charge` raises
`CostExceeded` above the limit of 1,000,000 units (resource.k8s.io CELSelectorExpressionMaxCost).

Steps return closures over a frame. An error is a value: `&&` and `||` absorb it when the other side
decides, and `orValue` and `or` evaluate their right side only if needed. `LazyValue` computes the value
of `cel.bind` when it is first read, and at most once. The accumulator of a running fold has no other
reference, so `append_step` grows it in place. Membership in a list of constants costs nothing, because
upstream looks it up in a set that it built beforehand.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rackloom.core.allocate.cel import check
from rackloom.core.allocate.cel.errors import CostExceeded, EvaluationError, no_such_overload
from rackloom.core.allocate.cel.library.operators import index_container, optional_index
from rackloom.core.allocate.cel.syntax import RESULT, CelNode, Ident
from rackloom.core.allocate.cel.values import (
    NONE,
    OptionalValue,
    SemanticVersion,
    find_entry,
    map_keys,
    type_name,
)

COST_LIMIT = 1_000_000
"""The most that one evaluation may cost (resource.k8s.io CELSelectorExpressionMaxCost)."""

_UNHASHABLE = (bytes, SemanticVersion)
"""Types that upstream cannot look up in a set of constants."""


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
        """The value, or the error from computing it."""
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
    """One step of a path. After an optional step, a missing value is absent and not an error."""

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
    """`&&` (decided by false) or `||` (decided by true). The deciding value outweighs an error."""

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
    """`@result + [item]`: nothing else refers to the accumulator of a running fold, so it grows in place."""

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
    """`left.or(right)` or `left.orValue(right)`. The right side is evaluated only if needed."""

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
    """The range of a one-variable loop: elements or keys."""
    if type(items) is list:
        return [(item, None) for item in items]
    if isinstance(items, dict):
        return [(key, None) for key in map_keys(items)]
    return EvaluationError(f"got '{_GO_NAMES.get(type_name(items), 'ref.Val')}', expected iterable type")


def two_variable_range(items: Any) -> Iterable[tuple[Any, Any]] | EvaluationError:
    """The range of a two-variable loop: index and element, or key and value."""
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
"""The names of types that cannot be iterated, in upstream's messages."""
