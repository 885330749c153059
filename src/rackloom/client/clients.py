"""The synchronous and the asynchronous client. They send the requests that `Exchange` yields, and wait.

Both are context managers, and threads (`Client`) or tasks (`AsyncClient`) may share them. Cancelling a task
cancels its request or its pause and leaves the client usable. The clients follow no redirects: a token goes
only to the address of the connection.
"""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import httpx2

from rackloom.client import events
from rackloom.client.call import Call, PagedCall
from rackloom.client.connection import Connection
from rackloom.client.errors import NotDecided
from rackloom.client.events import Event
from rackloom.client.exchange import (
    Answered,
    Exchange,
    Outcome,
    Pause,
    RetryPolicy,
    Send,
    Times,
    transport_text,
)
from rackloom.client.pages import LARGEST_PAGE, Page, page_steps
from rackloom.serving.request_log import asked

T = TypeVar("T")
TIMEOUT = httpx2.Timeout(30.0, connect=10.0)
"""Seconds. The service answers within a few, or with 503."""
STREAM_TIMEOUT = httpx2.Timeout(30.0, connect=10.0, read=60.0)
"""The service sends a keep-alive every 15 seconds."""
REAL = Times(time.monotonic, random.random, time.time)


async def _async_sleep(seconds: float) -> None:
    """Sleep. A program without asyncio does not import it."""
    import asyncio

    await asyncio.sleep(seconds)


def _settings(connection: Connection, timeout: httpx2.Timeout) -> dict[str, Any]:
    return {
        "base_url": connection.base_url(),
        "verify": connection.tls(),
        "trust_env": connection.may_use_proxy(),
        "timeout": timeout,
        "headers": {"User-Agent": "rackloom"},
    }


def _request(http: httpx2.Client | httpx2.AsyncClient, send: Send) -> httpx2.Request:
    return http.build_request(
        send.method, send.path, params=send.query or None, content=send.content, headers=send.headers
    )


def _stream_headers(exchange: Exchange, position: str | None) -> Mapping[str, str]:
    resumed = {} if position is None else {"Last-Event-ID": position}
    return {"Authorization": exchange.authorization(), "Accept": "text/event-stream", **resumed}


class _Reconnecting:
    """The pauses of an event stream before it is opened again."""

    def __init__(self, exchange: Exchange, position: str | None) -> None:
        self.position = position
        self._exchange = exchange
        self._failures = 0

    def received(self, event: Event) -> None:
        self.position = event.position or self.position
        self._failures = 0

    def pause(self, error: Exception | None) -> float:
        """Seconds. Raises the error of a stream that broke too often, or that will not come back."""
        if isinstance(error, httpx2.RequestError):
            error = NotDecided(
                f"no events: {transport_text(error)}", after=self._exchange.policy.longest_delay
            )
        if error is not None and not isinstance(error, NotDecided):
            raise error
        if error is not None:
            self._failures += 1
            if self._failures >= self._exchange.policy.attempts:
                raise error
        return self._exchange.policy.delay(max(self._failures, 1), self._exchange.times.random())


class Client:
    """Calls a service and waits for its answers.

    `transport` replaces the network in tests. The retries use `sleep` and `times` for time and randomness.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        retries: RetryPolicy = RetryPolicy(),  # noqa: B008 (a value)
        timeout: httpx2.Timeout = TIMEOUT,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        times: Times = REAL,
    ) -> None:
        self._exchange = Exchange(connection.authorization, retries, times)
        self._http = httpx2.Client(transport=transport, **_settings(connection, timeout))
        self._sleep = sleep

    def call(self, call: Call[T], *, safe: bool = False) -> T:
        """The answer of one operation. `safe` repeats a change if its answer was lost.

        Raises an error of `rackloom.client.errors`.
        """
        return self._answered(call, safe=safe).value

    def pages(self, call: PagedCall[T], *, size: int = LARGEST_PAGE) -> Iterator[Page[T]]:
        """The pages of a list, each read when it is needed."""
        steps = page_steps(call, size)
        step = next(steps)
        while True:
            if isinstance(step, Page):
                yield step
                try:
                    step = next(steps)
                except StopIteration:
                    return
            else:
                step = steps.send(self._answered(step))

    def items(self, call: PagedCall[T], *, size: int = LARGEST_PAGE) -> Iterator[T]:
        """All items of a list, read page by page."""
        for page in self.pages(call, size=size):
            yield from page.items

    def events(self, *, after: str | None = None) -> Iterator[Event]:
        """The tenant's events after the position `after`, or from now on if it is None, without an end."""
        state = _Reconnecting(self._exchange, after)
        while True:
            broken: Exception | None = None
            try:
                for event in self._stream(state.position):
                    state.received(event)
                    yield event
            except (httpx2.RequestError, NotDecided) as error:
                broken = error
            self._sleep(state.pause(broken))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answered(self, call: Call[T], *, safe: bool = False) -> Answered[T]:
        steps = self._exchange.steps(call, safe=safe)
        step: Send | Pause = next(steps)
        while True:
            try:
                step = steps.send(self._do(step))
            except StopIteration as end:
                answered: Answered[T] = end.value
                return answered

    def _do(self, step: Send | Pause) -> Outcome | None:
        if isinstance(step, Pause):
            self._sleep(step.seconds)
            return None
        request = _request(self._http, step)
        try:
            with asked(request.method, request.url) as sent:
                answer = self._http.send(request)
                sent.outcome = answer.status_code
        except httpx2.RequestError as error:
            return error
        return answer

    def _stream(self, position: str | None) -> Iterator[Event]:
        headers = _stream_headers(self._exchange, position)
        with self._http.stream("GET", events.PATH, headers=headers, timeout=STREAM_TIMEOUT) as answer:
            if answer.status_code != httpx2.codes.OK:
                answer.read()
                self._exchange.require_stream(answer)
            for sent in httpx2.EventSource(answer):
                if (event := events.event_of(sent)) is not None:
                    yield event


class AsyncClient:
    """`Client` for asyncio. `sleep` is a coroutine function."""

    def __init__(
        self,
        connection: Connection,
        *,
        retries: RetryPolicy = RetryPolicy(),  # noqa: B008 (a value)
        timeout: httpx2.Timeout = TIMEOUT,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = _async_sleep,
        times: Times = REAL,
    ) -> None:
        self._exchange = Exchange(connection.authorization, retries, times)
        self._http = httpx2.AsyncClient(transport=transport, **_settings(connection, timeout))
        self._sleep = sleep

    async def call(self, call: Call[T], *, safe: bool = False) -> T:
        """The answer of one operation. `safe` repeats a change if its answer was lost.

        Raises an error of `rackloom.client.errors`.
        """
        return (await self._answered(call, safe=safe)).value

    async def pages(self, call: PagedCall[T], *, size: int = LARGEST_PAGE) -> AsyncIterator[Page[T]]:
        """The pages of a list, each read when it is needed."""
        steps = page_steps(call, size)
        step = next(steps)
        while True:
            if isinstance(step, Page):
                yield step
                try:
                    step = next(steps)
                except StopIteration:
                    return
            else:
                step = steps.send(await self._answered(step))

    async def items(self, call: PagedCall[T], *, size: int = LARGEST_PAGE) -> AsyncIterator[T]:
        """All items of a list, read page by page."""
        async for page in self.pages(call, size=size):
            for item in page.items:
                yield item

    async def events(self, *, after: str | None = None) -> AsyncIterator[Event]:
        """The tenant's events after the position `after`, or from now on if it is None, without an end."""
        state = _Reconnecting(self._exchange, after)
        while True:
            broken: Exception | None = None
            try:
                async for event in self._stream(state.position):
                    state.received(event)
                    yield event
            except (httpx2.RequestError, NotDecided) as error:
                broken = error
            await self._sleep(state.pause(broken))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answered(self, call: Call[T], *, safe: bool = False) -> Answered[T]:
        steps = self._exchange.steps(call, safe=safe)
        step: Send | Pause = next(steps)
        while True:
            try:
                step = steps.send(await self._do(step))
            except StopIteration as end:
                answered: Answered[T] = end.value
                return answered

    async def _do(self, step: Send | Pause) -> Outcome | None:
        if isinstance(step, Pause):
            await self._sleep(step.seconds)
            return None
        request = _request(self._http, step)
        try:
            with asked(request.method, request.url) as sent:
                answer = await self._http.send(request)
                sent.outcome = answer.status_code
        except httpx2.RequestError as error:
            return error
        return answer

    async def _stream(self, position: str | None) -> AsyncIterator[Event]:
        headers = _stream_headers(self._exchange, position)
        async with self._http.stream("GET", events.PATH, headers=headers, timeout=STREAM_TIMEOUT) as answer:
            if answer.status_code != httpx2.codes.OK:
                await answer.aread()
                self._exchange.require_stream(answer)
            async for sent in httpx2.EventSource(answer):
                if (event := events.event_of(sent)) is not None:
                    yield event
