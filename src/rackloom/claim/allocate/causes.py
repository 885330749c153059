"""Why a device does not serve a request: one vocabulary for the search and for the explanation."""

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """What takes a device away from a request, in the order in which it is checked."""

    IN_USE = "in-use"
    BINDING_CONDITIONS = "binding-conditions"
    COMPATIBILITY_GROUPS = "compatibility-groups"
    CLASS_SELECTOR = "class-selector"
    REQUEST_SELECTOR = "request-selector"
    SELECTOR_FAILS = "selector-fails"
    OTHER_NODE = "other-node"
    CAPACITY = "capacity"
    COUNTERS = "counters"
    TAINT = "taint"
    CONSTRAINT = "constraint"
    ATTRIBUTE_MISSING = "attribute-missing"


class Cause(msgspec.Struct, frozen=True):
    """A kind, and the detail a person needs: an expression, a taint, an amount that is short."""

    kind: Kind
    detail: str = ""
