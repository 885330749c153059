"""DRANET's `--filter`: a CEL expression over a device's attributes that says whether it is published.

`attributes` maps full names (`dra.net/ifName`) to values with the fields of Kubernetes' Go type: StringValue,
BoolValue, IntValue, VersionValue; those that are not set are null. As with DRANET, a device of which the
expression cannot be evaluated is published, and one for which it gives no truth value is not.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rackloom.claim.allocate.objects import Device, DeviceAttribute
from rackloom.errors import Refused

DOMAIN = "dra.net"
VARIABLE = "attributes"
Filter = Callable[[Device], bool]
"""Whether a device is published."""


def everything(_: Device) -> bool:
    """The filter that leaves nothing out."""
    return True


def filter_of(expression: str) -> Filter:
    """Raises `Refused` for an expression that can never be evaluated."""
    # Four mebibytes that a node without a filter need not hold.
    from cel_expr_python import cel

    environment = cel.NewEnv(variables={VARIABLE: cel.Type.Map(cel.Type.STRING, cel.Type.DYN)})
    try:
        program = environment.compile(expression)
    except Exception as error:
        # The library raises whatever its C++ half says.
        raise Refused(f"--filter {expression!r}: {error}", nearest_fix=_EXAMPLE) from error
    if program.return_type() not in (cel.Type.BOOL, cel.Type.DYN):
        raise Refused(f"--filter {expression!r} is no condition", nearest_fix=_EXAMPLE)

    def is_published(one: Device) -> bool:
        value = program.eval(data={VARIABLE: fields_of(one.attributes)})
        return value.plain_value() is True if value.type() != cel.Type.ERROR else True

    return is_published


def fields_of(attributes: Mapping[str, DeviceAttribute]) -> dict[str, Any]:
    """Attributes as the expression sees them."""
    return {
        name if "/" in name else f"{DOMAIN}/{name}": {
            "StringValue": one.string,
            "BoolValue": one.bool_,
            "IntValue": one.int_,
            "VersionValue": one.version,
        }
        for name, one in attributes.items()
    }


def kept(devices: Iterable[Device], is_published: Filter) -> dict[str, Device]:
    """Those that are published, by name."""
    return {one.name: one for one in devices if is_published(one)}


_EXAMPLE = f"write a condition, such as {VARIABLE}['dra.net/type'].StringValue != 'veth'"
