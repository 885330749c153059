"""Compiled selectors: an expression in, a truth value per device out.

`compile_selector` parses, checks, validates and estimates an expression, and prepares both evaluators.
Results are cached by expression and environment. The type must be bool, or the type of attributes,
which is known only at run time.

`Program.matches` runs the generated fast path, and the exact evaluator when that path does not apply or
raises. The exact evaluator is built when it is first needed. `Program.evaluate` always runs it and
reports the cost.

`reads_of` traces which attributes and capacities the result can depend on, by following paths that
start at `device` through selections, indexes and `cel.bind`. `Program.key` gives the values of these
reads: devices with equal keys get equal answers, so one evaluation serves all of them.
"""

import functools
import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.check import CONVERSIONS, CheckedExpression, check_types, validate_literals
from rackloom.core.allocate.cel.cost import max_cost
from rackloom.core.allocate.cel.environment import DeviceView, FieldValues
from rackloom.core.allocate.cel.environment import environment as environment_of
from rackloom.core.allocate.cel.errors import CompileError, CostExceeded, EvaluationError
from rackloom.core.allocate.cel.generate import FastFunction, fast_path
from rackloom.core.allocate.cel.interpret import interpreter
from rackloom.core.allocate.cel.parse import parse_expression
from rackloom.core.allocate.cel.pins import Pins, pins_of
from rackloom.core.allocate.cel.runtime import COST_LIMIT, EvaluationFrame, Evaluator
from rackloom.core.allocate.cel.syntax import Call, CelNode, Const, Fold, Ident, Select, children
from rackloom.core.allocate.cel.values import DomainMap, SemanticVersion, type_name
from rackloom.core.allocate.quantity import Quantity

# The parts of a device that a selector can read.


Read = tuple[str, str | None, str | None]
"""Kind (`driver`, `allowMultipleAllocations`, `attribute`, `capacity`), domain, identifier. None is any."""

_KINDS = {"attributes": "attribute", "capacity": "capacity"}
_LEAF = 3
"""Steps from the device to one attribute: attributes, domain, identifier."""

ReadPath = tuple[str | None, ...]


def reads_of(checked: CheckedExpression) -> frozenset[Read]:
    """Everything that the result can depend on."""
    tracer = _ReadTracer()
    tracer.use(checked.root)
    return frozenset(read for path in tracer.paths for read in _reads_of_path(path))


def _reads_of_path(path: ReadPath) -> Iterable[Read]:
    if not path:
        return [
            read
            for name in ("driver", "allowMultipleAllocations", *_KINDS)
            for read in _reads_of_path((name,))
        ]
    kind = path[0] or ""
    if kind not in _KINDS:
        return [(kind, None, None)]
    domain, identifier = (*path[1:_LEAF], None, None)[:2]
    return [(_KINDS[kind], domain, identifier)]


class _ReadTracer:
    """Follows paths that start at the device. The use of a path decides how much of it is read."""

    def __init__(self) -> None:
        self.paths: set[ReadPath] = set()
        self.scopes: list[dict[str, ReadPath | None]] = [{"device": ()}]

    def use(self, node: CelNode) -> None:
        """The value of `node` matters as a whole."""
        path = self.follow(node)
        if path is not None:
            self.paths.add(path)

    def follow(self, node: CelNode) -> ReadPath | None:
        """The path that `node` is, not yet read. Any other node gives None, and its parts count as read."""
        match node:
            case Ident():
                name = node.name.removeprefix(".")
                return next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
            case Select():
                return self.step(node.operand, node.field)
            case Call(function="_[_]" | "_[?_]" | "_?._", args=(operand, key)):
                if isinstance(key, Const):
                    return self.step(operand, key.value if isinstance(key.value, str) else None)
                # A computed key may be any key, and the values that it is computed from matter as well.
                self.use(key)
                return self.step(operand, None)
            case Call(function="@in", args=(Const(value=str(key)), container)):
                path = self.step(container, key)
                if path is not None:
                    self.paths.add(path)
                return None
            case Fold() if node.is_bind:
                self.scopes.append({node.accu_var: self.follow(node.accu_init)})
                result = self.follow(node.result)
                self.scopes.pop()
                return result
            case Fold():
                # Variables of a loop stand for no path. The range of the loop is read as a whole.
                self.use(node.iter_range)
                self.use(node.accu_init)
                self.scopes.append({node.accu_var: None, node.iter_var: None, node.iter_var2: None})
                for part in (node.condition, node.step, node.result):
                    self.use(part)
                self.scopes.pop()
                return None
        for child in children(node):
            self.use(child)
        return None

    def step(self, operand: CelNode, key: str | None) -> ReadPath | None:
        path = self.follow(operand)
        if path is None:
            return None
        return path if len(path) == _LEAF else (*path, key)


def key_function(reads: frozenset[Read]) -> Callable[[DeviceView], Hashable]:
    """A function from a device to the values that `reads` names."""
    readers = [_reader(*read) for read in sorted(reads, key=str)]

    def key(view: DeviceView) -> Hashable:
        # A malformed device gives one error to every selector.
        return view.problem or tuple([read(view) for read in readers])

    return key


def _reader(kind: str, domain: str | None, identifier: str | None) -> Callable[[DeviceView], Hashable]:
    if kind == "driver":
        return lambda view: view.driver
    if kind == "allowMultipleAllocations":
        return lambda view: view.allow_multiple_allocations
    fields: Callable[[DeviceView], FieldValues] = operator.attrgetter(
        "attributes" if kind == "attribute" else "capacity"
    )
    if domain is None or identifier is None or "/" in domain:
        return lambda view: _values_read(fields(view).by_domain, domain, identifier)
    name = f"{domain}/{identifier}"
    return lambda view: _hashable(fields(view).value_or(name, None))


def _values_read(domains: DomainMap, domain: str | None, identifier: str | None) -> Hashable:
    chosen = domains if domain is None else {domain: domains[domain]} if domain in domains else {}
    return tuple(
        (where, name, _hashable(value))
        for where in sorted(chosen)
        for name, value in sorted(chosen[where].items())
        if identifier in (None, name)
    )


def _hashable(value: Any) -> Hashable:
    """A hashable stand-in that distinguishes types, unlike Python's 1 and True."""
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    if isinstance(value, Quantity):
        return value.unscaled, value.scale, value.format, value.unbounded
    if isinstance(value, SemanticVersion):
        return type(value), str(value)
    return type(value), value


# Programs.


_CACHED_PROGRAMS = 4096


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation: `value` or `error` is set. `cost` is None if the device itself was at fault."""

    value: bool | None
    error: EvaluationError | None
    cost: int | None

    def truth(self) -> bool:
        """The value. Raises the error."""
        if self.error is not None:
            raise self.error
        return bool(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A compiled selector. It holds no state and may be shared."""

    expression: str
    reads: frozenset[Read]
    """The reads that the result can depend on, as (kind, domain, identifier). None is any."""
    output: str
    """Static type of the result: bool, or dyn if it is known only at run time."""
    max_cost: int
    """Worst case of one evaluation, or 2**64 - 1 if nothing bounds it."""
    run: Evaluator
    fast: FastFunction | None
    keys: Callable[[DeviceView], Hashable]
    pins: tuple[Pins, ...]
    """Values that attributes must have."""

    def matches(self, view: DeviceView) -> bool:
        """Whether the device satisfies the selector. Raises EvaluationError."""
        if self.fast is not None and view.problem is None:
            try:
                return self.fast(view)
            except Exception:
                return self.evaluate(view).truth()
        return self.evaluate(view).truth()

    def evaluate(self, view: DeviceView, cost_limit: int = COST_LIMIT) -> "EvaluationResult":
        """The truth value or error for a device, and the cost."""
        if view.problem is not None:
            return EvaluationResult(None, EvaluationError(view.problem), None)
        frame = EvaluationFrame(view.variable, cost_limit)
        try:
            value = self.run(frame)
        except CostExceeded as error:
            value = error
        if value is True or value is False:
            return EvaluationResult(value, None, frame.cost)
        if not isinstance(value, EvaluationError):
            kind = type_name(value)
            why = f"type conversion error from {kind} to 'bool'"
            value = EvaluationError(f"CEL result of type {kind} could not be converted to bool: {why}")
        return EvaluationResult(None, value, frame.cost)

    def key(self, view: DeviceView) -> Hashable:
        """The values that `reads` names: devices with equal keys get equal answers."""
        return self.keys(view)


@functools.lru_cache(maxsize=_CACHED_PROGRAMS)
def compile_selector(
    expression: str,
    *,
    environment: str = "stored",
    consumable_capacity: bool = True,
    list_type_attributes: bool = True,
) -> Program:
    """Parse, check and prepare a selector. Raises CompileError with the position and a hint.

    The features matter to `environment="new"` only: stored expressions may use everything.
    """
    names = environment_of(
        environment, consumable_capacity=consumable_capacity, list_type_attributes=list_type_attributes
    )
    try:
        checked = check_types(parse_expression(expression), names)
        validate_literals(checked)
        if types.unwrapped(checked.output) not in (types.BOOL, names.attribute):
            raise CompileError(
                f"must evaluate to bool or the unknown type, not {checked.output}", source=expression
            )
        run = exact_evaluator(checked, expression)
        reads = reads_of(checked)
        cost = max_cost(checked)
        # Generated code counts no cost, and a pin refuses a device without running the rest. Both need an
        # expression that stays below the limit on every device.
        fast = fast_path(checked) if cost <= COST_LIMIT else None
        pins = pins_of(checked.root) if cost <= COST_LIMIT else ()
        return Program(expression, reads, str(checked.output), cost, run, fast, key_function(reads), pins)
    except RecursionError:
        raise CompileError("the expression is nested too deeply", source=expression) from None


def exact_evaluator(checked: CheckedExpression, expression: str) -> Evaluator:
    """The exact evaluator. It is built when first needed, unless building it may fail."""
    built: Evaluator | None = None

    def run(frame: EvaluationFrame) -> Any:
        nonlocal built
        if built is None:
            built = interpreter(checked)
        return built(frame)

    # Only a conversion of a constant can fail.
    if any(overloads[0].function in CONVERSIONS for overloads in checked.overloads.values()):
        try:
            built = interpreter(checked)
        except EvaluationError as error:
            raise CompileError(f"program instantiation failed: {error.message}", source=expression) from None
    return run
