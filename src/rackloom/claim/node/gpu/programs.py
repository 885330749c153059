"""Running programs of NVIDIA's driver, below the root that the driver is installed in."""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rackloom.errors import Retry

PATIENCE_SECONDS = 20.0
AGAIN_SECONDS = 2.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LONGEST_COMPLAINT = 300


class Programs:
    """Programs of one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix: tuple[str, ...] = () if root == Path("/") else ("chroot", str(root))

    async def run(self, *command: str, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
        """What the program prints. Raises `Retry` when it cannot run, fails, or does not end in time.

        Its output goes to a file, because a daemon that it leaves behind would keep a pipe open.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
            given.write(stdin.encode())
            given.seek(0)
            code = await self._code(command, given.fileno(), printed.fileno(), env or {})
            printed.seek(0)
            said = printed.read().decode(errors="replace").strip()
        if code != 0:
            raise Retry(
                f"`{' '.join(command)}` failed with {code}: {said[-_LONGEST_COMPLAINT:]}", after=AGAIN_SECONDS
            )
        return said

    async def _code(self, command: tuple[str, ...], given: int, printed: int, env: Mapping[str, str]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._prefix,
                *command,
                stdin=given,
                stdout=printed,
                stderr=printed,
                env={"PATH": os.environ.get("PATH", _PATH), **env},
            )
        except OSError as error:
            raise Retry(f"cannot run {command[0]}: {error}", after=AGAIN_SECONDS) from error
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await process.wait()
        except TimeoutError as error:
            raise Retry(
                f"`{' '.join(command)}` did not end in {PATIENCE_SECONDS:g} s", after=AGAIN_SECONDS
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
