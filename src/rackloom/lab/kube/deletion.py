"""Commit and deletion, and the garbage collection that follows.

`Deletion` is the only place where an object that may go does go: on a delete, or on the write that
removes its last finalizer. Namespaces and CRDs get a finalizer of the server, so that their contents go
first.

`GarbageCollector` does what kube-controller-manager does after a write. An object whose owners are all
gone is deleted. `Orphan` removes the owner from its dependents. `Foreground` deletes dependents first
and lets the owner go when none that blocks it is left. A terminating namespace deletes what is in it,
and a deleted CRD deletes the objects of its type.
"""

from collections.abc import Callable

from rackloom.core.kubernetes import objects as kubernetes_objects
from rackloom.core.kubernetes.objects import Object, ResourceKind, metav1_time
from rackloom.lab.kube import objects
from rackloom.lab.kube.store import ObjectKey, ObjectStore, key_of


class Deletion:
    """Writes to a store; `follow` is called for each write that garbage collection may react to."""

    def __init__(
        self, store: ObjectStore, now: Callable[[], float], follow: Callable[[ResourceKind, Object], None]
    ) -> None:
        self.store = store
        self._now = now
        self._follow = follow

    def commit(self, kind: ResourceKind, obj: Object) -> Object:
        """Store `obj`, or remove it where it was only waiting for this write."""
        stored = self.store.put(kind, obj)
        if objects.may_be_removed(stored):
            stored = self.store.drop(kind, key_of(stored))
            self._follow(kind, stored)
        elif objects.owner_references(stored) or "deletionTimestamp" in stored["metadata"]:
            self._follow(kind, stored)
        return stored

    def delete(
        self, kind: ResourceKind, key: ObjectKey, propagation: str | None = None, grace: int | None = None
    ) -> Object | None:
        """Ask an object to go: at once, or when its finalizers and its grace (seconds) allow."""
        obj = self.store.find(kind, key)
        if obj is None:
            return None
        seconds = objects.grace_seconds_of(kind, obj, grace)
        ending = metav1_time(self._now() + seconds)
        marked = objects.marked_for_deletion(obj, ending, seconds, propagation)
        if kind == kubernetes_objects.NAMESPACE and not objects.finalizers_of(marked):
            marked = objects.with_namespace_phase(objects.with_finalizer(marked, objects.NAMESPACE_FINALIZER))
        if kind == kubernetes_objects.CRD and not objects.finalizers_of(marked):
            marked = objects.with_finalizer(marked, objects.CRD_FINALIZER)
        if objects.may_be_removed(marked):
            gone = self.store.drop(kind, key)
            self._follow(kind, gone)
            return gone
        return obj if marked == obj else self.commit(kind, marked)

    def remove_finalizer(self, kind: ResourceKind, key: ObjectKey, finalizer: str) -> None:
        """Take a finalizer of the server's own controllers away."""
        obj = self.store.find(kind, key)
        if obj is not None and finalizer in objects.finalizers_of(obj):
            self.commit(kind, objects.without_finalizer(obj, finalizer))


# Garbage collection, as controllers of kube-controller-manager do it.


class GarbageCollector:
    """Garbage collection by ownerReferences, namespaces, and definitions of custom resources."""

    def __init__(self, removal: Deletion) -> None:
        self._removal = removal
        self._store = removal.store

    def follow(self, kind: ResourceKind, obj: Object) -> None:
        """Do what `obj`, which was just written or removed, makes necessary."""
        key = key_of(obj)
        if self._store.find(kind, key) is None:
            self._owner_gone(obj)
            self._empty((None, key[0] or ""))
            self._undefine((None, f"{kind.plural}.{kind.group}"))
        elif kind == kubernetes_objects.NAMESPACE:
            self._empty(key)
        elif kind == kubernetes_objects.CRD:
            self._undefine(key)
        elif "deletionTimestamp" in obj["metadata"]:
            self._lift(kind, key)
        else:
            self._check_owners(kind, key)
        self._lift_foreground_of_owners(obj)

    def _owner_gone(self, owner: Object) -> None:
        for kind, key, _ in list(self._store.dependents(owner["metadata"]["uid"])):
            self._check_owners(kind, key)

    def _check_owners(self, kind: ResourceKind, key: ObjectKey) -> None:
        """An object that had owners and has none left is garbage; a reference to one that is gone is not."""
        obj = self._store.find(kind, key)
        owners = objects.owner_references(obj) if obj else []
        if owners and not any(self._store.is_alive(owner["uid"]) for owner in owners):
            self._removal.delete(kind, key)

    def _lift(self, kind: ResourceKind, key: ObjectKey) -> None:
        obj = self._store.find(kind, key)
        held = objects.finalizers_of(obj) if obj else []
        if obj and objects.ORPHAN_FINALIZER in held:
            self._orphan_dependents(obj["metadata"]["uid"])
            self._removal.remove_finalizer(kind, key, objects.ORPHAN_FINALIZER)
        elif obj and objects.FOREGROUND_FINALIZER in held:
            self._foreground(kind, key, obj)

    def _orphan_dependents(self, uid: str) -> None:
        """Take the owner out of its dependents, which stay."""
        for kind, _, obj in list(self._store.dependents(uid)):
            kept = [owner for owner in objects.owner_references(obj) if owner["uid"] != uid]
            metadata = {**obj["metadata"], "ownerReferences": kept}
            self._removal.commit(kind, {**obj, "metadata": metadata})

    def _foreground(self, kind: ResourceKind, key: ObjectKey, owner: Object) -> None:
        """Dependents go first; the owner follows when none that blocks it is left."""
        uid = owner["metadata"]["uid"]
        blocking = False
        for dependent_kind, dependent_key, obj in list(self._store.dependents(uid)):
            # A dependent with another living owner stays, and does not hold this owner back.
            others = [reference for reference in objects.owner_references(obj) if reference["uid"] != uid]
            if any(self._store.is_alive(other["uid"]) for other in others):
                continue
            if "deletionTimestamp" not in obj["metadata"]:
                self._removal.delete(dependent_kind, dependent_key, "Foreground")
            still_there = self._store.find(dependent_kind, dependent_key) is not None
            blocking |= still_there and _blocks_deletion(obj, uid)
        if not blocking:
            self._removal.remove_finalizer(kind, key, objects.FOREGROUND_FINALIZER)

    def _lift_foreground_of_owners(self, obj: Object) -> None:
        for reference in objects.owner_references(obj):
            found = self._store.whose(reference["uid"])
            if found and "deletionTimestamp" in self._store.read(*found)["metadata"]:
                self._lift(*found)

    def _empty(self, key: ObjectKey) -> None:
        namespace = self._store.find(kubernetes_objects.NAMESPACE, key)
        if namespace is None or "deletionTimestamp" not in namespace["metadata"]:
            return
        for kind, inside in list(self._store.inside(key[1])):
            self._removal.delete(kind, inside)
        if not any(True for _ in self._store.inside(key[1])):
            self._removal.remove_finalizer(kubernetes_objects.NAMESPACE, key, objects.NAMESPACE_FINALIZER)

    def _undefine(self, key: ObjectKey) -> None:
        """A definition that was deleted goes when none of its objects is left; its type stays served here."""
        definition = self._store.find(kubernetes_objects.CRD, key)
        if definition is None or "deletionTimestamp" not in definition["metadata"]:
            return
        for kind, defined in list(self._store.defined_by(key[1])):
            self._removal.delete(kind, defined)
        if not any(True for _ in self._store.defined_by(key[1])):
            self._removal.remove_finalizer(kubernetes_objects.CRD, key, objects.CRD_FINALIZER)


def _blocks_deletion(obj: Object, uid: str) -> bool:
    return any(
        owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in objects.owner_references(obj)
    )
