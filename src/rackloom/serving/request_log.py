"""The log of this process's requests to other systems: a line for each, if the user wants it (`-v`).

Each request is sent within `asked`. Until `log_requests` names a listener, nothing is written and nothing is
timed. A line has the method, the address without user, query and fragment, the outcome, and the time in
milliseconds. It has no headers and bodies, which may hold secrets.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from urllib.parse import urlsplit

Listener = Callable[[str], None]


class Request:
    """A request that was sent, and its outcome, such as a status."""

    def __init__(self) -> None:
        self.outcome: object = "answered"


class _Log:
    """The listener that gets the lines of this process, or None."""

    listener: Listener | None = None


def log_requests(listener: Listener | None) -> None:
    """Give each line to `listener` from now on. None ends it."""
    _Log.listener = listener


def asked(method: str, address: object, path: str = "") -> AbstractContextManager[Request]:
    """Log the request that is sent within this context, or the error that leaves it.

    `address` is a URL or a name, and `path` the requested path below it.
    """
    if _Log.listener is None:
        return nullcontext(Request())
    whole = f"{str(address).rstrip('/')}/{path.lstrip('/')}" if path else str(address)
    return _timed(_Log.listener, method, whole)


@contextmanager
def _timed(listener: Listener, method: str, address: str) -> Iterator[Request]:
    request, begun = Request(), time.monotonic()
    try:
        yield request
    except BaseException as error:
        request.outcome = type(error).__name__
        raise
    finally:
        elapsed = 1e3 * (time.monotonic() - begun)
        listener(f"{method} {_public_part(address)}: {request.outcome} in {elapsed:.0f} ms")


def _public_part(address: str) -> str:
    """An address without the parts that may hold a secret."""
    parts = urlsplit(address)
    if not parts.netloc:
        return address.partition("?")[0]
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
