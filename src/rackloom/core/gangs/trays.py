"""The cluster as the placement search takes it: trays, their holders, and room for device claims.

A tray is a node with GPUs, as `core.cluster` reads it. Its GPU count depends on how the members ask for GPUs.
Recorded plans hold trays whole, beside the pods and claims that run.

How many members a tray can serve is counted by the real allocator. The counts are cached per kind of
claim and recounted only for trays whose inputs changed: labels, device classes, slice versions, taints
by DeviceTaintRules, devices of others. The cache speeds up and changes nothing.

Owners in other namespaces are anonymised before anything is reported to a gang.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimStatus,
    ResourceSlice,
    readable,
)
from rackloom.core.allocate.taint_rules import DeviceTaintRuleSpec, readable_rules, with_taint_rules
from rackloom.core.cluster.objects import (
    Object,
    allocated_devices,
)
from rackloom.core.cluster.pods import KUEUE_WORKLOAD_LABEL
from rackloom.core.cluster.state import ClusterState, TrayHold
from rackloom.core.cluster.trays import (
    ClaimCapacity,
    DraDevices,
    PlacementSite,
    placement_site,
    without_foreign_names,
)
from rackloom.core.gangs.snapshot import ClusterLists, GangKey, GangRecord, GangSnapshot, gang_key_of
from rackloom.core.gangs.terms import site_for_terms, without_conflicting_trays
from rackloom.core.place.claim_capacity import with_claim_capacity
from rackloom.core.place.placement_values import PlacementTerms

# Trays and their holders.


def running_site(state: ClusterState) -> PlacementSite:
    """Trays in order of clique and name; holds of running pods and of their claims.

    It has no holds of plans, so it is valid for all gangs of one placement pass. Taints are not read, because
    each group reads them by its terms.
    """
    site = placement_site(state, tolerations=None)
    ordered = sorted(
        (tray for tray in site.trays if tray.gpus), key=lambda tray: (tray.clique or "", tray.name)
    )
    there = {tray.name for tray in ordered}
    return PlacementSite(tuple(ordered), tuple(hold for hold in site.holds if hold.tray in there))


def with_reservations(
    running: PlacementSite, records: Iterable[GangRecord], plans: Iterable[TrayHold] = ()
) -> PlacementSite:
    """The trays that GangPlans reserve are held too, whole, and what `plans` of workloads hold."""
    size = {tray.name: tray.gpus for tray in running.trays}
    reserved = (
        TrayHold(owner=record.key.full_name, tray=tray, gpus=size.get(tray, 0))
        for record in records
        for tray in record.reserved
    )
    planned = (hold for hold in (*reserved, *plans) if hold.tray in size)
    return PlacementSite(running.trays, (*running.holds, *planned))


# Cached counts of members per tray.


MemberClaims = tuple[ResourceClaim, ...]
"""Of one member, in the order in which it names them."""
DevicePoolKey = tuple[str, str]
"""Driver and pool name."""
_MOST_KINDS = 8
"""Kinds of claims that are cached; the least recently used is evicted."""


class TrayInputs(msgspec.Struct, frozen=True):
    """Everything that decides how many members a tray serves: equal inputs give an equal count."""

    labels: Mapping[str, str]
    classes: tuple[object, ...]
    pools: tuple[tuple[object, ...], ...]
    """The versions of all slices of the pools that have devices of the tray, on whatever node."""
    rules: tuple[DeviceTaintRuleSpec, ...]
    """The DeviceTaintRules that may select a device of these pools, without what they report."""
    taken: tuple[object, ...]
    """Devices allocated to others."""


class TrayCountCache:
    """Counts of members per tray, by kind of claims. For one thread at a time."""

    def __init__(self) -> None:
        self._kinds: dict[bytes, dict[str, tuple[TrayInputs, ClaimCapacity | None]]] = {}
        self._states: dict[DevicePoolKey, tuple[object, ...]] = {}

    def interned(
        self, states: Mapping[DevicePoolKey, tuple[object, ...]]
    ) -> Mapping[DevicePoolKey, tuple[object, ...]]:
        """The states of pools, as the same objects as last time where they are equal.

        A pool may span many trays, and each tray holds the state of the whole pool: identical objects
        compare at once.
        """
        previous = self._states
        self._states = {
            key: previous[key] if previous.get(key) == state else state for key, state in states.items()
        }
        return self._states

    def with_counts(
        self,
        site: PlacementSite,
        kinds: Mapping[str, MemberClaims],
        inputs: Mapping[str, TrayInputs],
        devices_on: Callable[[Set[str]], DraDevices],
    ) -> PlacementSite:
        """The site with the room of each tray for each kind of claims; `inputs` covers all of its trays.

        `devices_on` reads the devices of some trays. Raises Refused for claims that no tray can serve.
        """
        rooms: dict[str, dict[str, ClaimCapacity]] = {tray.name: {} for tray in site.trays}
        for kind, claims in kinds.items():
            key = msgspec.json.encode(claims)
            cached = self._kinds.get(key, {})
            # A count is kept only while all of its inputs are equal, so the cache never changes a result.
            counts = {
                name: cached[name]
                for name, current in inputs.items()
                if name in cached and cached[name][0] == current
            }
            changed = tuple(tray for tray in site.trays if tray.name not in counts)
            if changed:
                devices = devices_on({tray.name for tray in changed})
                counted = with_claim_capacity(PlacementSite(changed), devices, {kind: claims})
                counts |= {tray.name: (inputs[tray.name], tray.rooms.get(kind)) for tray in counted.trays}
            # A dict keeps insertion order, so the first entry is the least recently used.
            self._kinds.pop(key, None)
            self._kinds[key] = counts
            if len(self._kinds) > _MOST_KINDS:
                del self._kinds[next(iter(self._kinds))]
            for name, (_, room) in counts.items():
                if room is not None:
                    rooms[name][kind] = room
        return site.with_trays(lambda tray: replace(tray, rooms=rooms[tray.name]))


# The devices of each tray, less what others hold.


_RESULT_FIELDS = ("request", "driver", "pool", "device", "adminAccess", "shareID", "consumedCapacity")
"""Fields of an allocated device that bear on others; fields newer than this program are left out."""


def with_claim_room(
    site: PlacementSite,
    objects: ClusterLists,
    kinds: Mapping[str, MemberClaims],
    mine: str,
    counts: TrayCountCache,
) -> PlacementSite:
    """The site with the room of each tray for each kind of claims. Raises Refused for an impossible claim.

    Claims of the holder `mine` do not count, nor those of an owner that holds GPUs of the same tray: the
    hold stands for them.
    """
    if not kinds:
        return site
    trays = {tray.name for tray in site.trays}
    # When the search assumes that a job ends, it frees the job's holds. Devices of that owner on the tray are
    # free then too, so they are left out here, and the hold stands for both.
    held = {(hold.owner, hold.tray) for hold in site.holds}
    devices = _NodeDevices(objects, trays, {*held, *((mine, tray) for tray in trays)})
    return counts.with_counts(site, kinds, devices.inputs(counts), devices.devices_on)


class _NodeDevices:
    """Devices published on trays, and those that others hold; (owner, tray) in `without` do not count."""

    def __init__(self, objects: ClusterLists, trays: Set[str], without: Set[tuple[str, str]]) -> None:
        self._classes = objects.classes
        self._rules = tuple(readable_rules(objects.taint_rules))
        self._nodes = {name: node for node in objects.nodes if (name := node["metadata"]["name"]) in trays}
        self._pools: dict[DevicePoolKey, list[Object]] = defaultdict(list)
        self._pools_on: dict[str, list[DevicePoolKey]] = defaultdict(list)
        self._taken: dict[str, list[Object]] = defaultdict(list)
        for slice_ in objects.slices:
            spec = slice_["spec"]
            if spec.get("nodeName"):
                self._pools[spec["driver"], spec["pool"]["name"]].append(slice_)
        node_of: dict[tuple[str, str, str], str] = {}
        for key, pool in self._pools.items():
            for spec in (slice_["spec"] for slice_ in pool):
                node = spec["nodeName"]
                node_of |= {(*key, device["name"]): node for device in spec.get("devices") or ()}
                if key not in self._pools_on[node]:
                    self._pools_on[node].append(key)
        for claim, holder in zip(objects.state.claims, objects.state.holders, strict=True):
            for result in allocated_devices(claim):
                node = node_of.get((result["driver"], result["pool"], result["device"]))
                if node is not None and (holder.owner, node) not in without:
                    device = {key: result[key] for key in _RESULT_FIELDS if key in result}
                    self._taken[node].append(device)

    def inputs(self, counts: TrayCountCache) -> dict[str, TrayInputs]:
        """The inputs of the count of each tray."""
        classes = tuple(map(_object_version, self._classes))
        states = counts.interned(
            {key: tuple(map(_object_version, pool)) for key, pool in self._pools.items()}
        )
        return {
            name: TrayInputs(
                labels=node["metadata"].get("labels") or {},
                classes=classes,
                pools=tuple(states[key] for key in self._pools_on.get(name, ())),
                rules=tuple(
                    rule.spec
                    for rule in self._rules
                    if any(rule.concerns(*key) for key in self._pools_on.get(name, ()))
                ),
                taken=tuple(self._taken.get(name, ())),
            )
            for name, node in self._nodes.items()
        }

    def devices_on(self, trays: Set[str]) -> DraDevices:
        """The devices of some trays, with their pools whole: nothing is allocated from an incomplete pool.

        An object that cannot be read offers no device.
        """
        names = [name for name in self._nodes if name in trays]
        keys = dict.fromkeys(key for name in names for key in self._pools_on.get(name, ()))
        slices = (_without_metadata(slice_) for key in keys for slice_ in self._pools[key])
        return DraDevices(
            nodes=tuple(readable((_node_with_labels(self._nodes[name]) for name in names), Node)),
            classes=tuple(readable(map(_without_metadata, self._classes), DeviceClass)),
            slices=with_taint_rules(readable(slices, ResourceSlice), self._rules),
            claims=tuple(_allocated_claim(taken) for name in names for taken in self._taken.get(name, ())),
        )


def _allocated_claim(result: Object) -> ResourceClaim:
    allocation = msgspec.convert({"devices": {"results": [result]}}, AllocationResult)
    return ResourceClaim(status=ResourceClaimStatus(allocation=allocation))


def _object_version(obj: Object) -> object:
    """A value that differs whenever the object does: the API server versions each of its states."""
    meta = obj["metadata"]
    version = meta.get("uid"), meta.get("resourceVersion")
    return version if all(version) else obj


def _node_with_labels(node: Object) -> Object:
    return {"metadata": {key: node["metadata"].get(key) or {} for key in ("name", "labels")}}


def _without_metadata(obj: Object) -> Object:
    return {"metadata": {"name": obj["metadata"]["name"]}, "spec": obj.get("spec") or {}}


# The site for one gang.


def site_for_members(
    snapshot: GangSnapshot, terms: Iterable[PlacementTerms | None], *, claimed: bool = False
) -> PlacementSite:
    """The site as its living members with these terms can use it, with all reservations. Raises Refused.

    `claimed`: they claim devices. Members may count GPUs beside that.

    It names the owners of all holds, so it is for the search and never for a message to the gang.
    """
    cluster = snapshot.cluster
    others = (pod for pod in cluster.pods if gang_key_of(pod) != snapshot.key)
    nodes = {node["metadata"]["name"]: node for node in cluster.nodes}
    site = with_reservations(cluster.running, cluster.records, _plans_of_others(snapshot))
    counted, gpus = any(member.gpus for member in snapshot.living), cluster.state.gpus
    site = site.with_trays(
        lambda tray: replace(tray, gpus=gpus[tray.name].usable(counted=counted, claimed=claimed))
    )
    return site_for_terms(
        without_conflicting_trays(site, snapshot.living, others, nodes.values()), terms, nodes
    )


def site_with_rooms(
    snapshot: GangSnapshot, site: PlacementSite, kinds: Mapping[str, MemberClaims], counts: TrayCountCache
) -> PlacementSite:
    """The site with the room for claims on each tray, as the gang may see it. Raises Refused."""
    key = snapshot.key
    site = with_claim_room(site, snapshot.cluster, kinds, key.full_name, counts)
    return PlacementSite(site.trays, without_foreign_names(site.holds, key.namespace))


def _plans_of_others(snapshot: GangSnapshot) -> Iterator[TrayHold]:
    """What is planned for workloads of Kueue, but for the one that the gang came by."""
    own = {
        (member.namespace, (member.obj["metadata"].get("labels") or {}).get(KUEUE_WORKLOAD_LABEL))
        for member in snapshot.members
    }
    for workload, holds in snapshot.cluster.planned.items():
        if workload not in own:
            yield from holds


class SpareRoom(msgspec.Struct, frozen=True):
    """How many spare trays a gang may keep."""

    trays: int
    limit: str = "its namespace"
    """What limits them, in words."""


class PromisedSpares(msgspec.Struct, frozen=True):
    """The spare trays of a workload of Kueue that may start; its gang may have no plan yet."""

    gang: GangKey
    trays: int
    templates: frozenset[str]
    """The claim templates that its pods will name."""


def spare_room(
    key: GangKey,
    templates: Set[str],
    cluster: ClusterLists,
    most: int,
    promised: Collection[PromisedSpares] = (),
) -> SpareRoom:
    """The room by the limit `most` of its namespace, and by the quota of the ComputeDomains that it uses.

    `templates`: the claim templates that its pods name, by which ComputeDomains are known.
    `promised` are those of other workloads; they and the plan of their gang count once. Several workloads may
    name one gang.
    """
    # By gang, what others keep or are promised: a workload and the plan of its gang count once.
    of_plans = {
        record.key: len(record.plan.spares)
        for record in cluster.records
        if record.key != key and record.plan is not None
    }
    of_workloads: Counter[GangKey] = Counter()
    for spares in promised:
        of_workloads[spares.gang] += spares.trays
    others = {
        gang: max(of_plans.get(gang, 0), of_workloads[gang])
        for gang in of_plans.keys() | of_workloads
        if gang.namespace == key.namespace
    }
    by_namespace = SpareRoom(max(most - sum(others.values()), 0))
    # Of the others, only gangs that use one of its ComputeDomains share the quota of those.
    quotas = cluster.spare_quotas
    counted = None if quotas is None else quotas.room(key.namespace, templates)
    if quotas is None or counted is None:
        return by_namespace
    channels = {name for name in templates if (key.namespace, name) in quotas.by_template}
    sharing = {gang_key_of(pod) for pod in cluster.pods if not channels.isdisjoint(claim_templates_of(pod))}
    sharing |= {spares.gang for spares in promised if not channels.isdisjoint(spares.templates)}
    used = sum(spares for gang, spares in others.items() if gang in sharing)
    by_quota = SpareRoom(max(counted - used, 0), "its ComputeDomains, by their quota,")
    return min(by_namespace, by_quota, key=lambda room: room.trays)


def claim_templates_of(pod: Object) -> Iterator[str]:
    """The claim templates that a pod, or the template of pods, names."""
    for claim in pod["spec"].get("resourceClaims") or ():
        if claim.get("resourceClaimTemplateName"):
            yield claim["resourceClaimTemplateName"]
