"""The work of a controller: woken by changes, one key at a time, what it wrote seen before it looks again."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from rackloom.claim.cluster.actions import Action
from rackloom.claim.cluster.echoes import Echoes, Seen
from rackloom.claim.cluster.executor import carry_out, write_status
from rackloom.claim.kube.api import Kind, KubeApi, KubeError, Object
from rackloom.claim.kube.informer import Informer
from rackloom.claim.kube.queue import WorkQueue
from rackloom.errors import Retry

log = structlog.get_logger(__name__)

STATUS_INTERVAL = 1.0
"""Seconds between two writes of one status: 18 daemons or pods that come within it are one write."""
DEFECT_PAUSE = 60.0
"""Seconds until work that failed in a way nobody expected is tried again."""
K = TypeVar("K", bound=Hashable)


class Followed(Seen, Protocol):
    """Caches that follow the API server."""

    @property
    def informers(self) -> Sequence[Informer]:
        """All of them, to be run."""
        ...

    async def synced(self) -> None:
        """Wait until all have taken in a first list."""
        ...


class Workbench(Generic[K]):
    """`do` works on a key; what it returns are seconds after which time alone may change something.

    `name` is for the log; `rng` draws the jitter of retries.
    """

    def __init__(
        self,
        name: str,
        api: KubeApi,
        caches: Followed,
        rng: random.Random,
        do: Callable[[K], Awaitable[float | None]],
    ) -> None:
        self.queue: WorkQueue[K] = WorkQueue(rng)
        self._name = name
        self._api = api
        self._caches = caches
        self._do = do
        self._echoes = Echoes(caches, _now)
        self._said: dict[str, float] = {}
        """Loop time of the last status write, by UID."""

    async def run(self, workers: int) -> None:
        """Follow the cluster and work, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self._caches.informers:
                tasks.create_task(informer.run())
            await self._caches.synced()
            log.info("controller.synced", of=self._name)
            await self.queue.work(self._work, workers=workers)

    async def act(self, key: K, actions: Iterable[Action]) -> None:
        """Carry out actions in order, up to the first that fails. Raises KubeError."""
        for action in actions:
            written = await carry_out(self._api, action)
            if written is not None:
                self.expect(key, action.kind, written)

    def expect(self, key: K, kind: Kind, written: Object) -> None:
        """Work on a key again only when the caches show this."""
        self._echoes.expect(key, kind, written)

    async def say(self, key: K, kind: Kind, obj: Object, status: Object) -> float | None:
        """Write the status of an object; None when that was done, else seconds after which it may be."""
        uid = obj["metadata"]["uid"]
        early = self._said.get(uid, float("-inf")) + STATUS_INTERVAL - _now()
        if early > 0:
            return early
        self._said[uid] = _now()
        self.expect(key, kind, await write_status(self._api, kind, obj, status))
        return None

    def forget(self, uid: str) -> None:
        """An object is gone, and nothing will be said of it any more."""
        self._said.pop(uid, None)

    async def _work(self, key: K) -> float | None:
        waits = self._echoes.outstanding(key)
        if waits is not None:
            return waits
        try:
            return await self._do(key)
        except (KubeError, Retry):
            raise
        except Exception as defect:
            # What is wrong with one object must not stop the work for the others.
            log.exception("controller.defect", of=self._name, key=repr(key))
            raise Retry(repr(defect), after=DEFECT_PAUSE) from defect


def _now() -> float:
    return asyncio.get_running_loop().time()
