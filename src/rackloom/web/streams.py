"""How many streams are open: the connections of a service are few, and REST needs them too."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from rackloom.web.door import Viewer

KEEP_ALIVE_SECONDS = 15
SEND_SECONDS = 20.0
OF_ONE = 16
OF_ALL = 256
"""A quarter of the connections that the service takes."""


class Streams:
    """The streams that are open, by whose they are."""

    def __init__(self) -> None:
        self._open: Counter[Viewer] = Counter()

    def full(self, viewer: Viewer) -> bool:
        """Whether a viewer, or everybody together, has as many as there may be."""
        return self._open[viewer] >= OF_ONE or self._open.total() >= OF_ALL

    @contextmanager
    def counted(self, viewer: Viewer) -> Iterator[None]:
        """Count one stream while the context is entered."""
        self._open[viewer] += 1
        try:
            yield
        finally:
            self._open[viewer] -= 1
            self._open += Counter()


class Stream(EventSourceResponse):
    """The answer that holds one stream, counted from its first byte to its end, however it ends."""

    def __init__(self, streams: Streams, viewer: Viewer, changes: AsyncIterator[ServerSentEvent]) -> None:
        super().__init__(changes, ping=KEEP_ALIVE_SECONDS, send_timeout=SEND_SECONDS, sep="\n")
        self._streams = streams
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        with self._streams.counted(self._viewer):
            await super().__call__(scope, receive, send)
