"""What an expression may name: the fields of a device, types, and functions.

`stored` is what the API server accepts in objects that exist already: every feature, whatever its gate.
`new` is what it accepts in new objects, where gated features must be on.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from rackloom.claim.allocate.cel import types as t
from rackloom.claim.allocate.cel.library import LIBRARIES
from rackloom.claim.allocate.cel.overloads import Overload
from rackloom.claim.allocate.cel.types import Type

_NAMED_TYPES = {
    **{one.name: one for one in (t.BOOL, t.INT, t.UINT, t.DOUBLE, t.STRING, t.BYTES, t.DYN, t.NULL)},
    **{one.name: one for one in (t.TIMESTAMP, t.DURATION, t.TYPE)},
    "list": t.list_of(t.DYN),
    "map": t.map_of(t.DYN, t.DYN),
    "optional_type": t.optional_of(t.param("V")),
    "net.IP": t.IP,
    "net.CIDR": t.CIDR,
}

_ELSEWHERE = {
    "math": "the math library is not part of Kubernetes' selectors",
    "base64": "the encoders library is not part of Kubernetes' selectors",
    "self": "the device under test is called device",
    "object": "the device under test is called device",
    "request": "selectors see only the device",
}


@dataclass(frozen=True, slots=True, eq=False)
class Environment:
    """Names and what they mean. `attribute` is the static type of attribute values."""

    fields: Mapping[str, Type]
    functions: Mapping[str, tuple[Overload, ...]]
    attribute: Type
    type_names: Mapping[str, Type]

    def advice(self, name: str) -> str | None:
        """What to write instead of an unknown name, where that is known."""
        return _ELSEWHERE.get(name.split(".")[0])


@functools.cache
def environment(
    kind: str = "stored", *, consumable_capacity: bool = True, list_type_attributes: bool = True
) -> Environment:
    """The environment for `stored` or `new` expressions; the features count for `new` only."""
    if kind not in ("stored", "new"):
        raise ValueError(f"environment must be 'stored' or 'new', not {kind!r}")
    lists = kind == "stored" or list_type_attributes
    attribute = t.DYN if lists else t.ANY
    fields = {
        "driver": t.STRING,
        "attributes": t.map_of(t.STRING, t.map_of(t.STRING, attribute)),
        "capacity": t.map_of(t.STRING, t.map_of(t.STRING, t.QUANTITY)),
    }
    if kind == "stored" or consumable_capacity:
        fields["allowMultipleAllocations"] = t.BOOL
    functions = {name: of for name, of in _functions().items() if lists or name != "includes"}
    return Environment(fields, functions, attribute, _NAMED_TYPES)


@functools.cache
def _functions() -> Mapping[str, tuple[Overload, ...]]:
    functions: dict[str, tuple[Overload, ...]] = {}
    for library in LIBRARIES:
        for overload in library:
            functions[overload.function] = (*functions.get(overload.function, ()), overload)
    return functions
