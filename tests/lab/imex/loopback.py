"""The IMEX stand-in as a task of this process, on the same sockets as a separate process."""

import asyncio
import json
from pathlib import Path
from signal import SIGKILL

from rackloom.claim.imex.nvidia_imex import ImexControl
from rackloom.errors import Retry
from rackloom.lab.imex.in_process import ImexTask
from rackloom.lab.imex.service import ImexService, ask_daemon
from rackloom.lab.imex.settings import ImexHost, ImexRefusal, read_imex_options

CONTROL_TIMEOUT = 5.0
"""Seconds that the control tool waits for an answer."""


class LoopbackImexChild(ImexTask):
    """A daemon that serves its real sockets."""

    def __init__(self, config: Path, host: ImexHost) -> None:
        self._service: ImexService | None = None
        super().__init__(self._serve(config, host))

    def send_signal(self, signal: int) -> None:
        """Sends a signal. SIGKILL leaves no time for a farewell, nor does any signal before the start."""
        if signal == SIGKILL or self._service is None:
            self._running.cancel()
        else:
            self._service.take(signal)

    async def _serve(self, config: Path, host: ImexHost) -> int:
        try:
            self._service = ImexService(read_imex_options(config, host), lambda *_: None)
            await self._service.serve()
        except (ImexRefusal, OSError) as error:
            return self._refuse(error)
        except asyncio.CancelledError:
            return -SIGKILL
        return 0


class LoopbackImexControl(ImexControl):
    """Talks to such a daemon at its command port."""

    def __init__(self, config: Path, host: ImexHost) -> None:
        super().__init__((), config)
        self._config = config
        self._host = host

    async def _ask(self, *options: str) -> str:
        question = "local" if "-q" in options else "domain"
        try:
            settings = read_imex_options(self._config, self._host)
            where = self._host.address(settings.command_ip), settings.command_port
            answer = await ask_daemon(where, question, patience=CONTROL_TIMEOUT)
        except (ImexRefusal, OSError, TimeoutError, ValueError) as error:
            raise Retry(f"the IMEX daemon does not answer: {error!r}", after=1.0) from error
        return json.dumps(answer) if "-j" in options else str(answer["status"])
