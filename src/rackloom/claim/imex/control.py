"""Asking the running daemon through nvidia-imex-ctl, the only interface that NVIDIA documents."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

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
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except FileNotFoundError as error:
            raise Retry(f"{self._command[0]} is not installed here: {error}", after=TIMEOUT) from error
        try:
            async with asyncio.timeout(TIMEOUT):
                output, complaint = await process.communicate()
        except TimeoutError as error:
            raise Retry(f"{self._command[0]} did not answer in {TIMEOUT:g} s", after=1.0) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            told = complaint.decode(errors="replace").strip() or output.decode(errors="replace").strip()
            raise Retry(f"{self._command[0]} ended with {process.returncode}: {told[:300]}", after=1.0)
        try:
            return output.decode()
        except UnicodeDecodeError as error:
            raise NotUnderstood(f"{self._command[0]} printed no text: {error}") from error
