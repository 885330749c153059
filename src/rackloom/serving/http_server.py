"""An HTTP/1.1 server that untrusted clients cannot exhaust, and that shares its process with others.

`HttpServer` is uvicorn without signal handling, because several servers run in one process. It sets an
event when it accepts connections. From the moment of `accept`, `HttpLimits` limit the number of connections
(`serving.acceptor`), the time of the TLS handshake, of the head and body of a request, and the size of the
head. A deadline runs whenever the server waits for the client, also while the client does not read its
answer. An answer may be an endless stream. HTTP/1.1 pipelining is not supported, and neither are upgrades to
other protocols: a request with an upgrade is answered without it, or refused if it has a body.

When `send` returns, the kernel has the answer, except for `PART_BYTES`, or three times that over TLS. `send`
takes a large body in parts, and waits for the client after each. So a limit of concurrent requests also
limits the memory of unread answers.

A connection is not closed for another client once its request has arrived completely, unless it waits for
its own client to read.
"""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rackloom.serving.acceptor import AcceptedConnection, Acceptor, ConnectionEnded
from rackloom.serving.limits import HttpLimits

REFUSAL_SECONDS = 0.05
"""From the refusal of a request to the end of its connection. By then the kernel has the answer, and delivers
it to a client that has stopped sending. From a client that goes on, the server reads no more."""
PART_BYTES = 64 << 10
"""The part of an answer that is sent at a time, and that may wait in a connection after the request."""
_SILENT_LOGGER = logging.getLogger("rackloom.serving.http_server.strangers")
"""A line for each bad request would let an attacker fill the log: they are counted instead."""
_SILENT_LOGGER.setLevel(logging.CRITICAL)


class HttpServer(uvicorn.Server):
    """uvicorn with `limits` and no signal handling. `answering` is set once it accepts connections."""

    def __init__(
        self, config: uvicorn.Config, limits: HttpLimits, ended: ConnectionEnded = lambda _: None
    ) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()
        self._limits = limits
        self._ended = ended

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles signals: several servers of uvicorn would each install a handler."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As in uvicorn, but `Acceptor` accepts the connections."""
        await self.lifespan.startup()
        acceptors = [
            Acceptor(listener, self._limits, self._protocol, tls=self.config.ssl, ended=self._ended)
            for listener in sockets or ()
        ]
        self.servers = acceptors  # type: ignore[assignment]
        self.started = True
        self.answering.set()

    def _protocol(self, connection: AcceptedConnection) -> "BoundedProtocol":
        return BoundedProtocol(
            self._limits,
            connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A deadline runs whenever the server waits for the client."""

    def __init__(self, limits: HttpLimits, connection: AcceptedConnection, **rest: Any) -> None:
        super().__init__(**rest)
        self.logger = _SILENT_LOGGER
        self.timeout_keep_alive = limits.idle_seconds
        self.ws_protocol_class = None
        self._application = self.app
        self.app = self._answer
        self._limits = limits
        self._connection = connection
        self._due: tuple[float, str] | None = None
        """The deadline, and the reason of `END_REASONS` if the client misses it."""
        self._timer: asyncio.TimerHandle | None = None
        """Fires at the deadline or before it, so that most requests need no new timer."""
        self._unread: asyncio.TimerHandle | None = None
        """Runs while the client does not read, beside `_timer`, because the client may still send."""
        self._in_head = False
        self._in_body = False
        self._head_bytes = 0
        """The bytes of the fields that the parser has completed."""
        self._head_received = 0
        self._has_progressed = False
        """Whether the last bytes contained part of the body."""
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is done: the request head is due."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._connection.transport = self.transport
        # asyncio's limit with TLS is 512 KiB.
        self.transport.set_write_buffer_limits(high=PART_BYTES)
        self._expect("head", self._limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release its share."""
        super().connection_lost(exc)
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
        self._stop_watching_reader()
        self._connection.lost()

    def data_received(self, data: bytes) -> None:
        """Refuse a head that does not end: the parser buffers an incomplete field without a limit."""
        if self._due is None and not self._is_answering():
            self._expect("head", self._limits.head_seconds)
        self._has_progressed = False
        super().data_received(data)
        if self._in_head or (self._in_body and not self._has_progressed):
            # In the body too: chunk extensions and trailers are buffered like the fields of a head.
            self._head_received += len(data)
            if self._head_received > self._limits.head_bytes and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._head_received = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Count the bytes. Raises ValueError, which stops the parser."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the field. Raises ValueError, which stops the parser."""
        if not self._in_head:
            # Trailers would count as fields of the head, which a proxy may have checked.
            raise ValueError("a trailer")
        self._count(name + value)
        if len(self.headers) >= self._limits.head_fields:
            raise ValueError("too many fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request on. Raises ValueError, which stops the parser."""
        if self._is_answering():
            raise ValueError("a request before the last was answered")
        if self.parser.should_upgrade() and any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in self.headers
        ):
            # After an upgrade the parser reads no body: it would take the body for the next request.
            raise ValueError("an upgrade with a body")
        self._in_head, self._in_body = False, True
        self._expect("body", self._limits.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._has_progressed, self._head_received = True, 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete and is answered, so its connection is not closed for another client."""
        self._in_body = False
        super().on_message_complete()
        if not self._is_answering():
            # The answer came before the end of the body, which was read and dropped.
            self._expect("head", self._limits.head_seconds)
            return
        self._connection.need()
        if self._limits.answer_seconds is None:
            self._due = None
        else:
            self._expect("answer", self._limits.answer_seconds)

    def on_response_complete(self) -> None:
        """An idle connection may be closed for others, after the older ones of its address."""
        self._connection.rest()
        if not self._in_body:
            self._due = None
        if self.transport.is_closing():
            self._watch_reader()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read, so its connection may be closed for others."""
        super().pause_writing()
        self._connection.rest()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        if self._is_answering() and not self._in_body:
            self._connection.need()
        if not self.transport.is_closing():
            self._stop_watching_reader()

    def timeout_keep_alive_handler(self) -> None:
        """The connection was idle for too long. Unread parts of an answer are not kept for ever."""
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        """Refuse an invalid request, and close the connection."""
        super().send_400_response(msg)
        # Without this, a client that goes on would be read until TLS is shut down: 600 MiB in one second.
        self.loop.call_later(REFUSAL_SECONDS, self.transport.abort)
        self._due = None
        self._watch_reader()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application. Its `send` returns when the client has read enough."""

        async def send_in_parts(message: Any) -> None:
            body = message.get("body", b"")
            last = max(len(body) - 1, 0) // PART_BYTES * PART_BYTES
            for start in range(0, last, PART_BYTES):
                await send({**message, "body": body[start : start + PART_BYTES], "more_body": True})
            if last:
                message = {**message, "body": body[last:]}
            await send(message)
            if self.flow.write_paused:
                await self.flow.drain()

        await self._application(scope, receive, send_in_parts)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._head_bytes > self._limits.head_bytes:
            raise ValueError("the head is too long")

    def _expect(self, what: str, seconds: float) -> None:
        until = self.loop.time() + seconds
        self._due = until, what
        if self._timer is not None and self._timer.when() > until:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self.loop.call_at(until, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._due is not None:
            until, what = self._due
            if until <= self.loop.time():
                self._connection.end(what)
            else:
                self._timer = self.loop.call_at(until, self._ring)

    def _watch_reader(self) -> None:
        """Close the connection if the client reads nothing of its answer for `unread_seconds`."""
        if self._unread is None:
            self._unread_bytes = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(self._limits.unread_seconds, self._check_reader)

    def _check_reader(self) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._watch_reader()
        else:
            self._connection.end("unread")

    def _stop_watching_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
