"""Asking the running daemon through nvidia-imex-ctl, the only interface that NVIDIA documents."""

from collections.abc import Sequence
from pathlib import Path

from rackloom import programs
from rackloom.claim.imex.status import ImexDomain, NotUnderstood, parse_domain, parse_local
from rackloom.errors import Retry

TIMEOUT = 8.0
"""Seconds: below the 10 of the pod's probes, so that a hanging tool is told as such."""


class ImexControl:
    """The control tool, for the daemon that runs with this configuration file."""

    def __init__(self, program: Sequence[str], config: Path) -> None:
        self._command = (*program, "-c", str(config))

    async def local_status(self) -> str:
        """The daemon's status word, e.g. `READY`. Raises `Retry` while it does not answer."""
        return parse_local(await self._ask("-q"))

    async def domain(self) -> ImexDomain:
        """The domain as this daemon sees it. Raises `Retry` while it does not answer."""
        return parse_domain(await self._ask("-N", "-j"))

    async def _ask(self, *options: str) -> str:
        ended = await programs.run(*self._command, *options, seconds=TIMEOUT, again=1.0)
        if ended.code != 0:
            told = ended.complaint.strip() or ended.printed.strip()
            reason = told.decode(errors="replace")[:300]
            raise Retry(f"{self._command[0]} ended with {ended.code}: {reason}", after=1.0)
        try:
            return ended.printed.decode()
        except UnicodeDecodeError as error:
            raise NotUnderstood(f"{self._command[0]} printed no text: {error}") from error
