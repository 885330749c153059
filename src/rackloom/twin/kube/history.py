"""The log of changes that watches read: a window of the past, and whoever waits for what comes."""

import asyncio
import contextvars
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rackloom.claim.kube.api import Kind, Object, WatchEvent
from rackloom.twin.kube import answers

Change = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One change: what became of an object, and what it was before (None: it was not there)."""

    version: int
    type: Change
    object: Object
    before: Object | None


@dataclass(frozen=True, slots=True)
class Scope:
    """What a watch looks at. Equal ones are asked once about a change, however many watches have them."""

    namespace: str | None
    matches: Callable[[Object], bool]

    def holds(self, obj: Object | None) -> bool:
        """Whether an object is one of those watched."""
        if obj is None:
            return False
        return self.namespace in (None, obj["metadata"].get("namespace")) and self.matches(obj)

    def seen(self, entry: Entry) -> WatchEvent | None:
        """How a change looks from here: what stops matching is DELETED, what starts is ADDED."""
        now = entry.type != "DELETED" and self.holds(entry.object)
        before = self.holds(entry.before)
        if now:
            return WatchEvent("MODIFIED" if before else "ADDED", entry.object)
        return WatchEvent("DELETED", entry.object) if before else None


class Feed:
    """What one watch has still to tell: changes after a version. None in the queue ends it."""

    def __init__(self, scope: Scope, after: int) -> None:
        self.scope = scope
        self.after = after
        self.queue: asyncio.Queue[WatchEvent | None] = asyncio.Queue()

    def tell(self, event: WatchEvent | None) -> None:
        """Queue a change as its scope sees it, if it does."""
        if event is not None:
            self.queue.put_nowait(event)


class History:
    """Changes of every kind, the newest `window` of each; older resourceVersions are expired."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._entries: dict[Kind, deque[Entry]] = defaultdict(deque)
        self._floor: dict[Kind, int] = defaultdict(int)
        self.compacted = 0
        self._feeds: dict[Kind, dict[Scope, dict[Feed, None]]] = defaultdict(dict)
        self.version = 1
        self.listeners: list[Callable[[Kind, Object], None]] = []
        """Told of every change as it happens: the way in for controllers of the same process."""
        self.context = contextvars.copy_context()
        """That of the server: what its controllers begin is not the writer's, who may be stopped."""

    def add(self, kind: Kind, change: Change, obj: Object, before: Object | None) -> None:
        """Record what happened at the current version, and tell it to the watches."""
        entry = Entry(self.version, change, obj, before)
        entries = self._entries[kind]
        entries.append(entry)
        if len(entries) > self._window:
            self._floor[kind] = entries.popleft().version
        for scope, feeds in self._feeds[kind].items():
            event = scope.seen(entry)
            for feed in feeds:
                if entry.version > feed.after:
                    feed.tell(event)
        for listener in self.listeners:
            self.context.copy().run(listener, kind, obj)

    def open(self, kind: Kind, scope: Scope, after: int) -> Feed:
        """A watch from a version on, be it one to come. Raises `Expired` when that is too long ago."""
        floor = self.oldest(kind)
        if after < floor:
            raise answers.expired(after, floor)
        feed = Feed(scope, after)
        for entry in self._entries[kind]:
            if entry.version > after:
                feed.tell(scope.seen(entry))
        self._feeds[kind].setdefault(scope, {})[feed] = None
        return feed

    def oldest(self, kind: Kind) -> int:
        """The version that a kind is known from."""
        return max(self._floor[kind], self.compacted)

    def undone(self, kind: Kind, until: int) -> Iterator[Entry]:
        """The changes of a kind after a version, the newest first."""
        for entry in reversed(self._entries[kind]):
            if entry.version <= until:
                return
            yield entry

    def close(self, kind: Kind, feed: Feed) -> None:
        """A watch that nobody reads any more."""
        feeds = self._feeds[kind].get(feed.scope, {})
        feeds.pop(feed, None)
        if not feeds:
            self._feeds[kind].pop(feed.scope, None)

    def compact(self) -> None:
        """Forget the past: every version but the current one is expired."""
        self._entries.clear()
        self.compacted = self.version

    def hang_up(self) -> None:
        """End every watch, as a server does that is restarted."""
        for scopes in self._feeds.values():
            for feed in (one for feeds in scopes.values() for one in feeds):
                feed.queue.put_nowait(None)
            scopes.clear()
