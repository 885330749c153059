"""Running a program for no longer than somebody waits for it."""

import asyncio
import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec

from rackloom.errors import Retry


class Ended(msgspec.Struct, frozen=True):
    """A program that ended: its exit code (negative: by which signal), its output and its complaints."""

    code: int
    printed: bytes
    complaint: bytes

    @property
    def said(self) -> str:
        """All that it wrote, complaints last."""
        return (self.printed + self.complaint).decode(errors="replace").strip()


async def run(
    *command: str, seconds: float, again: float, given: bytes = b"", env: Mapping[str, str] | None = None
) -> Ended:
    """How the program ended that got `given` on its input; without `env` it has this process' environment.

    It writes to memory and not to pipes, which a daemon that it leaves behind would keep open.

    Raises:
        Retry: after `again` seconds. It cannot be run, or has not ended within `seconds`; then it was killed.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_memory(name)) for name in ("given", "printed", "complaint")]
        files[0].write(given)
        files[0].seek(0)
        code = await _code(command, files, seconds, again, env)
        _, printed, complaint = (_content(file) for file in files)
    return Ended(code, printed, complaint)


def below(root: Path) -> tuple[str, ...]:
    """What stands before a command that is installed in another root."""
    return () if root == Path("/") else ("chroot", str(root))


async def _code(
    command: tuple[str, ...],
    files: list[BinaryIO],
    seconds: float,
    again: float,
    env: Mapping[str, str] | None,
) -> int:
    given, printed, complaint = files
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=given, stdout=printed, stderr=complaint, env=env
        )
    except OSError as error:
        raise Retry(f"cannot run {command[0]}: {error}", after=again) from error
    try:
        async with asyncio.timeout(seconds):
            return await process.wait()
    except TimeoutError as error:
        raise Retry(f"`{shlex.join(command)}` did not end in {seconds:g} s", after=again) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _memory(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "w+b")


def _content(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()
