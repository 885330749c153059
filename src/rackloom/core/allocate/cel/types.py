"""Static types, unification, and overloads declared by their signature.

`CelType` is the type that the checker knows without any device. `assignable` decides by unification
whether argument types fit parameter types, and returns the extended variable bindings. Its rules are
those of cel-go's checker: dyn and any fit everything, null fits nullable kinds, and a bound variable
widens to the more general type.

A function is data. `@cel_function("string_index_of_string", "string.indexOf(string) -> int")` adds the
decorated Python function to `FUNCTIONS` as one overload. The signature is all the checker needs, and
run-time dispatch looks at the same parameter types: `dispatch` applies the first candidate with
parameters that accept the values.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from rackloom.core.allocate.cel.errors import EvaluationError, no_such_overload
from rackloom.core.allocate.cel.values import TYPE_NAMES

# Static types.


class CelType(msgspec.Struct, frozen=True):
    """A type. `kind` decides the rules. Messages and `type()` show `name`."""

    kind: str
    name: str
    params: tuple["CelType", ...] = ()

    def __str__(self) -> str:
        if self.kind == "param":
            return f"<{self.name}>"
        return f"{self.name}({', '.join(map(str, self.params))})" if self.params else self.name


_KINDS = ("bool", "int", "uint", "double", "string", "bytes", "dyn", "type")
BOOL, INT, UINT, DOUBLE, STRING, BYTES, DYN, TYPE = (CelType(kind, kind) for kind in _KINDS)
ANY = CelType("any", "google.protobuf.Any")
NULL = CelType("null", "null_type")
TIMESTAMP = CelType("timestamp", "google.protobuf.Timestamp")
DURATION = CelType("duration", "google.protobuf.Duration")


def object_type(name: str) -> CelType:
    """A named object type."""
    return CelType("struct", name)


DEVICE = object_type("kubernetes.DRADevice")
QUANTITY, SEMVER = object_type("kubernetes.Quantity"), object_type("kubernetes.Semver")
URL, FORMAT = object_type("kubernetes.URL"), object_type("kubernetes.NamedFormat")
IP, CIDR = CelType("opaque", "net.IP"), CelType("opaque", "net.CIDR")


def list_of(element: CelType) -> CelType:
    """`list(element)`."""
    return CelType("list", "list", (element,))


def map_of(key: CelType, value: CelType) -> CelType:
    """`map(key, value)`."""
    return CelType("map", "map", (key, value))


def optional_of(value: CelType) -> CelType:
    """`optional_type(value)`."""
    return CelType("opaque", "optional_type", (value,))


def wrapper_of(value: CelType) -> CelType:
    """`wrapper(value)`: the type of a message such as Int32Value, which may also be null."""
    return CelType("wrapper", "wrapper", (value,))


def unwrapped(type_: CelType) -> CelType:
    """The type inside a wrapper. Any other type is returned as it is."""
    return type_.params[0] if type_.kind == "wrapper" else type_


def type_of(value: CelType) -> CelType:
    """The type of a type."""
    return CelType("type", "type", (value,))


def type_variable(name: str) -> CelType:
    """A type variable."""
    return CelType("param", name)


def is_dyn(type_: CelType) -> bool:
    """Whether checks are left to run time."""
    return type_.kind in ("dyn", "any")


def is_optional(type_: CelType) -> bool:
    """Whether this is `optional_type(...)`."""
    return type_.name == "optional_type"


def without_optional(type_: CelType) -> CelType:
    """The type inside an optional. Any other type is returned as it is."""
    return type_.params[0] if is_optional(type_) else type_


_NAMES = {
    type_.kind: type_ for type_ in (BOOL, INT, UINT, DOUBLE, STRING, BYTES, DYN, TIMESTAMP, DURATION)
} | {
    "quantity": QUANTITY,
    "semver": SEMVER,
    "url": URL,
    "named_format": FORMAT,
    "net_ip": IP,
    "net_cidr": CIDR,
    "authorizer": object_type("kubernetes.authorization.Authorizer"),
    "path_check": object_type("kubernetes.authorization.PathCheck"),
    "group_check": object_type("kubernetes.authorization.GroupCheck"),
    "resource_check": object_type("kubernetes.authorization.ResourceCheck"),
    "decision": object_type("kubernetes.authorization.Decision"),
}
_GENERIC: dict[str, Callable[..., CelType]] = {
    "list": list_of,
    "map": map_of,
    "optional": optional_of,
    "type": type_of,
}


@functools.cache
def parse_type(text: str) -> CelType:
    """Read `int`, `list<A>`, `map<K,V>`, `optional<V>`. Single capitals are type variables."""
    if len(text) == 1:
        return type_variable(text)
    if text in _NAMES:
        return _NAMES[text]
    head, _, rest = text.partition("<")
    return _GENERIC[head](*map(parse_type, split_at_top_level(rest[:-1])))


def split_at_top_level(text: str) -> Iterable[str]:
    """Split at commas that are not inside angle brackets."""
    depth = start = 0
    parts = []
    for at, char in enumerate(text):
        depth += (char == "<") - (char == ">")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else parts


# Unification of types with type variables.


Bindings = dict[CelType, CelType]
"""The type that each type variable stands for so far."""

_PLAIN = frozenset(type_.kind for type_ in (BOOL, INT, UINT, DOUBLE, STRING, BYTES, TIMESTAMP, DURATION))
_NULLABLE = ("opaque", "struct", "any", "timestamp", "duration", "wrapper")


def assignable(bindings: Bindings, given: list[CelType], wanted: list[CelType]) -> Bindings | None:
    """The bindings after assigning each of `given` to its `wanted`, or None if one does not fit."""
    tried = dict(bindings)
    return tried if _all_assignable(tried, given, wanted) else None


def are_apart(given: Iterable[CelType], wanted: Iterable[CelType]) -> bool:
    """Whether types of an argument and its parameter differ in a way that no binding can mend."""
    for first, second in zip(given, wanted, strict=False):
        if first.kind != second.kind and first.kind in _PLAIN and second.kind in _PLAIN:
            return True
    return False


def substitute(bindings: Bindings, type_: CelType, *, free_to_dyn: bool = False) -> CelType:
    """`type_` with bound variables replaced. With `free_to_dyn`, free ones become dyn."""
    if type_.kind == "param":
        if type_ in bindings:
            return substitute(bindings, bindings[type_], free_to_dyn=free_to_dyn)
        return DYN if free_to_dyn else type_
    if not type_.params or not _has_variables(type_):
        return type_
    inner = tuple(substitute(bindings, part, free_to_dyn=free_to_dyn) for part in type_.params)
    return CelType(type_.kind, type_.name, inner)


@functools.lru_cache(maxsize=4096)
def _has_variables(type_: CelType) -> bool:
    return type_.kind == "param" or any(map(_has_variables, type_.params))


def most_general(first: CelType, second: CelType) -> CelType:
    """The less specific of two types that fit each other."""
    return first if _no_more_specific(first, second) else second


def _all_assignable(bindings: Bindings, given: list[CelType], wanted: list[CelType]) -> bool:
    if len(given) != len(wanted):
        return False
    for first, second in zip(given, wanted, strict=True):  # noqa: SIM110 (twice as fast as a generator)
        if not _is_assignable(bindings, first, second):
            return False
    return True


def _is_assignable(bindings: Bindings, first: CelType, second: CelType) -> bool:
    if first is second and not first.params and first.kind != "param":
        return True
    if second.kind == "param":
        valid, bound = _bind_variable(bindings, first, second)
        if valid or bound:
            return valid
    if first.kind == "param":
        return _bind_variable(bindings, second, first)[0]
    if is_dyn(first) or is_dyn(second):
        return True
    if first.kind == "null" or second.kind == "null":
        other = second if first.kind == "null" else first
        return other.kind == "null" or other.kind in _NULLABLE
    if first.kind == "type":
        return second.kind == "type"
    first, second = unwrapped(first), unwrapped(second)
    return (first.kind, first.name) == (second.kind, second.name) and _all_assignable(
        bindings, list(first.params), list(second.params)
    )


def _bind_variable(bindings: Bindings, type_: CelType, variable: CelType) -> tuple[bool, bool]:
    """Whether `variable` can stand for `type_`, and whether it already stood for something."""
    if type_ == variable:
        return True, True
    if variable in bindings:
        current = bindings[variable]
        if type_ == current:
            return True, True
        if not _is_assignable(bindings, type_, current):
            return False, True
        general = most_general(type_, current)
        if not _occurs_in(bindings, variable, general):
            bindings[variable] = general
        return True, True
    if _occurs_in(bindings, variable, type_):
        return False, False
    bindings[variable] = type_
    return True, False


def _occurs_in(bindings: Bindings, variable: CelType, within: CelType) -> bool:
    if variable == within:
        return True
    if within.kind == "param":
        return within in bindings and _occurs_in(bindings, variable, bindings[within])
    return any(_occurs_in(bindings, variable, part) for part in within.params)


def _no_more_specific(first: CelType, second: CelType) -> bool:
    first, second = unwrapped(first), unwrapped(second)
    if is_dyn(first) or first.kind == "param":
        return True
    if is_dyn(second) or second.kind == "param" or (first.kind, first.name) != (second.kind, second.name):
        return False
    if first.kind == "type":
        return True
    return len(first.params) == len(second.params) and all(
        map(_no_more_specific, first.params, second.params)
    )


# Overloads, declared by signature and dispatched by run-time type.


Impl = Callable[..., Any]
F = TypeVar("F", bound=Impl)


class Overload(msgspec.Struct, frozen=True, eq=False):
    """One form of a function: `params` start with the receiver if `member`."""

    id: str
    function: str
    member: bool
    params: tuple[CelType, ...]
    result: CelType
    variables: tuple[CelType, ...]
    impl: Impl

    def accepts(self, args: tuple[Any, ...]) -> bool:
        """Whether the values have the declared types, as far as that shows at run time."""
        return len(args) == len(self.params) and all(map(_value_has_type, self.params, args))


_NAMESPACES = frozenset(("cel", "optional", "sets", "lists", "strings", "ip", "format"))
"""Functions below one of these have no receiver: it is a part of their name."""
NEW_MESSAGE = "new_message"
"""The overload id of a message's builder."""
FUNCTIONS: dict[str, tuple[Overload, ...]] = {}
"""Every function by name. Run-time dispatch takes the first overload that accepts the values."""


def cel_function(overload_id: str, signature: str) -> Callable[[F], F]:
    """Declare the decorated function as the overload with this id and signature."""
    head, result = signature.rsplit(" -> ", 1)
    path, args = head[:-1].split("(", 1)
    # `list<A>.size` has a receiver type before its name. Operators and namespaced functions have none.
    owner, _, function = path.rpartition(".")
    if path.startswith("_") or owner in _NAMESPACES:
        owner, function = "", path
    params = tuple(map(parse_type, [*([owner] if owner else []), *split_at_top_level(args)]))
    of = parse_type(result)
    variables = tuple(dict.fromkeys(_type_variables([*params, of])))

    def declare(impl: F) -> F:
        overload = Overload(overload_id, function, bool(owner), params, of, variables, impl)
        FUNCTIONS[function] = (*FUNCTIONS.get(function, ()), overload)
        return impl

    return declare


def declare_functions(*overloads: tuple[str, str, Impl]) -> None:
    """Declare overloads by id, signature and implementation."""
    for overload_id, signature, impl in overloads:
        cel_function(overload_id, signature)(impl)


def dispatch(candidates: tuple[Overload, ...], args: tuple[Any, ...]) -> Any:
    """Apply the first candidate that accepts the values."""
    for overload in candidates:
        if overload.accepts(args):
            return overload.impl(*args)
    shown = ", ".join(TYPE_NAMES[type(arg)] for arg in args)
    raise no_such_overload(f"{candidates[0].function}({shown})")


def accepts(parse: Impl) -> Impl:
    """Whether `parse` takes its arguments without an error."""

    def run(*args: Any) -> bool:
        try:
            parse(*args)
        except (EvaluationError, ValueError):
            return False
        return True

    return run


def unavailable(*args: object) -> Any:
    """The implementation of functions with a receiver that no selector can obtain."""
    raise no_such_overload()


def as_error(error: ValueError) -> EvaluationError:
    """A value error of a parser as the evaluation error it means here."""
    return EvaluationError(str(error))


def _type_variables(types: Iterable[CelType]) -> Iterator[CelType]:
    for first in types:
        if first.kind == "param":
            yield first
        yield from _type_variables(first.params)


def _value_has_type(wanted: CelType, value: Any) -> bool:
    if wanted.kind in ("dyn", "any", "param"):
        return True
    if TYPE_NAMES[type(value)] != wanted.name:
        return False
    if wanted.kind != "list" or not value or any(_type_variables([wanted])):
        return True
    return _value_has_type(wanted.params[0], value[0])
