"""nvidia-imex as a child process: its output is passed on, and why it ended is kept of it.

nvidia-imex ends with status 255 whatever keeps it from starting; the reason is in its log, which is its
standard error here. So its output is read and written unchanged to the container's log, and the last few
lines that are errors are remembered (without errors, the last line: a loader that misses a library writes no
level). The text is the program's and not ours: what is kept is cleaned and bounded.
"""

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO, Protocol

from rackloom.claim.domain.objects import clean_line
from rackloom.errors import Refused

KEPT_ERRORS = 3
"""The refusal of a configuration takes two lines: what is wrong, and that validation failed."""
LONGEST_LINE = 200
LONGEST_PARTIAL = 4096
"""Bytes of a line that has not ended yet; what follows is passed on and otherwise ignored."""
DRAIN_SECONDS = 1.0
"""How long output is awaited of a program that has ended: a process that it left may hold the pipe."""

_LEVEL = re.compile(r"(?:\[[^\]]*\] *)*?\[?(?:ERROR|CRITICAL|FATAL)\b[\]:]?")
"""`[Sep 18 2026 06:40:33] [ERROR] [tid 77] ...`, and `ERROR: ...` before the log is open."""
_PREFIX = re.compile(r"\A(?:(?:\[[^\]]*\] *)+|(?:ERROR|CRITICAL|FATAL): *)")


class Child(Protocol):
    """A started program: `asyncio.subprocess.Process`, as far as it is used, and its last words."""

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        ...

    @property
    def complaint(self) -> str:
        """The last errors that it logged, as one bounded line; empty where it wrote nothing."""
        ...

    def send_signal(self, signal: int) -> None:
        """Signal it; nothing once it has ended."""
        ...

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        ...


def how_it_ended(code: int, complaint: str) -> str:
    """An unexpected end in words, for people: the exit status or the signal, and what was logged last."""
    try:
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    except ValueError:
        ended = f"killed by signal {-code}"
    return f"{ended}: {complaint}" if complaint else ended


class LastErrors:
    """Fed with a program's output, piece by piece."""

    def __init__(self) -> None:
        self._partial = b""
        self._errors: deque[str] = deque(maxlen=KEPT_ERRORS)
        self._last = ""

    def feed(self, output: bytes) -> None:
        """Take note of the lines that end in this piece."""
        *lines, rest = (self._partial + output).split(b"\n")
        for line in lines:
            self._take(line)
        self._partial = rest[:LONGEST_PARTIAL]

    def __str__(self) -> str:
        """The last errors, or else the last line."""
        return "; ".join(self._errors) or self._last

    def _take(self, raw: bytes) -> None:
        line = raw[:LONGEST_PARTIAL].decode(errors="replace").strip()
        # Without date and thread, so that the same failure reads the same each time.
        text = clean_line(_PREFIX.sub("", line), LONGEST_LINE)
        if not text:
            return
        self._last = text
        if _LEVEL.match(line) and text not in self._errors:
            self._errors.append(text)


class ImexProcess:
    """The program as a process of its own; `output` is the reading end of its standard output and error."""

    def __init__(
        self, process: asyncio.subprocess.Process, output: BinaryIO, pass_on: Callable[[bytes], None]
    ) -> None:
        self._process = process
        self._output = output
        self._pass_on = pass_on
        self._errors = LastErrors()
        self._reading = asyncio.create_task(self._read())

    @property
    def returncode(self) -> int | None:
        """As `Child` has it."""
        return self._process.returncode

    @property
    def complaint(self) -> str:
        """As `Child` has it."""
        return str(self._errors)

    def send_signal(self, signal: int) -> None:
        """As `Child` has it."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal)

    async def wait(self) -> int:
        """As `Child` has it; its last output has been read then."""
        code = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=DRAIN_SECONDS)
        self._reading.cancel()
        self._errors.feed(b"\n")
        return code

    async def _read(self) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._output
        )
        try:
            while piece := await reader.read(1 << 16):
                self._errors.feed(piece)
                self._pass_on(piece)
        finally:
            transport.close()


async def start(command: Sequence[str]) -> ImexProcess:
    """Start the program. Raises `Refused` when it cannot be started."""
    # A pipe of our own: asyncio's PIPE has `wait` wait for every process that holds its other end.
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=writing, stderr=writing)
    except OSError as error:
        os.close(reading)
        raise Refused(
            f"{command[0]} does not start: {error.strerror}",
            nearest_fix="install the nvidia-imex package of the driver's version on the node",
        ) from error
    finally:
        os.close(writing)
    return ImexProcess(process, os.fdopen(reading, "rb", buffering=0), _to_stderr)


def _to_stderr(output: bytes) -> None:
    sys.stderr.buffer.write(output)
    sys.stderr.buffer.flush()
