"""What an answer of the API server that is no success means for the caller."""

from collections.abc import Mapping
from typing import Any

from rackloom.claim.kube.api import Conflict, Expired, KubeError, NotFound, Rejected

_MEANINGS: Mapping[int, type[KubeError]] = {
    404: NotFound,
    409: Conflict,
    410: Expired,
    **dict.fromkeys((400, 403, 405, 413, 415, 422), Rejected),
}


def error_of(code: int, status: Mapping[str, Any], retry_after: float | None = None) -> KubeError:
    """The error of a `Status` body (metav1): one of the named ones, or plain: try again.

    401 is plain: a token that was rotated is read again before the next attempt.
    """
    details = status.get("details") or {}
    after = retry_after if retry_after is not None else details.get("retryAfterSeconds")
    reason = str(status.get("reason") or "Unknown")
    message = str(status.get("message") or f"the API server answered {code}")
    meaning = _MEANINGS.get(code, KubeError)
    return meaning(code, reason, message, retry_after=None if after is None else float(after))


def unreachable(error: Exception) -> KubeError:
    """There was no answer."""
    return KubeError(0, "Unreachable", f"the API server was not reached: {error or type(error).__name__}")
