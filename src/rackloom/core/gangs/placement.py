"""The request of a gang to the placement search (`core.place`), and the writes that follow from the result.

A gang without a plan is placed. Reserved trays of a gang are checked. A running gang that lost a tray, or
has a pod that cannot be bound, is repaired one tray at a time, so that each choice sees the last one. If a
reserved tray has no room for the gang, because another pod was bound before the taint took effect, the plan
is withdrawn.

The request is made of the pods in `core.gangs.requests`, and the site in `core.gangs.trays`. A refusal
becomes the message of the condition Placed: `gang_refusal` names the trays that are missing and their
reasons, which are `PlacementTray.shut` and `closed` of the site.

Helpers, members without devices such as an MPI launcher, sit beside the first member that has devices, or
on another tray of the gang that their own rules allow and that has the CPU and memory for them.

CPU, memory and the like of nodes count wherever members get a tray (`MemberResources`): for a new plan, for
helpers beside the others, before pods are ungated, and for members that move.

Spare trays: all gangs of a namespace share the limit `max_spares`, since no ResourceQuota counts
reserved trays, and all gangs that use a ComputeDomain share the trays of its Kueue quota. A gang that
requests more is refused with the largest number that fits (`plan_within_spare_limit`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from functools import partial
from itertools import product

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster.gang_objects import SPARES_ANNOTATION, GangKey, gang_of
from rackloom.core.cluster.objects import ObjectWrite, list_names
from rackloom.core.cluster.scheduling import Thousandths
from rackloom.core.cluster.trays import (
    Gang,
    GangGroup,
    GangPlan,
    MemberAssignment,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
)
from rackloom.core.gangs.requests import (
    claim_gpus,
    claims_by_kind,
    is_still_requested,
    placement_request,
    pod_terms,
)
from rackloom.core.gangs.slots import assign_slots, delete_member, unschedulable_members
from rackloom.core.gangs.snapshot import (
    ClusterLists,
    GangRecord,
    GangSettings,
    GangSnapshot,
    record_plan,
    withdraw_plan,
)
from rackloom.core.gangs.trays import SiteCache, site_for_members, site_with_rooms
from rackloom.core.place.gang_fixes import gang_refusal
from rackloom.core.place.gang_planner import NodeUse, plan_or_refuse, scarcity, with_node_resources
from rackloom.core.place.job_moves import replace_member
from rackloom.core.place.search.site_view import SiteCapacity, SiteView
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused

# Spare trays.


class SpareRoom(msgspec.Struct, frozen=True):
    """How many spare trays a gang may keep."""

    trays: int
    limit: str = "its namespace"
    """The limit, in words."""


class PromisedSpares(msgspec.Struct, frozen=True):
    """The spare trays of a workload of Kueue that may start. Its gang may have no plan yet."""

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

    `templates`: the claim templates that its pods name, which identify ComputeDomains.
    `promised` are those of other workloads. They and the plan of their gang count once. Several workloads may
    name one gang.
    """
    # By gang, the trays that others keep or are promised: a workload and the plan of its gang count once.
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
    sharing = {gang_of(pod) for pod in cluster.state.pods if not channels.isdisjoint(pod.templates)}
    sharing |= {spares.gang for spares in promised if not channels.isdisjoint(spares.templates)}
    used = sum(spares for gang, spares in others.items() if gang in sharing)
    by_quota = SpareRoom(max(counted - used, 0), "its ComputeDomains, by their quota,")
    return min(by_namespace, by_quota, key=lambda room: room.trays)


def plan_within_spare_limit(allowed: SpareRoom, gang: Gang, plan: Callable[[Gang], GangPlan]) -> GangPlan:
    """The plan of a gang that keeps no more spare trays than are allowed. `plan` searches. Raises Refused.

    A pod's requests count against a ResourceQuota, but a spare tray has no pod. A gang is refused rather
    than planned with fewer spares than it declares. The refusal names the largest number that fits. The
    search takes longer with more spares, so it never runs for more of them than the limit allows: spares are
    per clique, and a plan in one clique already needs them all.
    """
    room = allowed.trays
    found = plan(gang) if gang.spares <= room else None
    # Spares are per clique, so a plan over several cliques may hold more than the gang declares.
    if found is not None and len(found.spares) <= room:
        return found
    kept = f"{gang.spares} spare trays or more" if found is None else f"{len(found.spares)} spare trays"
    fewer = (replace(gang, spares=number) for number in range(min(gang.spares - 1, room), -1, -1))
    fits = next(smaller.spares for smaller in fewer if len(plan(smaller).spares) <= room)
    raise Refused(
        f"the gang would keep {kept}, and {allowed.limit} may keep {room} more",
        nearest_fix=f"set annotation {SPARES_ANNOTATION} to {fits}",
    )


# CPU, memory and other resources of nodes.


class MemberResources(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of members besides devices, and the amounts that the nodes have for them."""

    owner: str
    """The name of the gang in holds."""
    requests: Mapping[str, Thousandths] = {}
    """The requests of a member of each group: the most of any that lives. A group without a living member is
    missing, since nothing is known of it."""
    use: NodeUse | None = None
    """None if it is not counted."""

    def why_short(self, tray: str, groups: Iterable[str]) -> str:
        """The resources of which a tray has too little for one member of each entry of `groups`, in words.

        The requests of other owners there count, and those of the gang itself do not.
        """
        left = None if self.use is None else self.use.left_without(tray, (self.owner,))
        if left is None:
            return ""
        wanted = Counter[str]()
        for group in groups:
            wanted.update(self.requests.get(group, {}))
        return scarcity(left, wanted, "its members")


def member_resources(snapshot: GangSnapshot) -> MemberResources:
    """Of the living members of a gang."""
    requests: dict[str, dict[str, int]] = {}
    for member in snapshot.living:
        most = requests.setdefault(member.group, {})
        for name, amount in member.requests.items():
            most[name] = max(most.get(name, 0), amount)
    return MemberResources(owner=snapshot.key.full_name, requests=requests, use=snapshot.cluster.use)


# Slots for members without devices.


def seat_helpers(
    plan: GangPlan,
    gang: Gang,
    site: PlacementSite,
    resources: MemberResources,
    kept: Collection[MemberAssignment] = (),
) -> GangPlan:
    """Move helpers to other trays of the plan if they may not stay on theirs. Raises Refused.

    Those of `kept` stay: their pods run, or wait for their tray.
    """
    groups = {group.name: group for group in gang.groups}
    helpers = {slot for slot in plan.seats if groups[slot.group].is_helper}.difference(kept)
    settled = [slot for slot in plan.seats if slot not in helpers]
    trays = tuple(dict.fromkeys(slot.tray for slot in settled))
    moved = {}
    for slot in (slot for slot in plan.seats if slot in helpers):
        terms = groups[slot.group].terms
        closed = {} if terms is None else _closed_trays(site, terms)
        barred = {
            other.tray
            for other in settled
            if terms is not None and terms.bar(groups[other.group].terms or PlacementTerms())
        }
        # Its own tray first: a helper stays if it may. Once it is settled, it counts for the next one.
        obstacles: list[str] = []
        for tray in (slot.tray, *trays):
            why = closed.get(tray) or ("it keeps apart from members there" if tray in barred else "")
            if not why:
                beside = [other.group for other in settled if other.tray == tray]
                short = resources.why_short(tray, (*beside, slot.group))
                why = f"has {short}" if short else ""
            if not why:
                moved[slot] = replace(slot, tray=tray)
                settled.append(moved[slot])
                break
            obstacles.append(why)
        else:
            reason = f"{slot.group} may go to none of the gang's trays ({slot.tray}: {obstacles[0]})"
            fix = f"let {slot.group} go where the other members do, or leave it out of the gang"
            raise Refused(reason, nearest_fix=fix)
    return replace(plan, seats=tuple(moved.get(slot, slot) for slot in plan.seats))


def _closed_trays(site: PlacementSite, terms: PlacementTerms) -> dict[str, str]:
    """Trays that members with the terms may not go to, and why."""
    reasons = {tray.name: tray.closed.get(terms.where) or tray.shut for tray in site.trays}
    return {name: why for name, why in reasons.items() if why is not None}


def _open_to_helpers(site: PlacementSite, gang: Gang, resources: MemberResources) -> PlacementSite:
    helpers = [group for group in gang.groups if group.is_helper]
    terms = [group.terms for group in helpers if group.terms is not None]
    closed = {name: why for term in terms for name, why in _closed_trays(site, term).items()}
    for tray, helper in product(site.trays, helpers):
        # One member is always beside it: the trays of a gang are those of members with devices.
        pairs = [resources.why_short(tray.name, (helper.name, group.name)) for group in gang.device_groups]
        if pairs and all(pairs):
            closed.setdefault(tray.name, f"has {pairs[0]}")
    return site.with_trays(lambda tray: replace(tray, shut=tray.shut or closed.get(tray.name)))


# From the result to the next writes.


class PlacementAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one gang."""

    actions: tuple[ObjectWrite, ...] = ()
    checked: GangPlan | None = None
    """The plan if its trays were found free of other pods."""


def answer_placement(snapshot: GangSnapshot, settings: GangSettings, cache: SiteCache) -> PlacementAnswer:
    """Place a gang, check its reserved trays, or repair its plan. Raises Refused."""
    record = snapshot.record
    if record is None or record.gang is None or record.plan is None:
        return PlacementAnswer(actions=(place_gang(snapshot, settings, cache),))
    # A pod that cannot be bound may have gained node rules since it was planned.
    own = [pod_terms(member) for member in snapshot.ungated if member.is_unschedulable]
    kinds = claims_by_kind(snapshot, record.gang, cache)
    terms = [*(group.terms for group in record.gang.groups), *own]
    usable = site_for_members(snapshot, terms, cache, claimed=claim_gpus(kinds))
    site = site_with_rooms(snapshot, usable, kinds, cache)
    # Once a pod was ungated, or a tray is lost, the plan is repaired. Before that it is checked.
    if snapshot.ungated or snapshot.lost(settings.lost_after):
        return PlacementAnswer(actions=repair_gang(snapshot, site, settings))
    # Another pod may have been bound to a reserved tray before the taint took effect.
    resources = member_resources(snapshot)
    are_free = all(_why_no_room(site, snapshot, tray, resources) is None for tray in record.reserved)
    if are_free and is_still_requested(placement_request(snapshot, cache), record.gang, record.plan):
        return PlacementAnswer(checked=record.plan)
    return PlacementAnswer(actions=(withdraw_plan(record),))


def place_gang(snapshot: GangSnapshot, settings: GangSettings, cache: SiteCache) -> ObjectWrite:
    """Plan a gang once all of its members exist. Raises Refused."""
    assert snapshot.record is not None  # noqa: S101 (only recorded gangs are placed)
    request = placement_request(snapshot, cache)
    gang = request.gang
    resources = member_resources(snapshot)

    def prepare() -> tuple[PlacementSite, PlacementSite, SiteView, Gang]:
        site = site_with_rooms(snapshot, request.site, request.kinds, cache)
        # Tray sizes are capped, so that no second member fits on a tray that one takes whole.
        if request.whole:
            most = max(group.gpus for group in gang.groups if group.name in request.whole)
            site = site.with_trays(lambda tray: replace(tray, gpus=min(tray.gpus, most)))
        # With the first site, because its identity is a part of the key.
        return request.site, site, *bounded(site, gang)

    def bounded(site: PlacementSite, asked: Gang) -> tuple[SiteView, Gang]:
        # The trays also need enough CPU, memory and the like for the members.
        if resources.use is not None:
            site, asked = with_node_resources(site, asked, resources.requests, resources.use)
        return SiteView.of(site), asked

    # Gangs of one namespace with equal requests and no holds have the same site.
    holds = {member.node for member in snapshot.living} != {None}
    demand = (
        *(snapshot.key if holds else snapshot.key.namespace, msgspec.json.encode(gang.groups)),
        *(id(request.site), msgspec.json.encode((request.kinds, request.whole, resources.requests))),
    )
    _, site, view, with_kinds = cache.shared(snapshot.cluster, demand, prepare)
    templates = {name for member in snapshot.living for name in member.pod.templates}
    allowed = spare_room(snapshot.key, templates, snapshot.cluster, settings.max_spares)

    def search(searched: SiteView, groups: tuple[GangGroup, ...], asked: Gang) -> GangPlan:
        return plan_or_refuse(searched, replace(asked, groups=groups), refuse)

    def refuse(capacity: SiteCapacity, asked: Gang, budget: SearchBudget) -> Refused:
        # The reason starts with the gang's name. The rest is the same for all gangs with this demand.
        first, _, found = cache.shared(
            snapshot.cluster,
            (*demand, id(capacity.view), msgspec.json.encode(replace(asked, name=""))),
            lambda: (asked.name, capacity.view, gang_refusal(capacity, asked, budget)),
        )
        return Refused(asked.name + found.reason.removeprefix(first), nearest_fix=found.nearest_fix)

    plan = plan_within_spare_limit(allowed, gang, partial(search, view, with_kinds.groups))
    try:
        plan = seat_helpers(plan, gang, site, resources)
    except Refused as refused:
        # The first plan leaves no tray for a helper. So search again on a site in which the trays that are
        # closed to helpers, or have too little for one beside another member, are closed to all. If that
        # finds nothing either, report the first refusal.
        try:
            opened, with_kinds = bounded(_open_to_helpers(site, gang, resources), gang)
            plan = plan_within_spare_limit(allowed, gang, partial(search, opened, with_kinds.groups))
            plan = seat_helpers(plan, gang, site, resources)
        except Refused:
            raise refused from None
    return record_plan(snapshot.record, gang, plan, site)


def repair_gang(
    snapshot: GangSnapshot, site: PlacementSite, settings: GangSettings
) -> tuple[ObjectWrite, ...]:
    """Move the members of one tray that is lost, or on which they cannot be bound. Raises Refused.

    If the tray has room after all, something else kept a pod from it (a claim that was allocated
    elsewhere), and its owner creates another. One tray is moved at a time, so that each choice sees the last.
    """
    record = snapshot.record
    if record is None or record.gang is None or record.plan is None:
        return ()
    resources = member_resources(snapshot)
    if lost := snapshot.lost(settings.lost_after):
        return (_move_tray(record, site, resources, lost[0]),)
    late = unschedulable_members(snapshot, assign_slots(snapshot, record.plan), settings)
    for tray in dict.fromkeys(member.tray for member in late if member.tray is not None):
        # A tray without room is the cause, so its members move: helpers alone if only they are late.
        if (why := _why_no_room(site, snapshot, tray, resources)) is not None:
            groups = {member.group for member in late if member.tray == tray}
            try:
                return (
                    _move_helpers(record, site, resources, tray, groups)
                    or _move_tray(record, site, resources, tray),
                )
            except Refused as refused:
                reason = f"{tray} ({why}): {refused.reason}"
                raise Refused(reason, nearest_fix=refused.nearest_fix) from refused
    # The trays have room. A replacement may be bound there, unless the pod's own rules forbid its tray.
    closed = {tray.name: tray.closed for tray in site.trays}
    reasons = {pod.uid: closed.get(pod.tray or "", {}).get(pod_terms(pod).where) for pod in late}
    deletions = tuple(delete_member(member) for member in late if reasons[member.uid] is None)
    if deletions or not late:
        return deletions
    reason = f"pod {late[0].name} asks for another node than {late[0].tray} ({reasons[late[0].uid]})"
    fix = "end the job and make it anew: the gang was placed for pods that asked for something else"
    raise Refused(reason, nearest_fix=fix)


def _move_helpers(
    record: GangRecord, site: PlacementSite, resources: MemberResources, tray: str, late: Collection[str]
) -> ObjectWrite | None:
    """Move the helpers of these groups alone to another tray of the gang.

    None if other members are among the groups, or if the helpers may go to no other tray.
    """
    gang, plan = _placed(record)
    if not all(group.is_helper for group in gang.groups if group.name in late):
        return None
    kept = [slot for slot in plan.seats if slot.tray != tray or slot.group not in late]
    try:
        moved = seat_helpers(plan, gang, site, resources, kept)
    except Refused:
        return None
    return None if moved == plan else record_plan(record, gang, moved, site)


def _placed(record: GangRecord) -> tuple[Gang, GangPlan]:
    """The recorded gang and plan of a gang that is repaired."""
    assert record.gang is not None  # noqa: S101 (only placed gangs are repaired)
    assert record.plan is not None  # noqa: S101
    return record.gang, record.plan


def _move_tray(record: GangRecord, site: PlacementSite, resources: MemberResources, lost: str) -> ObjectWrite:
    gang, plan = _placed(record)
    if all(known.name != lost for known in site.trays):
        # The search needs the clique of a tray even if its node is gone, and only the record still has it.
        gone = PlacementTray(name=lost, clique=record.cliques.get(lost), gpus=0, shut="its node is gone")
        site = PlacementSite((*site.trays, gone), site.holds)
    # Helpers may go to another tray of the plan than the members with devices.
    with_devices = [group.name for group in gang.device_groups]
    moving = [slot.group for slot in plan.seats if slot.tray == lost and slot.group in with_devices]
    # Trays that only lack CPU, memory or the like are closed for the search, and named if it finds no other.
    taken = {hold.tray for hold in site.holds if hold.owner != plan.gang} | set(plan.trays)
    opened = [tray.name for tray in site.trays if tray.shut is None and tray.name not in taken]
    short = {name: f"has {why}" for name in opened if (why := resources.why_short(name, moving))}
    open_site = site.with_trays(lambda tray: replace(tray, shut=tray.shut or short.get(tray.name)))
    try:
        moved = replace_member(open_site, gang, plan, lost)
    except Refused as refused:
        clique = {tray.name: tray.sharing for tray in site.trays}
        near = [f"{name} {why}" for name, why in short.items() if clique[name] == clique[lost]]
        if not near:
            raise
        reason = f"{refused.reason}: {list_names(near)}"
        raise Refused(reason, nearest_fix=refused.nearest_fix) from refused
    return record_plan(record, gang, seat_helpers(moved, gang, site, resources, plan.seats), site)


def _why_no_room(
    site: PlacementSite, snapshot: GangSnapshot, name: str, resources: MemberResources
) -> str | None:
    """The reason why members of the gang cannot use one of its trays, or None if they can."""
    tray = next((tray for tray in site.trays if tray.name == name), None)
    if tray is None:
        return "its node is gone"
    if tray.shut:
        return tray.shut
    mine = snapshot.key.full_name
    for hold in site.holds:
        if hold.tray == name and hold.owner != mine:
            return f"in use by {hold.owner}"
    if snapshot.record is None or snapshot.record.gang is None or snapshot.record.plan is None:
        return "the gang has no plan"
    # The node rules of the members with a slot here, then the devices that all of them claim together.
    groups = {group.name: group for group in snapshot.record.gang.groups}
    members = [groups[slot.group] for slot in snapshot.record.plan.seats if slot.tray == name]
    for group in members:
        if group.terms is not None and (why := tray.closed.get(group.terms.where)) is not None:
            return why
    for kind, count in Counter(group.devices for group in members).items():
        if kind is not None and (kind not in tray.rooms or tray.rooms[kind].now < count):
            return "too few devices"
    # Finally, compare their requests besides devices with the amounts that other owners leave there.
    short = resources.why_short(name, [group.name for group in members])
    return f"has {short}" if short else None
