"""Ends as child processes: their orders and events, how they are ended, and targets that serve.

UCX reads its pins from the environment of its process, so every end is a separate process. On standard
input an end gets the shared secret (on a separate line, so that no order holds it), then one order. When
standard input closes, the parent is gone and the end exits. On standard output it writes events. Both are
lines of JSON.

`EndProcess` starts an end in its own session, so that Ctrl-C reaches the parent alone, and ends it in
every case: closed input, then SIGTERM, then SIGKILL, two seconds apart, by its own process id. A process
that ends without a result is reported with its last line on standard error.

`serve_targets` runs one target per configuration on consecutive ports, each with its share of the processors.
"""

import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from typing import IO, TypeVar, cast

import msgspec

from rackloom.core.transfer.pairing import spread_cores
from rackloom.core.transfer.values import EndConfig, Measurement, TransferSpec
from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.installation import require_nixl
from rackloom.runtime.foreign_text import decode_json

# Orders and events.


class BeTarget(msgspec.Struct, frozen=True, tag=True):
    """Listen at `host`, `port` (0: any) and serve one initiator, or without `once` all that come."""

    host: str
    port: int
    config: EndConfig = msgspec.field(name="seat")
    once: bool
    timeout_seconds: float


class BeInitiator(msgspec.Struct, frozen=True, tag=True):
    """Measure `spec` against the target at `host`, `port`."""

    host: str
    port: int
    config: EndConfig = msgspec.field(name="seat")
    spec: TransferSpec
    hold: bool = False
    """Emit Warm after the warm-ups, and start timing when a further line arrives on standard input."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The target can be reached."""

    host: str
    port: int


class TurnedAway(msgspec.Struct, frozen=True, tag=True):
    """A connection did not lead to a measurement."""

    peer: str
    reason: str


class Warm(msgspec.Struct, frozen=True, tag=True):
    """The warm-ups are over. The initiator waits for the line that starts the timing."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The initiator has measured. A target has nothing to add."""

    measured: Measurement | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The end gave up. `after` is set when trying again may help."""

    reason: str
    nearest_fix: str | None = None
    after: float | None = None

    def error(self) -> Refused | Retry:
        """The error that the end raised."""
        if self.after is not None:
            return Retry(self.reason, after=self.after)
        return Refused(self.reason, nearest_fix=self.nearest_fix)


Order = BeTarget | BeInitiator
Event = Listening | TurnedAway | Warm | Done | Failed


# The child process.


END_PROGRAM = (sys.executable, "-P", "-m", "rackloom.prove.transfer.end")
"""-P: a directory named rackloom in the working directory must not shadow this package."""
LONGEST_LINE = 16 << 20
_LONGEST_WAIT = 3600.0
"""Longest single wait, seconds. The kernel's own limit is below a month."""
_GRACE_SECONDS = 2.0
"""Seconds between closing a child's standard input, SIGTERM, and SIGKILL."""

E = TypeVar("E", bound=Event)


class EndProcess:
    """A running end. Use it as a context manager: leaving it, however, ends the process.

    It gets its own session, so that Ctrl-C reaches the parent alone, which then ends both ends.
    """

    def __init__(self, prefix: Sequence[str], secret: str, order: Order) -> None:
        self._name = type(order).__name__.removeprefix("Be").lower()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the end)
        self._lines = bytearray()
        self._process = subprocess.Popen(
            [*prefix, *END_PROGRAM],
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

    def __enter__(self) -> "EndProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def event(self, deadline: float) -> Event:
        """The next event before `deadline` (of time.monotonic).

        Raises:
            Retry: the end emitted nothing in time, or ended without an event.
        """
        event: Event = decode_json(self._line(deadline), "the end", Event)
        return event

    def expect(self, kind: type[E], deadline: float) -> E:
        """The next event of `kind`. Others are passed over.

        Raises:
            Refused, Retry: the error with which the end failed.
        """
        while True:
            event = self.event(deadline)
            if isinstance(event, kind):
                return event
            if isinstance(event, Failed):
                raise event.error()

    def send_start(self) -> None:
        """Start the timing of an initiator that waits for it. A dead process is reported by `expect`."""
        with suppress(OSError):
            self._stdin.write(b"start\n")

    def stop(self) -> None:
        """End the process and wait for it. Safe to call again."""
        with suppress(OSError):
            self._stdin.close()
        for push in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(_GRACE_SECONDS)
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
                if not selector.select(min(_LONGEST_WAIT, max(0.0, deadline - time.monotonic()))):
                    if time.monotonic() < deadline:
                        continue
                    raise Retry(f"the {self._name} said nothing in time", after=1.0)
                piece = self._stdout.read(1 << 16)
                if not piece or len(self._lines) > LONGEST_LINE:
                    raise Retry(f"the {self._name} ended without a result{self._last_error()}", after=1.0)
                self._lines += piece
        line = bytes(self._lines[:end])
        del self._lines[: end + 1]
        return line

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


# Several targets at once.


_START_SECONDS = 30.0


def serve_targets(
    host: str,
    port: int,
    secret: str,
    configs: Sequence[EndConfig],
    print_line: Callable[[str], None],
    *,
    once: bool,
    timeout: float,
) -> None:
    """Serve configuration k at `port` + k, until each has served (`once`, in `timeout` seconds) or for ever.

    Raises:
        Refused, Retry: what the first target that failed failed with.
    """
    require_nixl()
    with ExitStack() as stack:
        # Left last: its threads end with the ends.
        pool = stack.enter_context(ThreadPoolExecutor(len(configs)))
        ends = []
        cores = spread_cores(len(configs), sorted(os.sched_getaffinity(0)))
        for k, config in enumerate(configs):
            pinned = msgspec.structs.replace(config, cores=cores[k] or config.cores)
            order = BeTarget(host, port + k, pinned, once, timeout)
            ends.append(stack.enter_context(EndProcess((), secret, order)))
            ends[-1].expect(Listening, time.monotonic() + _START_SECONDS)
            nics = ", ".join(config.ucx.net_devices)
            print_line(f"listening on {host} port {port + k} for {config.device} over {nics}")
        deadline = time.monotonic() + timeout + _START_SECONDS if once else math.inf
        following = [pool.submit(_relay_events, end, deadline, print_line) for end in ends]
        over, _ = wait(following, return_when=FIRST_EXCEPTION)
        for served in over:
            served.result()


def _relay_events(end: EndProcess, deadline: float, print_line: Callable[[str], None]) -> None:
    """Print the events of a target until it is done."""
    while not isinstance(event := end.event(deadline), Done):
        if isinstance(event, TurnedAway):
            print_line(f"{event.peer}: {event.reason}")
        elif isinstance(event, Failed):
            raise event.error()
