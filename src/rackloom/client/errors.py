"""The errors of the client, named by what the caller should do; each carries the message of the service.

They are `Refused`, `Retry` and `Unknown` of `rackloom.errors`, so that a caller need not know which part of
Rackloom said so:

- `RequestRefused`: the request will not be carried out as made. `SignIn` (401): get a new token;
  `NotPermitted` (403): ask for the role; `Missing` (404): it is not there; `Conflict` (409): read it again,
  then decide.
- `NotDecided`: nothing was carried out, and the retries of the client are used up; try again after `after` s.
- `OutcomeUnknown`: the answer to a change was lost. Read the object before the change is repeated.
- `NotUnderstood`: what answered is no service of this version, or it has a defect.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from rackloom.errors import Refused, Retry, Unknown


class RequestRefused(Refused):
    """The service refused the request: correct it. `data` names fields, or the object in the way."""

    fix: ClassVar[str | None] = None
    """What helps where the service names no fix."""

    def __init__(self, message: str, *, status: int, data: Mapping[str, Any]) -> None:
        fix = data.get("nearestFix")
        super().__init__(_with_fields(message, data), nearest_fix=fix if isinstance(fix, str) else self.fix)
        self.message = message
        self.status = status
        self.data = data


class SignIn(RequestRefused):
    """401: the service does not know the caller. Get a new token."""

    fix = "get a new token"


class NotPermitted(RequestRefused):
    """403: the caller may not do this. Ask for the role, or for a larger allocation."""


class Missing(RequestRefused):
    """404: there is no such object, or none that the caller may see."""


class Conflict(RequestRefused):
    """409: the state of the site is against it. Read the objects again, then decide."""


class NotDecided(Retry):
    """Nothing was carried out: try again after `after` seconds. `status` is None if there was no answer."""

    def __init__(self, message: str, *, after: float, status: int | None = None) -> None:
        super().__init__(message, after=after)
        self.message = message
        self.status = status


class OutcomeUnknown(Unknown):
    """A change was sent at `since`, and its answer was lost. Read the object before it is sent again."""


class NotUnderstood(Refused):
    """The answer is none of those that the service describes."""

    def __init__(self, message: str, *, status: int | None = None, fix: str | None = None) -> None:
        super().__init__(message, nearest_fix=fix)
        self.message = message
        self.status = status


_BY_STATUS: Mapping[int, type[RequestRefused]] = {401: SignIn, 403: NotPermitted, 404: Missing, 409: Conflict}


def refusal(status: int, message: str, data: Mapping[str, Any]) -> RequestRefused:
    """The error of an answer with a status from 400 to 499."""
    return _BY_STATUS.get(status, RequestRefused)(message, status=status, data=data)


def _with_fields(message: str, data: Mapping[str, Any]) -> str:
    """The message, and what the service says of each field; ids and fixes are no texts about a field."""
    fields = [f"{name}: {text}" for name, text in data.items() if name not in ("id", "nearestFix")]
    return f"{message} ({'; '.join(fields)})" if fields else message
