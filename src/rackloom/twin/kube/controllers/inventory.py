"""What the scheduler of the fake knows of devices: decoded once, kept while nothing changes."""

from typing import TypeVar

import msgspec

from rackloom.claim.allocate.eligibility import Selectors
from rackloom.claim.allocate.objects import DeviceClass, ResourceClaim, ResourceSlice
from rackloom.claim.allocate.pools import SliceIndex
from rackloom.claim.allocate.use import DeviceId, InUse, in_use_by
from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube.store import Key, Store, key_of

T = TypeVar("T")


def decoded(obj: Object, kind: type[T]) -> T:
    """An API object as the allocator takes it."""
    return msgspec.convert({key: obj[key] for key in obj if key not in ("apiVersion", "kind")}, kind)


class Inventory:
    """Classes, slices, and the claims that hold devices."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._index: SliceIndex | None = None
        self._classes: list[DeviceClass] | None = None
        self._dedicated: dict[Key, frozenset[DeviceId]] = {}
        self._shared: dict[Key, ResourceClaim] = {}
        self.selectors = Selectors()
        for claim in store.all(kinds.RESOURCE_CLAIM):
            self.hear(kinds.RESOURCE_CLAIM, claim)

    def hear(self, kind: Kind, obj: Object) -> None:
        """Take a change in."""
        if kind == kinds.RESOURCE_SLICE:
            self._index = None
        elif kind == kinds.DEVICE_CLASS:
            self._classes = None
        elif kind == kinds.RESOURCE_CLAIM:
            self._hear_of_claim(key_of(obj))

    def _hear_of_claim(self, key: Key) -> None:
        self._dedicated.pop(key, None)
        self._shared.pop(key, None)
        found = self._store.find(kinds.RESOURCE_CLAIM, key)
        if found is None or "allocation" not in (found.get("status") or {}):
            return
        claim = decoded(found, ResourceClaim)
        used = in_use_by([claim])
        if used.shared:
            self._shared[key] = claim
        else:
            self._dedicated[key] = used.dedicated

    @property
    def index(self) -> SliceIndex:
        """All slices."""
        if self._index is None:
            slices = self._store.all(kinds.RESOURCE_SLICE)
            self._index = SliceIndex(decoded(one, ResourceSlice) for one in slices)
        return self._index

    @property
    def classes(self) -> list[DeviceClass]:
        """All device classes."""
        if self._classes is None:
            self._classes = [decoded(one, DeviceClass) for one in self._store.all(kinds.DEVICE_CLASS)]
        return self._classes

    def in_use(self) -> InUse:
        """The devices that claims hold. Most claims share nothing: theirs are kept as they were read."""
        used = in_use_by(self._shared.values())
        return InUse(
            dedicated=used.dedicated.union(*self._dedicated.values()),
            shared=used.shared,
            consumed=used.consumed,
        )
