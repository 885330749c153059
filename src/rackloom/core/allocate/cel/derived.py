"""Derived attributes: an expression in, the value of an attribute per device out.

A derived attribute has an expression over `device`, as a selector has, but its result is a value for
constraints to compare: a string, integer, boolean or semantic version, or a list of one of these. An
expression does not compile if its static type excludes all of these. If the type is known only at run
time, any other value is an error of the evaluation.

The exact evaluator runs it. `DerivedProgram.key` gives the values that it reads: devices with equal keys
have equal values, so one evaluation serves all of them.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.check import check_types, validate_literals
from rackloom.core.allocate.cel.compiler import Read, exact_evaluator, key_function, reads_of
from rackloom.core.allocate.cel.cost import max_cost
from rackloom.core.allocate.cel.environment import DeviceView, environment
from rackloom.core.allocate.cel.errors import CompileError, CostExceeded, EvaluationError
from rackloom.core.allocate.cel.parse import parse_expression
from rackloom.core.allocate.cel.runtime import COST_LIMIT, EvaluationFrame, Evaluator
from rackloom.core.allocate.cel.values import OptionalValue, SemanticVersion, TypeName, type_name
from rackloom.core.allocate.objects import DeviceAttribute

_CACHED_PROGRAMS = 1024
_SCALARS = (types.BOOL, types.INT, types.STRING, types.SEMVER, types.ANY, types.DYN)
_FIELDS: dict[type, tuple[str, str]] = {
    bool: ("bool_", "bools"),
    int: ("int_", "ints"),
    str: ("string", "strings"),
    SemanticVersion: ("version", "versions"),
}
"""The fields of an attribute for each type: one for a single value and one for a list."""


@dataclass(frozen=True, slots=True, eq=False)
class DerivedProgram:
    """The compiled expression of a derived attribute. It holds no state and may be shared."""

    expression: str
    reads: frozenset[Read]
    """The reads that the value can depend on, as (kind, domain, identifier). None is any."""
    max_cost: int
    """Worst case of one evaluation, or 2**64 - 1 if nothing bounds it."""
    run: Evaluator
    key: Callable[[DeviceView], Hashable]
    """The values that `reads` names: devices with equal keys have equal values."""

    def evaluate(self, view: DeviceView) -> DeviceAttribute:
        """The attribute that a device has by this expression. Raises EvaluationError."""
        if view.problem is not None:
            raise EvaluationError(view.problem)
        try:
            value = self.run(EvaluationFrame(view.variable, COST_LIMIT))
        except CostExceeded as error:
            value = error
        if isinstance(value, EvaluationError):
            raise value
        return _attribute_of(value)


@functools.lru_cache(maxsize=_CACHED_PROGRAMS)
def compile_derived(expression: str) -> DerivedProgram:
    """Parse, check and prepare the expression of a derived attribute. Raises CompileError."""
    try:
        checked = check_types(parse_expression(expression), environment())
        validate_literals(checked)
        output = types.unwrapped(checked.output)
        item = types.unwrapped(checked.output.params[0]) if checked.output.name == "list" else output
        if output not in _SCALARS and item not in _SCALARS:
            raise CompileError(
                "must evaluate to a string, integer, boolean or semver, or to a list of one of these,"
                f" not {checked.output}",
                source=expression,
            )
        reads = reads_of(checked)
        run = exact_evaluator(checked, expression)
        return DerivedProgram(expression, reads, max_cost(checked), run, key_function(reads))
    except RecursionError:
        raise CompileError("the expression is nested too deeply", source=expression) from None


def _attribute_of(value: Any) -> DeviceAttribute:
    plain = _plain(value)
    if type(plain) in _FIELDS:
        return _attribute(_FIELDS[type(plain)][0], _published(plain))
    if type(value) is not list:
        raise EvaluationError(f"a value of type {type_name(value)} cannot be an attribute")
    items = [_plain(item) for item in value]
    kind = type(items[0]) if items else str
    if kind not in _FIELDS:
        raise EvaluationError(f"a list of {type_name(value[0])} cannot be an attribute")
    for number, item in enumerate(items):
        if type(item) is not kind:
            wanted, found = type_name(items[0]), type_name(value[number])
            raise EvaluationError(f"item {number} of the list is of type {found}, the first one of {wanted}")
    return _attribute(_FIELDS[kind][1], tuple(map(_published, items)))


def _attribute(field: str, value: Any) -> DeviceAttribute:
    return replace(DeviceAttribute(), **{field: value})


def _plain(value: Any) -> Any:
    """The value as upstream takes it: an optional counts as the value in it, a type as its name."""
    if type(value) is OptionalValue:
        return _plain(value.value) if value.present else None
    return value.name if type(value) is TypeName else value


def _published(value: Any) -> Any:
    return str(value) if type(value) is SemanticVersion else value
