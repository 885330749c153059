"""Optional values: what `.?` and `[?]` give, and how to get out of them."""

from typing import Any

from rackloom.claim.allocate.cel.errors import EvaluationError
from rackloom.claim.allocate.cel.overloads import Library
from rackloom.claim.allocate.cel.values import NONE, OptionalValue, some

OPTIONALS = Library()
_add = OPTIONALS.add


@_add("optional_of", "optional.of(V) -> optional<V>")
def _of(value: Any) -> OptionalValue:
    return some(value)


@_add("optional_ofNonZeroValue", "optional.ofNonZeroValue(V) -> optional<V>")
def _of_non_zero(value: Any) -> OptionalValue:
    return NONE if is_zero(value) else some(value)


@_add("optional_none", "optional.none() -> optional<V>")
def _none() -> OptionalValue:
    return NONE


@_add("optional_value", "optional<V>.value() -> V")
def _value(optional: OptionalValue) -> Any:
    if not optional.present:
        raise EvaluationError("optional.none() dereference")
    return optional.value


@_add("optional_hasValue", "optional<V>.hasValue() -> bool")
def _has_value(optional: OptionalValue) -> bool:
    return optional.present


@_add("optional_orValue_value", "optional<V>.orValue(V) -> V")
def _or_value(optional: OptionalValue, other: Any) -> Any:
    return optional.value if optional.present else other


@_add("optional_or_optional", "optional<V>.or(optional<V>) -> optional<V>")
def _or(optional: OptionalValue, other: OptionalValue) -> OptionalValue:
    return optional if optional.present else other


@_add("optional_unwrap", "optional.unwrap(list<optional<V>>) -> list<V>")
@_add("optional_unwrapOpt", "list<optional<V>>.unwrapOpt() -> list<V>")
def _unwrap(items: list[OptionalValue]) -> list[Any]:
    return [item.value for item in items if item.present]


def is_zero(value: Any) -> bool:
    """Whether a value is the zero of its type; types without one never are."""
    if value is None:
        return True
    if isinstance(value, OptionalValue):
        return not value.present
    nanos = getattr(value, "nanos", None)
    if nanos is not None:
        return bool(nanos == 0)
    return isinstance(value, bool | int | float | str | bytes | list | dict) and not value
