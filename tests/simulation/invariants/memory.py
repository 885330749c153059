"""The invariants of shared GPU memory: IMEX channels, IMEX members, and pods that start late.

`ChannelInvariants` knows which job holds which channel while its containers run. Two jobs never share a
channel in isolated mode (S8). Channel 0 is scoped to its node, because a node is in one IMEX domain. All
other channels are scoped to the clique. It also records a pod that only the resync interval of its kubelet
started: the condition that the pod waited for must then have changed a moment before.

`ImexMemberInvariants` watches the clique objects. An index is a daemon's identity among its peers, so
the entry of a running daemon must not move or vanish. No daemon is shown Ready at an address at which
it never was READY.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rackloom.core.cluster.domain_objects import Readiness
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    EVENT,
    LEASE,
    Object,
    ResourceKind,
)

MAX_WAIT_SECONDS = 10.0
"""Seconds that a pod may wait after a failure that has cleared."""
JOB_LABEL = "job"
"""Label of a job's pods: only pods of one job may share memory."""


class ChannelInvariants:
    """The channels of all running containers. `broken` lists the violations.

    No pod may need kubelet's resync to start. If the resync did start one, the needs of its claims were met
    before. If nothing has changed in the cluster for `MAX_WAIT_SECONDS`, they were met for that long.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._changed_at = 0.0
        self._held: dict[tuple[str, str], dict[str, str]] = {}
        """(where memory is shared, channel) -> pod UID -> job."""
        self.broken: list[str] = []
        self.checks = 0

    @contextmanager
    def job(self, node: str, clique: str, pod: Object, channels: tuple[str, ...]) -> Iterator[None]:
        """A pod's containers run with these channels while the context is entered."""
        uid, job = pod["metadata"]["uid"], pod["metadata"]["labels"][JOB_LABEL]
        if not channels:
            self.broken.append(f"{pod['metadata']['name']} runs on {node} without a channel")
        # Channel 0 belongs to the one IMEX domain of its node. The others belong to the whole clique.
        keys = [(node if channel.endswith("/channel0") else clique, channel) for channel in channels]
        for key in keys:
            self._enter(key, uid, job)
        try:
            yield
        finally:
            for key in keys:
                del self._held[key][uid]

    def written(self, kind: ResourceKind, obj: Object) -> None:
        """An object was written. Heartbeats and events help no pod to start."""
        if kind not in (EVENT, LEASE):
            self.changed()

    def changed(self) -> None:
        """Something changed for which a pod may have waited."""
        self._changed_at = self._now()

    def resynced(self, pod: Object) -> None:
        """Only the resync interval of its kubelet had the claims of a pod prepared."""
        quiet = self._now() - self._changed_at
        if quiet > MAX_WAIT_SECONDS:
            name = pod["metadata"]["name"]
            self.broken.append(
                f"{name} waited for the resync of its kubelet, {quiet:.0f} s after the last change"
            )

    def _enter(self, key: tuple[str, str], uid: str, job: str) -> None:
        users = self._held.setdefault(key, {})
        users[uid] = job
        self.checks += 1
        if len(jobs := set(users.values())) > 1:
            self.broken.append(f"S8: jobs {', '.join(sorted(jobs))} share {key[1]} of {key[0]}")


class ImexMemberInvariants:
    """The entries of IMEX daemons: only the daemon itself removes or moves its entry while it runs.

    An index is a daemon's identity among its peers. A daemon that has to enter again may get another one. No
    daemon is shown Ready that was never READY at its address. `is_there` returns whether an object of a kind
    and name is stored, `runs` whether a daemon of a ComputeDomain (its UID) runs on a node, `was_ready`
    whether the one on a node was READY at an address.
    """

    def __init__(
        self,
        is_there: Callable[[Object], bool],
        runs: Callable[[str, str], bool],
        was_ready: Callable[[str, str], bool],
        broken: list[str],
    ) -> None:
        self._is_there = is_there
        self._runs = runs
        self._was_ready = was_ready
        self._broken = broken
        self._known: dict[str, dict[str, int]] = {}
        self._ready: dict[str, set[tuple[str, str]]] = {}

    def written(self, kind: ResourceKind, obj: Object) -> None:
        """A clique object or the status of a ComputeDomain was written, or an object deleted."""
        if kind == COMPUTE_DOMAIN:
            nodes = (obj.get("status") or {}).get("nodes") or ()
            reported = [(node["name"], node.get("ipAddress", ""), node.get("status")) for node in nodes]
            self._check_ready(obj["metadata"]["uid"], reported)
        if kind != COMPUTE_DOMAIN_CLIQUE:
            return
        name = obj["metadata"]["name"]
        entries = (obj.get("daemons") or ()) if self._is_there(obj) else ()
        now = {entry["nodeName"]: entry["index"] for entry in entries}
        for node, index in self._known.get(name, {}).items():
            if now.get(node) != index and self._runs(name.partition(".")[0], node):
                self._broken.append(f"the entry of the daemon on {node} went away while it ran")
        self._known[name] = now
        listed = [(entry["nodeName"], entry["ipAddress"], entry.get("status")) for entry in entries]
        self._check_ready(name, listed)

    def _check_ready(self, where: str, entries: Iterable[tuple[str, str, str | None]]) -> None:
        now = {(node, address) for node, address, status in entries if status == Readiness.READY}
        for node, address in now - self._ready.get(where, set()):
            if not self._was_ready(node, address):
                self._broken.append(f"the daemon on {node} is shown Ready, and was never READY at {address}")
        self._ready[where] = now
