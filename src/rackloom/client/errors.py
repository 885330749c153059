"""The errors of the client, one for each action of the caller. Each carries the message of the service.

They derive from `Refused`, `Retry` and `Unknown` of `rackloom.errors`, so a caller need not know which part
of Rackloom raised them:

- `RequestRefused`: the service will not carry out this request. `SignIn` (401): get a new token.
  `NotPermitted` (403): get the role. `Missing` (404): there is no such object. `Conflict` (409): read the
  objects again, then decide.
- `NotDecided`: nothing was carried out, and the client has used up its retries. Try again after `after` s.
- `OutcomeUnknown`: the answer to a change was lost. Read the object before you repeat the change.
- `NotUnderstood`: the server is not a service of this version, or it has a defect.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from rackloom.errors import Refused, Retry, Unknown


class RequestRefused(Refused):
    """The service refused the request: correct it. `data` names fields, or the object that conflicts."""

    fix: ClassVar[str | None] = None
    """The remedy if the service names none."""

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
    """403: the caller may not do this. Get the role, or a larger allocation."""


class Missing(RequestRefused):
    """404: there is no such object, or none that the caller may see."""


class Conflict(RequestRefused):
    """409: the request conflicts with the state of the site. Read the objects again, then decide."""


class NotDecided(Retry):
    """Nothing was carried out: try again after `after` seconds. `status` is None if there was no answer."""

    def __init__(self, message: str, *, after: float, status: int | None = None) -> None:
        super().__init__(message, after=after)
        self.message = message
        self.status = status


class OutcomeUnknown(Unknown):
    """A change was sent at `since`, and its answer was lost. Read the object before you send it again."""


class NotUnderstood(Refused):
    """The answer is not one that the service describes."""

    def __init__(self, message: str, *, status: int | None = None, fix: str | None = None) -> None:
        super().__init__(message, nearest_fix=fix)
        self.message = message
        self.status = status


_BY_STATUS: Mapping[int, type[RequestRefused]] = {401: SignIn, 403: NotPermitted, 404: Missing, 409: Conflict}


def refusal(status: int, message: str, data: Mapping[str, Any]) -> RequestRefused:
    """The error of an answer with a status from 400 to 499."""
    return _BY_STATUS.get(status, RequestRefused)(message, status=status, data=data)


def _with_fields(message: str, data: Mapping[str, Any]) -> str:
    """The message with the text for each field. `id` and `nearestFix` in the data are not fields."""
    fields = [f"{name}: {text}" for name, text in data.items() if name not in ("id", "nearestFix")]
    return f"{message} ({'; '.join(fields)})" if fields else message
