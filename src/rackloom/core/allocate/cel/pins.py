"""Which attributes a selector pins to constants: no device with another value can satisfy it.

`device.attributes["d"].uuid == "X"` pins an attribute, and so do `in` with a list of constants and an
"or" of pins of one attribute. A pin counts where it is the whole expression or a part of its outermost
"and". CEL's "and" is false as soon as one part is false, whatever error another part has, so a device
with another value of the same type is refused without an error.

A pin says nothing about devices where the attribute is missing or of another type: to read it there may
be an error. Only a part that is false there too takes such devices out: `device.driver == "d"`, or a
presence test of the attribute. An expression whose cost may run over the limit pins nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rackloom.core.allocate.cel.syntax import Call, CelNode, Const, Ident, ListNode, Select

Scalar = str | int | bool
_SCALARS = (str, int, bool)


class PinnedAttribute(NamedTuple):
    """An attribute that must have one of some values, all of one type."""

    domain: str
    identifier: str
    type: type[Scalar]
    values: frozenset[Scalar]
    driver: str | None = None
    """Devices of other drivers are refused in any case."""
    guarded: bool = False
    """Devices without the attribute are refused, too."""


def pins_of(root: CelNode) -> tuple[PinnedAttribute, ...]:
    """The attributes that a checked expression pins."""
    terms = list(_terms(root, "_&&_"))
    drivers = [driver for driver in map(_driver, terms) if driver is not None]
    present = {name for name in map(_presence, terms) if name is not None}
    pins = [pin for pin in map(_pin, terms) if pin is not None]
    return tuple(
        pin._replace(driver=drivers[0] if drivers else None, guarded=(pin.domain, pin.identifier) in present)
        for pin in pins
    )


def _terms(node: CelNode, operator: str) -> Iterator[CelNode]:
    pending = [node]
    while pending:
        match pending.pop():
            case Call(function=function, args=args) if function == operator:
                pending.extend(reversed(args))
            case other:
                yield other


def _pin(node: CelNode) -> PinnedAttribute | None:
    match node:
        case Call(function="_==_", args=(Const(value=value), attribute)):
            return _pinned(attribute, [value])
        case Call(function="_==_", args=(attribute, Const(value=value))):
            return _pinned(attribute, [value])
        case Call(function="@in", args=(attribute, ListNode(elements=elements, optional=optional))):
            if optional or not all(isinstance(element, Const) for element in elements):
                return None
            return _pinned(attribute, [element.value for element in elements if isinstance(element, Const)])
        case Call(function="_||_"):
            pins = [_pin(term) for term in _terms(node, "_||_")]
            first = pins[0]
            if first is None or any(pin is None or pin[:3] != first[:3] for pin in pins):
                return None
            return first._replace(values=frozenset().union(*(pin.values for pin in pins if pin)))
    return None


def _pinned(node: CelNode, values: list[object]) -> PinnedAttribute | None:
    name = _attribute(node)
    kinds = {type(value) for value in values}
    if name is None or len(kinds) != 1:
        return None
    kind = kinds.pop()
    if kind not in _SCALARS:
        return None
    return PinnedAttribute(*name, kind, frozenset(values))  # type: ignore[arg-type]


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
            domain = _domain(container)
            return None if domain is None else (domain, identifier)
        case Call(function="@in", args=(Const(value=str(identifier)), container)):
            domain = _domain(container)
            return None if domain is None else (domain, identifier)
    return None


def _attribute(node: CelNode) -> tuple[str, str] | None:
    match node:
        case Select(operand=container, field=identifier, test_only=False):
            pass
        case Call(function="_[_]", args=(container, Const(value=str(identifier)))):
            pass
        case _:
            return None
    domain = _domain(container)
    return None if domain is None else (domain, identifier)


def _domain(node: CelNode) -> str | None:
    match node:
        case Call(
            function="_[_]",
            args=(
                Select(operand=Ident(name="device"), field="attributes", test_only=False),
                Const(value=str(domain)),
            ),
        ):
            return domain
        case Select(
            operand=Select(operand=Ident(name="device"), field="attributes", test_only=False),
            field=domain,
            test_only=False,
        ):
            return domain
    return None
