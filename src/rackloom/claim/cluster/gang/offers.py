"""What each tray has left of what members claim; `claim/place` counts."""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import TypeVar

import msgspec

from rackloom.claim.allocate.objects import (
    AllocationResult,
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.claim.cluster.gang.counted import Claims, Counted, PoolKey, Told
from rackloom.claim.cluster.gang.site import Objects, owners_of_claims
from rackloom.claim.kube.api import Object
from rackloom.claim.place.reading.devices import Devices
from rackloom.claim.place.values import Site

T = TypeVar("T")
_RESULT = ("request", "driver", "pool", "device", "adminAccess", "shareID", "consumedCapacity")
"""What of an allocated device bears on others; fields that are newer than this program do not."""


def furnished(site: Site, objects: Objects, kinds: Mapping[str, Claims], mine: str, counted: Counted) -> Site:
    """The site with the room of each tray for each kind of claims. Raises Refused for one nobody can serve.

    Claims of `mine` do not count, nor those that go with a hold: the owner has GPUs of the same tray.
    """
    if not kinds:
        return site
    trays = {one.name for one in site.trays}
    held = {(one.owner, one.tray) for one in site.holds}
    offers = _Offers(objects, trays, {*held, *((mine, tray) for tray in trays)})
    return counted.furnish(site, kinds, offers.told(counted), offers.devices_on)


class _Offers:
    """What drivers publish on trays, and what others have of it; owners on trays `without` do not count."""

    def __init__(self, objects: Objects, trays: Set[str], without: Set[tuple[str, str]]) -> None:
        self._classes = objects.classes
        self._nodes = {name: one for one in objects.nodes if (name := one["metadata"]["name"]) in trays}
        self._pools = _pools(objects.slices)
        self._reached = _reached(self._pools, trays)
        self._taken = _taken(objects, self._pools, without)

    def told(self, counted: Counted) -> dict[str, Told]:
        """What bears on each tray."""
        classes = tuple(map(_version, self._classes))
        states = counted.same({key: tuple(map(_version, pool)) for key, pool in self._pools.items()})
        return {
            name: Told(
                labels=node["metadata"].get("labels") or {},
                classes=classes,
                pools=tuple(states[key] for key in self._reached.get(name, ())),
                taken=tuple(self._taken.get(name, ())),
            )
            for name, node in self._nodes.items()
        }

    def devices_on(self, trays: Set[str]) -> Devices:
        """What is on some trays, with all of their pools: of a part of a pool nothing is allocated.

        What cannot be read offers nothing.
        """
        names = [name for name in self._nodes if name in trays]
        keys = dict.fromkeys(key for name in names for key in self._reached.get(name, ()))
        slices = (_bare(one) for key in keys for one in self._pools[key])
        return Devices(
            nodes=tuple(_readable((_labelled(self._nodes[name]) for name in names), Node)),
            classes=tuple(_readable(map(_bare, self._classes), DeviceClass)),
            slices=tuple(_readable(slices, ResourceSlice)),
            claims=tuple(_allocated(one) for name in names for one in self._taken.get(name, ())),
        )


def _pools(slices: Iterable[Object]) -> dict[PoolKey, list[Object]]:
    """The slices that name their node."""
    found: dict[PoolKey, list[Object]] = {}
    for one in slices:
        if one["spec"].get("nodeName"):
            found.setdefault((one["spec"]["driver"], one["spec"]["pool"]["name"]), []).append(one)
    return found


def _reached(pools: Mapping[PoolKey, list[Object]], trays: Set[str]) -> dict[str, list[PoolKey]]:
    """The pools of each tray; most nodes of a cluster may be none."""
    found: dict[str, list[PoolKey]] = {}
    for key, pool in pools.items():
        for name in {one["spec"]["nodeName"] for one in pool} & trays:
            found.setdefault(name, []).append(key)
    return found


def _taken(
    objects: Objects, pools: Mapping[PoolKey, list[Object]], without: Set[tuple[str, str]]
) -> dict[str, list[Object]]:
    """Allocated devices by node, without those that an owner has on a tray where it does not count."""
    on = {
        (*key, device["name"]): one["spec"]["nodeName"]
        for key, pool in pools.items()
        for one in pool
        for device in one["spec"].get("devices") or ()
    }
    found: dict[str, list[Object]] = {}
    for claim, owner in owners_of_claims(objects):
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for one in (allocation.get("devices") or {}).get("results") or ():
            node = on.get((one["driver"], one["pool"], one["device"]))
            if node is not None and (owner, node) not in without:
                found.setdefault(node, []).append({key: one[key] for key in _RESULT if key in one})
    return found


def _allocated(result: Object) -> ResourceClaim:
    has = msgspec.convert({"devices": {"results": [result]}}, AllocationResult)
    return ResourceClaim(status=ResourceClaimStatus(allocation=has))


def _version(obj: Object) -> object:
    """What differs where an object does: the API server gives each state of it a version of its own."""
    meta = obj["metadata"]
    version = meta.get("uid"), meta.get("resourceVersion")
    return version if all(version) else obj


def _labelled(node: Object) -> Object:
    return {"metadata": {key: node["metadata"].get(key) or {} for key in ("name", "labels")}}


def _bare(obj: Object) -> Object:
    return {"metadata": {"name": obj["metadata"]["name"]}, "spec": obj.get("spec") or {}}


def _readable(objects: Iterable[Object], kind: type[T]) -> Iterator[T]:
    for obj in objects:
        try:
            yield msgspec.convert(obj, kind)
        except msgspec.ValidationError:
            continue
