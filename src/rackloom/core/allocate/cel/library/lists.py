"""Lists, sets and map insertion: order, search, reshaping, and comparison without order.

`min`, `max`, `sum`, `sort` and `isSorted` use the overloads of `<` and `+`, so they accept the same types.
`sets` functions compare without order. `includes` is Kubernetes' function for attributes that may be a
scalar or a list. It refuses lists over 48 values, the limit of one device. Functions with names that
begin with @ are called by expanded macros only.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rackloom.core.allocate.cel.errors import EvaluationError
from rackloom.core.allocate.cel.types import FUNCTIONS, cel_function, declare_functions, dispatch
from rackloom.core.allocate.cel.values import (
    NONE,
    Duration,
    Uint,
    equal,
    find_entry,
    key_of,
    present_optional,
    same_value,
)

_MAX_INCLUDES = 48
"""Values that one device may have (resource.k8s.io ResourceSliceMaxAttributeValuesPerDevice)."""

_ORDERED = ("int", "uint", "double", "bool", "duration", "timestamp", "string", "bytes")
_PROTO = {"duration": "google.protobuf.Duration", "timestamp": "google.protobuf.Timestamp"}


def _less(first: Any, second: Any) -> bool:
    """Whether `first` is less than `second`. False if the two have no order."""
    try:
        return bool(dispatch(FUNCTIONS["_<_"], (first, second)))
    except EvaluationError:
        return False


def _sorted(items: list[Any]) -> bool:
    return not any(_less(second, first) for first, second in itertools.pairwise(items))


def _extreme(name: str, better: Callable[[Any, Any], bool]) -> Any:
    def extreme(items: list[Any]) -> Any:
        if not items:
            raise EvaluationError(f"{name} called on empty list")
        return functools.reduce(lambda best, item: item if better(item, best) else best, items)

    return extreme


def _sum(nothing: Any) -> Any:
    return lambda items: functools.reduce(
        lambda first, second: dispatch(FUNCTIONS["_+_"], (first, second)), items, nothing
    )


def _order_by(items: list[Any], sort_keys: list[Any]) -> list[Any]:
    if len(items) != len(sort_keys):
        raise EvaluationError(
            f"@sortByAssociatedKeys() expected a list of the same size as the associated keys list, but got"
            f" {len(items)} and {len(sort_keys)} elements respectively"
        )
    if len({type(key) for key in sort_keys}) > 1:
        raise EvaluationError("list elements must have the same type")

    def compare(first: int, second: int) -> int:
        return _less(sort_keys[second], sort_keys[first]) - _less(sort_keys[first], sort_keys[second])

    return [items[at] for at in sorted(range(len(items)), key=functools.cmp_to_key(compare))]


for _type in _ORDERED:
    _list, _full = f"list<{_type}>", _PROTO.get(_type, _type)
    declare_functions(
        (f"list_{_type}_is_sorted_bool", f"{_list}.isSorted() -> bool", _sorted),
        (f"list_{_type}_min_{_type}", f"{_list}.min() -> {_type}", _extreme("min", _less)),
        (
            f"list_{_type}_max_{_type}",
            f"{_list}.max() -> {_type}",
            _extreme("max", lambda first, second: _less(second, first)),
        ),
        (f"list_{_full}_sort", f"{_list}.sort() -> {_list}", lambda items: _order_by(items, items)),
        (
            f"list_{_full}_sortByAssociatedKeys",
            f"list<T>.@sortByAssociatedKeys({_list}) -> list<T>",
            _order_by,
        ),
    )
for _type, _nothing in (("int", 0), ("uint", Uint(0)), ("double", 0.0), ("duration", Duration(0))):
    cel_function(f"list_{_type}_sum_{_type}", f"list<{_type}>.sum() -> {_type}")(_sum(_nothing))


@cel_function("list_a_index_of_int", "list<A>.indexOf(A) -> int")
def _index_of(items: list[Any], item: Any) -> int:
    return next((at for at, other in enumerate(items) if same_value(other, item)), -1)


@cel_function("list_a_last_index_of_int", "list<A>.lastIndexOf(A) -> int")
def _last_index_of(items: list[Any], item: Any) -> int:
    return next((at for at in reversed(range(len(items))) if same_value(items[at], item)), -1)


@cel_function("list_slice", "list<T>.slice(int, int) -> list<T>")
def _slice(items: list[Any], start: int, end: int) -> list[Any]:
    if start < 0 or end < 0:
        raise EvaluationError(f"cannot slice({start}, {end}), negative indexes not supported")
    if start > end:
        raise EvaluationError(
            f"cannot slice({start}, {end}), start index must be less than or equal to end index"
        )
    if end > len(items):
        raise EvaluationError(f"cannot slice({start}, {end}), list is length {len(items)}")
    return items[start:end]


declare_functions(
    ("list_flatten", "list<list<T>>.flatten() -> list<T>", lambda items: list(_flat(items, 1))),
    ("list_reverse", "list<T>.reverse() -> list<T>", lambda items: items[::-1]),
    (
        "list_first",
        "list<V>.first() -> optional<V>",
        lambda items: present_optional(items[0]) if items else NONE,
    ),
    (
        "list_last",
        "list<V>.last() -> optional<V>",
        lambda items: present_optional(items[-1]) if items else NONE,
    ),
)


@cel_function("list_flatten_int", "list<dyn>.flatten(int) -> list<dyn>")
def _flatten_to(items: list[Any], depth: int) -> list[Any]:
    if depth < 0:
        raise EvaluationError("level must be non-negative")
    return list(_flat(items, depth))


def _flat(items: list[Any], depth: int) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list) and depth:
            yield from _flat(item, depth - 1)
        else:
            yield item


@cel_function("list_distinct", "list<T>.distinct() -> list<T>")
def _distinct(items: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for item in items:
        if not any(equal(item, other) for other in kept):
            kept.append(item)
    return kept


_MAX_RANGE = 10_000_000


@cel_function("lists_range", "lists.range(int) -> list<int>")
def _range(count: int) -> list[int]:
    if count > _MAX_RANGE:
        raise EvaluationError("operation cancelled: actual cost limit exceeded")
    return list(range(count))


def _holds(items: list[Any], item: Any) -> bool:
    return any(same_value(item, other) for other in items)


@cel_function("list_sets_contains_list", "sets.contains(list<T>, list<T>) -> bool")
def _contains(items: list[Any], others: list[Any]) -> bool:
    return all(_holds(items, other) for other in others)


@cel_function("list_sets_equivalent_list", "sets.equivalent(list<T>, list<T>) -> bool")
def _equivalent(items: list[Any], others: list[Any]) -> bool:
    return _contains(items, others) and _contains(others, items)


@cel_function("list_sets_intersects_list", "sets.intersects(list<T>, list<T>) -> bool")
def _intersects(items: list[Any], others: list[Any]) -> bool:
    return any(_holds(items, other) for other in others)


@cel_function("dra_includes_dyn_dyn", "dyn.includes(dyn) -> bool")
def _includes(target: Any, item: Any) -> bool:
    if isinstance(target, list):
        if len(target) > _MAX_INCLUDES:
            raise EvaluationError(
                f"'includes' function cannot be applied to lists longer than {_MAX_INCLUDES} values"
            )
        return _holds(target, item)
    return same_value(target, item)


@cel_function("@mapInsert_map_key_value", "cel.@mapInsert(map<K, V>, K, V) -> map<K, V>")
def _insert(grown: dict[Any, Any], key: Any, value: Any) -> dict[Any, Any]:
    """Only macros call this, on the accumulator of a running fold, which may grow in place."""
    if find_entry(grown, key).present:
        raise EvaluationError(f"insert failed: key {key} already exists")
    grown[key_of(key)] = value
    return grown


@cel_function("@mapInsert_map_map", "cel.@mapInsert(map<K, V>, map<K, V>) -> map<K, V>")
def _insert_all(grown: dict[Any, Any], more: Mapping[Any, Any]) -> dict[Any, Any]:
    for key, value in more.items():
        if key in grown:
            raise EvaluationError(f"insert failed: key {key} already exists")
        grown[key] = value
    return grown
