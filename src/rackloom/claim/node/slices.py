"""What must change for the API server to know the devices of a node, as a plan.

A pool is complete when all slices of its highest generation are there, so a change raises the generation:
changed and new slices first, what is too much afterwards. Nothing is written while nothing differs.
Source: resource.k8s.io/v1 ResourceSlice and its limits (128 devices in a slice, 64 where any has taints or
counters).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from rackloom.claim.allocate.objects import Device
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import NODE, RESOURCE_SLICE
from rackloom.claim.node.kept import Kept, Plain, plain, timeless
from rackloom.claim.node.values import Pool

MAX_DEVICES = 128
MAX_DEVICES_WITH_EXTRAS = 64


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Whose slices they are."""

    driver: str
    node: str
    node_uid: str


class Create(msgspec.Struct, frozen=True):
    """Write a new slice."""

    slice: Object


class Update(msgspec.Struct, frozen=True):
    """Write a slice back, at the resourceVersion that was read."""

    slice: Object


class Delete(msgspec.Struct, frozen=True):
    """Delete the slice that was read."""

    name: str
    uid: str


Action = Create | Update | Delete


def plan_slices(
    pools: Iterable[Pool], existing: Iterable[Object], owner: Owner, kept: Kept | None = None
) -> tuple[Action, ...]:
    """What turns `existing` (the owner's slices) into those of `pools`; `kept` is what became of writes."""
    known = kept or Kept()
    found: dict[str, list[Object]] = {}
    for one in sorted(existing, key=lambda one: one["metadata"]["name"]):
        found.setdefault(one["spec"]["pool"]["name"], []).append(one)
    actions = [
        action for pool in pools for action in _plan_pool(pool, found.pop(pool.name, []), owner, known)
    ]
    surplus = [_delete(one) for slices in found.values() for one in slices]
    # A plan may be cut off: what is there stays complete for as long as possible.
    return (*sorted(actions, key=lambda action: isinstance(action, Delete)), *surplus)


def chunks(devices: tuple[Device, ...]) -> tuple[tuple[Device, ...], ...]:
    """The devices of each slice; a pool without devices has one empty slice, which says that it is known."""
    extras = any(device.taints or device.consumes_counters for device in devices)
    size = MAX_DEVICES_WITH_EXTRAS if extras else MAX_DEVICES
    return tuple(devices[start : start + size] for start in range(0, max(len(devices), 1), size))


def _plan_pool(pool: Pool, existing: list[Object], owner: Owner, kept: Kept) -> Iterator[Action]:
    newest = max((one["spec"]["pool"]["generation"] for one in existing), default=0)
    wanted = [msgspec.json.decode(msgspec.json.encode(chunk)) for chunk in chunks(pool.devices)]
    current = [one for one in existing if one["spec"]["pool"]["generation"] == newest]
    if _is_published([kept.of(devices) for devices in wanted], current):
        yield from (_delete(one) for one in existing if one["spec"]["pool"]["generation"] != newest)
        return
    place = {"name": pool.name, "generation": newest + 1, "resourceSliceCount": len(wanted)}
    for index, (devices, old) in enumerate(zip_longest(wanted, existing)):
        if devices is None:
            yield _delete(old)
        elif old is None:
            yield Create(_new_slice(index, _spec(devices, place, owner), owner))
        else:
            yield Update({**old, "spec": _spec(_keep_times(devices, old), place, owner)})


def _is_published(wanted: list[Plain], existing: list[Object]) -> bool:
    if len(wanted) != len(existing):
        return False
    counted = all(one["spec"]["pool"]["resourceSliceCount"] == len(wanted) for one in existing)
    found = [plain(one["spec"].get("devices", ())) for one in existing]
    return counted and sorted(wanted, key=repr) == sorted(found, key=repr)


def _keep_times(devices: list[dict[str, Any]], old: Object) -> list[dict[str, Any]]:
    """A taint that stays keeps the time since when it is there."""
    known = {
        (device["name"], repr(sorted(timeless(taint).items()))): taint["timeAdded"]
        for device in old["spec"].get("devices", ())
        for taint in device.get("taints", ())
        if "timeAdded" in taint
    }

    def dated(device: dict[str, Any], taint: dict[str, Any]) -> dict[str, Any]:
        since = known.get((device["name"], repr(sorted(timeless(taint).items()))))
        return taint if since is None else {**taint, "timeAdded": since}

    return [
        {**device, "taints": [dated(device, taint) for taint in device["taints"]]}
        if "taints" in device
        else device
        for device in devices
    ]


def _spec(devices: Any, place: Mapping[str, Any], owner: Owner) -> dict[str, Any]:
    return {"driver": owner.driver, "nodeName": owner.node, "pool": dict(place), "devices": devices}


def _new_slice(index: int, spec: dict[str, Any], owner: Owner) -> Object:
    return {
        "apiVersion": RESOURCE_SLICE.api_version,
        "kind": RESOURCE_SLICE.kind,
        "metadata": {
            "generateName": f"{index:05x}-{owner.driver}-{owner.node}-",
            "ownerReferences": [
                {
                    "apiVersion": NODE.api_version,
                    "kind": NODE.kind,
                    "name": owner.node,
                    "uid": owner.node_uid,
                    "controller": True,
                }
            ],
        },
        "spec": spec,
    }


def _delete(one: Object) -> Delete:
    return Delete(one["metadata"]["name"], one["metadata"]["uid"])
