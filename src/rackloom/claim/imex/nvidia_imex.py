"""The programs nvidia-imex and nvidia-imex-ctl: starting one, querying the other.

nvidia-imex ends with status 255 for every failure to start. The reason is in its log, which is its
standard error here. So its output is read, passed on unchanged to the container's log, and the last three
lines that are errors are kept (without errors the last line: a loader that misses a library writes no
level). The text is the program's, so it is cleaned and bounded. A pipe of our own is used, because
asyncio's PIPE makes `wait` wait for every process that holds the other end.

nvidia-imex-ctl is the only interface that NVIDIA documents (IMEX service guide). `-q` prints one status
word, `-N -j` the domain as JSON. `mesh_of` decides whether a daemon is connected with each of its peers,
both ways. The domain's own verdict is not used: in DNS mode the node file names more nodes than have
joined, and empty places count there as missing.
"""

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from rackloom.errors import Refused, Retry, Undecodable
from rackloom.runtime import programs
from rackloom.runtime.foreign_text import clean_line, decode_json

# Reading nvidia-imex-ctl's output.


READY = "READY"
CONNECTED = "CONNECTED"


class ImexConnection(msgspec.Struct, frozen=True):
    """One node's connection to another, as that node sees it."""

    status: str
    host: str = ""


class ImexNode(msgspec.Struct, frozen=True, rename="camel"):
    """One node of the domain. `connections` is keyed by the other node's index."""

    status: str
    host: str = ""
    host_name: str = ""
    version: str = ""
    connections: Mapping[str, ImexConnection] = {}


class ImexDomain(msgspec.Struct, frozen=True):
    """The domain as one daemon sees it. `status` is UP, DOWN or DEGRADED. `nodes` is keyed by index."""

    status: str
    nodes: Mapping[str, ImexNode]


class PeerMesh(msgspec.Struct, frozen=True, rename="camel"):
    """Whether one daemon reaches each of its peers. `missing` names the others, in words."""

    complete: bool
    peers: int
    missing: tuple[str, ...] = ()


class UnknownOutput(Exception):
    """The control tool printed something that this code does not know."""


def parse_local(output: str) -> str:
    """The daemon's own status word, from `nvidia-imex-ctl -q`."""
    word = output.strip()
    if not word or len(word.split()) != 1:
        raise UnknownOutput(f"nvidia-imex-ctl -q printed {output[:200]!r} instead of one word")
    return word


def parse_domain(output: str | bytes) -> ImexDomain:
    """The domain, from `nvidia-imex-ctl -N -j`."""
    try:
        return decode_json(output, "nvidia-imex-ctl", ImexDomain)
    except Undecodable as error:
        raise UnknownOutput(f"nvidia-imex-ctl -N -j printed no domain: {error.reason}") from error


def mesh_of(domain: ImexDomain, own_index: int, peers: Iterable[int]) -> PeerMesh:
    """Whether the daemon at `own_index` is connected with every other of `peers`, both ways.

    In DNS mode the node file names more nodes than have joined, so the domain's own verdict counts empty
    places as missing. Only the members of the clique matter.
    """
    others = sorted(set(peers) - {own_index})
    missing = [
        f"{source} -> {target}: {status}"
        for peer in others
        for source, target in ((own_index, peer), (peer, own_index))
        if (status := _connection_status(domain, source, target)) != CONNECTED
    ]
    return PeerMesh(complete=not missing, peers=len(others), missing=tuple(missing))


def _connection_status(domain: ImexDomain, source: int, target: int) -> str:
    node = domain.nodes.get(str(source))
    if node is None:
        return f"node {source} is not in the domain"
    connection = node.connections.get(str(target))
    return "no connection" if connection is None else connection.status


# Querying the running daemon.


CONTROL_SECONDS = 8.0
"""Seconds: below the 10 of the pod's probes, so that a tool that hangs is reported as such."""


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
        result = await programs.run_program(*self._command, *options, seconds=CONTROL_SECONDS, again=1.0)
        if result.code != 0:
            output = result.stderr.strip() or result.stdout.strip()
            reason = output.decode(errors="replace")[:300]
            raise Retry(f"{self._command[0]} ended with {result.code}: {reason}", after=1.0)
        try:
            return result.stdout.decode()
        except UnicodeDecodeError as error:
            raise UnknownOutput(f"{self._command[0]} printed no text: {error}") from error


# nvidia-imex as a child process.


KEPT_ERRORS = 3
"""The refusal of a configuration takes two lines: what is wrong, and that validation failed."""
LONGEST_LINE = 200
LONGEST_PARTIAL = 4096
"""Bytes of a line that has not ended yet. The rest is passed on and otherwise ignored."""
DRAIN_SECONDS = 1.0
"""How long output is awaited of a program that has ended: a process that it left may hold the pipe."""

_LEVEL = re.compile(r"(?:\[[^\]]*\] *)*?\[?(?:ERROR|CRITICAL|FATAL)\b[\]:]?")
"""`[Sep 18 2026 06:40:33] [ERROR] [tid 77] ...`, and `ERROR: ...` before the log is open."""
_PREFIX = re.compile(r"\A(?:(?:\[[^\]]*\] *)+|(?:ERROR|CRITICAL|FATAL): *)")


class ImexChild(Protocol):
    """A started program: `asyncio.subprocess.Process`, as far as it is used, and its last errors."""

    @property
    def returncode(self) -> int | None:
        """None while it runs."""

    @property
    def complaint(self) -> str:
        """The last errors that it logged, as one bounded line. Empty if it wrote nothing."""

    def send_signal(self, signal: int) -> None:
        """Signal it. Does nothing once it has ended."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""


def how_it_ended(code: int, complaint: str) -> str:
    """An unexpected end in words, for people: the exit status or the signal, and the last errors logged."""
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
    """The program as a separate process. `output` is the reading end of its standard output and error."""

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
        """See `ImexChild`."""
        return self._process.returncode

    @property
    def complaint(self) -> str:
        """See `ImexChild`."""
        return str(self._errors)

    def send_signal(self, signal: int) -> None:
        """See `ImexChild`."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal)

    async def wait(self) -> int:
        """Its exit code, once its last output has been read."""
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


async def start_imex(command: Sequence[str]) -> ImexProcess:
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
