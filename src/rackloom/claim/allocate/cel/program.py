"""Compiled selectors: text in, a truth value per device out."""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from rackloom.claim.allocate.cel import types as t
from rackloom.claim.allocate.cel.check import check
from rackloom.claim.allocate.cel.cost import max_cost
from rackloom.claim.allocate.cel.device import DeviceView
from rackloom.claim.allocate.cel.environment import environment as environment_of
from rackloom.claim.allocate.cel.errors import CompileError, CostExceeded, EvaluationError
from rackloom.claim.allocate.cel.generate import Fast, fast_path
from rackloom.claim.allocate.cel.interpret import interpreter
from rackloom.claim.allocate.cel.parse import parse
from rackloom.claim.allocate.cel.reads import Read, key_function, reads_of
from rackloom.claim.allocate.cel.steps import COST_LIMIT, Eval, Frame
from rackloom.claim.allocate.cel.validate import validate
from rackloom.claim.allocate.cel.values import type_name

_CACHED_PROGRAMS = 4096


@dataclass(frozen=True, slots=True)
class Result:
    """One evaluation: `value` or `error` is set. `cost` is None where the device itself was at fault."""

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
    """What the result can depend on, as (kind, domain, identifier); None is any."""
    output: str
    """Static type of the result: bool, or dyn where only run time tells."""
    max_cost: int
    """Worst case of one evaluation; 2**64 - 1 where nothing bounds it."""
    run: Eval
    fast: Fast | None
    keys: Callable[[DeviceView], Hashable]

    def matches(self, view: DeviceView) -> bool:
        """Whether the device satisfies the selector. Raises EvaluationError."""
        if self.fast is not None and view.problem is None:
            try:
                return self.fast(view)
            except Exception:
                return self.evaluate(view).truth()
        return self.evaluate(view).truth()

    def evaluate(self, view: DeviceView, cost_limit: int = COST_LIMIT) -> "Result":
        """The truth value or error for a device, and what it cost."""
        if view.problem is not None:
            return Result(None, EvaluationError(view.problem), None)
        frame = Frame(view.variable, cost_limit)
        try:
            value = _truth(self.run(frame))
        except CostExceeded as error:
            value = error
        if isinstance(value, EvaluationError):
            return Result(None, value, frame.cost)
        return Result(value, None, frame.cost)

    def key(self, view: DeviceView) -> Hashable:
        """The values that `reads` names: devices with equal keys get equal answers."""
        return self.keys(view)


@functools.lru_cache(maxsize=_CACHED_PROGRAMS)
def compile(  # noqa: A001 - what it does, and callers write cel.compile
    expression: str,
    *,
    environment: str = "stored",
    consumable_capacity: bool = True,
    list_type_attributes: bool = True,
) -> Program:
    """Parse, check and prepare a selector. Raises CompileError, which says where and what to write instead.

    The features matter to `environment="new"` only: stored expressions may use everything.
    """
    try:
        return _compiled(
            expression,
            environment_of(
                environment,
                consumable_capacity=consumable_capacity,
                list_type_attributes=list_type_attributes,
            ),
        )
    except RecursionError:
        raise CompileError("the expression is nested too deeply", source=expression) from None


def _compiled(expression: str, names: Any) -> Program:
    checked = check(parse(expression), names)
    validate(checked)
    if checked.output not in (t.BOOL, names.attribute):
        raise CompileError(
            f"must evaluate to bool or the unknown type, not {checked.output}", source=expression
        )
    try:
        run = interpreter(checked)
    except EvaluationError as error:
        raise CompileError(f"program instantiation failed: {error.message}", source=expression) from None
    reads = reads_of(checked)
    cost = max_cost(checked)
    fast = fast_path(checked) if cost <= COST_LIMIT else None
    return Program(expression, reads, str(checked.output), cost, run, fast, key_function(reads))


def _truth(value: Any) -> bool | EvaluationError:
    if value is True or value is False or isinstance(value, EvaluationError):
        return value
    kind = type_name(value)
    why = f"type conversion error from {kind} to 'bool'"
    return EvaluationError(f"CEL result of type {kind} could not be converted to bool: {why}")
