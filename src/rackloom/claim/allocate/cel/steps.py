"""The steps of exact evaluation that need no plan: variables, paths, logic, membership, iteration."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rackloom.claim.allocate.cel import constants
from rackloom.claim.allocate.cel.errors import CostExceeded, EvaluationError, no_such_overload
from rackloom.claim.allocate.cel.library.operators import index, optional_index
from rackloom.claim.allocate.cel.nodes import RESULT, Ident, Node
from rackloom.claim.allocate.cel.values import NONE, OptionalValue, find, keys, type_name
from rackloom.claim.allocate.semver import Semver

COST_LIMIT = 1_000_000
"""What one evaluation may cost (resource.k8s.io CELSelectorExpressionMaxCost)."""

_UNHASHABLE = (bytes, Semver)
"""What upstream cannot look up in a set of constants."""


class Frame:
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


class Lazy:
    """The value of cel.bind: computed when first read, and at most once."""

    __slots__ = ("code", "done", "scope", "value")

    def __init__(self, code: "Eval", scope: dict[str, Any]) -> None:
        self.code = code
        self.scope = scope
        self.done = False
        self.value: Any = None

    def read(self, frame: Frame) -> Any:
        """The value, or the error that computing it came to."""
        if not self.done:
            inner, frame.scope = frame.scope, self.scope
            self.value = self.code(frame)
            frame.scope = inner
            self.done = True
        return self.value


Eval = Callable[[Frame], Any]


def variable(name: str) -> Eval:
    """A variable, or the value that cel.bind gave the name."""
    bare = name.removeprefix(".")

    def run(frame: Frame) -> Any:
        value = frame.scope[bare]
        return value.read(frame) if type(value) is Lazy else value

    return run


def qualified(operand: Eval, key: Eval, *, optional: bool) -> Eval:
    """One step of a path. After an optional step, what is missing is absent and not an error."""

    def run(frame: Frame) -> Any:
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
            found = optional_index(container, wanted) if tolerant else index(container, wanted)
        except EvaluationError as error:
            frame.charge(1)
            return error
        if not tolerant or found.present:
            frame.charge(1)
        return found

    return run


def presence(operand: Eval, field: str) -> Eval:
    """`has(operand.field)`."""

    def run(frame: Frame) -> Any:
        container = operand(frame)
        if isinstance(container, EvaluationError):
            return container
        if type(container) is OptionalValue:
            if not container.present:
                return False
            container = container.value
        if type(container) is list:
            return EvaluationError("unsupported index type 'string' in list")
        return isinstance(container, dict) and find(container, field).present

    return run


def logical(left: Eval, right: Eval, *, decides: bool) -> Eval:
    """`&&` (decided by false) or `||` (decided by true); the deciding value outweighs an error."""

    def run(frame: Frame) -> Any:
        one = left(frame)
        if one is decides:
            return decides
        two = right(frame)
        if two is decides:
            return decides
        if type(one) is bool and type(two) is bool:
            return not decides
        for value in (one, two):
            if isinstance(value, EvaluationError):
                return value
        return no_such_overload()

    return run


def not_strictly_false(operand: Eval) -> Eval:
    """The condition of all() and exists(): an error does not end the loop."""

    def run(frame: Frame) -> Any:
        value = operand(frame)
        frame.charge(1)
        return value is not False

    return run


def append(item: Eval) -> Eval:
    """`@result + [item]`: the accumulator of a running fold belongs to nobody else and grows in place."""

    def run(frame: Frame) -> Any:
        grown = frame.scope[RESULT]
        frame.charge(1)
        added = item(frame)
        frame.charge(1)
        if isinstance(grown, EvaluationError):
            return grown
        if isinstance(added, EvaluationError):
            return added
        grown.extend(added)
        return grown

    return run


def or_value(left: Eval, right: Eval) -> Eval:
    """`left.orValue(right)`; the right side is evaluated only if needed."""

    def run(frame: Frame) -> Any:
        value = left(frame)
        if isinstance(value, EvaluationError):
            return value
        if type(value) is not OptionalValue:
            return no_such_overload("orValue")
        return value.value if value.present else right(frame)

    return run


def either(left: Eval, right: Eval) -> Eval:
    """`left.or(right)`; the right side is evaluated only if needed."""

    def run(frame: Frame) -> Any:
        value = left(frame)
        if isinstance(value, EvaluationError):
            return value
        if type(value) is not OptionalValue:
            return no_such_overload("or")
        return value if value.present else right(frame)

    return run


def membership(item: Eval, items: list[Any]) -> Eval:
    """`x in [constants]`: upstream looks it up in a set that it built beforehand, free of charge."""

    def run(frame: Frame) -> Any:
        value = item(frame)
        if isinstance(value, EvaluationError):
            return value
        if isinstance(value, _UNHASHABLE):
            return EvaluationError(f"hash of unhashable type {_GO_NAMES[type_name(value)]}")
        return any(constants.same_primitive(value, one) for one in items)

    return run


def is_constant_list(value: Any) -> bool:
    """Whether a value is a list that upstream makes a lookup set of."""
    return type(value) is list and all(constants.is_primitive(one) for one in value)


def is_accumulator(node: Node) -> bool:
    """Whether a node is the accumulator of the fold around it."""
    return isinstance(node, Ident) and node.name == RESULT


def singles(items: Any) -> Iterable[tuple[Any, Any]] | EvaluationError:
    """What a one-variable loop runs over: elements or keys."""
    if type(items) is list:
        return [(item, None) for item in items]
    if isinstance(items, dict):
        return [(key, None) for key in keys(items)]
    return EvaluationError(f"got '{_GO_NAMES.get(type_name(items), 'ref.Val')}', expected iterable type")


def pairs(items: Any) -> Iterable[tuple[Any, Any]] | EvaluationError:
    """What a two-variable loop runs over: index and element, or key and value."""
    if type(items) is list:
        return enumerate(items)
    if isinstance(items, dict):
        return list(zip(keys(items), items.values(), strict=True))
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
