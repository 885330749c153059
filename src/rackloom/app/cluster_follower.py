"""A cluster as the map follows it: one list and one watch of each kind, however often it is drawn.

While a watch is broken its kind may be behind, and the whole cluster is unknown since then: half of it would
show pods without devices, or racks without pods.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from functools import partial

import msgspec

from rackloom.app.picture.cluster import Reach, excused
from rackloom.app.picture.glance import KINDS, glance
from rackloom.claim.kube.api import Kind, KubeApi, KubeError, Listed, Object
from rackloom.claim.kube.cache import key_of
from rackloom.claim.kube.informer import Informer

_UNREAD = KubeError(0, "Unread", "it was not read yet")
_REST = 30.0
"""Seconds after a defect, before what was told is taken in again."""
_log = logging.getLogger(__name__)


class ClusterFollower:
    """All kinds that a picture is made of, as last told. Made in a running event loop; `run` follows."""

    def __init__(self, api: KubeApi, clock: Callable[[], float], rng: random.Random) -> None:
        """`clock` gives seconds since the epoch; `rng` draws the jitter of retries."""
        self._informers = {
            kind: Informer(api, kind, excuses=partial(excused, kind), rng=rng) for kind in KINDS
        }
        for kind, informer in self._informers.items():
            informer.on_change(partial(self._hear, kind))
        self._began = asyncio.get_running_loop().time()
        self._epoch = clock() - self._began
        self._drawn: dict[tuple[Kind, str, str], int] = {}
        self._changes = 0

    async def run(self) -> None:
        """Follow the API server until cancelled, however long it is away and whatever it tells."""
        async with asyncio.TaskGroup() as tasks:
            for kind in self._informers:
                tasks.create_task(self._follow(kind))

    async def _follow(self, kind: Kind) -> None:
        """A defect makes the cluster unknown; the site is served without it."""
        while True:
            try:
                await self._informers[kind].run()
            except Exception:
                _log.exception("following %s failed", kind.plural)
            self._changes += 1
            await asyncio.sleep(_REST)

    async def list(self, kind: Kind, /) -> Listed:
        """All objects of a kind of `KINDS`, not to be changed. Raises `KubeError` while it is unknown."""
        informer = self._informers[kind]
        if informer.problem is not None:
            raise informer.problem
        if _behind(informer):
            raise _UNREAD
        return Listed(tuple(informer.cache), "")

    def version(self) -> object:
        """Something that differs after every change worth drawing; heartbeats of nodes are none."""
        told = self._informers.items()
        return self._changes, frozenset(kind for kind, one in told if one.problem is not None or _behind(one))

    def reach(self) -> Reach:
        """How far the cluster is known."""
        heard = [one.observed_at for one in self._informers.values()]
        at = None if None in heard else min(moment for moment in heard if moment is not None)
        return Reach(self._moment(at), self._moment(self._unknown_since()))

    def _unknown_since(self) -> float | None:
        """Loop time. A kind that was never listed counts only where nothing else is behind."""
        behind = [one for one in self._informers.values() if _behind(one)]
        since = [one.unknown_since for one in behind if one.is_synced and one.unknown_since is not None]
        return min(since, default=self._began if behind else None)

    def _moment(self, loop_time: float | None) -> float | None:
        return None if loop_time is None else self._epoch + loop_time

    def _hear(self, kind: Kind, obj: Object) -> None:
        """Count a change, unless what is drawn of the object is as before."""
        namespace, name = key_of(obj)
        told = None if self._informers[kind].cache.get(name, namespace) is None else glance(kind, obj)
        before = self._drawn.pop((kind, namespace, name), None)
        if told is not None:
            self._drawn[kind, namespace, name] = _print(told)
        self._changes += before != self._drawn.get((kind, namespace, name))


def _behind(informer: Informer) -> bool:
    return informer.unknown_since is not None or not informer.is_synced


def _print(told: Object) -> int:
    """A fingerprint of an object without its version."""
    metadata = {key: value for key, value in told["metadata"].items() if key != "resourceVersion"}
    return hash(msgspec.json.encode({**told, "metadata": metadata}))
