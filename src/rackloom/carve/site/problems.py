"""What a rule of the site says when it refuses, named by what the caller did wrong.

Every door (REST now, others later) translates the kind, and only the kind, into its own status code.
"""

from collections.abc import Mapping
from enum import StrEnum

from rackloom.errors import Refused


class Kind(StrEnum):
    """Why a request is refused."""

    INVALID = "invalid"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not-found"
    CONFLICT = "conflict"


class Rejected(Refused):
    """A request that a rule of the site refuses; nothing was changed."""

    def __init__(
        self,
        kind: Kind,
        reason: str,
        *,
        data: Mapping[str, str] | None = None,
        nearest_fix: str | None = None,
    ) -> None:
        super().__init__(reason, nearest_fix=nearest_fix)
        self.kind = kind
        self.data = data


def invalid(reason: str, **data: str) -> Rejected:
    """The request contradicts itself or a record it names."""
    return Rejected(Kind.INVALID, reason, data=data or None)


def forbidden(reason: str) -> Rejected:
    """The caller may not do this."""
    return Rejected(Kind.FORBIDDEN, reason)


def not_found(reason: str) -> Rejected:
    """The thing named in the path does not exist."""
    return Rejected(Kind.NOT_FOUND, reason)


def conflict(reason: str, **data: str) -> Rejected:
    """The request is fine, but the state of the site is against it."""
    return Rejected(Kind.CONFLICT, reason, data=data or None)
