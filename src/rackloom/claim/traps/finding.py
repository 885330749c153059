"""One trap that was found: where, why it is one, and what to write instead."""

from enum import StrEnum

import msgspec

FieldPath = tuple[str | int, ...]


class Trap(StrEnum):
    """What is wrong, in the words the command line prints."""

    DOES_NOT_COMPILE = "does-not-compile"
    CONSTANT = "constant"
    """A selector that is true, or false, whatever the device."""
    MATCHES_NOTHING = "matches-nothing"
    UNKNOWN_CLASS = "unknown-class"
    UNPUBLISHED = "unpublished-attribute"
    DEREFERENCE = "missing-attribute"
    """Some device of the class lacks an attribute: the pod is stopped on every node."""
    FAILS = "fails-on-devices"
    """No answer for some device, for another reason; the consequence is the same."""
    NO_DRIVER_CHECK = "no-driver-check"
    FOREIGN_ID = "id-of-another-machine"
    MANAGEMENT_NIC = "management-nic"
    IDLE_HCA = "hca-without-data"
    """An RDMA device that must not carry tenant data."""
    COUNT = "count"
    ONE_VALUE = "one-value-for-all"
    """A matchAttribute that forces one root or NUMA node, where none has all that is asked for."""
    NO_NODE = "no-node"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A trap in one object."""

    trap: Trap
    path: FieldPath
    """The field, from the claim's or class's `spec`."""
    why: str
    fix: str


def dotted(path: FieldPath) -> str:
    """`spec.devices.requests[0].name`."""
    words = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(words).removeprefix(".")
