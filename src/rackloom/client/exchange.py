"""The steps between a call and its answer: attempts, pauses and errors, without sending anything.

`Exchange.steps` is a generator. It yields a `Send` and receives the outcome, or yields a `Pause`. Its return
value is the answer. So the synchronous and the asynchronous client share one set of rules.

The client repeats:

- every request that was not carried out: the connection failed, or the service answered 429, which it does
  before it handles the request.
- a request that may be repeated (`GET`, `DELETE`, and calls that the caller declares safe), also if its
  answer was lost, and after 502, 503 and 504. A 503 means that nothing was decided, unless the service failed
  "during a commit". So the client does not repeat other changes after a 503.

The client obeys `Retry-After`. Without it the pause doubles from `first_delay` to `longest_delay`, and half
of it is random, so that clients do not come back together. Both `attempts` and `seconds` limit the retries: a
pause that would end later is not begun, and the error has the wait that the service wants.
"""

from collections.abc import Callable, Generator
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar

import httpx2
import msgspec

from rackloom.client.call import Call, QueryPairs, query_pairs
from rackloom.client.errors import NotDecided, NotUnderstood, OutcomeUnknown, refusal
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json

T = TypeVar("T")
NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
"""The request did not leave this process."""
REPEATABLE_METHODS = frozenset({"GET", "DELETE"})
BUSY = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})
LONGEST_MESSAGE = 300
"""Characters of an answer that another server wrote."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how long a request is tried. `attempts=1` never repeats."""

    attempts: int = 5
    seconds: float = 60.0
    """From the first attempt to the end of the last pause."""
    first_delay: float = 0.2
    longest_delay: float = 10.0

    def delay(self, attempt: int, random: float) -> float:
        """The pause in seconds after this attempt (the first is 1). `random` is from 0 to 1."""
        whole: float = min(self.longest_delay, self.first_delay * 2 ** (attempt - 1))
        return whole / 2 + whole / 2 * random


class Send(NamedTuple):
    """Send this request."""

    method: str
    path: str
    query: QueryPairs
    content: bytes | None
    headers: dict[str, str]


class Pause(NamedTuple):
    """Wait for this time."""

    seconds: float


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of an error."""

    message: str
    data: dict[str, Any] | None = None


class Answered(NamedTuple, Generic[T]):
    """The value of a successful answer, and its headers."""

    value: T
    headers: httpx2.Headers


Outcome = httpx2.Response | httpx2.RequestError
Steps = Generator[Send | Pause, Outcome | None, Answered[T]]


class Times(NamedTuple):
    """The sources of time and of random numbers."""

    monotonic: Callable[[], float]
    """Seconds."""
    random: Callable[[], float]
    """From 0 to 1."""
    now: Callable[[], float]
    """Seconds since the epoch."""


class Exchange(msgspec.Struct, frozen=True):
    """The rules of one client."""

    authorization: Callable[[], str]
    policy: RetryPolicy
    times: Times

    def steps(self, call: Call[T], *, safe: bool = False) -> Steps[T]:
        """The attempts of a call. `safe` allows repeating it although it is a change.

        Raises the errors of `rackloom.client.errors`, and ValueError if the query cannot be sent.
        """
        query = query_pairs(call.query)
        content = None if call.body is None else msgspec.json.encode(call.body)
        repeatable = safe or call.method in REPEATABLE_METHODS
        until = self.times.monotonic() + self.policy.seconds
        attempt = 0
        while True:
            attempt += 1
            begun = self.times.now()
            outcome = yield Send(call.method, call.path, query, content, self._headers(content))
            if outcome is None:
                raise RuntimeError("a request was given no outcome")
            if isinstance(outcome, httpx2.Response) and not may_pass(outcome):
                return decoded(call, outcome)
            pause = self._pause(outcome, attempt, until) if repeatable or _undone(outcome) else None
            if pause is None:
                raise self._error(outcome, repeatable, begun, attempt)
            yield Pause(pause)

    def require_stream(self, answer: httpx2.Response) -> None:
        """Raise the error of an answer that does not start an event stream."""
        if may_pass(answer):
            raise not_decided(answer, self.policy)
        require_success(answer)

    def _headers(self, content: bytes | None) -> dict[str, str]:
        headers = {"Authorization": self.authorization(), "Accept": "application/json"}
        return headers | ({} if content is None else {"Content-Type": "application/json"})

    def _pause(self, outcome: Outcome, attempt: int, until: float) -> float | None:
        """Seconds until the next attempt, or None if this was the last."""
        if attempt >= self.policy.attempts:
            return None
        wanted = retry_after(outcome)
        pause = self.policy.delay(attempt, self.times.random()) if wanted is None else wanted
        return pause if self.times.monotonic() + pause <= until else None

    def _error(self, outcome: Outcome, repeatable: bool, begun: float, attempts: int) -> Exception:
        if isinstance(outcome, httpx2.Response):
            return not_decided(outcome, self.policy)
        what = f"no answer: {transport_text(outcome)}"
        if repeatable or _undone(outcome):
            tried = f" ({attempts} attempts)" if attempts > 1 else ""
            return NotDecided(what + tried, after=self.policy.longest_delay)
        return OutcomeUnknown(
            f"{what}; the change may have been made: read before you repeat it", since=begun
        )


def may_pass(answer: httpx2.Response) -> bool:
    """Whether the same request may succeed later."""
    return answer.status_code == HTTPStatus.TOO_MANY_REQUESTS or answer.status_code in BUSY


def _undone(outcome: Outcome) -> bool:
    """Whether it is certain that nothing was carried out."""
    if isinstance(outcome, httpx2.Response):
        return outcome.status_code == HTTPStatus.TOO_MANY_REQUESTS
    return isinstance(outcome, NOT_SENT)


def not_decided(answer: httpx2.Response, policy: RetryPolicy) -> NotDecided:
    """The error of an answer after which the same request may succeed later."""
    after = retry_after(answer) or policy.longest_delay
    return NotDecided(problem_text(answer), after=after, status=answer.status_code)


def retry_after(outcome: Outcome) -> float | None:
    """The seconds of `Retry-After`, or None if it is missing."""
    text = outcome.headers.get("Retry-After", "") if isinstance(outcome, httpx2.Response) else ""
    return float(text) if text.isascii() and text.isdigit() else None


def transport_text(error: httpx2.RequestError) -> str:
    """The reason in words. Some errors have no text."""
    return str(error) or type(error).__name__


def decoded(call: Call[T], answer: httpx2.Response) -> Answered[T]:
    """The answer as a value. Raises the error of an answer that is not a success."""
    require_success(answer)
    try:
        return Answered(decode_json(answer.content, call.operation, call.answer), answer.headers)
    except Undecodable as error:
        raise NotUnderstood(
            f"the answer to {call.operation} is not what this client knows: {error.reason}",
            status=answer.status_code,
            fix="use a client of the service's version",
        ) from error


def require_success(answer: httpx2.Response) -> None:
    """Raise the error of an answer that is not a success."""
    status = answer.status_code
    if status < HTTPStatus.MULTIPLE_CHOICES:
        return
    problem = _own_problem(answer)
    if problem is None and status not in _OF_PROXIES:
        fix = "give the address of the service" if status < HTTPStatus.INTERNAL_SERVER_ERROR else None
        raise NotUnderstood(_foreign_text(answer), status=status, fix=fix)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise NotUnderstood(problem_text(answer), status=status)
    raise refusal(status, problem_text(answer), (problem.data if problem else None) or {})


_OF_PROXIES = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
"""Statuses that a proxy may send with its own text. With another status, such an answer is NotUnderstood."""


def problem_text(answer: httpx2.Response) -> str:
    """The message of the service. If another server wrote it, the status and the start of the text."""
    problem = _own_problem(answer)
    return _foreign_text(answer) if problem is None else problem.message


def _own_problem(answer: httpx2.Response) -> ErrorBody | None:
    try:
        return decode_json(answer.content, "the answer", ErrorBody)
    except Undecodable:
        return None


def _foreign_text(answer: httpx2.Response) -> str:
    text = " ".join(answer.text.split())[:LONGEST_MESSAGE]
    return f"{answer.status_code} {answer.reason_phrase}" + (f": {text}" if text else "")
