"""Values that all records share: statuses, id factories, change results, name rules and refusals.

A rule that refuses a request raises `Rejected` with a `RefusalKind`: invalid, forbidden, not found or
conflict. The REST and gRPC interfaces translate the kind, and only the kind, into their status codes.
`invalid`, `forbidden`, `not_found` and `conflict` build the common cases.

`Changed` is the result of a change of intent, with the NVLink domains to reconcile after the commit.
`Status` lists the states of REST objects. Each kind of object uses some of them.
`RELEASED_OWNER` is the owner of a found partition that an operator released: no logical partition has
this id, so the planner removes the partition.

This module imports neither SQLAlchemy nor a web framework, because light commands import it.
"""

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from rackloom.errors import Refused

T_co = TypeVar("T_co", covariant=True)

# Refusals.


MAX_KEPT_BYTES = 64 << 10
"""Limit of fields without a meaning here that one object keeps, as JSON. They are read with the object."""


def has_too_large_fields(kept: Mapping[str, Any]) -> bool:
    """Whether an object may not keep all of these fields."""
    return len(msgspec.json.encode(kept)) > MAX_KEPT_BYTES


class RefusalKind(StrEnum):
    """The reason of a refusal."""

    INVALID = "invalid"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not-found"
    CONFLICT = "conflict"


class Rejected(Refused):
    """A request that a rule of the site refuses. Nothing was changed."""

    def __init__(
        self,
        kind: RefusalKind,
        reason: str,
        *,
        data: Mapping[str, str] | None = None,
        nearest_fix: str | None = None,
    ) -> None:
        super().__init__(reason, nearest_fix=nearest_fix)
        self.kind = kind
        self.data = data


def invalid(reason: str, nearest_fix: str | None = None, **data: str) -> Rejected:
    """The request contradicts itself or a record it names."""
    return Rejected(RefusalKind.INVALID, reason, data=data or None, nearest_fix=nearest_fix)


def forbidden(reason: str, nearest_fix: str | None = None) -> Rejected:
    """The caller may not do this."""
    return Rejected(RefusalKind.FORBIDDEN, reason, nearest_fix=nearest_fix)


def not_found(reason: str, nearest_fix: str | None = None) -> Rejected:
    """The object named in the path does not exist."""
    return Rejected(RefusalKind.NOT_FOUND, reason, nearest_fix=nearest_fix)


def conflict(reason: str, nearest_fix: str | None = None, **data: str) -> Rejected:
    """The request is fine, but the state of the site is against it."""
    return Rejected(RefusalKind.CONFLICT, reason, data=data or None, nearest_fix=nearest_fix)


# Names of objects that people refer to.


_UNPRINTABLE_CLASS = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
"""For a regular expression's brackets: characters that hide, reorder or end a line where a text is shown.

Control characters (category Cc), separators of lines and paragraphs (Zl, Zp), and characters that control the
direction of text (property Bidi_Control, see Trojan Source: Boucher and Anderson, USENIX Security 2023).
Halves of surrogate pairs (Cs) are refused wherever text is decoded.
"""
UNPRINTABLE = re.compile(f"[{_UNPRINTABLE_CLASS}]")
TEXT_PATTERN = f"^[^{_UNPRINTABLE_CLASS}]*$"
TEXT_RULE = "must hold no control characters, and none that change the direction of text"
_INVISIBLE_CLASS = (
    r"\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    r"\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
)
"""Not seen in a name, so that two look alike. Of the basic plane: format characters (category Cf), characters
that a font may ignore (property Default_Ignorable_Code_Point), and the blank of Braille."""
_INVISIBLE_BEYOND = re.compile(
    "[\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""The same of other planes. Not all dialects of regular expressions can say this, so no pattern does."""
_NOT_IN_NAMES = f"\\x00-\\x1f\\x7f-\\x9f{_INVISIBLE_CLASS}"
NAME_PATTERN = rf"^[^\s{_NOT_IN_NAMES}]([^{_NOT_IN_NAMES}]*[^\s{_NOT_IN_NAMES}])?$"
NAME_RULE = (
    "must hold no control characters and none that are not seen, and neither begin nor end with a space"
)
NAME_MIN_LENGTH, NAME_MAX_LENGTH = 2, 256


def check_name(name: str) -> None:
    """Refuse a name that is too short, too long, or holds characters that are not shown."""
    if not NAME_MIN_LENGTH <= len(name) <= NAME_MAX_LENGTH:
        raise invalid(
            "Error validating name", name=f"must have {NAME_MIN_LENGTH} to {NAME_MAX_LENGTH} characters"
        )
    if re.fullmatch(NAME_PATTERN, name) is None or not is_visible(name):
        raise invalid("Error validating name", name=NAME_RULE)


def is_visible(name: str) -> bool:
    """Whether a name that matches NAME_PATTERN holds no invisible character of another plane either."""
    return _INVISIBLE_BEYOND.search(name) is None


def check_description(description: str) -> None:
    """Refuse a description that holds characters that are not shown."""
    if UNPRINTABLE.search(description):
        raise invalid("Error validating description", description=TEXT_RULE)


# Statuses and the results of changes.


IdFactory: TypeAlias = Callable[[], str]
"""Makes a new uuid string. It is passed in, so that a simulation can be replayed."""


class Changed(msgspec.Struct, Generic[T_co], frozen=True):
    """The result of a change of intent, and the NVLink domains to reconcile."""

    value: T_co
    domains: frozenset[str]


RELEASED_OWNER = "released"
"""Owner of a found partition that an operator released. No logical partition has this id, so the planner
removes the partition."""


class Status(StrEnum):
    """States of REST objects. Each kind of object uses a part of them."""

    PENDING = "Pending"
    PROVISIONING = "Provisioning"
    CONFIGURING = "Configuring"
    READY = "Ready"
    REGISTERED = "Registered"
    DELETING = "Deleting"
    TERMINATING = "Terminating"
    TERMINATED = "Terminated"
    REPAIRING = "Repairing"
    ERROR = "Error"
    UNKNOWN = "Unknown"


class InterfaceSpec(msgspec.Struct, frozen=True):
    """One GPU of an instance (0-based, module id minus 1) and the logical partition it shall join."""

    logical_partition_id: str
    device_instance: int


class OperationState(StrEnum):
    """Whether the controller carried it out."""

    PENDING = "pending"
    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"
