"""Committing and deleting: the one place where an object that may go does go."""

from collections.abc import Callable

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.timestamps import whole_time
from rackloom.twin.kube import lifecycle
from rackloom.twin.kube.store import Key, Store, key_of


class Removal:
    """Writes to a store; `follow` is told of each one that garbage collection may care about."""

    def __init__(
        self, store: Store, now: Callable[[], float], follow: Callable[[Kind, Object], None]
    ) -> None:
        self.store = store
        self._now = now
        self._follow = follow

    def commit(self, kind: Kind, obj: Object) -> Object:
        """Store `obj`, or remove it where it was only waiting for this write."""
        stored = self.store.put(kind, obj)
        if lifecycle.is_done(stored):
            stored = self.store.drop(kind, key_of(stored))
            self._follow(kind, stored)
        elif lifecycle.owners(stored) or "deletionTimestamp" in stored["metadata"]:
            self._follow(kind, stored)
        return stored

    def delete(
        self, kind: Kind, key: Key, propagation: str | None = None, grace: int | None = None
    ) -> Object | None:
        """Ask an object to go: at once, or when its finalizers and its grace (seconds) allow."""
        obj = self.store.find(kind, key)
        if obj is None:
            return None
        seconds = lifecycle.grace_of(kind, obj, grace)
        ending = whole_time(self._now() + seconds)
        marked = lifecycle.doomed(obj, ending, seconds, propagation)
        if kind == kinds.NAMESPACE and not lifecycle.finalizers(marked):
            marked = lifecycle.in_phase(lifecycle.held(marked, lifecycle.NAMESPACE))
        if kind == kinds.CRD and not lifecycle.finalizers(marked):
            marked = lifecycle.held(marked, lifecycle.CUSTOM_RESOURCES)
        if lifecycle.is_done(marked):
            gone = self.store.drop(kind, key)
            self._follow(kind, gone)
            return gone
        return obj if marked == obj else self.commit(kind, marked)

    def unhold(self, kind: Kind, key: Key, finalizer: str) -> None:
        """Take a finalizer of the server's own controllers away."""
        obj = self.store.find(kind, key)
        if obj is not None and finalizer in lifecycle.finalizers(obj):
            self.commit(kind, lifecycle.released(obj, finalizer))
