"""What the members of a gang claim, and what of it each tray has left; `claim/place` counts.

IMEX channels are not among it: a node has one, so a member with a channel takes a whole tray anyway.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeVar

import msgspec

from rackloom.claim.allocate.objects import (
    AllocationResult,
    DeviceClass,
    Node,
    ObjectMeta,
    ResourceClaim,
    ResourceClaimSpec,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.site import Objects, owners_of_claims
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Object
from rackloom.claim.place.devices import Devices
from rackloom.claim.place.rooms import with_rooms
from rackloom.claim.place.values import Room, Site
from rackloom.errors import Refused

T = TypeVar("T")
Claims = tuple[ResourceClaim, ...]
"""Of one member, in the order in which it names them."""
_CHANNELS = (names.CHANNEL_CLASS, names.ISOLATED_CHANNEL_CLASS)
_RESULT = ("request", "driver", "pool", "device", "adminAccess", "shareID", "consumedCapacity")
"""What of an allocated device bears on others; fields that are newer than this program do not."""
_READ_FIX = "use the fields of resource.k8s.io/v1 that this version of rackloom knows"
_APART_FIX = "give those that differ a group of their own (label rackloom.dev/gang-group)"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What each member of a group claims."""

    kind: str
    """The names of the templates and claims: what the planner calls it."""
    claims: Claims


class Known:
    """Claim templates and claims of one namespace, by name. Raises Refused for what is not there."""

    def __init__(self, objects: Objects, namespace: str) -> None:
        self._templates = _named(objects.templates, namespace)
        self._claims = _named(objects.claims, namespace)

    def template(self, name: str) -> Object:
        """The spec of the claims that are made from a template."""
        return _found(self._templates, "claim template", name)["spec"]["spec"]  # type: ignore[no-any-return]

    def claim(self, name: str) -> Object:
        """The spec of a claim."""
        return _found(self._claims, "claim", name)["spec"]  # type: ignore[no-any-return]


def wanted(group: Iterable[Member], known: Known) -> Wanted | None:
    """What the members of a group claim; those that claim nothing are served by any tray.

    Raises Refused where they differ, where two name one claim, or for a claim that cannot be read.
    """
    members = tuple(group)
    _check_apart(members, known)
    found = [one for one in (_wanted(member, known) for member in members) if one is not None]
    if not found:
        return None
    first = found[0]
    other = next((one for one in found if _specs(one) != _specs(first)), None)
    if other is not None:
        raise Refused(f"members of one group claim {first.kind} and {other.kind}", nearest_fix=_APART_FIX)
    return first


def furnished(site: Site, objects: Objects, kinds: Mapping[str, Claims], mine: str) -> Site:
    """The site with the room of each tray for each kind of claims. Raises Refused for one nobody can serve.

    Claims of `mine` do not count, nor those that go with a hold: the owner has GPUs of the same tray.
    """
    if not kinds:
        return site
    held = {(one.owner, one.tray) for one in site.holds}
    trays = {one.name for one in site.trays}
    taken = tuple(_taken(objects, {*held, *((mine, tray) for tray in trays)}))
    found = with_rooms(site, _devices(objects, trays, taken), kinds)
    counted = (msgspec.structs.replace(one, rooms=_unheld(one.rooms)) for one in found.trays)
    return Site(tuple(counted), found.holds)


def _check_apart(members: tuple[Member, ...], known: Known) -> None:
    """The devices of a claim are on one node, and pods that share it would all have to go there."""
    seen: set[str] = set()
    for member in members:
        for name in member.pod.named_claims:
            if name in seen and takes_devices(known.claim(name)):
                fix = "use resourceClaimTemplateName, which makes a claim for each pod"
                raise Refused(f"claim {name} is named by several members", nearest_fix=fix)
            seen.add(name)


def _wanted(member: Member, known: Known) -> Wanted | None:
    specs = {name: known.template(name) for name in member.pod.templates}
    specs |= {f"claim {name}": known.claim(name) for name in member.pod.named_claims}
    claims = {name: _claim(name, spec) for name, spec in specs.items() if takes_devices(spec)}
    return Wanted(kind="+".join(claims), claims=tuple(claims.values())) if claims else None


def takes_devices(spec: Object) -> bool:
    """Channels are counted with the tray; administrators look at devices without taking them."""
    requests = (spec.get("devices") or {}).get("requests") or ()
    return any(map(_takes, requests))


def _takes(request: Object) -> bool:
    alternatives: Sequence[Object] = request.get("firstAvailable") or ({},)
    asked: Object = request.get("exactly") or alternatives[0]
    return asked.get("deviceClassName") not in _CHANNELS and not asked.get("adminAccess")


def _claim(name: str, spec: Object) -> ResourceClaim:
    try:
        read = msgspec.convert(spec, ResourceClaimSpec)
    except msgspec.ValidationError as error:
        raise Refused(f"what {name} claims cannot be read: {error}", nearest_fix=_READ_FIX) from error
    return ResourceClaim(metadata=ObjectMeta(name=name), spec=read)


def _specs(one: Wanted) -> list[ResourceClaimSpec]:
    return [claim.spec for claim in one.claims]


def _devices(objects: Objects, trays: Set[str], taken: Claims) -> Devices:
    """Those of the trays; most nodes of a cluster may be none. What cannot be read offers nothing."""
    nodes = (one for one in objects.nodes if one["metadata"]["name"] in trays)
    slices = (one for one in objects.slices if one["spec"].get("nodeName") in trays)
    return Devices(
        nodes=tuple(_readable(map(_labelled, nodes), Node)),
        classes=tuple(_readable(map(_bare, objects.classes), DeviceClass)),
        slices=tuple(_readable(map(_bare, slices), ResourceSlice)),
        claims=taken,
    )


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


def _taken(objects: Objects, without: set[tuple[str, str]]) -> Iterator[ResourceClaim]:
    """Allocated claims, without the devices that an owner has on a tray where it does not count."""
    for claim, owner in owners_of_claims(objects):
        allocation = (claim.get("status") or {}).get("allocation") or {}
        found = (allocation.get("devices") or {}).get("results") or ()
        results = [
            {key: one[key] for key in _RESULT if key in one}
            for one in found
            if (owner, one["pool"]) not in without
        ]
        if results:
            has = msgspec.convert({"devices": {"results": results}}, AllocationResult)
            yield ResourceClaim(status=ResourceClaimStatus(allocation=has))


def _unheld(rooms: Mapping[str, Room]) -> dict[str, Room]:
    return {kind: Room(now=room.now, empty=room.now) for kind, room in rooms.items()}


def _named(objects: Iterable[Object], namespace: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in objects if one["metadata"].get("namespace") == namespace}


def _found(objects: Mapping[str, Object], what: str, name: str) -> Object:
    if name not in objects:
        raise Refused(f"{what} {name} does not exist", nearest_fix="create it")
    return objects[name]
