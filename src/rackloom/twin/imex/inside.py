"""The stand-in inside this process: a rack of daemons without a rack of Python interpreters.

It speaks over the same sockets as the one in a process of its own; only starting it, signalling it and asking
it are calls here instead of `exec`, `kill` and the control tool.
"""

import asyncio
import contextlib
import json
import signal
from pathlib import Path

from rackloom.claim.imex.control import ImexControl
from rackloom.errors import Retry
from rackloom.twin.imex.links import ask
from rackloom.twin.imex.service import Service
from rackloom.twin.imex.settings import Refusal, Surroundings, read_settings

PATIENCE = 5.0
"""Seconds for an answer, as the control tool waits."""


class InsideChild:
    """A daemon that `Supervisor` may take for its child process."""

    def __init__(self, config: Path, around: Surroundings) -> None:
        self._service = Service(read_settings(config, around))
        self._serving = asyncio.create_task(self._serve())

    @property
    def returncode(self) -> int | None:
        """None while it serves."""
        return self._serving.result() if self._serving.done() else None

    def send_signal(self, number: int) -> None:
        """Signal it; SIGKILL leaves no time for a farewell."""
        if number == signal.SIGKILL:
            self._serving.cancel()
        else:
            self._service.take(number)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.shield(self._serving)

    async def _serve(self) -> int:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._service.serve()
                return 0
        except (Refusal, OSError):
            return 1
        return -signal.SIGKILL


class InsideControl(ImexControl):
    """Asks such a daemon at its command port."""

    def __init__(self, config: Path, around: Surroundings) -> None:
        super().__init__((), config)
        self._config = config
        self._around = around

    async def _ask(self, *options: str) -> str:
        question = "local" if "-q" in options else "domain"
        try:
            settings = read_settings(self._config, self._around)
            answer = await ask(settings.bind_ip, settings.command_port, question, patience=PATIENCE)
        except (Refusal, OSError, TimeoutError, ValueError) as error:
            raise Retry(f"the IMEX daemon does not answer: {error!r}", after=1.0) from error
        return json.dumps(answer) if "-j" in options else str(answer["status"])
