"""The stand-in's connections to its peers, and those of its peers to it.

Names are resolved at start and at SIGUSR1, never between: a peer that came or moved is not found by itself.
An attempt that fails is repeated after 1 s, then 1.6 times as long each time, up to 120 s: gRPC's connection
back-off (grpc/doc/connection-backoff.md, without its jitter), which nvidia-imex uses.
"""

import asyncio
import hashlib
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rackloom.twin.imex.settings import Log, Settings

FIRST_BACKOFF, BACKOFF_FACTOR, LONGEST_BACKOFF = 1.0, 1.6, 120.0
CONNECT_SECONDS = 2.0


@dataclass(slots=True)
class Link:
    """One outgoing connection, as the control tool prints it."""

    address: str | None = None
    status: str = "NEVER_CONNECTED"
    changed_at: float = 0.0
    reconnects: int = 0

    def become(self, status: str) -> None:
        """Take note of a new status."""
        if status != self.status:
            self.reconnects += status == "CONNECTED" and self.status == "DISCONNECTED"
            self.status, self.changed_at = status, _now()


class Links:
    """One outgoing connection per peer, this daemon itself included."""

    def __init__(self, settings: Settings, index: int, log: Log) -> None:
        self._settings = settings
        self._index = index
        self._log = log
        self._map = hashlib.sha256("\n".join(settings.nodes).encode()).hexdigest()
        self.to = [Link(changed_at=_now()) for _ in settings.nodes]
        self._tasks: list[asyncio.Task[None]] = []
        self._open: set[asyncio.StreamWriter] = set()

    def addresses(self) -> list[str | None]:
        """The peers' addresses now."""
        return [self._settings.around.resolve(node) for node in self._settings.nodes]

    async def connect(self, addresses: list[str | None], tls: ssl.SSLContext | None) -> None:
        """Connect to every peer at these addresses, in place of the connections so far; stay connected."""
        await self._cancel()
        for link, address in zip(self.to, addresses, strict=True):
            link.address = address
        self._tasks = [asyncio.create_task(self._hold(peer, tls)) for peer in range(len(self.to))]

    async def stop(self) -> None:
        """End all connections, without waiting for what peers say to it."""
        for writer in self._open:
            writer.transport.abort()
        await self._cancel()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a peer's connection: refuse another node map, then echo its heart-beats."""
        self._open.add(writer)
        try:
            hello = json.loads(await reader.readline())
            accepted = hello.get("map") == self._map
            writer.write(json.dumps({"accepted": accepted}).encode() + b"\n")
            while accepted and (line := await reader.readline()):
                writer.write(line)
        except (OSError, ValueError):
            pass
        except asyncio.CancelledError:
            pass  # the service ends; asyncio reports a cancelled handler as an error
        finally:
            self._open.discard(writer)
            writer.close()

    async def _hold(self, peer: int, tls: ssl.SSLContext | None) -> None:
        link, wait = self.to[peer], FIRST_BACKOFF
        while link.address is not None:
            try:
                await self._stay_connected(link, link.address, tls)
            except ssl.SSLError as error:
                self._log("ERROR", f"Handshake failed with fatal error {error}")
            except (OSError, TimeoutError, ValueError, EOFError):
                pass
            if link.status == "CONNECTED":
                wait = FIRST_BACKOFF
                link.become("DISCONNECTED")
                await asyncio.sleep(self._settings.around.beat)
            else:
                await asyncio.sleep(self._settings.around.seconds(wait))
                wait = min(wait * BACKOFF_FACTOR, LONGEST_BACKOFF)
        if link.status == "CONNECTED":
            link.become("DISCONNECTED")

    async def _stay_connected(self, link: Link, address: str, tls: ssl.SSLContext | None) -> None:
        name = self._settings.options.get("IMEX_SECURITY_TARGET_OVERRIDE") or address
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                address, self._settings.port, ssl=tls, server_hostname=name if tls else None
            )
        self._open.add(writer)
        try:
            await self._greet(link, reader, writer)
            while True:
                writer.write(b"beat\n")
                async with asyncio.timeout(CONNECT_SECONDS):
                    if not await reader.readline():
                        raise EOFError
                await asyncio.sleep(self._settings.around.beat)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _greet(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"index": self._index, "map": self._map}).encode() + b"\n")
        async with asyncio.timeout(CONNECT_SECONDS):
            greeting = json.loads(await reader.readline())
        link.become("CONNECTED" if greeting["accepted"] else "INVALID")
        if not greeting["accepted"]:
            raise ValueError("another node map")


async def ask(where: tuple[str, int] | str, question: str, *, patience: float) -> dict[str, Any]:
    """Ask a command port, or a Unix socket; raises OSError, TimeoutError or ValueError without an answer."""
    async with asyncio.timeout(patience):
        if isinstance(where, str):
            reader, writer = await asyncio.open_unix_connection(where)
        else:
            reader, writer = await asyncio.open_connection(*where)
        try:
            writer.write(question.encode() + b"\n")
            answer: dict[str, Any] = json.loads(await reader.readline())
            return answer
        finally:
            writer.close()


Answerer = Callable[[str], Awaitable[dict[str, Any]]]


async def serve_commands(settings: Settings, answer: Answerer) -> list[asyncio.Server]:
    """The command port and socket: one question a connection, answered as one line of JSON."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = (await reader.readline()).decode(errors="replace").strip()
            writer.write(json.dumps(await answer(question)).encode() + b"\n")
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    address = settings.around.address(settings.command_ip) or None
    servers = [await asyncio.start_server(handle, address, settings.command_port)]
    if settings.command_socket:
        servers.append(await asyncio.start_unix_server(handle, settings.command_socket))
    return servers


def _now() -> float:
    return asyncio.get_running_loop().time()
