"""Run an external program with a time limit and a limit on its output.

`run_program` starts the program without a shell, gives it `given` on standard input, and returns its exit
code and its output (`ProgramResult`). Standard input, output and error are anonymous memory files
(memfd), not pipes: a daemon that the program leaves behind would keep a pipe open, and the caller would
wait for it.

The program is polled ten times a second. It is killed when it has not ended within `seconds`, or has
written more than `MAX_OUTPUT_BYTES`. Both cases, and a program that cannot be started, raise `Retry`. No
child survives the call, because the process is killed and awaited on every way out.
"""

import asyncio
import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from rackloom.errors import Retry

MAX_OUTPUT_BYTES = 16 << 20
"""Bytes that a program may write to each of standard output and error: they are kept in memory."""
_POLL_SECONDS = 0.1
"""Seconds between two checks of how much it wrote."""


class ProgramResult(msgspec.Struct, frozen=True):
    """A program that ended. A negative code is the signal that ended it."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def output(self) -> str:
        """Standard output, then standard error, as text."""
        return (self.stdout + self.stderr).decode(errors="replace").strip()


async def run_program(
    *command: str, seconds: float, again: float, given: bytes = b"", env: Mapping[str, str] | None = None
) -> ProgramResult:
    """Run a program with `given` on its input. Without `env` it has the environment of this process.

    Raises:
        Retry: after `again` seconds. It cannot be run (an argument has a NUL, for example), or it was killed:
            it had not ended within `seconds`, or wrote more than `MAX_OUTPUT_BYTES`.
    """
    with ExitStack() as stack:
        # A daemon that the program leaves behind keeps its files open: a reader of pipes would wait for it.
        files: list[BinaryIO] = [
            stack.enter_context(os.fdopen(os.memfd_create(name), "w+b"))
            for name in ("stdin", "stdout", "stderr")
        ]
        files[0].write(given)
        files[0].seek(0)
        code = await _exit_code(command, files, seconds, again, env)
        _check_size(command, files[1:], again)
        for file in files[1:]:
            file.seek(0)
        return ProgramResult(code, files[1].read(), files[2].read())


def chroot_prefix(root: Path) -> tuple[str, ...]:
    """The prefix of a command that is installed in another root."""
    return () if root == Path("/") else ("chroot", str(root))


async def _exit_code(
    command: tuple[str, ...],
    files: list[BinaryIO],
    seconds: float,
    again: float,
    env: Mapping[str, str] | None,
) -> int:
    stdin, stdout, stderr = files
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=stdin, stdout=stdout, stderr=stderr, env=env
        )
    except (OSError, ValueError) as error:
        raise Retry(f"cannot run {command[0]}: {error}", after=again) from error
    try:
        async with asyncio.timeout(seconds):
            while process.returncode is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await process.wait()
                _check_size(command, files[1:], again)
            return process.returncode
    except TimeoutError as error:
        raise Retry(f"`{shlex.join(command)}` did not end in {seconds:g} s", after=again) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _check_size(command: tuple[str, ...], written: list[BinaryIO], again: float) -> None:
    if any(os.fstat(file.fileno()).st_size > MAX_OUTPUT_BYTES for file in written):
        raise Retry(f"`{shlex.join(command)}` wrote more than {MAX_OUTPUT_BYTES >> 20} MiB", after=again)
