"""The rate limit of log lines with the same cause: one processor for all of a process's events.

A cause that lasts (a full disk, a controller that is switched off) is reported by each pass that meets it.
Among lines from WARNING on that are equal except for their time, the first is written, and then one in
`WINDOW_SECONDS`, with the number of those that were left out as `repeated`. Equal means: the same event,
level and fields, and an exception of the same type and text. Lines below WARNING are steps that happened,
and are all written.

At most `MOST_CAUSES` are remembered, the newest. A line with any other cause is written.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import msgspec
import structlog

WINDOW_SECONDS = 60.0
MOST_CAUSES = 1000
_UNLIMITED = ("debug", "info")


class _LastLine(msgspec.Struct):
    written_at: float
    repeated: int = 0


class RepeatedLines:
    """A processor of structlog, the first of the chain. `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: OrderedDict[str, _LastLine] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(
        self, _logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """The event, or DropEvent for one that repeats another."""
        if method in _UNLIMITED:
            return event
        with self._lock:
            repeated = self._count(_cause(method, event))
        if repeated is None:
            raise structlog.DropEvent
        return {**event, "repeated": repeated} if repeated else event

    def _count(self, cause: str) -> int | None:
        """The number of lines that were left out before this one, or None to leave it out too."""
        now, last = self._clock(), self._last.get(cause)
        if last is not None and now - last.written_at < WINDOW_SECONDS:
            last.repeated += 1
            return None
        self._last[cause] = _LastLine(now)
        self._last.move_to_end(cause)
        if len(self._last) > MOST_CAUSES:
            self._last.popitem(last=False)
        return 0 if last is None else last.repeated


def _cause(method: str, event: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if name != "exc_info"}
    exception = _exception_of(event.get("exc_info"))
    return repr((method, sorted(fields.items(), key=lambda item: item[0]), type(exception), str(exception)))


def _exception_of(exc_info: object) -> BaseException | None:
    match exc_info:
        case BaseException():
            return exc_info
        case (_, BaseException() as error, _):
            return error
    return sys.exception() if exc_info else None
