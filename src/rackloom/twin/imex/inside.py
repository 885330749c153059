"""The stand-in inside this process: a rack of daemons without a rack of Python interpreters.

It speaks over the same sockets as the one in a process of its own; only starting it, signalling it and asking
it are calls here instead of `exec`, `kill` and the control tool.
"""

import asyncio
import json
from pathlib import Path
from signal import SIGKILL

from rackloom.claim.imex.control import ImexControl
from rackloom.errors import Retry
from rackloom.twin.imex.links import ask
from rackloom.twin.imex.service import REFUSED, Service
from rackloom.twin.imex.settings import Refusal, Surroundings, read_settings

PATIENCE = 5.0
"""Seconds for an answer, as the control tool waits."""


class InsideChild:
    """A daemon that `Supervisor` may take for its child process."""

    def __init__(self, config: Path, around: Surroundings) -> None:
        self.complaint = ""
        """Why it did not start."""
        self._service: Service | None = None
        self._serving = asyncio.create_task(self._serve(config, around))

    @property
    def returncode(self) -> int | None:
        """None while it serves."""
        return self._code() if self._serving.done() else None

    def send_signal(self, signal: int) -> None:
        """Signal it; SIGKILL leaves no time for a farewell, nor does any signal before it takes them."""
        if signal == SIGKILL or self._service is None:
            self._serving.cancel()
        else:
            self._service.take(signal)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        await asyncio.wait({self._serving})
        return self._code()

    def _code(self) -> int:
        return -SIGKILL if self._serving.cancelled() else self._serving.result()

    async def _serve(self, config: Path, around: Surroundings) -> int:
        try:
            self._service = Service(read_settings(config, around), lambda *_: None)
            await self._service.serve()
        except (Refusal, OSError) as error:
            self.complaint = "; ".join(map(str, error.args)) if isinstance(error, Refusal) else str(error)
            return REFUSED
        except asyncio.CancelledError:
            return -SIGKILL
        return 0


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
            where = self._around.address(settings.command_ip), settings.command_port
            answer = await ask(where, question, patience=PATIENCE)
        except (Refusal, OSError, TimeoutError, ValueError) as error:
            raise Retry(f"the IMEX daemon does not answer: {error!r}", after=1.0) from error
        return json.dumps(answer) if "-j" in options else str(answer["status"])
