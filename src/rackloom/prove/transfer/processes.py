"""The ends as child processes: started with an order, heard, and ended by their own id in every case."""

import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, TypeVar, cast

import msgspec

from rackloom.errors import Retry
from rackloom.prove.transfer.events import Event, Failed, Order

PROGRAM = (sys.executable, "-P", "-m", "rackloom.prove.transfer.end")
"""-P: a directory named rackloom where the user stands is not this package."""
LONGEST_LINE = 16 << 20
_LOOK = 3600.0
"""Longest single wait, seconds; the kernel's own limit is below a month."""
_GRACE = 2.0
"""Seconds between asking a child to end (its standard input closes), SIGTERM, and SIGKILL."""

_EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
E = TypeVar("E", bound=Event)


class End:
    """A running end. Use it as a context manager: leaving it, however, ends the process.

    It gets its own session, so that Ctrl-C reaches the parent alone, which then ends both ends.
    """

    def __init__(self, prefix: Sequence[str], secret: str, order: Order) -> None:
        self._name = type(order).__name__.removeprefix("Be").lower()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the end)
        self._lines = bytearray()
        self._process = subprocess.Popen(
            [*prefix, *PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
        )
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._stdout = cast("IO[bytes]", self._process.stdout)
        with suppress(BrokenPipeError):  # a child that died at once is reported by `expect`
            self._stdin.write(secret.encode() + b"\n" + msgspec.json.encode(order) + b"\n")

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    def __enter__(self) -> "End":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def event(self, deadline: float) -> Event:
        """The next event before `deadline` (of time.monotonic).

        Raises:
            Retry: the end said nothing in time, or ended without a word.
        """
        return _EVENT.decode(self._line(deadline))

    def expect(self, kind: type[E], deadline: float) -> E:
        """The next event of `kind`; others are passed over.

        Raises:
            Refused, Retry: what the end failed with.
        """
        while True:
            event = self.event(deadline)
            if isinstance(event, kind):
                return event
            if isinstance(event, Failed):
                raise event.error()

    def say_start(self) -> None:
        """Give an initiator that holds the word to start; one that died is reported by `expect`."""
        with suppress(OSError):
            self._stdin.write(b"start\n")

    def stop(self) -> None:
        """End the process and wait for it; safe to call again."""
        with suppress(OSError):
            self._stdin.close()
        for push in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_GRACE)
                break
            except subprocess.TimeoutExpired:
                push()
        self._process.wait()
        self._stdout.close()
        self._errors.close()

    def _line(self, deadline: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while (end := self._lines.find(b"\n")) < 0:
                if not selector.select(min(_LOOK, max(0.0, deadline - time.monotonic()))):
                    if time.monotonic() < deadline:
                        continue
                    raise Retry(f"the {self._name} said nothing in time", after=1.0)
                piece = self._stdout.read(1 << 16)
                if not piece or len(self._lines) > LONGEST_LINE:
                    raise Retry(f"the {self._name} ended without a result{self._last_words()}", after=1.0)
                self._lines += piece
        line = bytes(self._lines[:end])
        del self._lines[: end + 1]
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
