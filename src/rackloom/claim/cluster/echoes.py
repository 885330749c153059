"""Own writes that the caches have not shown yet.

A decision from a cache that does not know our last write would repeat it. So a key waits until what was
written for it has come back; for a limited time, since the watch may skip to something newer.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

from rackloom.claim.kube.api import Kind, Object

PATIENCE = 5.0
"""Seconds after which a write that was not seen is no longer waited for."""


class Seen(Protocol):
    """Objects as last seen."""

    def at(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        ...


class Echoes:
    """What is still to come back, by key. `now` is a monotonic clock in seconds."""

    def __init__(self, cluster: Seen, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now = now
        self._expected: dict[Hashable, list[tuple[Kind, Object, float]]] = {}

    def expect(self, key: Hashable, kind: Kind, written: Object) -> None:
        """Wait for this version of an object, or a newer one."""
        self._expected.setdefault(key, []).append((kind, written, self._now() + PATIENCE))

    def outstanding(self, key: Hashable) -> float | None:
        """Seconds to wait for at most; None when everything has come back."""
        now = self._now()
        left = [
            (kind, obj, until)
            for kind, obj, until in self._expected.pop(key, ())
            if until > now and not self._is_seen(kind, obj)
        ]
        if not left:
            return None
        self._expected[key] = left
        return max(until for _, _, until in left) - now

    def _is_seen(self, kind: Kind, written: Object) -> bool:
        meta = written["metadata"]
        seen = self._cluster.at(kind, meta.get("namespace"), meta["name"])
        if seen is None:
            # A new object not shown yet; or one whose last finalizer we took off, which is gone.
            return bool(meta.get("deletionTimestamp"))
        other = seen["metadata"]["uid"] != meta["uid"]
        return other or int(seen["metadata"]["resourceVersion"]) >= int(meta["resourceVersion"])
