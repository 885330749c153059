"""Limits on the requests of an organisation: rate, concurrency and queue length.

`RequestLimitMiddleware` runs after authentication. A body is received first, within the limits of
`BodyLimitMiddleware`, so that a client that sends slowly delays no other client of its organisation. As many
bodies are received at a time as requests may wait. Each organisation has its own queue (`OrgQueue`), so its
requests wait behind each other and not in front of other organisations' requests:

1. A request begins at once if the organisation has a token left and a place free. Tokens come from a token
   bucket: `rate` a second, up to `burst`.
2. Otherwise it waits, first come, first served. A client with many connections is slowed down to `rate`. It
   need not know of the limit.
3. If `waiting` requests wait already, it is refused: 429, with the seconds until those are served in
   `Retry-After`.

A request occupies its place until the kernel has its answer (`serving.http_server` waits for that), because
unread answers take memory. Event streams occupy none once they have begun.
Administrators of a provider have separate queues and limits (`CallerClass`), so an organisation's other
callers do not delay them. The limits hold for each process. Replicas share nothing.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackloom.carve.api import routing
from rackloom.carve.api.auth import Caller, Role

# The limits.


class CallerClass(StrEnum):
    """The class of a caller, which selects its limits."""

    TENANT = "tenant"
    PROVIDER = "provider"


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one organisation."""

    rate: float
    """Requests per second, in the long run."""
    burst: int
    """Requests that may begin without a pause after a quiet time."""
    concurrent: int
    waiting: int


class CallerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of an organisation, by class. `refused` is called for each refused request."""

    tenant: RequestLimits
    provider: RequestLimits
    refused: Callable[[CallerClass], None] = lambda _: None

    def of(self, kind: CallerClass) -> RequestLimits:
        """The limits of a class."""
        return self.provider if kind is CallerClass.PROVIDER else self.tenant


def class_of(caller: Caller) -> CallerClass:
    """The class of a caller. A provider's readers do not use up the limits of its administrators."""
    return CallerClass.PROVIDER if Role.PROVIDER_ADMIN in caller.roles else CallerClass.TENANT


# The queue of one organisation.


MIN_TIMER_SECONDS = 0.001


class TooManyRequests(Exception):
    """The queue of the organisation is full."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after
        """Seconds."""


class OrgQueue:
    """The requests of one organisation that are in service, and those that wait. `clock` gives seconds."""

    def __init__(self, limits: RequestLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._tokens = float(limits.burst)
        self._filled_at = clock()
        self._running = 0
        self._receiving = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def is_idle(self) -> bool:
        """Whether this queue can be dropped without loss."""
        self._fill()
        is_unused = not (self._running or self._receiving or self._waiting)
        return is_unused and self._tokens >= self._limits.burst

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Count a body that is received within the context. Raises TooManyRequests."""
        if len(self._waiting) + self._receiving >= self._limits.waiting:
            raise self._refusal()
        self._receiving += 1
        try:
            yield
        finally:
            self._receiving -= 1

    async def enter(self) -> None:
        """Return when a request may begin, or raise TooManyRequests. Each return needs a `leave`."""
        if not self._waiting and self._begin():
            return
        if len(self._waiting) >= self._limits.waiting:
            raise self._refusal()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._begin_waiting()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(turn)
            else:
                # It was let in and cancelled in the same step.
                self.leave()
            raise

    def leave(self) -> None:
        """Give up the place of a request."""
        self._running -= 1
        self._begin_waiting()

    def _refusal(self) -> TooManyRequests:
        return TooManyRequests(max(1, math.ceil(len(self._waiting) / self._limits.rate)))

    def _begin_waiting(self) -> None:
        """Let the requests begin that may begin now, and the next one once there is a token for it."""
        while self._waiting and self._begin():
            self._waiting.popleft().set_result(None)
        if self._waiting and self._timer is None and self._running < self._limits.concurrent:
            # Not zero by rounding: the timer would fire again and again until the clock has moved.
            seconds = max((1.0 - self._tokens) / self._limits.rate, MIN_TIMER_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_token)

    def _on_token(self) -> None:
        self._timer = None
        self._begin_waiting()

    def _begin(self) -> bool:
        """Take a token and a place, if there are both."""
        self._fill()
        if self._tokens < 1.0 or self._running >= self._limits.concurrent:
            return False
        self._tokens -= 1.0
        self._running += 1
        return True

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._filled_at) * self._limits.rate, self._limits.burst)
        self._filled_at = now


# Bodies.


def announced_length(scope: Scope) -> int:
    """The length of the body in bytes, as announced in the head of a request."""
    length = Headers(scope=scope).get("content-length", "0")
    # The HTTP server has refused other values already.
    return int(length) if length.isdecimal() else 0


def has_body(scope: Scope) -> bool:
    """Whether the head of a request announces a body."""
    return announced_length(scope) > 0 or "transfer-encoding" in Headers(scope=scope)


async def _receive_body(receive: Receive) -> list[Message] | None:
    """All messages of a body, or None if the client disconnected."""
    received: list[Message] = []
    while not received or received[-1].get("more_body", False):
        message = await receive()
        if message["type"] != "http.request":
            return None
        received.append(message)
    return received


class _Replay:
    """Receives the messages of a body again, then new ones."""

    def __init__(self, received: list[Message], receive: Receive) -> None:
        self._received = deque(received)
        self._receive = receive

    async def __call__(self) -> Message:
        return self._received.popleft() if self._received else await self._receive()


# The middleware.


def _begins_stream(message: Message) -> bool:
    """Whether this is the head of an event stream."""
    if message["type"] != "http.response.start":
        return False
    return Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")


QUEUES_BEFORE_SWEEP = 1024
"""The number of queues at which those of idle organisations are dropped."""
TOO_MANY_MESSAGE = "Too many requests of the org wait already"


class RequestLimitMiddleware:
    """ASGI middleware: the limits of each organisation, for requests with a verified caller."""

    def __init__(self, app: ASGIApp, limits: CallerLimits) -> None:
        self.app = app
        self.limits = limits
        self._queues: dict[tuple[CallerClass, str], OrgQueue] = {}
        self._sweep_at = QUEUES_BEFORE_SWEEP

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on when it may begin, or answer it."""
        caller: Caller | None = scope.get("state", {}).get("caller")
        if caller is None:
            await self.app(scope, receive, send)
            return
        kind = class_of(caller)
        queue = self._queue_of(kind, caller.org)
        try:
            if has_body(scope):
                with queue.receiving():
                    received = await _receive_body(receive)
                if received is None:
                    return
                receive = _Replay(received, receive)
            await queue.enter()
        except HTTPException as error:
            await routing.problem_response(error.status_code, str(error.detail))(scope, receive, send)
            return
        except TooManyRequests as error:
            self.limits.refused(kind)
            headers = {"Retry-After": str(error.retry_after)}
            refusal = routing.problem_response(429, TOO_MANY_MESSAGE, headers=headers)
            await refusal(scope, receive, send)
            return
        # The end of the request and the start of a stream share this list, so the place is left once.
        occupied = [queue]

        async def send_and_leave(message: Message) -> None:
            if occupied and _begins_stream(message):
                occupied.pop().leave()
            await send(message)

        try:
            await self.app(scope, receive, send_and_leave)
        finally:
            if occupied:
                occupied.pop().leave()

    def _queue_of(self, kind: CallerClass, org: str) -> OrgQueue:
        queue = self._queues.get((kind, org))
        if queue is None:
            if len(self._queues) >= self._sweep_at:
                self._queues = {key: queue for key, queue in self._queues.items() if not queue.is_idle()}
                self._sweep_at = max(QUEUES_BEFORE_SWEEP, 2 * len(self._queues))
            queue = OrgQueue(self.limits.of(kind), asyncio.get_running_loop().time)
            self._queues[kind, org] = queue
        return queue
