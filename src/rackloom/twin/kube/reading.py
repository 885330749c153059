"""What can be wrong with what clients read: a server whose cache stands still, and events out of order.

Real servers do both. One behind a load balancer may lag behind the others (kubernetes/kubernetes#59848), and
a watch that is resumed tells again what was told. What stays true there stays true here: the changes of one
object come in their order, and no change is lost.
"""

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence

from rackloom.claim.kube.api import Kind, Object, WatchEvent
from rackloom.twin.kube.store import Store, key_of

HELD_SECONDS = 0.02
"""How long a change is kept back for a later one to come before it."""


class OldView:
    """All objects as they were at one version."""

    def __init__(self, store: Store, kinds: Collection[Kind]) -> None:
        self.version = store.version
        self._objects: Mapping[Kind, Sequence[Object]] = {kind: store.all(kind) for kind in kinds}

    def all(self, kind: Kind) -> Sequence[Object]:
        """Every object of a kind, by namespace and name."""
        return self._objects.get(kind, ())


class Lag:
    """A server that some users are stuck with: until it catches up, its watches are silent.

    Lists are old only for who takes them from its memory (resourceVersion=0, or one that it has reached).
    Plain lists, reads of single objects and writes go to the newest state, as the real ones go to etcd.
    """

    def __init__(self) -> None:
        self.hits = 0
        """Lists that were old, and changes that were kept back."""
        self._users: frozenset[str] = frozenset()
        self._view: OldView | None = None
        self._caught_up = asyncio.Event()

    def begin(self, store: Store, kinds: Collection[Kind], users: Collection[str]) -> None:
        """From now on `users` see what there is now."""
        self.end()
        self._users, self._view = frozenset(users), OldView(store, kinds)
        self._caught_up = asyncio.Event()

    def end(self) -> None:
        """They see everything again, and hear what they have missed."""
        self._users, self._view, self.hits = frozenset(), None, 0
        self._caught_up.set()

    def view(self, user: str, asked: str) -> OldView | None:
        """What is read for a user who asked for this version; None: the newest state."""
        view = self._view
        if view is None or user not in self._users or not asked or int(asked) > view.version:
            return None
        self.hits += 1
        return view

    async def wait(self, user: str, event: WatchEvent) -> None:
        """Until this may be told to a user."""
        if user in self._users:
            self.hits += event.type != "BOOKMARK"
            await self._caught_up.wait()


class Tangle:
    """Changes that watches of some users tell twice, or after a later one of another object."""

    def __init__(self, seed: int) -> None:
        self.hits = 0
        """Changes that were told twice or late."""
        self._random = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._users: frozenset[str] = frozenset()
        self._twice = self._late = 0.0

    def begin(self, users: Collection[str], *, twice: float = 0.0, late: float = 0.0) -> None:
        """From now on; `twice` and `late` are probabilities."""
        self._users, self._twice, self._late = frozenset(users), twice, late

    def end(self) -> None:
        """From now on, each change is told once and in its turn."""
        self.begin(())
        self.hits = 0

    async def told(
        self, user: str, event: WatchEvent, coming: "asyncio.Queue[WatchEvent | None]"
    ) -> Sequence[WatchEvent]:
        """What a watch tells when `event` is due, `coming` being what is due after it."""
        if user not in self._users or event.type == "BOOKMARK":
            return (event,)
        events = (event,) if self._random.random() >= self._late else await self._behind(event, coming)
        return [one for event in events for one in [event] * self._copies()]

    async def _behind(
        self, event: WatchEvent, coming: "asyncio.Queue[WatchEvent | None]"
    ) -> Sequence[WatchEvent]:
        await asyncio.sleep(HELD_SECONDS)
        if coming.empty():
            return (event,)
        later = coming.get_nowait()
        if later is None:
            coming.put_nowait(None)
            return (event,)
        if key_of(later.object) == key_of(event.object):
            return event, later
        self.hits += 1
        return later, event

    def _copies(self) -> int:
        twice = self._random.random() < self._twice
        self.hits += twice
        return 1 + twice
