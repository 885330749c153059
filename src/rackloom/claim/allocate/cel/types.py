"""Static types: what the checker knows of a value before any device is seen."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Type:
    """A type; `kind` decides the rules, `name` is what messages and `type()` show."""

    kind: str
    name: str
    params: tuple["Type", ...] = ()

    def __str__(self) -> str:
        if self.kind == "param":
            return f"<{self.name}>"
        return f"{self.name}({', '.join(map(str, self.params))})" if self.params else self.name


def _simple(kind: str, name: str | None = None) -> Type:
    return Type(kind, name or kind)


BOOL, INT, UINT, DOUBLE = _simple("bool"), _simple("int"), _simple("uint"), _simple("double")
STRING, BYTES, DYN = _simple("string"), _simple("bytes"), _simple("dyn")
ANY = _simple("any", "google.protobuf.Any")
NULL = _simple("null", "null_type")
ERROR = _simple("error", "!error!")
TIMESTAMP = _simple("timestamp", "google.protobuf.Timestamp")
DURATION = _simple("duration", "google.protobuf.Duration")
TYPE = _simple("type")


def struct(name: str) -> Type:
    """A named object type."""
    return Type("struct", name)


DEVICE = struct("kubernetes.DRADevice")
QUANTITY, SEMVER = struct("kubernetes.Quantity"), struct("kubernetes.Semver")
URL, FORMAT = struct("kubernetes.URL"), struct("kubernetes.NamedFormat")
IP, CIDR = Type("opaque", "net.IP"), Type("opaque", "net.CIDR")


def list_of(element: Type) -> Type:
    """`list(element)`."""
    return Type("list", "list", (element,))


def map_of(key: Type, value: Type) -> Type:
    """`map(key, value)`."""
    return Type("map", "map", (key, value))


def optional_of(value: Type) -> Type:
    """`optional_type(value)`."""
    return Type("opaque", "optional_type", (value,))


def type_of(value: Type) -> Type:
    """The type of a type."""
    return Type("type", "type", (value,))


def param(name: str) -> Type:
    """A type variable."""
    return Type("param", name)


def is_dyn(type_: Type) -> bool:
    """Whether checks are left to run time."""
    return type_.kind in ("dyn", "any")


def is_optional(type_: Type) -> bool:
    """Whether this is `optional_type(...)`."""
    return type_.name == "optional_type"


def unwrapped(type_: Type) -> Type:
    """The type inside an optional; any other type as it is."""
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
    "authorizer": struct("kubernetes.authorization.Authorizer"),
    "path_check": struct("kubernetes.authorization.PathCheck"),
    "group_check": struct("kubernetes.authorization.GroupCheck"),
    "resource_check": struct("kubernetes.authorization.ResourceCheck"),
    "decision": struct("kubernetes.authorization.Decision"),
}
_GENERIC: dict[str, Callable[..., Type]] = {
    "list": list_of,
    "map": map_of,
    "optional": optional_of,
    "type": type_of,
}


@functools.cache
def parse_type(text: str) -> Type:
    """Read `int`, `list<A>`, `map<K,V>`, `optional<V>`; single capitals are type variables."""
    if len(text) == 1:
        return param(text)
    if text in _NAMES:
        return _NAMES[text]
    head, _, rest = text.partition("<")
    return _GENERIC[head](*map(parse_type, split_top(rest[:-1])))


def split_top(text: str) -> Iterable[str]:
    """Split at commas that are not inside angle brackets."""
    depth = start = 0
    parts = []
    for at, char in enumerate(text):
        depth += (char == "<") - (char == ">")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()] if text.strip() else parts
