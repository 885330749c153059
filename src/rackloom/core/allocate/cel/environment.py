"""The variable `device` and everything else that an expression may name.

`environment` gives the static side: the fields of a device with their types, type names and functions.
In objects that exist already, the API server accepts the `stored` kind: every feature, gated or not. In
new objects it accepts the `new` kind, for which gated features must be on. Without list attributes, an
attribute has the type google.protobuf.Any and `includes` does not exist.

`DeviceView` gives the values: attributes and capacities of one device by domain. A name without a
domain belongs to the driver's domain. A value is read when a selector first needs it, because most
selectors read few of them. A malformed value does not raise: `problem` then fails every selector on
that device.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rackloom.core.allocate.cel import library as _library  # noqa: F401 (declares the functions)
from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.types import CelType, Overload
from rackloom.core.allocate.cel.values import DomainMap, SemanticVersion
from rackloom.core.allocate.objects import Amount, Device, DeviceAttribute, DeviceCapacity
from rackloom.core.allocate.quantity import Quantity

# The dynamic side: the values of one device.


class FieldValues(dict[str, Any]):
    """Attributes or capacities by `domain/identifier`, each read on first use.

    A domain with a slash is not of this form and is found in `by_domain` alone.
    """

    __slots__ = ("_domains", "_driver", "_identifiers", "_parse", "_raw")

    def __init__(self, driver: str, raw: Mapping[str, Any], parse: Callable[[Any], Any]) -> None:
        super().__init__()
        self._driver = driver
        self._raw = raw
        self._parse = parse
        self._domains: DomainMap | None = None
        self._identifiers: dict[str, list[str]] = {}

    def __missing__(self, key: str) -> Any:
        found = self._raw.get(key)
        domain, _, identifier = key.partition("/")
        if domain == self._driver and "/" not in identifier and identifier in self._raw:
            # A name written both ways has the value that was written last.
            found = self._raw[identifier] if found is None else self._written_last(key, identifier)
        if found is None:
            raise KeyError(key)
        value = self[key] = self._parse(found)
        return value

    def _written_last(self, *names: str) -> Any:
        return [value for name, value in self._raw.items() if name in names][-1]

    def has(self, key: str) -> bool:
        """Whether there is a value under `domain/identifier`."""
        if key in self or key in self._raw:
            return True
        domain, _, identifier = key.partition("/")
        return domain == self._driver and "/" not in identifier and identifier in self._raw

    def value_or(self, key: str, default: Any) -> Any:
        """The value under `domain/identifier`, or the default if there is none."""
        try:
            return self[key]
        except KeyError:
            return default

    def identifiers(self, domain: str) -> list[str]:
        """The identifiers in a domain, in order."""
        known = self._identifiers.get(domain)
        if known is None:
            prefix, own = f"{domain}/", domain == self._driver
            found = [
                name.removeprefix(prefix)
                for name in self._raw
                if name.startswith(prefix) or (own and "/" not in name)
            ]
            known = self._identifiers[domain] = list(dict.fromkeys(found))
        return known

    @property
    def by_domain(self) -> DomainMap:
        """All values by domain and identifier. A name without a domain is in the driver's."""
        if self._domains is None:
            split: dict[str, dict[str, Any]] = {}
            for name, wrapped in self._raw.items():
                domain, slash, identifier = name.partition("/")
                where, what = (domain, identifier) if slash else (self._driver, name)
                split.setdefault(where, {})[what] = self._parse(wrapped)
            self._domains = DomainMap(split)
        return self._domains


class DeviceView:
    """One device, its attributes and capacities by domain. Build it once, evaluate many selectors on it.

    Building it reads only the values that show whether the device is malformed. If it is, `problem` is
    set, and every selector on it fails with that error.
    """

    __slots__ = ("_variable", "allow_multiple_allocations", "attributes", "capacity", "driver", "problem")

    def __init__(
        self,
        driver: str,
        attributes: Mapping[str, DeviceAttribute],
        capacity: Mapping[str, Amount | DeviceCapacity],
        allow_multiple_allocations: bool | None = False,
    ) -> None:
        self.driver = driver
        self.allow_multiple_allocations = bool(allow_multiple_allocations)
        self.attributes = FieldValues(driver, attributes, _attribute_value)
        self.capacity = FieldValues(driver, capacity, _capacity_value)
        self.problem = _problem_of(attributes, capacity)
        self._variable: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        driver: str,
        attributes: Mapping[str, Mapping[str, Any]],
        capacity: Mapping[str, Amount],
        allow_multiple_allocations: bool = False,
    ) -> "DeviceView":
        """A view from API JSON values: `{"numa": {"int": 0}}` and `{"memory": "80Gi"}`.

        Names without a domain get the driver's domain.
        """
        read = {name: _attribute_of(wrapped) for name, wrapped in attributes.items()}
        return cls(driver, read, capacity, allow_multiple_allocations)

    @classmethod
    def of_device(cls, driver: str, device: Device) -> "DeviceView":
        """A view of a device of the API."""
        return cls(driver, device.attributes, device.capacity, device.allow_multiple_allocations)

    @property
    def variable(self) -> Mapping[str, Any]:
        """The value of the variable `device`, with everything in it."""
        if self._variable is None:
            self._variable = {
                "driver": self.driver,
                "allowMultipleAllocations": self.allow_multiple_allocations,
                "attributes": self.attributes.by_domain,
                "capacity": self.capacity.by_domain,
            }
        return self._variable


def _attribute_of(wrapped: Mapping[str, Any]) -> DeviceAttribute:
    value = wrapped.get
    return DeviceAttribute(
        int_=value("int"),
        bool_=value("bool"),
        string=value("string"),
        version=value("version"),
        ints=value("ints"),
        bools=value("bools"),
        strings=value("strings"),
        versions=value("versions"),
    )


def _problem_of(
    attributes: Mapping[str, DeviceAttribute], capacity: Mapping[str, Amount | DeviceCapacity]
) -> str | None:
    """The reason why the device is malformed: a missing value, or a text that is no version or quantity."""
    for name, attribute in attributes.items():
        if (
            attribute.string is None and attribute.int_ is None and attribute.bool_ is None
        ) or attribute.versions:
            try:
                _attribute_value(attribute)
            except ValueError as error:
                return f"attribute {name}: {error}"
    for name, amount in capacity.items():
        try:
            _capacity_value(amount)
        except ValueError as error:
            return f"capacity {name}: {error}"
    return None


def _attribute_value(attribute: DeviceAttribute) -> Any:
    """The one value that is set. Lists come first, as upstream looks for them first."""
    for items in (attribute.ints, attribute.bools, attribute.strings):
        if items is not None:
            return list(items)
    if attribute.versions is not None:
        return list(map(_version, attribute.versions))
    for value in (attribute.int_, attribute.bool_, attribute.string):
        if value is not None:
            return value
    if attribute.version is not None:
        return _version(attribute.version)
    raise ValueError("unsupported attribute value")


def _version(text: str) -> SemanticVersion:
    try:
        return SemanticVersion.parse(text)
    except ValueError as error:
        raise ValueError(f"parse semantic version: {error}") from None


def _capacity_value(amount: Amount | DeviceCapacity) -> Quantity:
    return Quantity.parse(str(amount.value) if isinstance(amount, DeviceCapacity) else amount)


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


class CelEnvironment(msgspec.Struct, frozen=True, eq=False):
    """Names and their meanings. `attribute` is the static type of attribute values."""

    fields: Mapping[str, CelType]
    functions: Mapping[str, tuple[Overload, ...]]
    attribute: CelType
    type_names: Mapping[str, CelType]

    def advice(self, name: str) -> str | None:
        """The replacement for an unknown name, or None if there is no advice."""
        return _ADVICE.get(name.split(".")[0])


@functools.cache
def environment(
    kind: str = "stored", *, consumable_capacity: bool = True, list_type_attributes: bool = True
) -> CelEnvironment:
    """The environment for `stored` or `new` expressions. The features count for `new` only."""
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
