"""The one place where refusals become gRPC status codes."""

import grpc

from rackloom.carve.fabric.ports import FabricRefused, FabricUnavailable
from rackloom.carve.site.problems import Kind, Rejected
from rackloom.errors import Refused, Retry, Unknown

FIX = "nearest-fix-bin"
"""Trailing metadata with what would make a refused request acceptable, in UTF-8."""

EXPECTED = (Refused, Retry, Unknown, FabricRefused, FabricUnavailable)
"""What a handler may raise; anything else is a defect."""

_CODES = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: Exception) -> grpc.StatusCode:
    """The status code that says what the caller should do about `error`."""
    if isinstance(error, Rejected):
        # A conflict that names the object in the way is one of identity, not of state.
        exists = error.kind is Kind.CONFLICT and "id" in (error.data or {})
        return grpc.StatusCode.ALREADY_EXISTS if exists else _CODES[error.kind]
    if isinstance(error, Refused | FabricRefused):
        return grpc.StatusCode.FAILED_PRECONDITION
    return grpc.StatusCode.UNAVAILABLE


def reason_of(error: Exception) -> str:
    """The sentence for the caller."""
    return error.reason if isinstance(error, Refused | Retry | Unknown) else str(error)


def fix_of(error: Exception) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with the nearest fix, where there is one."""
    fix = error.nearest_fix if isinstance(error, Refused) else None
    return () if fix is None else ((FIX, fix.encode()),)
