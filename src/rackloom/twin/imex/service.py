"""`python -m rackloom.twin.imex.service -c FILE`: the stand-in for nvidia-imex."""

import argparse
import asyncio
import contextlib
import os
import signal
import ssl
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rackloom.twin.imex.links import Links, ask, serve_commands
from rackloom.twin.imex.settings import Log, Refusal, Settings, read_settings, surroundings

REFUSED = 255
"""The exit status of a daemon that does not start, whatever the reason is."""
RELOAD_WINDOW = 5.0
"""Seconds in which a second SIGUSR1 is ignored, as NVIDIA documents."""
RELOAD_SECONDS = 4.0
"""From SIGUSR1 to the new connections; the old ones serve until then. 4.1 was the longest observed."""
ABSENT_SECONDS = 3.0
"""How long the status of the whole domain takes while a node of it does not answer."""
STOP_SECONDS = 3.9
"""From SIGTERM to the end."""


class Service:
    """One daemon."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings = settings
        self._log = log
        self._index, self._address = settings.own(log)
        self._links = Links(settings, self._index, log)
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
        """Do what the signal asks for."""
        if number == signal.SIGUSR1:
            self._asked_to_reload()
        else:
            self._stop.set()

    async def serve(self) -> None:
        """Serve until a signal that is taken says otherwise."""
        try:
            self._servers = await serve_commands(self._settings, self._answer)
            await self._serve_peers()
        finally:
            await self._links.stop()
            for server in self._servers:
                server.close()
        self._log("INFO", "Cleaning up imex")
        await asyncio.sleep(self._settings.around.seconds(STOP_SECONDS))
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

    def _asked_to_reload(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reloaded >= self._settings.around.seconds(RELOAD_WINDOW):
            self._reloaded = now
            self._reload.set()

    async def _reload_when_asked(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            try:
                client_tls = self._settings.client_tls()
                self._reload_server_tls()
            except Refusal as refusal:
                self._log("ERROR", str(refusal))
                continue  # as NVIDIA documents: with credentials that cannot be read all stays as it was
            addresses = self._links.addresses()
            await asyncio.sleep(self._settings.around.seconds(RELOAD_SECONDS))
            await self._links.connect(addresses, client_tls)

    def _reload_server_tls(self) -> None:
        """New connections get the new certificate; those that are open keep theirs."""
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
            str(peer): {
                "host": link.address or self._settings.nodes[peer],
                "status": link.status,
                "changed": False,
                "sec_since_last_change": int(now - link.changed_at),
                "reconnects": link.reconnects,
            }
            for peer, link in enumerate(self._links.to)
        }
        return self._node(self._index, "READY", connections, "STAND-IN")

    async def _domain(self) -> dict[str, Any]:
        began = asyncio.get_running_loop().time()
        rows = await asyncio.gather(*(self._row_of(peer) for peer in range(len(self._settings.nodes))))
        up = all(row["status"] == "READY" for row in rows)
        if not up:
            left = self._settings.around.seconds(ABSENT_SECONDS) + began - asyncio.get_running_loop().time()
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
            patience = self._settings.around.seconds(ABSENT_SECONDS)
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                return await ask((address, self._settings.command_port), "row", patience=patience)
        unknown = {
            str(other): {
                "host": node,
                "status": "INVALID",
                "changed": False,
                "sec_since_last_change": 0,
                "reconnects": 0,
            }
            for other, node in enumerate(self._settings.nodes)
        }
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


def open_log(options: dict[str, str]) -> TextIO:
    """The log file; where it cannot be opened, or none is named, standard error, with a warning."""
    name = options.get("LOG_FILE_NAME", "")
    try:
        return Path(name or "/nowhere/log").open("a", buffering=1)
    except OSError as error:
        sys.stderr.write(f"WARNING: failed to open IMEX log file {name} errno = {error.strerror}\n")
        sys.stderr.write("INFO: using stderr for IMEX logging\n")
        return sys.stderr


def logging_to(file: TextIO) -> Log:
    """Lines as NVIDIA's program writes them."""

    def log(level: str, text: str) -> None:
        file.write(f"[{time.strftime('%b %d %Y %H:%M:%S')}] [{level}] [tid {os.getpid()}] {text}\n")
        file.flush()

    return log


def log_start(options: dict[str, str], log: Log) -> None:
    """The version, and each option on a line of its own."""
    log("INFO", "IMEX version 0.0.0-stand-in is running with the following configuration options:")
    for name, value in options.items():
        log("INFO", f"{name} = {value}")


def main() -> int:
    """Run one daemon in the foreground."""
    parser = argparse.ArgumentParser(prog="nvidia-imex")
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--nogpu", action="store_true")
    log = logging_to(sys.stderr)
    try:
        settings = read_settings(parser.parse_args().config, surroundings())
        log = logging_to(open_log(settings.options))
        log_start(settings.options, log)
        asyncio.run(_run(settings, log))
    except Refusal as refusal:
        for line in refusal.args:
            log("ERROR", line)
        return REFUSED
    except OSError as error:
        log("ERROR", str(error))
        return REFUSED
    return 0


async def _run(settings: Settings, log: Log) -> None:
    await Service(settings, log).run()


if __name__ == "__main__":
    sys.exit(main())
