"""The cluster on a site's racks: the client that `[kubernetes]` names, and a cache that follows it.

`ClusterFollower` has one informer (list and watch) per kind that the rack map shows, however often the
map is drawn. While the watch of one kind is broken, the whole cluster is unknown since then: half of it
would show pods without devices, or racks without pods. `version` changes only with the drawn fields of an
object. Heartbeats of nodes do not count. A programming error in one informer makes the cluster unknown,
and the site is served without it.

The client keeps only the fields of each object that the snapshot uses. `in_cluster` requires the pod's
service account: a kubeconfig that happens to lie around must not take its place.
"""

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rackloom.app.config import ClusterConfig
from rackloom.app.snapshot.cluster import ClusterFreshness, is_excused
from rackloom.claim.kube.api import KubeApi, KubeError, ObjectList
from rackloom.claim.kube.client import KubeClient, connect
from rackloom.claim.kube.informer import Informer, key_of
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.core.cluster.projection import SNAPSHOT_KINDS, content_hash, project_object
from rackloom.errors import Refused

# The cache.


_NOT_READ_YET = KubeError(0, "Unread", "it was not read yet")
_RESTART_SECONDS = 30.0
"""Seconds after a defect, before an informer is started again."""
_log = logging.getLogger(__name__)


class ClusterFollower:
    """A cache of all kinds that a snapshot shows. Construct it in a running event loop. `run` fills it."""

    def __init__(self, api: KubeApi, clock: Callable[[], float], rng: random.Random) -> None:
        """`clock` gives seconds since the epoch. `rng` draws the jitter of retries."""
        self._informers = {
            kind: Informer(api, kind, excuses=partial(is_excused, kind), rng=rng) for kind in SNAPSHOT_KINDS
        }
        for kind, informer in self._informers.items():
            informer.on_change(partial(self._count_change, kind))
        self._began = asyncio.get_running_loop().time()
        self._epoch = clock() - self._began
        self._fingerprints: dict[tuple[ResourceKind, str, str], int] = {}
        self._changes = 0

    async def run(self) -> None:
        """Follow the API server until cancelled, also while it cannot be reached."""
        async with asyncio.TaskGroup() as tasks:
            for kind in self._informers:
                tasks.create_task(self._follow(kind))

    async def _follow(self, kind: ResourceKind) -> None:
        """Run one informer. A defect makes the cluster unknown, and the site is served without it."""
        while True:
            try:
                await self._informers[kind].run()
            except Exception:
                _log.exception("following %s failed", kind.plural)
            self._changes += 1
            await asyncio.sleep(_RESTART_SECONDS)

    async def list(self, kind: ResourceKind, /) -> ObjectList:
        """All objects of a kind of `KINDS`, not to be changed. Raises `KubeError` while it is unknown."""
        informer = self._informers[kind]
        if informer.problem is not None:
            raise informer.problem
        if _is_behind(informer):
            raise _NOT_READ_YET
        return ObjectList(tuple(informer.cache), "")

    def version(self) -> object:
        """A value that differs after every change that the map shows. Heartbeats of nodes do not count."""
        informers = self._informers.items()
        return self._changes, frozenset(
            kind for kind, informer in informers if informer.problem is not None or _is_behind(informer)
        )

    def reach(self) -> ClusterFreshness:
        """The time when all kinds were last observed, and since when any of them is unknown."""
        times = [informer.observed_at for informer in self._informers.values()]
        oldest = None if None in times else min(time for time in times if time is not None)
        return ClusterFreshness(self._epoch_time(oldest), self._epoch_time(self._unknown_since()))

    def _unknown_since(self) -> float | None:
        """Loop time. A kind that was never listed counts only if no other kind is behind."""
        behind = [informer for informer in self._informers.values() if _is_behind(informer)]
        since = [
            informer.unknown_since
            for informer in behind
            if informer.is_synced and informer.unknown_since is not None
        ]
        return min(since, default=self._began if behind else None)

    def _epoch_time(self, loop_time: float | None) -> float | None:
        return None if loop_time is None else self._epoch + loop_time

    def _count_change(self, kind: ResourceKind, obj: Object) -> None:
        """Count a change, unless the map shows the same of the object as before."""
        namespace, name = key_of(obj)
        shown = (
            None if self._informers[kind].cache.get(name, namespace) is None else project_object(kind, obj)
        )
        before = self._fingerprints.pop((kind, namespace, name), None)
        if shown is not None:
            self._fingerprints[kind, namespace, name] = content_hash(shown)
        self._changes += before != self._fingerprints.get((kind, namespace, name))


def _is_behind(informer: Informer) -> bool:
    return informer.unknown_since is not None or not informer.is_synced


# The client.


SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Kubernetes' mount point of the service account."""


def cluster_client(config: ClusterConfig, user_agent: str) -> KubeClient:
    """A client that keeps only the fields that a snapshot uses. It connects at its first request.

    Raises Refused when the configuration names no API server.
    """
    if config.in_cluster:
        _check_account(SERVICE_ACCOUNT)
    try:
        return connect(config.kubeconfig, config.context, user_agent=user_agent, keep=project_object)
    except Refused as error:
        raise Refused(
            f"[kubernetes]: {'in_cluster' if config.in_cluster else 'kubeconfig'}: {error.reason}",
            nearest_fix="name a kubeconfig that can be read, and a context of it",
        ) from error


def _check_account(folder: Path) -> None:
    # Without this check, a kubeconfig on the disk would be used in place of the pod's account.
    if "KUBERNETES_SERVICE_HOST" not in os.environ or not (folder / "token").is_file():
        raise Refused(
            f"[kubernetes]: in_cluster: there is no service account in {folder}",
            nearest_fix="set automountServiceAccountToken: true in the pod, or name a kubeconfig",
        )


@asynccontextmanager
async def follow_cluster(config: ClusterConfig, clock: Callable[[], float]) -> AsyncIterator[ClusterFollower]:
    """A follower of the cluster, connected while the context is entered. `clock`: seconds since the epoch.

    Raises Refused when the configuration names no API server. It waits for a server that does not answer.
    """
    async with cluster_client(config, "rackloom-map") as api:
        yield ClusterFollower(api, clock, random.Random())  # noqa: S311 (jitter)
