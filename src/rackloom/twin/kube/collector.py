"""What follows a deletion: dependents go after their owners, namespaces and definitions take theirs along.

The real ones are controllers of kube-controller-manager.
"""

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube import lifecycle
from rackloom.twin.kube.removal import Removal
from rackloom.twin.kube.store import Key, key_of


class Collector:
    """Garbage collection by ownerReferences, namespaces, and definitions of custom resources."""

    def __init__(self, removal: Removal) -> None:
        self._removal = removal
        self._store = removal.store

    def follow(self, kind: Kind, obj: Object) -> None:
        """Do what `obj`, which was just written or removed, makes necessary."""
        key = key_of(obj)
        if self._store.find(kind, key) is None:
            self._owner_gone(obj)
            self._empty((None, key[0] or ""))
            self._undefine((None, f"{kind.plural}.{kind.group}"))
        elif kind == kinds.NAMESPACE:
            self._empty(key)
        elif kind == kinds.CRD:
            self._undefine(key)
        elif "deletionTimestamp" in obj["metadata"]:
            self._lift(kind, key)
        else:
            self._check_owners(kind, key)
        self._lift_foreground_of_owners(obj)

    def _owner_gone(self, owner: Object) -> None:
        for kind, key, _ in list(self._store.dependents(owner["metadata"]["uid"])):
            self._check_owners(kind, key)

    def _check_owners(self, kind: Kind, key: Key) -> None:
        """An object that had owners and has none left is garbage; a reference to one that is gone is not."""
        obj = self._store.find(kind, key)
        owners = lifecycle.owners(obj) if obj else []
        if owners and not any(self._store.is_alive(owner["uid"]) for owner in owners):
            self._removal.delete(kind, key)

    def _lift(self, kind: Kind, key: Key) -> None:
        obj = self._store.find(kind, key)
        held = lifecycle.finalizers(obj) if obj else []
        if obj and lifecycle.ORPHAN in held:
            self._let_go(obj["metadata"]["uid"])
            self._removal.unhold(kind, key, lifecycle.ORPHAN)
        elif obj and lifecycle.FOREGROUND in held:
            self._foreground(kind, key, obj)

    def _let_go(self, uid: str) -> None:
        """Take the owner out of its dependents, which stay."""
        for kind, _, obj in list(self._store.dependents(uid)):
            kept = [owner for owner in lifecycle.owners(obj) if owner["uid"] != uid]
            metadata = {**obj["metadata"], "ownerReferences": kept}
            self._removal.commit(kind, {**obj, "metadata": metadata})

    def _foreground(self, kind: Kind, key: Key, owner: Object) -> None:
        """Dependents go first; the owner follows when none that blocks it is left."""
        uid = owner["metadata"]["uid"]
        blocking = False
        for dependent_kind, dependent_key, obj in list(self._store.dependents(uid)):
            others = [one for one in lifecycle.owners(obj) if one["uid"] != uid]
            if any(self._store.is_alive(one["uid"]) for one in others):
                continue
            if "deletionTimestamp" not in obj["metadata"]:
                self._removal.delete(dependent_kind, dependent_key, "Foreground")
            still_there = self._store.find(dependent_kind, dependent_key) is not None
            blocking |= still_there and _blocks(obj, uid)
        if not blocking:
            self._removal.unhold(kind, key, lifecycle.FOREGROUND)

    def _lift_foreground_of_owners(self, obj: Object) -> None:
        for reference in lifecycle.owners(obj):
            found = self._store.whose(reference["uid"])
            if found and "deletionTimestamp" in self._store.read(*found)["metadata"]:
                self._lift(*found)

    def _empty(self, key: Key) -> None:
        namespace = self._store.find(kinds.NAMESPACE, key)
        if namespace is None or "deletionTimestamp" not in namespace["metadata"]:
            return
        for kind, inside in list(self._store.inside(key[1])):
            self._removal.delete(kind, inside)
        if not any(True for _ in self._store.inside(key[1])):
            self._removal.unhold(kinds.NAMESPACE, key, lifecycle.NAMESPACE)

    def _undefine(self, key: Key) -> None:
        """A definition that was deleted goes when none of its objects is left; its type stays served here."""
        definition = self._store.find(kinds.CRD, key)
        if definition is None or "deletionTimestamp" not in definition["metadata"]:
            return
        for kind, defined in list(self._store.defined_by(key[1])):
            self._removal.delete(kind, defined)
        if not any(True for _ in self._store.defined_by(key[1])):
            self._removal.unhold(kinds.CRD, key, lifecycle.CUSTOM_RESOURCES)


def _blocks(obj: Object, uid: str) -> bool:
    return any(owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in lifecycle.owners(obj))
