"""The cluster as the placement search takes it: trays, their holders, and room for device claims.

A tray is a node with GPUs, as `core.cluster` reads it. Its GPU count depends on how the members request
GPUs. Recorded plans hold trays whole, beside the pods and claims that run.

A tray is closed to members by the state of its node and its taints, by the node rules of the members
(`site_for_terms`), and by pods that exclude members (`trays_barred_by`). The texts become the
reasons in a refusal, and so in the status of the GangPlan. Anti-affinity of other jobs' pods counts for any
topology key, so all nodes of the cluster are read. The node rules of a group are stored in the plan as
canonical JSON text: equal rules have equal text.

The real allocator counts how many members a tray can serve. The counts are cached per kind of claim.
A tray is recounted only if its inputs changed: labels, device classes, slice versions, taints by
DeviceTaintRules, devices that others hold. The cache changes speed alone.

Owners in other namespaces are anonymised before anything is reported to a gang.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    DeviceClass,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.pools import MalformedNodeSelector
from rackloom.core.allocate.taint_rules import DeviceTaintRuleSpec, readable_rules, with_taint_rules
from rackloom.core.cluster.claims import AllocatedDevice, allocated_devices, allocator_claim
from rackloom.core.cluster.devices import allocator_values
from rackloom.core.cluster.gang_objects import (
    GANG_TAINT,
    GangKey,
    GangMember,
    NodeRequirements,
    PodConstraints,
    constraints_of_bound,
    gang_of,
)
from rackloom.core.cluster.nodes import NodeObject, closing_taints, device_names, node_of_slice, slice_pool
from rackloom.core.cluster.objects import Object, owners_of, uid_of, version_of
from rackloom.core.cluster.pods import KUEUE_WORKLOAD_LABEL, Toleration
from rackloom.core.cluster.scheduling import (
    TopologyDomains,
    allocator_node,
    node_amounts,
    selector_keys,
    unmet_requirements,
)
from rackloom.core.cluster.state import ClusterState, TrayHold
from rackloom.core.cluster.trays import (
    ClaimCapacity,
    DraDevices,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
    combine_sites,
    placement_site,
    without_foreign_names,
)
from rackloom.core.gangs.snapshot import ClusterLists, GangRecord, GangSnapshot
from rackloom.core.place.claim_capacity import with_claim_capacity
from rackloom.core.place.gang_planner import NodeUse
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json

V = TypeVar("V")

# Trays and their holders.


def running_site(
    state: ClusterState,
    before: ClusterState = ClusterState(),  # noqa: B008 (a frozen value)
    last: PlacementSite = PlacementSite(()),  # noqa: B008 (a frozen value)
) -> PlacementSite:
    """Trays in order of clique and name, and holds of running pods and of their claims.

    It has no holds of plans, so it is valid for all gangs of one placement pass. Taints are not read, because
    each group reads them by its terms. `last` is the site of the state `before`. Trays of nodes that have
    not changed since are taken from it.
    """
    kept = set(map(id, before.nodes))
    changed, trays = list[NodeObject](), dict[str, PlacementTray]()
    known = {tray.name: tray for tray in last.trays}
    for node in state.nodes:
        name = node.name
        if id(node) not in kept or state.gpus[name] != before.gpus[name]:
            changed.append(node)
        elif name in known:
            trays[name] = known[name]
    for tray in placement_site(replace(state, nodes=tuple(changed)), tolerations=None).trays:
        if tray.gpus:
            # Most changes of a node do not affect its tray.
            trays[tray.name] = known[tray.name] if known.get(tray.name) == tray else tray
    # The search fills trays in this order. It ignores holds on nodes without GPUs.
    ordered = tuple(sorted(trays.values(), key=lambda tray: (tray.clique or "", tray.name)))
    holds = tuple(hold for hold in state.holds if hold.tray in trays)
    return PlacementSite(ordered, holds)


def follow_lists(before: ClusterLists, now: ClusterLists) -> ClusterLists:
    """The lists of a cluster with the values that are derived from them.

    `before` is the last result. It is returned again if nothing has changed.
    """
    if now.state is before.state and _other_objects(now) == _other_objects(before):
        return before
    running, use = before.running, before.use
    if now.state is not before.state or use is None:
        running = running_site(now.state, before.state, before.running)
        use = NodeUse(now.state, before=use)
    return replace(now, running=running, use=use)


def _other_objects(lists: ClusterLists) -> tuple[object, ...]:
    return (
        *(lists.slices, lists.classes, lists.templates, lists.taint_rules, lists.records),
        *(lists.planned, lists.spare_quotas),
    )


def offers_more(before: ClusterLists, now: ClusterLists) -> bool:
    """Whether a gang that fitted nowhere before may fit now.

    It errs on the safe side. Pods that come, plans that are written, and heartbeats offer nothing.
    """
    if now is before:
        return False
    offers = ("slices", "classes", "templates", "taint_rules", "spare_quotas")
    return (
        any(getattr(now, field) != getattr(before, field) for field in offers)
        or now.running.trays != before.running.trays
        or now.state.gpus != before.state.gpus
        or not _planned(before) <= _planned(now)
        or any(_has_nodes_changed(before.state, now.state))
        or any(_have_pods_gone(before, now))
        or any(_have_claims_gone(before.state, now.state))
    )


def _planned(lists: ClusterLists) -> set[object]:
    reserved = {(record.uid, tray) for record in lists.records for tray in record.reserved}
    return reserved.union(*lists.planned.values())


def _has_nodes_changed(before: ClusterState, now: ClusterState) -> Iterator[bool]:
    """For each node that is another object: whether it has other labels, taints or amounts."""
    kept = set(map(id, now.nodes))
    old = {node.name: node for node in before.nodes if id(node) not in kept}
    kept = set(map(id, before.nodes))
    for node in now.nodes:
        if id(node) not in kept:
            last = old.get(node.name)
            yield last is None or _bearing(node) != _bearing(last)


def _bearing(node: NodeObject) -> object:
    return node.labels, node.taints, node_amounts(node)


def _have_pods_gone(before: ClusterLists, now: ClusterLists) -> Iterator[bool]:
    """For each pod on a tray, or with required anti-affinity: whether it is gone, or has other labels."""
    trays = {tray.name for tray in before.running.trays}
    for name, pods in before.state.bound.items():
        left = now.state.bound.get(name, {})
        if left is not pods:
            for key, pod in pods.items():
                if name in trays or pod.spec.apart:
                    yield key not in left or left[key].labels != pod.labels


def _have_claims_gone(before: ClusterState, now: ClusterState) -> Iterator[bool]:
    """For each claim: whether it has other devices, or is new and has a name that pods may refer to."""
    if now.claims is before.claims:
        return
    old = {uid_of(claim): claim for claim in before.claims}
    for claim in now.claims:
        last = old.pop(uid_of(claim), None)
        if last is not claim:
            devices = None if last is None else allocated_devices(last)
            yield (
                not owners_of(claim)
                if last is None
                else bool(devices) and devices != allocated_devices(claim)
            )
    yield bool(old)


def with_reservations(
    running: PlacementSite, records: Iterable[GangRecord], plans: Iterable[TrayHold] = ()
) -> PlacementSite:
    """The site with more holds: whole trays that GangPlans reserve, and the holds `plans` of workloads."""
    size = {tray.name: tray.gpus for tray in running.trays}
    # A reserved tray is held whole, also while the pods of its gang are still to come.
    reserved = (
        TrayHold(owner=record.key.full_name, tray=tray, gpus=size.get(tray, 0))
        for record in records
        for tray in record.reserved
    )
    planned = (hold for hold in (*reserved, *plans) if hold.tray in size)
    return PlacementSite(running.trays, (*running.holds, *planned))


# The trays that are closed to members, and why. The texts of the rules:
#
# - cordoned, not ready (for all pods): `core.cluster.nodes.closed_reasons`
# - a taint that is not tolerated: `core.cluster.nodes.closing_taints`
# - node selector, node affinity: `core.cluster.scheduling.unmet_requirements`
# - pods that exclude each other, host ports: `_KEPT_AWAY`
# - too little CPU or memory: `core.place.gang_planner.scarcity`
#
# `core.place.gang_fixes.describe_shortage` puts them into the refusal, and adds trays that are open but full:
# in use, or with too few devices. For a recorded plan, `placement` does both (`_why_no_room`).


_TOLERATES_RESERVATIONS = Toleration(key=GANG_TAINT, operator="Exists")
"""Reservations are read from plans instead, and an ungated pod tolerates the taint of its plan."""
_KEPT_AWAY = "a pod there or near it and pods of the gang keep apart"


def _closed_by(needs: NodeRequirements, tray: PlacementTray, node: NodeObject) -> PlacementTray:
    """The tray with the reasons for which members may not go there. Raises MalformedNodeSelector."""
    # `running_site` has named a cordon and a node that is not ready, so their taints are no further reasons.
    taints = closing_taints(node, (*needs.tolerations, _TOLERATES_RESERVATIONS))
    unfit = list(unmet_requirements(needs.rule, node))
    why = [*filter(None, [tray.shut]), *taints, *unfit]
    return replace(tray, shut="; ".join(why) or None, is_unfit=bool(unfit))


def site_for_terms(
    site: PlacementSite, terms: Iterable[PlacementTerms | None], nodes: Mapping[str, NodeObject]
) -> PlacementSite:
    """The site as members with these terms can use it. Raises Refused."""
    sites = {}
    # Groups with equal rules meet equal trays, so each set of rules is compared with the nodes once.
    for text in dict.fromkeys("" if term is None else term.where for term in terms):
        where = _read_requirements(text)
        try:
            trays = tuple([_closed_by(where, tray, nodes[tray.name]) for tray in site.trays])
        except MalformedNodeSelector as error:
            fix = "correct it in the pod template"
            raise Refused(f"node affinity of the pods cannot be read: {error}", nearest_fix=fix) from error
        sites[text] = PlacementSite(trays, site.holds)
    return combine_sites(sites)


def _read_requirements(text: str) -> NodeRequirements:
    try:
        return decode_json(text, "GangPlan", NodeRequirements) if text else NodeRequirements()
    except Undecodable as error:
        fix = "end its pods: the GangPlan was changed by somebody else"
        raise Refused(
            f"the plan says of its pods what cannot be read: {error.reason}", nearest_fix=fix
        ) from error


def trays_barred_by(
    members: Iterable[GangMember],
    theirs: Callable[[bool], Sequence[tuple[str, PodConstraints]]],
    nodes: Iterable[NodeObject],
) -> frozenset[str]:
    """Trays on which a pod of another job and members exclude each other.

    `theirs` gives the bound pods of other jobs: all, or those with required anti-affinity. `nodes` are
    all nodes of the cluster: a pod on any of them may exclude members from its clique or zone.
    """
    mine = [member.constraints for member in members]
    # A pod without anti-affinity affects members only if one of them keeps away from pods.
    others = theirs(any(pod.identity.apart or pod.ports for pod in mine))
    if not others:
        return frozenset()
    # Members of one class conflict with the same pods, so two of each class stand for all.
    classes = two_of_each_class(mine, set(label_keys([*mine, *(pod for _, pod in others)])))
    # A term by zone or clique keeps members off all nodes around the pod, not only off its node.
    domains = TopologyDomains(nodes)
    return frozenset(
        tray
        for node, other in others
        for pod in classes
        for tray in domains.around(node, pod.barred_by(other))
    )


def _without_barred(site: PlacementSite, barred: Collection[str]) -> PlacementSite:
    return site.with_trays(
        lambda tray: (
            replace(tray, shut="; ".join(filter(None, (tray.shut, _KEPT_AWAY))))
            if tray.name in barred
            else tray
        )
    )


def label_keys(pods: Iterable[PodConstraints]) -> Iterator[str]:
    """The labels that terms of these pods read."""
    return (key for pod in pods for term in pod.identity.apart for key in selector_keys(term.selector))


def two_of_each_class(pods: Iterable[PodConstraints], read: Collection[str]) -> list[PodConstraints]:
    """At most two of each class of interchangeable pods, which are equal in all labels that a term reads.

    Two are enough: they also show whether pods of one class exclude each other.
    """
    classes: dict[bytes, list[PodConstraints]] = {}
    for pod in pods:
        labels = {key: value for key, value in pod.identity.labels.items() if key in read}
        bare = replace(pod, identity=replace(pod.identity, labels=labels))
        members = classes.setdefault(msgspec.json.encode(bare, order="deterministic"), [])
        if len(members) < 2:
            members.append(bare)
    return [pod for members in classes.values() for pod in members]


# Cached counts of members per tray.


MemberClaims = tuple[ResourceClaim, ...]
"""The claims of one member, in the order in which it names them."""
DevicePoolKey = tuple[str, str]
"""Driver and pool name."""
_MOST_KINDS = 8
"""Kinds of claims that are cached. The least recently used is evicted."""


class TrayInputs(msgspec.Struct, frozen=True):
    """Everything that decides how many members a tray serves: equal inputs give an equal count."""

    labels: Mapping[str, str]
    classes: tuple[object, ...]
    pools: tuple[tuple[object, ...], ...]
    """The versions of all slices of the pools that have devices of the tray, even slices of other nodes."""
    rules: tuple[DeviceTaintRuleSpec, ...]
    """The DeviceTaintRules that may select a device of these pools, without their status."""
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
        """The states of pools. A state that equals the last one is the same object.

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
        """The site with the room of each tray for each kind of claims. `inputs` covers all of its trays.

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


_MOST_SITES = 16
"""Values of one cluster that are kept, sites among them."""


class SiteCache(TrayCountCache):
    """Values that the gangs of a placement pass share: equal requests meet the same site.

    Counts of members survive a change of the cluster. All other values do not. For one thread at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: ClusterLists | None = None
        self._shared: dict[Hashable, Any] = {}

    def shared(self, cluster: ClusterLists, key: Hashable, compute: Callable[[], V]) -> V:
        """The value of a key on this cluster. The key has everything else that decides the value."""
        if cluster is not self._of:
            self._of = cluster
            self._shared.clear()
        if key not in self._shared:
            if len(self._shared) >= _MOST_SITES:
                self._shared.clear()
            self._shared[key] = compute()
        value: V = self._shared[key]
        return value


# The devices of each tray, less those that others hold.


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
    """Devices published on trays, and those that others hold. (owner, tray) in `without` do not count."""

    def __init__(self, objects: ClusterLists, trays: Set[str], without: Set[tuple[str, str]]) -> None:
        self._classes = objects.classes
        self._rules = tuple(readable_rules(objects.taint_rules))
        self._nodes = {node.name: node for node in objects.state.nodes if node.name in trays}
        self._pools: dict[DevicePoolKey, list[Object]] = defaultdict(list)
        self._pools_on: dict[str, dict[DevicePoolKey, None]] = defaultdict(dict)
        self._taken: dict[str, list[AllocatedDevice]] = defaultdict(list)
        node_of: dict[tuple[str, str, str], str] = {}
        for slice_ in objects.slices:
            node, names = node_of_slice(slice_), device_names(slice_)
            found = slice_pool(slice_)
            pool = (found.driver, found.name)
            if node:
                self._pools[pool].append(slice_)
                self._pools_on[node][pool] = None
                node_of |= {(*pool, device): node for device in names}
        for claim, holder in zip(objects.state.claims, objects.state.holders, strict=True):
            for result in allocated_devices(claim):
                tray = node_of.get((result.driver, result.pool, result.device))
                if tray is not None and (holder.owner, tray) not in without:
                    self._taken[tray].append(result)

    def inputs(self, counts: TrayCountCache) -> dict[str, TrayInputs]:
        """The inputs of the count of each tray."""
        classes = tuple(map(_object_version, self._classes))
        states = counts.interned(
            {key: tuple(map(_object_version, pool)) for key, pool in self._pools.items()}
        )
        return {
            name: TrayInputs(
                labels=node.labels,
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
        slices = (slice_ for key in keys for slice_ in self._pools[key])
        return DraDevices(
            nodes=tuple(allocator_node(self._nodes[name]) for name in names),
            classes=tuple(allocator_values(self._classes, DeviceClass)),
            slices=with_taint_rules(allocator_values(slices, ResourceSlice), self._rules),
            claims=tuple(allocator_claim([held], {}) for name in names for held in self._taken.get(name, ())),
        )


def _object_version(obj: Object) -> object:
    """A value that differs whenever the object does: the API server versions each of its states."""
    version = uid_of(obj), version_of(obj)
    return version if all(version) else obj


# The site for one gang.


def site_for_members(
    snapshot: GangSnapshot,
    terms: Iterable[PlacementTerms | None],
    cache: SiteCache,
    *,
    claimed: bool = False,
) -> PlacementSite:
    """The site as its living members with these terms can use it, with all reservations. Raises Refused.

    `claimed`: they claim devices. Members may also count GPUs.

    It names the owners of all holds, so it is for the search and never for a message to the gang.
    """
    cluster, terms = snapshot.cluster, tuple(terms)
    wheres = tuple(dict.fromkeys("" if term is None else term.where for term in terms))
    nodes = cache.shared(cluster, "nodes", lambda: {node.name: node for node in cluster.state.nodes})

    def bound_pods(all_pods: bool) -> Sequence[tuple[str, PodConstraints]]:
        found = cache.shared(
            cluster, ("pods", all_pods), lambda: _constraints_by_gang(cluster.state, all_pods)
        )
        return [(node, pod) for gang, node, pod in found if gang != snapshot.key]

    barred = trays_barred_by(snapshot.living, bound_pods, cluster.state.nodes)
    # A node may offer another number of GPUs by limits than by claims (`NodeGpus`).
    counted, gpus = any(member.gpus for member in snapshot.living), cluster.state.gpus

    def open_trays() -> tuple[PlacementTray, ...]:
        site = PlacementSite(cluster.running.trays).with_trays(
            lambda tray: replace(tray, gpus=gpus[tray.name].usable(counted=counted, claimed=claimed))
        )
        return site_for_terms(_without_barred(site, barred), terms, nodes).trays

    own = _own_workloads(snapshot).intersection(cluster.planned)
    return cache.shared(
        cluster,
        ("site", wheres, counted, claimed, barred, own),
        lambda: PlacementSite(
            cache.shared(cluster, ("trays", wheres, counted, claimed, barred), open_trays),
            cache.shared(cluster, ("holds", own), lambda: _held(cluster, own)),
        ),
    )


def _constraints_by_gang(
    state: ClusterState, all_pods: bool
) -> list[tuple[GangKey | None, str, PodConstraints]]:
    """The bound pods that may keep others off, with their gangs and nodes."""
    pods = [pod for on_node in state.bound.values() for pod in on_node.values()]
    return [
        (gang_of(pod), node, constraints)
        for pod in pods
        for node, constraints in constraints_of_bound((pod,), all_pods=all_pods)
    ]


def _held(cluster: ClusterLists, own: Collection[tuple[str, str | None]]) -> tuple[TrayHold, ...]:
    """All holds without those that are planned for the workloads `own`."""
    plans = (hold for workload, holds in cluster.planned.items() if workload not in own for hold in holds)
    return with_reservations(cluster.running, cluster.records, plans).holds


def site_with_rooms(
    snapshot: GangSnapshot, site: PlacementSite, kinds: Mapping[str, MemberClaims], cache: SiteCache
) -> PlacementSite:
    """The site with the room for claims on each tray, as the gang may see it. Raises Refused."""
    key = snapshot.key
    site = with_claim_room(site, snapshot.cluster, kinds, key.full_name, cache)
    return PlacementSite(site.trays, without_foreign_names(site.holds, key.namespace))


def _own_workloads(snapshot: GangSnapshot) -> frozenset[tuple[str, str]]:
    """The workloads of Kueue from which the gang came."""
    labels = ((member.namespace, member.pod.labels.get(KUEUE_WORKLOAD_LABEL)) for member in snapshot.members)
    return frozenset((namespace, uid) for namespace, uid in labels if uid is not None)
