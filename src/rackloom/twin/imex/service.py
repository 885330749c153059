"""`python -m rackloom.twin.imex.service -c FILE`: the stand-in for nvidia-imex."""

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rackloom.twin.imex.links import Links, ask, serve_commands
from rackloom.twin.imex.settings import Refusal, Settings, read_settings, surroundings

RELOAD_WINDOW = 5.0
"""Seconds in which a second SIGUSR1 is ignored, as NVIDIA documents."""


class Service:
    """One daemon."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._index = settings.own_index()
        self._links = Links(settings, self._index)
        self._listening: asyncio.Server | None = None
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
        commands = await serve_commands(self._settings.bind_ip, self._settings.command_port, self._answer)
        async with commands:
            try:
                await self._serve_peers()
            finally:
                await self._close()

    async def _serve_peers(self) -> None:
        await self._start()
        reloading = asyncio.create_task(self._reload_when_asked())
        try:
            await self._stop.wait()
        finally:
            reloading.cancel()

    async def _start(self) -> None:
        server_tls, client_tls = self._settings.server_tls(), self._settings.client_tls()
        self._listening = await asyncio.start_server(
            self._links.answer, self._settings.bind_ip, self._settings.port, ssl=server_tls
        )
        self._links.start(client_tls)

    async def _close(self) -> None:
        await self._links.stop()
        if self._listening is not None:
            self._listening.close()

    def _asked_to_reload(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._reloaded >= RELOAD_WINDOW:
            self._reloaded = now
            self._reload.set()

    async def _reload_when_asked(self) -> None:
        while True:
            await self._reload.wait()
            self._reload.clear()
            await self._close()
            await self._start()

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
        return {
            "status": "READY",
            "host": self._settings.bind_ip,
            "hostName": self._settings.nodes[self._index],
            "connections": {
                str(peer): {"host": self._links.addresses[peer] or "", "status": status, "changed": False}
                for peer, status in enumerate(self._links.status)
            },
            "changed": False,
            "version": "STAND-IN",
        }

    async def _domain(self) -> dict[str, Any]:
        rows = await asyncio.gather(*(self._row_of(peer) for peer in range(len(self._settings.nodes))))
        up = all(row["status"] == "READY" for row in rows)
        return {
            "nodes": {str(peer): row for peer, row in enumerate(rows)},
            "timestamp": time.strftime("%m/%d/%Y %H:%M:%S"),
            "status": "UP" if up else "DEGRADED",
        }

    async def _row_of(self, peer: int) -> dict[str, Any]:
        address = self._links.addresses[peer]
        if address is not None:
            try:
                return await ask(address, self._settings.command_port, "row", patience=2)
            except (OSError, TimeoutError, ValueError):
                pass
        return {
            "status": "UNAVAILABLE",
            "host": address or "",
            "hostName": self._settings.nodes[peer],
            "connections": {},
            "changed": False,
            "version": "",
        }


def main() -> int:
    """Run one daemon in the foreground."""
    parser = argparse.ArgumentParser(prog="nvidia-imex")
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--nogpu", action="store_true")
    try:
        asyncio.run(Service(read_settings(parser.parse_args().config, surroundings())).run())
    except (Refusal, OSError) as error:
        print(f"nvidia-imex (stand-in): {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
