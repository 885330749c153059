"""A device as selectors see it."""

from collections.abc import Mapping
from typing import Any

from rackloom.claim.allocate.cel.values import DomainMap
from rackloom.claim.allocate.quantity import Quantity
from rackloom.claim.allocate.semver import Semver

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
        problem: str | None = None
        read: dict[str, Any] = {}
        for name, wrapped in attributes.items():
            try:
                read[name] = _attribute(wrapped)
            except ValueError as error:
                problem = problem or f"attribute {name}: {error}"
        amounts: dict[str, Any] = {}
        for name, amount in capacity.items():
            try:
                amounts[name] = Quantity.parse(amount)
            except ValueError as error:
                problem = problem or f"capacity {name}: {error}"
        variable = {
            "driver": driver,
            "allowMultipleAllocations": bool(allow_multiple_allocations),
            "attributes": _by_domain(read, driver),
            "capacity": _by_domain(amounts, driver),
        }
        return cls(variable, problem)

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


def _attribute(wrapped: Mapping[str, object]) -> Any:
    """The one value that is set; lists come first, as upstream looks for them first."""
    for kind in _LISTS:
        if wrapped.get(kind) is not None:
            return [_scalar(kind[:-1], item) for item in wrapped[kind]]  # type: ignore[attr-defined]
    for kind in _SCALARS:
        if wrapped.get(kind) is not None:
            return _scalar(kind, wrapped[kind])
    raise ValueError("unsupported attribute value")


def _scalar(kind: str, value: Any) -> Any:
    if kind == "version":
        try:
            return Semver.parse(value)
        except ValueError as error:
            raise ValueError(f"parse semantic version: {error}") from None
    return value
