"""One painter for each kind of viewer, kept while somebody's stream is drawn by it."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from rackloom.web.colouring import Mode
from rackloom.web.live import Now
from rackloom.web.parts import Painter, Sheet

KINDS_KEPT = 32
"""Kinds of viewers whose drawings are kept though no stream is drawn by them; others are drawn anew."""

Kind = tuple[str | None, Mode]
"""Organisation (None: it sees everything) and mode."""


class Painters:
    """The painters of one site; `switch_trays` are in one rack, as far as that is known."""

    def __init__(self, switch_trays: int) -> None:
        self._switch_trays = switch_trays
        self._painters: OrderedDict[Kind, Painter] = OrderedDict()
        self._streams: Counter[Kind] = Counter()
        self._painting = asyncio.Lock()

    @contextmanager
    def held(self, kind: Kind) -> Iterator[None]:
        """Keep the painter of a kind: a new one gives other colours, and sends every rack again."""
        self._streams[kind] += 1
        try:
            yield
        finally:
            self._streams[kind] -= 1
            self._streams += Counter()

    async def sheet(self, kind: Kind, now: Now) -> Sheet:
        """What a kind of viewer sees of a reading."""
        await self._painting.acquire()
        # Drawing a hundred racks takes a while, in which others want to be answered.
        painting = asyncio.get_running_loop().run_in_executor(None, self._painter(kind).follow, now)
        # The thread goes on when its client goes away: until it ends, nobody else may paint.
        painting.add_done_callback(lambda _: self._painting.release())
        return await asyncio.shield(painting)

    def _painter(self, kind: Kind) -> Painter:
        painter = self._painters.setdefault(kind, Painter(*kind, self._switch_trays))
        self._painters.move_to_end(kind)
        self._drop_some()
        return painter

    def _drop_some(self) -> None:
        idle = [kind for kind in self._painters if kind not in self._streams]
        for kind in idle[: max(0, len(idle) - KINDS_KEPT)]:
            del self._painters[kind]
