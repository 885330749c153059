"""Commit and deletion, and the garbage collection that follows.

Only `Deletion` removes objects: on a delete, or on the write that removes the last finalizer. Namespaces
and CRDs get a finalizer of the server, so that their contents go first.

After a write it acts as kube-controller-manager does, in a later turn of the loop. An object is deleted
when all its owners are gone. `Orphan` removes the owner from its dependents. `Foreground` deletes
dependents first and lets the owner go when none that blocks it is left. A terminating namespace deletes
its contents, and a deleted CRD deletes the objects of its type.
"""

import asyncio
from collections.abc import Callable

from rackloom.core.cluster import objects as kubernetes_objects
from rackloom.core.cluster.objects import Object, ResourceKind, metav1_time
from rackloom.lab.kube import objects
from rackloom.lab.kube.store import ObjectKey, ObjectStore, key_of

_CONTAINERS = {
    kubernetes_objects.NAMESPACE: (ObjectStore.inside, objects.NAMESPACE_FINALIZER),
    kubernetes_objects.CRD: (ObjectStore.defined_by, objects.CRD_FINALIZER),
}
"""The kinds that go only after their contents: how these are found, and the server's finalizer."""


class Deletion:
    """Writes to a store, and the garbage collection that they make necessary."""

    def __init__(self, store: ObjectStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now

    def commit(self, kind: ResourceKind, obj: Object) -> Object:
        """Store `obj`, or remove it where it was only waiting for this write."""
        stored = self._store.put(kind, obj)
        if objects.may_be_removed(stored):
            return self._drop(kind, key_of(stored))
        if objects.owner_references(stored) or "deletionTimestamp" in stored["metadata"]:
            self._collect_later(kind, stored)
        return stored

    def delete(
        self, kind: ResourceKind, key: ObjectKey, propagation: str | None = None, grace: int | None = None
    ) -> Object | None:
        """Delete an object: at once, or when its finalizers and its grace period (seconds) allow."""
        obj = self._store.find(kind, key)
        if obj is None:
            return None
        seconds = objects.grace_seconds_of(kind, obj, grace)
        ending = metav1_time(self._now() + seconds)
        marked = objects.marked_for_deletion(obj, ending, seconds, propagation)
        if kind in _CONTAINERS and not objects.finalizers_of(marked):
            marked = objects.with_finalizer(marked, _CONTAINERS[kind][1])
        if kind == kubernetes_objects.NAMESPACE:
            marked = objects.with_namespace_phase(marked)
        if objects.may_be_removed(marked):
            return self._drop(kind, key)
        return obj if marked == obj else self.commit(kind, marked)

    def _drop(self, kind: ResourceKind, key: ObjectKey) -> Object:
        gone = self._store.drop(kind, key)
        self._collect_later(kind, gone)
        return gone

    def _remove_finalizer(self, kind: ResourceKind, key: ObjectKey, finalizer: str) -> None:
        """Take a finalizer of the server's own controllers away."""
        obj = self._store.find(kind, key)
        if obj is not None and finalizer in objects.finalizers_of(obj):
            self.commit(kind, objects.without_finalizer(obj, finalizer))

    # Garbage collection, as controllers of kube-controller-manager do it.

    def _collect_later(self, kind: ResourceKind, obj: Object) -> None:
        # Not in the call of the client: it belongs to another controller, and may be stopped or killed.
        loop = asyncio.get_running_loop()
        loop.call_later(0.0, self._collect, kind, obj, context=self._store.context.copy())

    def _collect(self, kind: ResourceKind, obj: Object) -> None:
        """Garbage collection after `obj` was written or removed."""
        key = key_of(obj)
        if self._store.find(kind, key) is None:
            for dependent_kind, dependent_key, _ in list(self._store.dependents(obj["metadata"]["uid"])):
                self._check_owners(dependent_kind, dependent_key)
            self._empty(kubernetes_objects.NAMESPACE, (None, key[0] or ""))
            self._empty(kubernetes_objects.CRD, (None, f"{kind.plural}.{kind.group}"))
        elif kind in _CONTAINERS:
            self._empty(kind, key)
        elif "deletionTimestamp" in obj["metadata"]:
            self._lift(kind, key)
        else:
            self._check_owners(kind, key)
        for reference in objects.owner_references(obj):
            found = self._store.whose(reference["uid"])
            if found and "deletionTimestamp" in self._store.read(*found)["metadata"]:
                self._lift(*found)

    def _check_owners(self, kind: ResourceKind, key: ObjectKey) -> None:
        """Delete an object if it has owner references and all these owners are gone."""
        obj = self._store.find(kind, key)
        owners = objects.owner_references(obj) if obj else []
        if owners and not any(self._store.is_alive(owner["uid"]) for owner in owners):
            self.delete(kind, key)

    def _lift(self, kind: ResourceKind, key: ObjectKey) -> None:
        obj = self._store.find(kind, key)
        held = objects.finalizers_of(obj) if obj else []
        if obj and objects.ORPHAN_FINALIZER in held:
            self._orphan_dependents(obj["metadata"]["uid"])
            self._remove_finalizer(kind, key, objects.ORPHAN_FINALIZER)
        elif obj and objects.FOREGROUND_FINALIZER in held:
            self._foreground(kind, key, obj)

    def _orphan_dependents(self, uid: str) -> None:
        """Take the owner out of its dependents, which stay."""
        for kind, _, obj in list(self._store.dependents(uid)):
            kept = [owner for owner in objects.owner_references(obj) if owner["uid"] != uid]
            self.commit(kind, {**obj, "metadata": {**obj["metadata"], "ownerReferences": kept}})

    def _foreground(self, kind: ResourceKind, key: ObjectKey, owner: Object) -> None:
        """Dependents go first. The owner follows when none that blocks it is left."""
        uid = owner["metadata"]["uid"]
        is_blocked = False
        for dependent_kind, dependent_key, obj in list(self._store.dependents(uid)):
            owners = objects.owner_references(obj)
            # A dependent with another living owner stays, and does not hold this owner back.
            if any(other["uid"] != uid and self._store.is_alive(other["uid"]) for other in owners):
                continue
            if "deletionTimestamp" not in obj["metadata"]:
                self.delete(dependent_kind, dependent_key, "Foreground")
            if self._store.find(dependent_kind, dependent_key) is not None:
                is_blocked |= any(own["uid"] == uid and own.get("blockOwnerDeletion") for own in owners)
        if not is_blocked:
            self._remove_finalizer(kind, key, objects.FOREGROUND_FINALIZER)

    def _empty(self, kind: ResourceKind, key: ObjectKey) -> None:
        """Delete the contents of a namespace or definition that is being deleted. It goes after the last.

        The type of a definition that is gone stays served here.
        """
        obj = self._store.find(kind, key)
        if obj is None or "deletionTimestamp" not in obj["metadata"]:
            return
        contents, finalizer = _CONTAINERS[kind]
        for inside_kind, inside in list(contents(self._store, key[1])):
            self.delete(inside_kind, inside)
        if not any(True for _ in contents(self._store, key[1])):
            self._remove_finalizer(kind, key, finalizer)
