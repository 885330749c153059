"""A kubelet's DRA manager: which plugins prepare the claims of a pod, and when.

`ClaimInfoCache` is the checkpoint of one node: the claims by namespace and name, each with the UIDs of
the pods that use it (k8s.io/kubernetes, pkg/kubelet/cm/dra). A claim that several pods share is
prepared for the first of them and unprepared with the last. A new claim of the same name waits until
the old one was unprepared. After a restart kubelet knows the users from its checkpoint, but prepares
again.

A pod uses nothing if its plugin is not registered, so that it can end without one.

`DraManager` outlives the simulated kubelets of a process: it stands for their disks.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.objects import Object
from rackloom.errors import Retry


class PodClaim(msgspec.Struct, frozen=True, kw_only=True):
    """An allocated claim, and the drivers of its devices."""

    ref: ClaimRef
    drivers: frozenset[str]

    @property
    def uid(self) -> str:
        """UID of the claim."""
        return self.ref.uid


def pod_claim(obj: dict[str, Any]) -> PodClaim:
    """Read an allocated ResourceClaim."""
    meta = obj["metadata"]
    results = obj["status"]["allocation"]["devices"]["results"]
    return PodClaim(
        ref=ClaimRef(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"]),
        drivers=frozenset(result["driver"] for result in results),
    )


# The checkpoint: which pods use which claims.


_AGAIN_S = 1.0


@dataclass(slots=True)
class _ClaimInfo:
    claim: PodClaim
    pods: set[str] = field(default_factory=set)
    is_prepared: bool = False


class ClaimInfoCache:
    """The claims of one node, by namespace and name, each with the UIDs of the pods that use it."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _ClaimInfo] = {}
        self._pods: set[str] = set()
        self._started: set[str] = set()

    def add_pod(self, pod: Object) -> None:
        """Note a pod on this node, also before anything is prepared for it."""
        self._pods.add(pod["metadata"]["uid"])

    def begin(self, pod: Object, claims: Sequence[Object]) -> list[PodClaim]:
        """Note that `pod` uses these, and return those that are to be prepared for it.

        Raises:
            Retry: an older claim of the same name is still prepared.
        """
        self.add_pod(pod)
        if pod["metadata"]["uid"] in self._started:
            # Only a restarted kubelet prepares a pod again: its checkpoint holds the users, not the state.
            self._started.clear()
            for entry in self._entries.values():
                entry.is_prepared = False
        return [entry.claim for entry in [self._use(pod, claim) for claim in claims] if not entry.is_prepared]

    def _use(self, pod: Object, claim: Object) -> _ClaimInfo:
        found = pod_claim(claim)
        entry = self._entries.setdefault((found.ref.namespace, found.ref.name), _ClaimInfo(found))
        if entry.claim.uid != found.uid:
            same = f"old ResourceClaim with same name {found.ref.name}"
            raise Retry(f"{same} and different UID {entry.claim.uid} still exists", after=_AGAIN_S)
        # A pod that went while the node was off has no reservation left. Kubelet checks every minute.
        entry.pods &= {user["uid"] for user in claim["status"].get("reservedFor") or ()}
        entry.pods.add(pod["metadata"]["uid"])
        return entry

    def note_started(self, pod: Object, claims: Iterable[PodClaim]) -> None:
        """Note that these were prepared: the pod has all its claims."""
        self._started.add(pod["metadata"]["uid"])
        for claim in claims:
            self._entries[claim.ref.namespace, claim.ref.name].is_prepared = True

    def end(self, pod: Object, claims: Sequence[Object]) -> list[PodClaim]:
        """Note that `pod` no longer uses these, and return those without a user, which are to be unprepared.

        The pod stays a user of those until `forget`, so that a failed call can be repeated.
        """
        uid, last = pod["metadata"]["uid"], []
        is_known = uid in self._pods
        self._pods.discard(uid)
        self._started.discard(uid)
        for claim in claims:
            entry = self._entries.get((claim["metadata"]["namespace"], claim["metadata"]["name"]))
            if entry is None and not is_known:
                # There is no file behind this, so only the claim shows what an earlier process prepared.
                status = claim.get("status") or {}
                others = {user["uid"] for user in status.get("reservedFor") or ()} - {uid}
                last += [] if others or "allocation" not in status else [pod_claim(claim)]
            elif entry is not None and entry.pods == {uid}:
                last.append(entry.claim)
            elif entry is not None:
                entry.pods.discard(uid)
        return last

    def forget(self, claims: Iterable[PodClaim]) -> None:
        """These were unprepared."""
        for claim in claims:
            self._entries.pop((claim.ref.namespace, claim.ref.name), None)


# The manager.


class NodePlugins(Protocol):
    """The DRA plugins of one node, wherever they run."""

    @property
    def drivers(self) -> Container[str]:
        """Those that are registered."""

    async def prepare(self, claims: Sequence[PodClaim]) -> None:
        """Prepare each claim. Raises `Retry` with the plugins' errors."""

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        """Unprepare each claim. Raises `Retry` with the plugins' errors."""


class DraManager:
    """The `DeviceManager` of kubelets: the plugins of each node, and which pods use which claim there.

    `plugins_of` finds those of a node by its name, or raises `Retry`. Keep this across restarts of kubelets:
    it stands for their disks.
    """

    def __init__(self, plugins_of: Callable[[str], NodePlugins]) -> None:
        self._plugins_of = plugins_of
        self._users: defaultdict[str, ClaimInfoCache] = defaultdict(ClaimInfoCache)

    async def prepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Raises `Retry` with the plugins' errors."""
        # Kubelet's order: record the users, prepare the claims that need it, then record that they are.
        plugins, users = self._plugins_of(node), self._users[node]
        users.add_pod(pod)
        # A pod uses nothing if its plugin was never registered, so that it can end without one.
        for driver in sorted({driver for claim in claims for driver in pod_claim(claim).drivers}):
            if driver not in plugins.drivers:
                raise Retry(f"DRA driver {driver} is not registered", after=_AGAIN_S)
        fresh = users.begin(pod, claims)
        await plugins.prepare(fresh)
        users.note_started(pod, fresh)

    async def unprepare(self, node: str, pod: Object, claims: Sequence[Object]) -> None:
        """Raises `Retry` where a plugin still holds something."""
        plugins, users = self._plugins_of(node), self._users[node]
        last = users.end(pod, claims)
        await plugins.unprepare(last)
        users.forget(last)
