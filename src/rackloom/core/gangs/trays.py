"""The cluster as the placement search takes it: trays, who holds them, and room for device claims.

A tray is a node with GPUs. Its GPU count is the larger of the device plugin's allocatable resource and
the whole GPUs in published ResourceSlices. Running pods, allocated claims and recorded plans hold GPUs;
a plan and an IMEX channel hold a whole tray. A pod whose limits cannot be read counts as the whole
tray, so that one bad pod does not stop the placement of all.

How many members a tray can serve is counted by the real allocator. The counts are cached per kind of
claim and recounted only for trays whose inputs changed: labels, device classes, slice versions, devices
of others. The cache speeds up and changes nothing.

Owners in other namespaces are anonymised before anything is reported to a gang.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
)
from rackloom.core.domains import names
from rackloom.core.gangs.members import GPU_RESOURCE, GangMember, counted_gpus
from rackloom.core.gangs.record import GangKey, GangRecord
from rackloom.core.gangs.snapshot import ClusterLists, NamespaceClaims, gang_key_of
from rackloom.core.gangs.spec import GangSettings
from rackloom.core.gangs.terms import site_for_terms, without_conflicting_trays
from rackloom.core.kubernetes.objects import Object
from rackloom.core.place.claim_capacity import with_claim_capacity
from rackloom.core.place.observed_site import DraDevices, is_imex_channel
from rackloom.core.place.placement_values import (
    ClaimCapacity,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
    TrayHold,
)
from rackloom.core.place.pod_constraints import parse_count

# Trays, and who holds them.


_ENDED = ("Succeeded", "Failed")
ANONYMOUS_HOLDER = "another job"


def read_site(objects: ClusterLists, records: Iterable[GangRecord], settings: GangSettings) -> PlacementSite:
    """Trays in order of clique and name; holds of running pods, of their claims, and of recorded plans."""
    return with_reservations(running_site(objects, settings), records)


def running_site(objects: ClusterLists, settings: GangSettings) -> PlacementSite:
    """The same without the plans: it holds for all gangs that are placed from one look."""
    published = _published_gpus(objects.slices)
    trays = (_read_tray(node, published, settings) for node in objects.nodes)
    found = sorted((tray for tray in trays if tray.gpus > 0), key=lambda tray: (tray.clique or "", tray.name))
    size = {one.name: one.gpus for one in found}
    holds = (*_pod_holds(objects.pods, size), *_claim_holds(objects, size))
    return PlacementSite(tuple(found), tuple(hold for hold in holds if hold.tray in size))


def with_reservations(running: PlacementSite, records: Iterable[GangRecord]) -> PlacementSite:
    """The trays that plans reserve are held too, whole."""
    size = {tray.name: tray.gpus for tray in running.trays}
    planned = (hold for hold in _plan_holds(records, size) if hold.tray in size)
    return PlacementSite(running.trays, (*running.holds, *planned))


def anonymised_for(site: PlacementSite, namespace: str) -> PlacementSite:
    """The site as it may be told in a namespace: of jobs elsewhere, only that they are others.

    Owners stay apart, since a job ends whole.
    """
    others: dict[str, str] = {}
    for hold in site.holds:
        if not hold.owner.startswith(f"{namespace}/"):
            others.setdefault(
                hold.owner, f"{ANONYMOUS_HOLDER} {len(others) + 1}" if others else ANONYMOUS_HOLDER
            )
    return PlacementSite(
        site.trays, tuple(replace(one, owner=others.get(one.owner, one.owner)) for one in site.holds)
    )


def holder_of_pod(pod: Object) -> str:
    """Whose pod it is: of its gang, of the controller that made it, or its own.

    No word with a space is the name of a gang: what is only called like one is another job.
    """
    gang, meta = gang_key_of(pod), pod["metadata"]
    if gang is not None:
        return gang.called
    owners = (
        f"{reference['kind']} {reference['name']}"
        for reference in meta.get("ownerReferences") or ()
        if reference.get("controller")
    )
    return f"{meta['namespace']}/{next(owners, 'pod ' + meta['name'])}"


def holders_of_claims(objects: ClusterLists) -> Iterator[tuple[Object, str]]:
    """Each claim, and whose it is: of the pod for which it is reserved or was made, or its own."""
    uids = {uid for claim in objects.claims for uid in _claim_users(claim)}
    owners = {uid: holder_of_pod(pod) for pod in objects.pods if (uid := pod["metadata"]["uid"]) in uids}
    for claim in objects.claims:
        meta = claim["metadata"]
        found = (owners[uid] for uid in _claim_users(claim) if uid in owners)
        yield claim, next(found, f"{meta['namespace']}/claim {meta['name']}")


def _claim_users(claim: Object) -> Iterator[str]:
    reserved = (claim.get("status") or {}).get("reservedFor") or ()
    return (one["uid"] for one in (*reserved, *(claim["metadata"].get("ownerReferences") or ())))


def _published_gpus(slices: Iterable[Object]) -> Counter[str]:
    """GPUs that node plugins publish, by node."""
    found: Counter[str] = Counter()
    for slice_ in slices:
        spec = slice_["spec"]
        if spec["driver"] == names.GPU_DRIVER and spec.get("nodeName"):
            found[spec["nodeName"]] += sum(_is_whole_gpu(device) for device in spec.get("devices") or ())
    return found


def _is_whole_gpu(device: Object) -> bool:
    """A slice lists the MIG parts of a GPU beside it."""
    kind = (device.get("attributes") or {}).get("type") or {}
    return bool(kind.get("string", "gpu") == "gpu")


def _read_tray(node: Object, published: Mapping[str, int], settings: GangSettings) -> PlacementTray:
    name, labels = node["metadata"]["name"], node["metadata"].get("labels") or {}
    counted = parse_count(((node.get("status") or {}).get("allocatable") or {}).get(GPU_RESOURCE, 0))
    gpus = max(counted, published.get(name, 0))
    return PlacementTray(name=name, clique=labels.get(settings.clique_label), gpus=gpus, shut=_why_shut(node))


def _why_shut(node: Object) -> str | None:
    """What keeps everybody away; of taints, pods say themselves."""
    if (node.get("spec") or {}).get("unschedulable"):
        return "cordoned"
    conditions = (node.get("status") or {}).get("conditions") or ()
    if not any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions):
        return "not ready"
    return None


def _pod_holds(pods: Iterable[Object], size: Mapping[str, int]) -> Iterator[TrayHold]:
    for pod in pods:
        node = pod["spec"].get("nodeName")
        if node not in size or (pod.get("status") or {}).get("phase") in _ENDED:
            continue
        gpus = _pod_gpus(pod["spec"], size[node])
        if gpus:
            yield TrayHold(owner=holder_of_pod(pod), tray=node, gpus=gpus)


def _pod_gpus(spec: Object, whole: int) -> int:
    """What cannot be read counts as the whole tray: one pod of anybody must not stop the placement of all."""
    try:
        return counted_gpus(spec)
    except ValueError:
        return whole


def _claim_holds(objects: ClusterLists, size: Mapping[str, int]) -> Iterator[TrayHold]:
    """A node's channel counts as the whole tray: no other job's channel fits beside it."""
    for claim, owner in holders_of_claims(objects):
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for tray, gpus in _allocated_gpus(allocation, size).items():
            yield TrayHold(owner=owner, tray=tray, gpus=gpus)


def _allocated_gpus(allocation: Object, size: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for result in (allocation.get("devices") or {}).get("results") or ():
        if result["driver"] == names.GPU_DRIVER:
            found[result["pool"]] += 1
        elif is_imex_channel(result["driver"], result["device"]):
            found[result["pool"]] += size.get(result["pool"], 0)
    return found


def _plan_holds(records: Iterable[GangRecord], size: Mapping[str, int]) -> Iterator[TrayHold]:
    for record in records:
        for tray in record.reserved:
            yield TrayHold(owner=record.key.called, tray=tray, gpus=size.get(tray, 0))


# Cached counts of members per tray.


MemberClaims = tuple[ResourceClaim, ...]
"""Of one member, in the order in which it names them."""
DevicePoolKey = tuple[str, str]
"""Driver and pool name."""
_MOST_KINDS = 8
"""Of claims that are remembered; what has not been asked for longest goes first."""


class TrayInputs(msgspec.Struct, frozen=True):
    """All that bears on how many members a tray serves: where it equals what was, so does the count."""

    labels: Mapping[str, str]
    classes: tuple[object, ...]
    pools: tuple[tuple[object, ...], ...]
    """The versions of all slices of the pools that have devices of the tray, on whatever node."""
    taken: tuple[object, ...]
    """The devices of others, as they were allocated."""


class TrayCountCache:
    """The memory of one who counts often; for one thread at a time."""

    def __init__(self) -> None:
        self._kinds: dict[bytes, dict[str, tuple[TrayInputs, ClaimCapacity | None]]] = {}
        self._states: dict[DevicePoolKey, tuple[object, ...]] = {}

    def same(
        self, states: Mapping[DevicePoolKey, tuple[object, ...]]
    ) -> Mapping[DevicePoolKey, tuple[object, ...]]:
        """The states of pools, and the very values of before where they are equal: those compare at once.

        A pool may span many trays, and each of them is told all of it.
        """
        before = self._states
        self._states = {
            key: before[key] if before.get(key) == state else state for key, state in states.items()
        }
        return self._states

    def furnish(
        self,
        site: PlacementSite,
        kinds: Mapping[str, MemberClaims],
        told: Mapping[str, TrayInputs],
        devices_on: Callable[[Set[str]], DraDevices],
    ) -> PlacementSite:
        """The site with the room of each tray for each kind of claims; `told` names all of its trays.

        `devices_on` reads what is on some of them. Raises Refused for claims that nobody can serve.
        """
        rooms: dict[str, dict[str, ClaimCapacity]] = {tray.name: {} for tray in site.trays}
        for kind, claims in kinds.items():
            for name, room in self._rooms(site, kind, claims, told, devices_on).items():
                rooms[name][kind] = room
        return PlacementSite(tuple(replace(tray, rooms=rooms[tray.name]) for tray in site.trays), site.holds)

    def _rooms(
        self,
        site: PlacementSite,
        kind: str,
        claims: MemberClaims,
        told: Mapping[str, TrayInputs],
        devices_on: Callable[[Set[str]], DraDevices],
    ) -> dict[str, ClaimCapacity]:
        key = msgspec.json.encode(claims)
        before = self._kinds.get(key, {})
        now = {name: before[name] for name, one in told.items() if name in before and before[name][0] == one}
        changed = tuple(tray for tray in site.trays if tray.name not in now)
        if changed:
            part = with_claim_capacity(
                PlacementSite(changed), devices_on({one.name for one in changed}), {kind: claims}
            )
            now |= {tray.name: (told[tray.name], tray.rooms.get(kind)) for tray in part.trays}
        self._keep(key, now)
        return {name: room for name, (_, room) in now.items() if room is not None}

    def _keep(self, key: bytes, now: dict[str, tuple[TrayInputs, ClaimCapacity | None]]) -> None:
        self._kinds.pop(key, None)
        self._kinds[key] = now
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]


# The devices of each tray, less what others hold.


T = TypeVar("T")
_RESULT_FIELDS = ("request", "driver", "pool", "device", "adminAccess", "shareID", "consumedCapacity")
"""What of an allocated device bears on others; fields that are newer than this program do not."""


def with_claim_room(
    site: PlacementSite,
    objects: ClusterLists,
    kinds: Mapping[str, MemberClaims],
    mine: str,
    counted: TrayCountCache,
) -> PlacementSite:
    """The site with the room of each tray for each kind of claims. Raises Refused for one nobody can serve.

    Claims of `mine` do not count, nor those that go with a hold: the owner has GPUs of the same tray.
    """
    if not kinds:
        return site
    trays = {tray.name for tray in site.trays}
    held = {(hold.owner, hold.tray) for hold in site.holds}
    offers = _NodeDevices(objects, trays, {*held, *((mine, tray) for tray in trays)})
    return counted.furnish(site, kinds, offers.told(counted), offers.devices_on)


class _NodeDevices:
    """What drivers publish on trays, and what others have of it; owners on trays `without` do not count."""

    def __init__(self, objects: ClusterLists, trays: Set[str], without: Set[tuple[str, str]]) -> None:
        self._classes = objects.classes
        self._nodes = {name: node for node in objects.nodes if (name := node["metadata"]["name"]) in trays}
        self._pools = _slices_by_pool(objects.slices)
        self._reached = _pools_by_tray(self._pools, trays)
        self._taken = _allocated_devices(objects, self._pools, without)

    def told(self, counted: TrayCountCache) -> dict[str, TrayInputs]:
        """What bears on each tray."""
        classes = tuple(map(_object_version, self._classes))
        states = counted.same({key: tuple(map(_object_version, pool)) for key, pool in self._pools.items()})
        return {
            name: TrayInputs(
                labels=node["metadata"].get("labels") or {},
                classes=classes,
                pools=tuple(states[key] for key in self._reached.get(name, ())),
                taken=tuple(self._taken.get(name, ())),
            )
            for name, node in self._nodes.items()
        }

    def devices_on(self, trays: Set[str]) -> DraDevices:
        """What is on some trays, with all of their pools: of a part of a pool nothing is allocated.

        What cannot be read offers nothing.
        """
        names = [name for name in self._nodes if name in trays]
        keys = dict.fromkeys(key for name in names for key in self._reached.get(name, ()))
        slices = (_without_metadata(pool) for key in keys for pool in self._pools[key])
        return DraDevices(
            nodes=tuple(_readable((_node_with_labels(self._nodes[name]) for name in names), Node)),
            classes=tuple(_readable(map(_without_metadata, self._classes), DeviceClass)),
            slices=tuple(_readable(slices, ResourceSlice)),
            claims=tuple(_allocated_claim(one) for name in names for one in self._taken.get(name, ())),
        )


def _slices_by_pool(slices: Iterable[Object]) -> dict[DevicePoolKey, list[Object]]:
    """The slices that name their node."""
    found: dict[DevicePoolKey, list[Object]] = {}
    for slice_ in slices:
        if slice_["spec"].get("nodeName"):
            found.setdefault((slice_["spec"]["driver"], slice_["spec"]["pool"]["name"]), []).append(slice_)
    return found


def _pools_by_tray(
    pools: Mapping[DevicePoolKey, list[Object]], trays: Set[str]
) -> dict[str, list[DevicePoolKey]]:
    """The pools of each tray; most nodes of a cluster may be none."""
    found: dict[str, list[DevicePoolKey]] = {}
    for key, pool in pools.items():
        for name in {one["spec"]["nodeName"] for one in pool} & trays:
            found.setdefault(name, []).append(key)
    return found


def _allocated_devices(
    objects: ClusterLists, pools: Mapping[DevicePoolKey, list[Object]], without: Set[tuple[str, str]]
) -> dict[str, list[Object]]:
    """Allocated devices by node, without those that an owner has on a tray where it does not count."""
    on = {
        (*key, device["name"]): one["spec"]["nodeName"]
        for key, pool in pools.items()
        for one in pool
        for device in one["spec"].get("devices") or ()
    }
    found: dict[str, list[Object]] = {}
    for claim, owner in holders_of_claims(objects):
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in (allocation.get("devices") or {}).get("results") or ():
            node = on.get((result["driver"], result["pool"], result["device"]))
            if node is not None and (owner, node) not in without:
                found.setdefault(node, []).append(
                    {key: result[key] for key in _RESULT_FIELDS if key in result}
                )
    return found


def _allocated_claim(result: Object) -> ResourceClaim:
    has = msgspec.convert({"devices": {"results": [result]}}, AllocationResult)
    return ResourceClaim(status=ResourceClaimStatus(allocation=has))


def _object_version(obj: Object) -> object:
    """What differs where an object does: the API server gives each state of it a version of its own."""
    meta = obj["metadata"]
    version = meta.get("uid"), meta.get("resourceVersion")
    return version if all(version) else obj


def _node_with_labels(node: Object) -> Object:
    return {"metadata": {key: node["metadata"].get(key) or {} for key in ("name", "labels")}}


def _without_metadata(obj: Object) -> Object:
    return {"metadata": {"name": obj["metadata"]["name"]}, "spec": obj.get("spec") or {}}


def _readable(objects: Iterable[Object], kind: type[T]) -> Iterator[T]:
    for obj in objects:
        try:
            yield msgspec.convert(obj, kind)
        except msgspec.ValidationError:
            continue


# The site as one gang meets it.


class GangSite(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh lists, and what they say to one gang."""

    key: GangKey
    site: PlacementSite
    """With the names of all owners; it is not told to the gang."""
    objects: ClusterLists
    counted: TrayCountCache
    """What was counted before; it speeds up, and changes nothing."""
    spares: int = 0
    """Spare trays that the other gangs of its namespace keep."""

    @property
    def known(self) -> NamespaceClaims:
        """The claims and templates of its namespace."""
        return NamespaceClaims(self.objects, self.key.namespace)

    def met(self, members: Iterable[GangMember], terms: Iterable[PlacementTerms | None]) -> PlacementSite:
        """The site as such members of the gang with these terms meet it. Raises Refused."""
        others = (pod for pod in self.objects.pods if gang_key_of(pod) != self.key)
        nodes = {node["metadata"]["name"]: node for node in self.objects.nodes}
        return site_for_terms(
            without_conflicting_trays(self.site, members, others, nodes.values()), terms, nodes
        )

    def furnished(self, met: PlacementSite, kinds: Mapping[str, MemberClaims]) -> PlacementSite:
        """That as the gang may see it, with the room for its claims on each tray. Raises Refused."""
        site = with_claim_room(met, self.objects, kinds, self.key.called, self.counted)
        return anonymised_for(site, self.key.namespace)


class PlacementLists(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh lists, and what is the same in them for every gang."""

    objects: ClusterLists
    running: PlacementSite
    counted: TrayCountCache


def gang_site(key: GangKey, look: PlacementLists, records: Iterable[GangRecord]) -> GangSite:
    """The scene of a gang, with the plans that are recorded."""
    known = tuple(records)
    others = (one.plan for one in known if one.key.namespace == key.namespace and one.key != key)
    spares = sum(len(plan.spares) for plan in others if plan is not None)
    site = with_reservations(look.running, known)
    return GangSite(key=key, site=site, objects=look.objects, counted=look.counted, spares=spares)
