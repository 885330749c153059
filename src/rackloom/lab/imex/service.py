"""The stand-in for nvidia-imex: `python -m rackloom.lab.imex.service -c FILE`.

The daemon keeps one connection to each peer, itself included. A peer with another node map is refused.
Peer names are resolved at start and at SIGUSR1, never between, so a peer that came or moved is not found
without a signal. A failed attempt is repeated after 1 s, then 1.6 times as long each time, up to 120 s:
gRPC's connection back-off, without its jitter.

SIGUSR1 reloads names and certificates. A second one within 5 s is ignored, the new connections come
about 4 s later, and unreadable credentials leave everything as it was. SIGTERM ends the daemon after
3.9 s. These figures were observed on NVIDIA's program.

The command port answers `local` (READY), and `domain`: UP only if every node answers, otherwise
DEGRADED after 3 s.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rackloom.lab.imex.settings import (
    ImexOptions,
    ImexRefusal,
    LogLine,
    imex_host_from_environment,
    read_imex_options,
)

# Connections to peers, and the command port.


FIRST_BACKOFF, BACKOFF_FACTOR, LONGEST_BACKOFF = 1.0, 1.6, 120.0
CONNECT_SECONDS = 2.0


@dataclass(slots=True)
class PeerConnection:
    """One outgoing connection, as the control tool prints it."""

    address: str | None = None
    status: str = "NEVER_CONNECTED"
    changed_at: float = 0.0
    reconnects: int = 0

    def become(self, status: str) -> None:
        """Take note of a new status."""
        if status != self.status:
            self.reconnects += status == "CONNECTED" and self.status == "DISCONNECTED"
            self.status, self.changed_at = status, _loop_time()


class PeerConnections:
    """One outgoing connection per peer, this daemon itself included."""

    def __init__(self, settings: ImexOptions, index: int, log: LogLine) -> None:
        self._settings = settings
        self._index = index
        self._log = log
        self._map = hashlib.sha256("\n".join(settings.nodes).encode()).hexdigest()
        self.to = [PeerConnection(changed_at=_loop_time()) for _ in settings.nodes]
        self._tasks: list[asyncio.Task[None]] = []
        self._open: set[asyncio.StreamWriter] = set()

    def addresses(self) -> list[str | None]:
        """The peers' addresses now."""
        return [self._settings.host.resolve(node) for node in self._settings.nodes]

    async def connect(self, addresses: list[str | None], tls: ssl.SSLContext | None) -> None:
        """Replace all connections with ones to these addresses, and stay connected."""
        await self._cancel()
        for link, address in zip(self.to, addresses, strict=True):
            link.address = address
        self._tasks = [asyncio.create_task(self._hold(peer, tls)) for peer in range(len(self.to))]

    async def stop(self) -> None:
        """End all connections, without waiting for the peers."""
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
            pass  # The service ends. Asyncio would report a cancelled handler as an error.
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
                await asyncio.sleep(self._settings.host.beat)
            else:
                await asyncio.sleep(self._settings.host.seconds(wait))
                wait = min(wait * BACKOFF_FACTOR, LONGEST_BACKOFF)
        if link.status == "CONNECTED":
            link.become("DISCONNECTED")

    async def _stay_connected(self, link: PeerConnection, address: str, tls: ssl.SSLContext | None) -> None:
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
                await asyncio.sleep(self._settings.host.beat)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _greet(
        self, link: PeerConnection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(json.dumps({"index": self._index, "map": self._map}).encode() + b"\n")
        async with asyncio.timeout(CONNECT_SECONDS):
            greeting = json.loads(await reader.readline())
        link.become("CONNECTED" if greeting["accepted"] else "INVALID")
        if not greeting["accepted"]:
            raise ValueError("another node map")


async def ask_daemon(where: tuple[str, int] | str, question: str, *, patience: float) -> dict[str, Any]:
    """Query a command port or a Unix socket. Raises OSError, TimeoutError or ValueError without an answer."""
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


CommandHandler = Callable[[str], Awaitable[dict[str, Any]]]


async def serve_commands(settings: ImexOptions, answer: CommandHandler) -> list[asyncio.Server]:
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

    address = settings.host.address(settings.command_ip) or None
    servers = [await asyncio.start_server(handle, address, settings.command_port)]
    if settings.command_socket:
        servers.append(await asyncio.start_unix_server(handle, settings.command_socket))
    return servers


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


# The daemon.


EXIT_REFUSED = 255
"""The exit status of a daemon that does not start, for any reason."""
RELOAD_WINDOW = 5.0
"""Seconds in which a second SIGUSR1 is ignored, as NVIDIA documents."""
RELOAD_SECONDS = 4.0
"""From SIGUSR1 to the new connections. The old ones serve until then. 4.1 was the longest observed."""
ABSENT_SECONDS = 3.0
"""How long the status of the whole domain takes while a node of it does not answer."""
STOP_SECONDS = 3.9
"""From SIGTERM to the end."""


class ImexService:
    """One daemon."""

    def __init__(self, settings: ImexOptions, log: LogLine) -> None:
        self._settings = settings
        self._log = log
        self._index, self._address = settings.own(log)
        self._links = PeerConnections(settings, self._index, log)
        self._servers: list[asyncio.Server] = []
        self._server_tls: ssl.SSLContext | None = None
        self._reloaded = -RELOAD_WINDOW
        self._reload = asyncio.Event()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGQUIT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1):
            loop.add_signal_handler(number, self.take, number)
        await self.serve()

    def take(self, number: int) -> None:
        """Handle a signal: SIGUSR1 reloads, any other stops."""
        if number == signal.SIGUSR1:
            now = asyncio.get_running_loop().time()
            if now - self._reloaded >= self._settings.host.seconds(RELOAD_WINDOW):
                self._reloaded = now
                self._reload.set()
        else:
            self._stop.set()

    async def serve(self) -> None:
        """Serve until a signal stops the daemon."""
        try:
            self._servers = await serve_commands(self._settings, self._answer)
            await self._serve_peers()
        finally:
            await self._links.stop()
            for server in self._servers:
                server.close()
        self._log("INFO", "Cleaning up imex")
        await asyncio.sleep(self._settings.host.seconds(STOP_SECONDS))
        self._log("INFO", "The completion queues are shut down")

    async def _serve_peers(self) -> None:
        self._server_tls = self._settings.server_tls()
        listening = asyncio.start_server(
            self._links.answer, self._address, self._settings.port, ssl=self._server_tls
        )
        self._servers.append(await listening)
        await self._links.connect(self._links.addresses(), self._settings.client_tls())
        reloading = asyncio.create_task(self._reload_when_asked())
        try:
            await self._stop.wait()
        finally:
            reloading.cancel()

    async def _reload_when_asked(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            try:
                client_tls = self._settings.client_tls()
                self._reload_server_tls()
            except ImexRefusal as refusal:
                self._log("ERROR", str(refusal))
                continue  # as NVIDIA documents: with credentials that cannot be read all stays as it was
            addresses = self._links.addresses()
            await asyncio.sleep(self._settings.host.seconds(RELOAD_SECONDS))
            await self._links.connect(addresses, client_tls)

    def _reload_server_tls(self) -> None:
        """New connections get the new certificate. Open connections keep theirs."""
        if self._server_tls is not None:
            certificate, key = (self._settings.options[f"IMEX_SERVER_{what}"] for what in ("CERT", "KEY"))
            self._server_tls.load_cert_chain(certificate, key)
            self._server_tls.load_verify_locations(self._settings.options["IMEX_SERVER_CERT_AUTH"])

    async def _answer(self, question: str) -> dict[str, Any]:
        match question:
            case "local":
                return {"status": "READY"}
            case "row":
                return self._row()
            case "domain":
                return await self._domain()
            case _:
                return {"error": f"unknown question {question!r}"}

    def _row(self) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        connections = {
            str(peer): _connection_row(
                link.address or self._settings.nodes[peer],
                link.status,
                int(now - link.changed_at),
                link.reconnects,
            )
            for peer, link in enumerate(self._links.to)
        }
        return self._node(self._index, "READY", connections, "STAND-IN")

    async def _domain(self) -> dict[str, Any]:
        began = asyncio.get_running_loop().time()
        rows = await asyncio.gather(*(self._row_of(peer) for peer in range(len(self._settings.nodes))))
        up = all(row["status"] == "READY" for row in rows)
        if not up:
            left = self._settings.host.seconds(ABSENT_SECONDS) + began - asyncio.get_running_loop().time()
            await asyncio.sleep(max(left, 0))
        return {
            "nodes": {str(peer): row for peer, row in enumerate(rows)},
            "timestamp": time.strftime("%m/%d/%Y %H:%M:%S"),
            "status": "UP" if up else "DEGRADED",
        }

    async def _row_of(self, peer: int) -> dict[str, Any]:
        if peer == self._index:
            return self._row()
        address = self._links.to[peer].address
        if address is not None:
            patience = self._settings.host.seconds(ABSENT_SECONDS)
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                return await ask_daemon((address, self._settings.command_port), "row", patience=patience)
        nodes = enumerate(self._settings.nodes)
        unknown = {str(other): _connection_row(node, "INVALID") for other, node in nodes}
        return self._node(peer, "UNAVAILABLE", unknown, "")

    def _node(self, index: int, status: str, connections: dict[str, Any], version: str) -> dict[str, Any]:
        return {
            "status": status,
            "host": self._links.to[index].address or self._settings.nodes[index],
            "hostName": self._settings.nodes[index],
            "connections": connections,
            "changed": False,
            "version": version,
        }


def _connection_row(host: str, status: str, seconds: int = 0, reconnects: int = 0) -> dict[str, Any]:
    return {
        "host": host,
        "status": status,
        "changed": False,
        "sec_since_last_change": seconds,
        "reconnects": reconnects,
    }


def open_log(options: dict[str, str]) -> TextIO:
    """The log file. If none is named, or it cannot be opened: standard error, with a warning."""
    name = options.get("LOG_FILE_NAME", "")
    try:
        return Path(name or "/nowhere/log").open("a", buffering=1)
    except OSError as error:
        sys.stderr.write(f"WARNING: failed to open IMEX log file {name} errno = {error.strerror}\n")
        sys.stderr.write("INFO: using stderr for IMEX logging\n")
        return sys.stderr


LOG_LEVELS = {"CRITICAL": 1, "ERROR": 2, "WARNING": 3, "INFO": 4}
"""The lowest LOG_LEVEL at which lines of each level are written: by NVIDIA's documentation, not observed."""


def logging_to(file: TextIO, most: int) -> LogLine:
    """Lines as NVIDIA's program writes them, of the levels that LOG_LEVEL `most` includes."""

    def log(level: str, text: str) -> None:
        if LOG_LEVELS[level] > most:
            return
        file.write(f"[{time.strftime('%b %d %Y %H:%M:%S')}] [{level}] [tid {os.getpid()}] {text}\n")
        file.flush()

    return log


def main() -> int:
    """Run one daemon in the foreground."""
    parser = argparse.ArgumentParser(prog="nvidia-imex")
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--nogpu", action="store_true")
    log = logging_to(sys.stderr, LOG_LEVELS["INFO"])
    try:
        settings = read_imex_options(parser.parse_args().config, imex_host_from_environment())
        log = logging_to(open_log(settings.options), settings.log_level)
        # Log the version, and each option on a separate line.
        log("INFO", "IMEX version 0.0.0-stand-in is running with the following configuration options:")
        for name, value in settings.options.items():
            log("INFO", f"{name} = {value}")
        asyncio.run(_serve(settings, log))
    except ImexRefusal as refusal:
        for line in refusal.args:
            log("ERROR", line)
        return EXIT_REFUSED
    except OSError as error:
        log("ERROR", str(error))
        return EXIT_REFUSED
    return 0


async def _serve(settings: ImexOptions, log: LogLine) -> None:
    # The service reads the clock of the loop when it is made.
    await ImexService(settings, log).run()


if __name__ == "__main__":
    sys.exit(main())
