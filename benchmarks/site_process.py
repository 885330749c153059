"""A server of a benchmark as a process: how it is started, what it used, and the client that asks it.

The client is as small as can be, with connections that stay open: its cost would hide that of the servers.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import msgspec

Request = tuple[str, str, Any]
"""Method, path below the organisation, and body (None: no body)."""


# In the server.


def announce(port: int) -> None:
    """Let the parent process know where to ask."""
    print(port, flush=True)


async def wait_for_end_of_input() -> None:
    """Return when the parent process closes the pipe, or ends."""
    ended = asyncio.Event()

    def on_input() -> None:
        if not sys.stdin.buffer.read1():
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), on_input)
    await ended.wait()


# In the benchmark.


class Answer(msgspec.Struct, frozen=True):
    """Status, fields of the head, and body."""

    status: int
    head: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as a value."""
        return msgspec.json.decode(self.body)


class Server:
    """A process that serves a copy of the site."""

    def __init__(self, process: "Popen[bytes]", port: int) -> None:
        self.process = process
        self.port = port

    def cpu_seconds(self) -> float:
        """CPU time of all threads so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    async def ask(self, token: str, org: str, request: Request) -> Answer:
        """One request, on a connection of its own."""
        connection = await Connection.open(self.port)
        try:
            return await connection.request(token, org, request)
        finally:
            connection.close()

    async def busy(
        self, token: str, org: str, requests: Iterator[Request], connections: int, seconds: float
    ) -> "Spent":
        """What it takes to answer for so long on connections that are open; each waits for its answer."""
        # Opened for each round: between two rounds the servers may close what is idle.
        opened = [await Connection.open(self.port) for _ in range(connections)]
        until = time.perf_counter() + seconds

        async def client(connection: "Connection") -> int:
            answered = 0
            while time.perf_counter() < until:
                request = next(requests)
                answer = await connection.request(token, org, request)
                if answer.status >= 300:
                    raise RuntimeError(f"{request}: {answer.status} {answer.body.decode()}")
                answered += 1
            return answered

        cpu, began = self.cpu_seconds(), time.perf_counter()
        answered = sum(await asyncio.gather(*map(client, opened)))
        spent = Spent(answered, time.perf_counter() - began, self.cpu_seconds() - cpu)
        for connection in opened:
            connection.close()
        return spent


class Spent(msgspec.Struct, frozen=True):
    """What some answers took."""

    answers: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        """Answers a second."""
        return self.answers / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU time of the server for an answer, in microseconds."""
        return self.cpu_s / self.answers * 1e6


@asynccontextmanager
async def serving(script: str, home: Path) -> AsyncIterator[Server]:
    """A server of `home` until the context ends."""
    words = [sys.executable, str(Path(__file__).parent / script), str(home)]
    process = await asyncio.to_thread(Popen, words, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            raise RuntimeError(f"{script} did not start")
        yield Server(process, int(line))
    finally:
        process.stdin.close()
        await asyncio.to_thread(process.wait)


class Connection:
    """A connection that stays open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """A new connection to this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def request(self, token: str, org: str, request: Request) -> Answer:
        """Send a request and receive its answer."""
        method, path, body = request
        content = b"" if body is None else msgspec.json.encode(body)
        self._writer.write(
            f"{method} /v2/org/{org}/nico/{path} HTTP/1.1\r\nHost: benchmark\r\n"
            f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        head = dict(field.split(": ", 1) for field in lines[1:] if field)
        head = {name.lower(): value for name, value in head.items()}
        answer = await self._reader.readexactly(int(head.get("content-length", "0")))
        return Answer(int(lines[0].split()[1]), head, answer)

    def close(self) -> None:
        """Close."""
        self._writer.close()
