"""The stand-in's connections to its peers, and those of its peers to it."""

import asyncio
import hashlib
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from rackloom.twin.imex.settings import Settings

RETRY = 0.2
"""Seconds between attempts; NVIDIA's daemon takes 15 and more."""


class Links:
    """One outgoing connection per peer. `status` is what the control tool prints of each."""

    def __init__(self, settings: Settings, index: int) -> None:
        self._settings = settings
        self._index = index
        self._map = hashlib.sha256("\n".join(settings.nodes).encode()).hexdigest()
        self.status = ["NEVER_CONNECTED"] * len(settings.nodes)
        self.addresses: list[str | None] = [None] * len(settings.nodes)
        self._tasks: list[asyncio.Task[None]] = []
        self._open: set[asyncio.StreamWriter] = set()

    def start(self, tls: ssl.SSLContext | None) -> None:
        """Connect to every peer, and stay connected."""
        self._tasks = [
            asyncio.create_task(self._hold(peer, tls)) for peer in range(len(self._settings.nodes))
        ]

    async def stop(self) -> None:
        """End all connections, without waiting for what peers say to it."""
        for writer in self._open:
            writer.transport.abort()
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
        while True:
            try:
                await self._stay_connected(peer, tls)
            except (OSError, TimeoutError, ValueError, EOFError):
                if self.status[peer] == "CONNECTED":
                    self.status[peer] = "DISCONNECTED"
            await asyncio.sleep(RETRY)

    async def _stay_connected(self, peer: int, tls: ssl.SSLContext | None) -> None:
        address = self.addresses[peer] = self._settings.around.resolve(self._settings.nodes[peer])
        if address is None:
            return
        name = self._settings.options.get("IMEX_SECURITY_TARGET_OVERRIDE") or address
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(
                address,
                self._settings.port,
                ssl=tls,
                server_hostname=name if tls else None,
                local_addr=(self._settings.bind_ip, 0),
            )
        self._open.add(writer)
        try:
            await self._greet(peer, reader, writer)
            while True:
                writer.write(b"beat\n")
                async with asyncio.timeout(2):
                    if not await reader.readline():
                        raise EOFError
                await asyncio.sleep(self._settings.around.beat)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _greet(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"index": self._index, "map": self._map}).encode() + b"\n")
        async with asyncio.timeout(2):
            greeting = json.loads(await reader.readline())
        self.status[peer] = "CONNECTED" if greeting["accepted"] else "INVALID"
        if not greeting["accepted"]:
            raise ValueError("another node map")


async def ask(address: str, port: int, question: str, *, patience: float) -> dict[str, Any]:
    """Ask a command port; raises OSError, TimeoutError or ValueError where no answer comes."""
    async with asyncio.timeout(patience):
        reader, writer = await asyncio.open_connection(address, port)
        try:
            writer.write(question.encode() + b"\n")
            answer: dict[str, Any] = json.loads(await reader.readline())
            return answer
        finally:
            writer.close()


Answerer = Callable[[str], Awaitable[dict[str, Any]]]


async def serve_commands(address: str, port: int, answer: Answerer) -> asyncio.Server:
    """The command port: one question a connection, answered as one line of JSON."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = (await reader.readline()).decode(errors="replace").strip()
            writer.write(json.dumps(await answer(question)).encode() + b"\n")
            await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    return await asyncio.start_server(handle, address, port)
