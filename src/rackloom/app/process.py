"""Set-up of every long-running process: signals, its log file, and the settings of the interpreter.

SIGTERM and SIGINT set an event, and the process then closes everything in order. SIGUSR2 prints all
stacks to stderr and the process goes on: threads are printed by faulthandler from the signal handler
itself, which works while the event loop hangs. Tasks are printed from the loop. `run_until_stopped` runs
one coroutine until the event is set and raises the coroutine's error.

Logs are JSON lines, one event each, from structlog and the standard library alike: Rackloom's events from
INFO on, those of libraries from WARNING on. Lines with the same cause are limited (`repeated_lines`). A log
file on a full disk loses lines, and ends nothing.

`keep_files_private` makes new files of a process readable by its owner only. `allow_open_files` raises the
limit of open files to the number that the listeners of a process may need.

`elapsed_seconds` is the clock of everything that ages: readings and leases.

Two interpreter settings bound the pauses of a large site. `freeze_loaded_objects` takes objects loaded at
the start out of the garbage collector (`gc.freeze`) and makes full collections ten times rarer: with
CPython's thresholds a site of a hundred racks paused for 0.15 s in every three seconds.
`shorten_switch_interval` makes a computing thread give up the interpreter lock after 1 ms in place of 5
ms, because a REST request changes threads several times.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import Processor

from rackloom.app.repeated_lines import RepeatedLines
from rackloom.errors import file_error_text
from rackloom.serving.acceptor import split_listen
from rackloom.serving.limits import plan_file_limit

# Time.


_COUNTS_SUSPENSION = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def elapsed_seconds() -> float:
    """Seconds since some moment, by a clock that is never set and that counts while the machine is suspended.

    Linux's monotonic clock stands still then: after a resume, old data would look new.
    """
    return time.clock_gettime(_COUNTS_SUSPENSION)


# Signals.


def stop_on_signals() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set. The process then closes everything and ends.

    SIGUSR2 prints all stacks to stderr, and the process goes on.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    _dump_stacks_on_signal(loop)
    return stopped


async def run_until_stopped(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until `stopped` is set, then cancel it. Raises the error that it fails with."""
    task = asyncio.create_task(work)
    await wait_stopped_or_ended(stopped, task)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@asynccontextmanager
async def background_task(work: Coroutine[Any, Any, None]) -> "AsyncIterator[asyncio.Task[None]]":
    """`work` as a task, which is cancelled at the end of the context. It ends earlier only if it fails."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def wait_stopped_or_ended(stopped: asyncio.Event, *work: "asyncio.Task[None]") -> None:
    """Return when `stopped` is set, or when any task of `work` has ended or failed."""
    waiting = asyncio.create_task(_wait_for_event(stopped))
    await asyncio.wait({waiting, *work}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def _wait_for_event(event: asyncio.Event) -> None:
    await event.wait()


def _dump_stacks_on_signal(loop: asyncio.AbstractEventLoop) -> None:
    """Threads first, from the signal itself, which works while the loop hangs, then tasks, from the loop."""
    loop.add_signal_handler(signal.SIGUSR2, _print_tasks)
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True, chain=True)


def _print_tasks() -> None:
    """Places without source lines, as faulthandler has them: to look for those fails for some libraries."""
    for task in asyncio.all_tasks():
        print(f"{task!r} (most recent call last):", file=sys.__stderr__)
        for frame in task.get_stack():
            code = frame.f_code
            place = f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
            print(place, file=sys.__stderr__)
    print("end of stacks", file=sys.__stderr__, flush=True)


# Log files.


_SHARED_PROCESSORS: tuple[Processor, ...] = (
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
)


class _LogFile(logging.FileHandler):
    """A log file that may be on a full disk: then one sentence on stderr reports it."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._reported = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging calls it)
        """Report a line that could not be written, as logging does if its own output is at fault."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported and sys.stderr is not None:
            self._reported = True
            sys.stderr.write(f"rackloom: log lines are lost: {file_error_text(error)}\n")


def log_to_output() -> None:
    """Send our events to standard output, as text."""
    structlog.configure(processors=[RepeatedLines(time.monotonic), *structlog.get_config()["processors"]])


LogSetup = Callable[[Path], None]
"""Sends the events of a process to a log file."""


def log_to_file(file: Path) -> None:
    """Send our events from INFO on, and those of the libraries from WARNING on, to `file`."""
    logging.basicConfig(handlers=[_log_handler(file)], level=logging.WARNING, force=True)
    logging.getLogger("rackloom").setLevel(logging.INFO)
    _log_through_standard_library()


@contextmanager
def log_beside_host() -> Iterator[LogSetup]:
    """A `LogSetup` for a host process: only Rackloom's events go to the file, until the end.

    The handlers of the host stay as they are, and so does structlog where the host configured it. Contexts
    may overlap: the first changes the logger `rackloom`, and the last to end sets it back.
    """
    logger, handlers = logging.getLogger("rackloom"), list[logging.Handler]()

    def set_up(file: Path) -> None:
        handlers.append(_log_handler(file))
        logger.addHandler(handlers[-1])

    _host_logging.enter()
    try:
        yield set_up
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        _host_logging.leave()


class _HostLogging:
    """The logging of a host process, while it has Rackloom's sites."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts = 0
        self._set_back: Callable[[], None]

    def enter(self) -> None:
        with self._lock:
            self._contexts += 1
            if self._contexts == 1:
                self._set_back = _log_apart_from_host()

    def leave(self) -> None:
        with self._lock:
            self._contexts -= 1
            if not self._contexts:
                self._set_back()


_host_logging = _HostLogging()


def _log_apart_from_host() -> Callable[[], None]:
    """Keep Rackloom's events from the handlers of the host. Return a function that undoes this."""
    logger, made = logging.getLogger("rackloom"), None
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not structlog.is_configured():
        _log_through_standard_library()
        made = structlog.get_config()["processors"]

    def set_back() -> None:
        logger.setLevel(level)
        logger.propagate = propagate
        # A host that has configured structlog keeps its configuration.
        if structlog.get_config()["processors"] is made:
            structlog.reset_defaults()

    return set_back


def _log_handler(file: Path) -> logging.Handler:
    handler = _LogFile(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED_PROCESSORS,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    return handler


def _log_through_standard_library() -> None:
    structlog.configure(
        processors=[
            RepeatedLines(time.monotonic),
            *_SHARED_PROCESSORS,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


# Garbage collection.


FULL_COLLECTION_AFTER = 100
"""Collections of the middle generation before a full one. CPython's own default is 10."""


def freeze_loaded_objects() -> None:
    """Exempt all present objects from later collections, and make full collections rare."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_AFTER)


# Thread switches.


SWITCH_INTERVAL = 0.001
"""Seconds. CPython's default is 0.005. A REST request changes threads several times. Beside a thread that
computes (a reading of the map, an examination) each change waits for one interval, beside two for two."""


def shorten_switch_interval() -> None:
    """Let a thread that answers requests wait less for threads that compute."""
    sys.setswitchinterval(SWITCH_INTERVAL)


# Files.


def keep_files_private() -> None:
    """Let only their owner read the files that this process makes from now on."""
    os.umask(0o077)


def allow_open_files(needed: int) -> None:
    """Let this process have this number of files open. Raises Refused if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    limits = [sys.maxsize if limit == unlimited else limit for limit in (soft, hard)]
    planned = plan_file_limit(needed, *limits)
    if planned != limits[0]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (planned, hard))


# Listen addresses, already validated by the configuration.


def is_loopback(listen: str) -> bool:
    """Whether only this machine can connect."""
    return split_listen(listen)[0] in ("127.0.0.1", "::1", "localhost")
