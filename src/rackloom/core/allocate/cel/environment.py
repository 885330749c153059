"""The variable `device` and everything else that an expression may name.

`environment` gives the static side: the fields of a device with their types, type names and functions.
`stored` is what the API server accepts in objects that exist already: every feature, whatever its gate.
`new` is what it accepts in new objects, where gated features must be on. Without list attributes, an
attribute has the type google.protobuf.Any and `includes` does not exist.

`DeviceView` gives the values: attributes and capacities of one device by domain. A name without a
domain belongs to the driver's domain. A malformed value does not raise: `problem` then fails every
selector on that device.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rackloom.core.allocate.cel import library as _library  # noqa: F401 (declares the functions)
from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.types import CelType, Overload
from rackloom.core.allocate.cel.values import DomainMap, SemanticVersion
from rackloom.core.allocate.quantity import Quantity

# The dynamic side: the values of one device.


_LISTS = ("ints", "bools", "strings", "versions")
_SCALARS = ("int", "bool", "string", "version")


class DeviceView:
    """One device, its attributes and capacities by domain. Build it once, evaluate many selectors on it.

    `problem` is set where the device itself is malformed: every selector on it then fails with that error.
    """

    __slots__ = ("attributes", "capacity", "problem", "variable")

    def __init__(self, variable: Mapping[str, Any], problem: str | None) -> None:
        self.variable = variable
        self.attributes: DomainMap = variable["attributes"]
        self.capacity: DomainMap = variable["capacity"]
        self.problem = problem

    @classmethod
    def of(
        cls,
        driver: str,
        attributes: Mapping[str, Mapping[str, object]],
        capacity: Mapping[str, str | int | float],
        allow_multiple_allocations: bool = False,
    ) -> "DeviceView":
        """A view from API JSON values: `{"numa": {"int": 0}}` and `{"memory": "80Gi"}`.

        Names without a domain get the driver as theirs.
        """
        problems: list[str] = []

        def parsed(kind: str, values: Mapping[str, Any], parse: Callable[[Any], Any]) -> DomainMap:
            found: dict[str, Any] = {}
            for name, value in values.items():
                try:
                    found[name] = parse(value)
                except ValueError as error:
                    problems.append(f"{kind} {name}: {error}")
            return _by_domain(found, driver)

        variable = {
            "driver": driver,
            "allowMultipleAllocations": bool(allow_multiple_allocations),
            "attributes": parsed("attribute", attributes, _attribute_value),
            "capacity": parsed("capacity", capacity, Quantity.parse),
        }
        return cls(variable, problems[0] if problems else None)

    @property
    def driver(self) -> str:
        """The driver's name."""
        return str(self.variable["driver"])


def _by_domain(values: Mapping[str, Any], driver: str) -> DomainMap:
    split: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        domain, slash, identifier = name.partition("/")
        where, what = (domain, identifier) if slash else (driver, name)
        split.setdefault(where, {})[what] = value
    return DomainMap(split)


def _attribute_value(wrapped: Mapping[str, object]) -> Any:
    """The one value that is set; lists come first, as upstream looks for them first."""
    for kind in _LISTS:
        if wrapped.get(kind) is not None:
            return [_scalar_value(kind[:-1], item) for item in wrapped[kind]]  # type: ignore[attr-defined]
    for kind in _SCALARS:
        if wrapped.get(kind) is not None:
            return _scalar_value(kind, wrapped[kind])
    raise ValueError("unsupported attribute value")


def _scalar_value(kind: str, value: Any) -> Any:
    if kind == "version":
        try:
            return SemanticVersion.parse(value)
        except ValueError as error:
            raise ValueError(f"parse semantic version: {error}") from None
    return value


# The static side: names and types.


_NAMED_TYPES = {
    type_.name: type_
    for type_ in (
        *(types.BOOL, types.INT, types.UINT, types.DOUBLE, types.STRING, types.BYTES, types.DYN, types.NULL),
        *(types.TIMESTAMP, types.DURATION, types.TYPE, types.IP, types.CIDR, types.list_of(types.DYN)),
        *(types.map_of(types.DYN, types.DYN), types.optional_of(types.type_variable("V"))),
    )
}

_ADVICE = {
    "math": "the math library is not part of Kubernetes' selectors",
    "base64": "the encoders library is not part of Kubernetes' selectors",
    "self": "the device under test is called device",
    "object": "the device under test is called device",
    "request": "selectors see only the device",
}


@dataclass(frozen=True, slots=True, eq=False)
class CelEnvironment:
    """Names and what they mean. `attribute` is the static type of attribute values."""

    fields: Mapping[str, CelType]
    functions: Mapping[str, tuple[Overload, ...]]
    attribute: CelType
    type_names: Mapping[str, CelType]

    def advice(self, name: str) -> str | None:
        """What to write instead of an unknown name, where that is known."""
        return _ADVICE.get(name.split(".")[0])


@functools.cache
def environment(
    kind: str = "stored", *, consumable_capacity: bool = True, list_type_attributes: bool = True
) -> CelEnvironment:
    """The environment for `stored` or `new` expressions; the features count for `new` only."""
    if kind not in ("stored", "new"):
        raise ValueError(f"environment must be 'stored' or 'new', not {kind!r}")
    lists = kind == "stored" or list_type_attributes
    attribute = types.DYN if lists else types.ANY
    fields = {
        "driver": types.STRING,
        "attributes": types.map_of(types.STRING, types.map_of(types.STRING, attribute)),
        "capacity": types.map_of(types.STRING, types.map_of(types.STRING, types.QUANTITY)),
    }
    if kind == "stored" or consumable_capacity:
        fields["allowMultipleAllocations"] = types.BOOL
    functions = {name: of for name, of in types.FUNCTIONS.items() if lists or name != "includes"}
    return CelEnvironment(fields, functions, attribute, _NAMED_TYPES)
