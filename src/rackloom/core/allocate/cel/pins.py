"""The attribute values that a selector can hold for: it refuses all other devices without an error.

`device.attributes["d"].uuid == "X"` pins an attribute, and so do `in` with a list of constants and a
comparison with an integer. A pin counts if it is the whole expression, a part of its outermost "and", or
a part of an "or" of pins in one of these places. CEL's "and" is false as soon as one part is false, even if
another part is an error, so a device with another value of the same type is refused without an error.

A pin decides nothing for devices that lack the attribute or have it with another type: to read it there may
be an error. Only a part that is false there too excludes such devices: `device.driver == "d"`, or a
presence test of the attribute. An expression that may cost more than the limit pins nothing.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rackloom.core.allocate.cel.syntax import Call, CelNode, Const, Ident, ListNode, Select

Scalar = str | int | bool
_SCALARS = (str, int, bool)


class PinnedName(NamedTuple):
    """The attribute of a pin, and the devices that are refused in any case."""

    domain: str
    identifier: str
    type: type[Scalar]
    driver: str | None = None
    """Devices of other drivers are refused in any case."""
    guarded: bool = False
    """Devices without the attribute are refused, too."""


class Pin(NamedTuple):
    """An attribute that must have one of some values, or a number from `low` to `high`."""

    name: PinnedName
    values: frozenset[Scalar] = frozenset()
    low: int | None = None
    high: int | None = None


Pins = tuple[Pin, ...]
"""Pins of which one must be met."""


def pins_of(root: CelNode) -> tuple[Pins, ...]:
    """The pins of a checked expression: all must be met."""
    terms = list(_terms(root, "_&&_"))
    drivers = [driver for driver in map(_driver, terms) if driver is not None]
    present = {name for name in map(_presence, terms) if name is not None}

    def refined(pin: Pin) -> Pin:
        guarded = (pin.name.domain, pin.name.identifier) in present
        return pin._replace(name=pin.name._replace(driver=drivers[0] if drivers else None, guarded=guarded))

    found = (_alternatives(term) for term in terms)
    return tuple(tuple(map(refined, pins)) for pins in found if pins is not None)


def _terms(node: CelNode, operator: str) -> Iterator[CelNode]:
    pending = [node]
    while pending:
        match pending.pop():
            case Call(function=function, args=args) if function == operator:
                pending.extend(reversed(args))
            case other:
                yield other


def _alternatives(node: CelNode) -> Pins | None:
    pins = [_pin(term) for term in _terms(node, "_||_")]
    known = tuple(pin for pin in pins if pin is not None)
    return known if len(known) == len(pins) else None


def _pin(node: CelNode) -> Pin | None:
    match node:
        case Call(function="_==_", args=(Const(value=value), attribute)):
            return _pinned(attribute, [value])
        case Call(function="_==_", args=(attribute, Const(value=value))):
            return _pinned(attribute, [value])
        case Call(function="@in", args=(attribute, ListNode(elements=elements, optional=optional))):
            values = [element.value for element in elements if isinstance(element, Const)]
            return _pinned(attribute, values) if len(values) == len(elements) and not optional else None
        case Call(function=function, args=(Const(value=value), attribute)) if function in _SWAPPED:
            return _compared(attribute, _SWAPPED[function], value)
        case Call(function=function, args=(attribute, Const(value=value))) if function in _SWAPPED:
            return _compared(attribute, function, value)
    return None


_SWAPPED = {"_<_": "_>_", "_>_": "_<_", "_<=_": "_>=_", "_>=_": "_<=_"}


def _pinned(node: CelNode, values: Sequence[object]) -> Pin | None:
    name = _attribute(node)
    kinds = {type(value) for value in values}
    if name is None or len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind not in _SCALARS:
        return None
    return Pin(PinnedName(*name, kind), frozenset(values))  # type: ignore[arg-type]


def _compared(node: CelNode, function: str, value: object) -> Pin | None:
    name = _attribute(node)
    if name is None or type(value) is not int:
        return None
    whose = PinnedName(*name, int)
    match function:
        case "_>_":
            return Pin(whose, low=value + 1)
        case "_>=_":
            return Pin(whose, low=value)
        case "_<_":
            return Pin(whose, high=value - 1)
    return Pin(whose, high=value)


def _driver(node: CelNode) -> str | None:
    match node:
        case Call(
            function="_==_",
            args=(
                Select(operand=Ident(name="device"), field="driver", test_only=False),
                Const(value=str(name)),
            ),
        ):
            return name
    return None


def _presence(node: CelNode) -> tuple[str, str] | None:
    match node:
        case Select(operand=container, field=identifier, test_only=True):
            return _named(container, identifier)
        case Call(function="@in", args=(Const(value=str(identifier)), container)):
            return _named(container, identifier)
    return None


def _attribute(node: CelNode) -> tuple[str, str] | None:
    match node:
        case Select(operand=container, field=identifier, test_only=False):
            return _named(container, identifier)
        case Call(function="_[_]", args=(container, Const(value=str(identifier)))):
            return _named(container, identifier)
    return None


def _named(container: CelNode, identifier: str) -> tuple[str, str] | None:
    """Domain and identifier, if the container is the attributes of a domain."""
    match container:
        case Call(function="_[_]", args=(attributes, Const(value=str(domain)))):
            pass
        case Select(operand=attributes, field=domain, test_only=False):
            pass
        case _:
            return None
    match attributes:
        case Select(operand=Ident(name="device"), field="attributes", test_only=False):
            return domain, identifier
    return None
