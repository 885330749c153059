"""Streams, uploads and readers that do not read: a bounded server serves some and ends others."""

import asyncio
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from tests import attacks
from tests.conftest import Authority
from tests.waiting import until_so

from rackloom.app import process
from rackloom.app.listeners import serve_http
from rackloom.errors import Refused
from rackloom.serving import acceptor
from rackloom.serving.limits import LISTENERS, HttpLimits, Process, files_needed, plan_file_limit

HURRIED = HttpLimits(
    connections=8,
    connections_of_an_address=4,
    head_seconds=0.5,
    body_seconds=0.2,
    unread_seconds=1.0,
    idle_seconds=60,
)
LARGE = 64 << 20


class Application:
    """Counts the bytes that it receives, and streams until `stop` is set."""

    def __init__(self) -> None:
        self.received = 0
        self.sent = 0
        self.stop = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await getattr(self, scope["path"].strip("/") or "plain")(receive, send)

    async def plain(self, _: Any, send: Any) -> None:
        await self._answer(send, b"ok")

    async def upload(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            self.received += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        await self._answer(send, b"ok")

    async def stream(self, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.stop.is_set():
            await send({"type": "http.response.body", "body": b"event\n", "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self.stop.wait()
        await send({"type": "http.response.body", "body": b"end"})

    async def large(self, _: Any, send: Any) -> None:
        await self._answer(send, bytes(LARGE))

    async def _answer(self, send: Any, body: bytes) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self.sent += 1


class Served:
    def __init__(self, port: int, app: Application, ended: list[str]) -> None:
        self.port, self.app, self.ended = port, app, ended

    async def ask(self, path: str, more: str = "", address: str = "127.0.0.1") -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
        return reader, writer


@asynccontextmanager
async def served(limits: HttpLimits = HURRIED, **tls: Any) -> AsyncIterator[Served]:
    app, ended = Application(), []  # type: ignore[var-annotated]
    async with serve_http(app, "127.0.0.1:0", limits=limits, ended=ended.append, **tls) as port:
        yield Served(port, app, ended)
        app.stop.set()


def run(story: Any, runner: Any = asyncio.run) -> None:
    async def limited() -> None:
        async with asyncio.timeout(attacks.PATIENCE):
            await story()

    runner(limited())


def test_a_stream_outlives_every_deadline() -> None:
    async def story() -> None:
        async with served() as server:
            reader, writer = await server.ask("/stream")
            for _ in range(14):
                await reader.readuntil(b"event\n")
            server.app.stop.set()
            assert await reader.readuntil(b"end")
            writer.close()
            assert server.ended == []

    run(story)


def test_a_stream_is_not_closed_for_others() -> None:
    async def story() -> None:
        async with served() as server:
            streams = [await server.ask("/stream") for _ in range(HURRIED.connections_of_an_address)]
            for reader, _ in streams:
                await reader.readuntil(b"event\n")
            for _ in range(3):
                with suppress(OSError):
                    _, writer = await server.ask("/")
                    writer.close()
            await until_so(lambda: server.ended == ["full"] * 3, "they are refused")
            other, writer = await server.ask("/", address=attacks.STRANGER)
            assert b" 200 " in await other.readline()
            for reader, _ in streams:
                await reader.readuntil(b"event\n")
            for _, stream in streams:
                stream.close()
            writer.close()

    run(story)


def test_a_large_upload_arrives() -> None:
    async def story() -> None:
        async with served(HttpLimits()) as server:
            reader, writer = await server.ask("/upload", f"Content-Length: {LARGE}\r\n")
            for _ in range(LARGE >> 20):
                writer.write(bytes(1 << 20))
                await writer.drain()
            assert b" 200 " in await reader.readline()
            assert server.app.received == LARGE
            writer.close()

    run(story)


@pytest.mark.parametrize("path", ["/upload", "/plain"])
def test_a_body_that_does_not_come_is_not_waited_for(path: str) -> None:
    """This holds whether the request is answered before or not."""

    async def story() -> None:
        async with served() as server:
            reader, writer = await server.ask(path, "Content-Length: 100\r\n")
            with suppress(ConnectionResetError):
                await reader.read()
            assert server.ended == ["body"]
            writer.close()

    run(story)


def test_the_rest_of_a_body_is_read_after_an_early_answer() -> None:
    async def story() -> None:
        async with served(HttpLimits()) as server:
            reader, writer = await server.ask("/plain", "Content-Length: 1000\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\nok")
            writer.write(bytes(1000) + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\nok")
            writer.close()

    run(story)


def test_who_reads_nothing_is_cut_off_and_who_reads_slowly_is_not() -> None:
    async def story() -> None:
        async with served() as server:
            _, silent = await server.ask("/large")
            silent.transport.pause_reading()
            slow, writer = await server.ask("/large")
            await slow.readuntil(b"\r\n\r\n")
            left = LARGE
            while left:
                left -= len(await slow.readexactly(min(left, LARGE // 24)))
                await asyncio.sleep(0.05)
            await until_so(lambda: server.ended == ["unread"], "who reads nothing is cut off")
            silent.close()
            writer.close()

    run(story)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
def test_an_answer_is_sent_when_the_client_has_read_it(
    authority: Authority, tmp_path: Path, over_tls: bool, runner: Any
) -> None:
    """Until then its request is not over, so that a count of requests includes it."""
    certificate, key = authority.issue("server").save(tmp_path, "server")

    async def story() -> None:
        files = {"cert": certificate, "key": key} if over_tls else {}
        async with served(msgspec.structs.replace(HURRIED, unread_seconds=60.0), **files) as server:
            with attacks.connected(server.port) as raw:
                client = await asyncio.to_thread(attacks.encrypted, raw) if over_tls else raw
                client.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.to_thread(client.recv, 1)
                await asyncio.sleep(0.2)
                assert server.app.sent == 0
                await asyncio.to_thread(read_all, client)
                await until_so(lambda: server.app.sent == 1, "it was sent")
                client.close()

    run(story, runner)


def read_all(client: socket.socket) -> None:
    """The large answer."""
    left = LARGE
    while left > 0:
        left -= len(client.recv(1 << 20))


def test_the_oldest_of_an_address_gives_way_to_its_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "SPARED_SECONDS", 0.02)

    async def story() -> None:
        async with served(HttpLimits(connections=8, connections_of_an_address=4)) as server:
            silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
            await asyncio.sleep(0.05)
            reader, writer = await server.ask("/")
            assert b" 200 " in await reader.readline()
            assert server.ended == ["evicted"]
            with suppress(ConnectionResetError):
                assert await silent[0][0].read() == b""
            for _, opened in [*silent, (reader, writer)]:
                opened.close()

    run(story)


def test_it_goes_on_when_the_files_run_out() -> None:
    """The connections that cannot be accepted wait, and are answered later."""

    async def story() -> None:
        async with served(HttpLimits()) as server:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            waiting = socket.socket()
            waiting.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
            try:
                await asyncio.get_running_loop().sock_connect(waiting, ("127.0.0.1", server.port))
                await asyncio.sleep(0.1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            reader, writer = await asyncio.open_connection(sock=waiting)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readline()
            writer.close()

    run(story)


def test_connections_that_are_reset_at_once_harm_nothing() -> None:
    async def story() -> None:
        async with served(HttpLimits()) as server:
            for _ in range(50):
                broken = attacks.connected(server.port)
                broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                broken.close()
            reader, writer = await server.ask("/")
            assert b" 200 " in await reader.readline()
            writer.close()

    run(story)


# Open files.


def test_the_limit_of_open_files_is_raised_but_not_lowered() -> None:
    assert plan_file_limit(2000, 1024, 4096) == 2000
    assert plan_file_limit(2000, 4096, 4096) == 4096
    with pytest.raises(Refused) as refused:
        plan_file_limit(5000, 1024, 4096)
    assert "4096" in refused.value.reason
    assert "5000" in str(refused.value.nearest_fix)


@pytest.mark.parametrize("command", Process)
def test_every_process_counts_what_its_listeners_may_hold(command: Process) -> None:
    own = [listener.limits for listener in LISTENERS if listener.process is command]
    assert files_needed(command, racks=1) > sum(limits.connections for limits in own)
    assert files_needed(Process.UP, racks=9) > files_needed(Process.UP, racks=1)


def test_a_process_may_open_what_it_needs() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        process.allow_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, before[1])
        if before[1] != resource.RLIM_INFINITY:
            with pytest.raises(Refused):
                process.allow_open_files(sys.maxsize)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    "part", [b"0\r\nX-Field: " + b"x" * 4096, b"0\r\n" + b"X-Field: x\r\n" * 400, b"1;" + b"x" * 4096]
)
def test_what_surrounds_a_chunked_body_is_limited_like_a_head(part: bytes) -> None:
    """Trailers that do not end, ever more trailers, and an extension of a chunk that does not end."""

    async def story() -> None:
        async with served(HttpLimits()) as server:
            reader, writer = await server.ask("/upload", "Transfer-Encoding: chunked\r\n")
            sent = 0
            with suppress(ConnectionError):
                while sent < LARGE:
                    writer.write(part if not sent else b"x" * 4096)
                    sent += len(part)
                    await writer.drain()
            with suppress(ConnectionError):
                assert b" 400 " in await reader.read()
            assert sent < LARGE
            writer.close()

    run(story)


def test_a_trailer_is_no_field_of_the_head() -> None:
    async def story() -> None:
        async with served(HttpLimits()) as server:
            reader, writer = await server.ask("/upload", "Transfer-Encoding: chunked\r\n")
            writer.write(b"2\r\nok\r\n0\r\nAuthorization: Bearer x\r\n\r\n")
            assert b" 400 " in await reader.read()
            writer.close()

    run(story)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize(
    ("field", "body"),
    [("Content-Length: 28", b"GET /plain HTTP/1.1\r\nHost: x"), ("Transfer-Encoding: chunked", b"0\r\n\r\n")],
)
def test_the_body_of_an_upgrade_is_not_read_as_a_request(protocol: str, field: str, body: bytes) -> None:
    async def story() -> None:
        async with served(HttpLimits()) as server:
            more = f"Connection: Upgrade\r\nUpgrade: {protocol}\r\n{field}\r\n"
            reader, writer = await server.ask("/upload", more)
            writer.write(body + b"\r\n\r\n")
            with suppress(ConnectionError):
                assert (await reader.read()).count(b"HTTP/1.1 400 ") == 1
            assert server.app.sent == 0
            writer.close()

    run(story)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_upgrade_without_a_body_is_answered_as_if_none_were_wanted(protocol: str) -> None:
    async def story() -> None:
        async with served(HttpLimits()) as server:
            reader, writer = await server.ask("/plain", f"Connection: Upgrade\r\nUpgrade: {protocol}\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\nok")
            writer.write(b"POST /plain HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\nok")
            writer.close()

    run(story)
