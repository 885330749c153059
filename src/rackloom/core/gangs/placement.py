"""The request of a gang to the placement search (`core.place`), and what follows from the result.

A gang without a plan is placed; a gang whose trays are reserved has them checked; a gang that runs and
lost a tray, or has a pod that cannot be bound, is repaired one tray at a time, so that each choice sees
the last one. Where a reserved tray has no room for the gang, because another pod was bound before the
taint took effect, the plan is withdrawn.

Trays are reserved as a whole, so a gang asks for empty ones. Members that take a tray whole get the GPU
count of the trays that fit. Helpers, members without devices such as an MPI launcher, sit beside the
first member that has devices, or on another tray of the gang that their own rules allow.

Spare trays: all gangs of a namespace share the limit `max_spares`, since no ResourceQuota counts
reserved trays. A gang that asks for more is refused with the largest number that fits
(`plan_within_spare_limit`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from rackloom.core.gangs import spec
from rackloom.core.gangs.assignment import assign_slots, delete_member, unschedulable_members
from rackloom.core.gangs.completion import remaining_spec
from rackloom.core.gangs.demand import GpuDemand, group_claims, group_demand, whole_tray_gpus
from rackloom.core.gangs.members import GangMember
from rackloom.core.gangs.record import GangRecord, record_plan, withdraw_plan
from rackloom.core.gangs.snapshot import GangSnapshot
from rackloom.core.gangs.spec import GangSettings, GangSpec
from rackloom.core.gangs.terms import group_terms, pod_terms
from rackloom.core.gangs.trays import GangSite, MemberClaims
from rackloom.core.kubernetes.objects import ObjectWrite
from rackloom.core.place.gang_planner import plan_gang
from rackloom.core.place.job_moves import replace_member
from rackloom.core.place.placement_values import (
    Gang,
    GangGroup,
    GangPlan,
    MemberAssignment,
    PlacementSite,
    PlacementTerms,
    PlacementTray,
)
from rackloom.errors import Refused

# Slots for members without devices.


def plan_with_helpers(site: PlacementSite, gang: Gang, plan: Callable[[PlacementSite], GangPlan]) -> GangPlan:
    """A plan whose helpers may sit where they do; `plan` makes one on a site. Raises Refused."""
    found = plan(site)
    try:
        return seat_helpers(found, gang, site)
    except Refused as refused:
        try:
            return seat_helpers(plan(_open_to_helpers(site, gang)), gang, site)
        except Refused:
            raise refused from None


def seat_helpers(plan: GangPlan, gang: Gang, site: PlacementSite) -> GangPlan:
    """The plan with helpers on other trays of it, where they may not be on theirs. Raises Refused."""
    groups = {group.name: group for group in gang.groups}
    if not any(group.is_helper and group.terms is not None for group in gang.groups):
        return plan
    seats = [one for one in plan.seats if not groups[one.group].is_helper]
    trays = tuple(dict.fromkeys(one.tray for one in seats))
    moved = {}
    for seat in (one for one in plan.seats if groups[one.group].is_helper):
        moved[seat] = _helper_slot(seat, trays, seats, groups, site)
        seats.append(moved[seat])
    return replace(plan, seats=tuple(moved.get(one, one) for one in plan.seats))


def _helper_slot(
    seat: MemberAssignment,
    trays: Sequence[str],
    seats: Sequence[MemberAssignment],
    groups: dict[str, GangGroup],
    site: PlacementSite,
) -> MemberAssignment:
    terms = groups[seat.group].terms
    if terms is None:
        return seat
    closed = _closed_trays(site, terms)
    barred = {one.tray for one in seats if terms.bar(groups[one.group].terms or PlacementTerms())}
    found = next((tray for tray in (seat.tray, *trays) if tray not in closed and tray not in barred), None)
    if found is None:
        why = closed.get(seat.tray) or "it keeps apart from members there"
        fix = f"let {seat.group} go where the other members do, or leave it out of the gang"
        raise Refused(
            f"{seat.group} may go to none of the gang's trays ({seat.tray}: {why})", nearest_fix=fix
        )
    return replace(seat, tray=found)


def _closed_trays(site: PlacementSite, terms: PlacementTerms) -> dict[str, str]:
    """Trays that members with the terms may not go to, and why."""
    found = {tray.name: tray.closed.get(terms.where) or tray.shut for tray in site.trays}
    return {name: why for name, why in found.items() if why is not None}


def _open_to_helpers(site: PlacementSite, gang: Gang) -> PlacementSite:
    terms = [group.terms for group in gang.groups if group.is_helper and group.terms is not None]
    closed = {name: why for term in terms for name, why in _closed_trays(site, term).items()}
    return PlacementSite(tuple(replace(tray, shut=closed.get(tray.name)) for tray in site.trays), site.holds)


# From the pods of a gang to the request.


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner is asked."""

    gang: Gang
    kinds: Mapping[str, MemberClaims]
    """What each member claims, by `Group.devices`."""
    whole: Mapping[str, int]
    """Groups whose members take a tray each, and the GPUs that one of them counts."""
    met: PlacementSite
    """The site as it is to its members."""


def placement_request(view: GangSnapshot, scene: GangSite) -> PlacementRequest:
    """Read the pods of a gang; its trays are reserved whole, so it wants empty ones. Raises Refused."""
    wish, known = remaining_spec(view), scene.known
    members = {name: _group_members(view, name) for name, _ in wish.sizes}
    terms = group_terms(members)
    demands = {name: group_demand(some, known) for name, some in members.items()}
    met = scene.met(view.living, terms.values())
    whole = _whole_tray_gpus(
        view,
        wish,
        demands,
        _without_closed_trays(met, [terms[name] for name, demand in demands.items() if demand.whole]),
    )
    groups, kinds = [], {}
    for name, size in wish.sizes:
        claimed = group_claims(members[name], known)
        if claimed is not None:
            kinds[claimed.kind] = claimed.claims
        asked = demands[name]
        gpus = max(asked.gpus, whole) if asked.whole else asked.gpus
        devices = None if claimed is None else claimed.kind
        groups.append(GangGroup(name=name, members=size, gpus=gpus, devices=devices, terms=terms[name]))
    gang = Gang(
        name=view.key.called,
        groups=tuple(groups),
        priority=max((one.priority for one in view.living), default=0),
        segment=wish.segment,
        spares=wish.spares,
        exclusive=True,
    )
    counted = {name: demand.gpus for name, demand in demands.items() if demand.whole}
    return PlacementRequest(gang=gang, kinds=kinds, whole=counted, met=met)


def site_for_request(asked: PlacementRequest, site: PlacementSite) -> PlacementSite:
    """The site as it is to a gang: where a member takes a tray whole, no second one goes on a larger tray."""
    most = max((group.gpus for group in asked.gang.groups if group.name in asked.whole), default=None)
    if most is None:
        return site
    return PlacementSite(tuple(replace(tray, gpus=min(tray.gpus, most)) for tray in site.trays), site.holds)


def is_still_requested(asked: PlacementRequest, recorded: Gang, plan: GangPlan) -> bool:
    """Whether a gang still asks for what it was placed with: its pods may have been made anew.

    How many GPUs a whole tray has may be another number by now, since other trays are there: it has one.
    """
    now, had = asked.gang, {group.name: group.gpus for group in recorded.groups}
    groups = tuple(_with_recorded_gpus(group, had.get(group.name, 0), asked) for group in now.groups)
    alone = Counter(seat.tray for seat in plan.seats if seat.group in asked.whole)
    same = replace(now, groups=groups) == replace(recorded, priority=now.priority)
    return same and all(members == 1 for members in alone.values())


def _with_recorded_gpus(group: GangGroup, had: int, asked: PlacementRequest) -> GangGroup:
    has_room = group.name in asked.whole and had >= max(asked.whole[group.name], 1)
    return replace(group, gpus=had) if has_room else group


def _whole_tray_gpus(
    view: GangSnapshot, wish: GangSpec, demands: Mapping[str, GpuDemand], site: PlacementSite
) -> int:
    """GPUs of a tray that is taken whole."""
    taken = {hold.tray for hold in site.holds if hold.owner != view.key.called}
    members = sum(size for name, size in wish.sizes if demands[name].whole)
    together = members if wish.segment is None else min(wish.segment, members)
    gpus = max((demand.gpus for demand in demands.values()), default=0)
    return whole_tray_gpus(site.trays, together, gpus, taken) if together else 0


def _without_closed_trays(site: PlacementSite, terms: Iterable[PlacementTerms | None]) -> PlacementSite:
    """The site with the trays shut that are closed to members with one of the terms."""
    wheres = {term.where for term in terms if term is not None}
    trays = (
        replace(tray, shut=tray.shut or "closed") if wheres & tray.closed.keys() else tray
        for tray in site.trays
    )
    return PlacementSite(tuple(trays), site.holds)


def claims_by_kind(view: GangSnapshot, gang: Gang, scene: GangSite) -> dict[str, MemberClaims]:
    """What each member of a placed gang claims, by the kinds of its record. Raises Refused."""
    found = {}
    for group in gang.groups:
        claimed = (
            None if group.devices is None else group_claims(_group_members(view, group.name), scene.known)
        )
        if group.devices is not None and claimed is not None:
            found[group.devices] = claimed.claims
    return found


def plan_within_spare_limit(room: int, gang: Gang, plan: Callable[[Gang], GangPlan]) -> GangPlan:
    """The plan of a gang that keeps at most `room` spare trays; `plan` makes one. Raises Refused.

    What a pod requests counts against a ResourceQuota, but a spare tray has no pod. The more spares, the
    longer the search: none is made for more than there is room for, which one clique would fill.
    """
    found = plan(gang) if gang.spares <= room else None
    if found is not None and len(found.spares) <= room:
        return found
    kept = f"{gang.spares} spare trays or more" if found is None else f"{len(found.spares)} spare trays"
    fewer = (replace(gang, spares=number) for number in range(min(gang.spares - 1, room), -1, -1))
    fits = next(one.spares for one in fewer if len(plan(one).spares) <= room)
    raise Refused(
        f"the gang would keep {kept}, and its namespace may keep {room} more",
        nearest_fix=f"set annotation {spec.SPARES_ANNOTATION} to {fits}",
    )


def _group_members(view: GangSnapshot, name: str) -> tuple[GangMember, ...]:
    return tuple(sorted((one for one in view.living if one.group == name), key=lambda one: one.rank))


# From the result to the next writes.


class GangPlanner(Protocol):
    """The planner of whole jobs (`core/place`). Both raise Refused with the nearest fix."""

    def plan_gang(self, site: PlacementSite, gang: Gang) -> GangPlan:
        """A seat for every member."""
        ...

    def replace_member(self, site: PlacementSite, gang: Gang, plan: GangPlan, lost: str) -> GangPlan:
        """The same with the members of the tray `lost` on one other tray of its clique."""
        ...


class PlacementAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What follows for one gang."""

    actions: tuple[ObjectWrite, ...] = ()
    checked: GangPlan | None = None
    """The plan whose trays were seen empty of others."""


def answer_placement(
    view: GangSnapshot, scene: GangSite, planner: GangPlanner, settings: GangSettings
) -> PlacementAnswer:
    """Serve a gang that asks: place it, look at its reserved trays, or mend it. Raises Refused."""
    record = view.record
    if record is None or record.gang is None or record.plan is None:
        return PlacementAnswer(actions=(place_gang(view, scene, planner, settings),))
    own = [pod_terms(one) for one in view.let_go if one.is_unschedulable]
    met = scene.met(view.living, [*(group.terms for group in record.gang.groups), *own])
    site = scene.furnished(met, claims_by_kind(view, record.gang, scene))
    if view.let_go or view.lost(settings.lost_after):
        return PlacementAnswer(actions=repair_gang(view, site, planner, settings))
    if occupied_trays(view, site) or not is_still_requested(
        placement_request(view, scene), record.gang, record.plan
    ):
        return PlacementAnswer(actions=(withdraw_plan(record),))
    return PlacementAnswer(checked=record.plan)


def place_gang(
    view: GangSnapshot, scene: GangSite, planner: GangPlanner, settings: GangSettings
) -> ObjectWrite:
    """Plan a gang whose members are all there. Raises Refused."""
    assert view.record is not None  # noqa: S101 (only recorded gangs ask)
    asked = placement_request(view, scene)
    site = site_for_request(asked, scene.furnished(asked.met, asked.kinds))
    room = max(settings.max_spares - scene.spares, 0)
    plan = plan_with_helpers(
        site, asked.gang, lambda where: _plan_within_room(room, where, asked.gang, planner)
    )
    return record_plan(view.record, asked.gang, plan, site)


def _plan_within_room(room: int, site: PlacementSite, gang: Gang, planner: GangPlanner) -> GangPlan:
    return plan_within_spare_limit(room, gang, lambda one: planner.plan_gang(site, one))


def repair_gang(
    view: GangSnapshot, site: PlacementSite, planner: GangPlanner, settings: GangSettings
) -> tuple[ObjectWrite, ...]:
    """Move the members of one tray that is lost, or on which they cannot be bound. Raises Refused.

    Where there is room after all, something else kept a pod from its tray (a claim that was allocated
    elsewhere): its owner makes another. One tray at a time, so that each choice sees the last one.
    """
    record = view.record
    if record is None or record.gang is None or record.plan is None:
        return ()
    lost = view.lost(settings.lost_after)
    if lost:
        return (_move_tray(record, record.gang, record.plan, site, lost[0], planner),)
    seats = assign_slots(view, record.plan)
    late = unschedulable_members(view, seats, settings)
    for tray in dict.fromkeys(one.tray for one in late if one.tray is not None):
        if (why := _why_no_room(site, view, tray)) is not None:
            try:
                return (_move_tray(record, record.gang, record.plan, site, tray, planner),)
            except Refused as refused:
                raise Refused(
                    f"{tray} ({why}): {refused.reason}", nearest_fix=refused.nearest_fix
                ) from refused
    return _delete_late_members(late, site)


def _delete_late_members(late: Sequence[GangMember], site: PlacementSite) -> tuple[ObjectWrite, ...]:
    """The next pod may be bound; but not one that asks for another node by itself. Raises Refused."""
    closed = {tray.name: tray.closed for tray in site.trays}
    others = {one.uid: closed.get(one.tray or "", {}).get(pod_terms(one).where) for one in late}
    gone = tuple(delete_member(one) for one in late if others[one.uid] is None)
    if gone or not late:
        return gone
    reason = f"pod {late[0].name} asks for another node than {late[0].tray} ({others[late[0].uid]})"
    fix = "end the job and make it anew: the gang was placed for pods that asked for something else"
    raise Refused(reason, nearest_fix=fix)


def _move_tray(
    record: GangRecord, gang: Gang, plan: GangPlan, site: PlacementSite, tray: str, planner: GangPlanner
) -> ObjectWrite:
    whole = _with_lost_tray(site, record, tray)
    found = planner.replace_member(whole, gang, plan, tray)
    return record_plan(record, gang, seat_helpers(found, gang, whole), whole)


def _with_lost_tray(site: PlacementSite, record: GangRecord, tray: str) -> PlacementSite:
    """The site with a tray whose node is gone, where nothing may go."""
    if any(one.name == tray for one in site.trays):
        return site
    gone = PlacementTray(name=tray, clique=record.cliques.get(tray), gpus=0, shut="its node is gone")
    return PlacementSite((*site.trays, gone), site.holds)


def occupied_trays(view: GangSnapshot, site: PlacementSite) -> tuple[str, ...]:
    """Reserved trays on which there is no room for the gang: somebody was faster than the taint."""
    trays = () if view.record is None else view.record.reserved
    return tuple(tray for tray in trays if _why_no_room(site, view, tray) is not None)


def _why_no_room(site: PlacementSite, view: GangSnapshot, tray: str) -> str | None:
    """What keeps members of the gang off one of its trays; None where nothing does."""
    here = next((one for one in site.trays if one.name == tray), None)
    if here is None:
        return "its node is gone"
    others = (hold.owner for hold in site.holds if hold.tray == tray and hold.owner != view.key.called)
    other = next(others, None)
    return here.shut or (None if other is None else f"in use by {other}") or _why_not_served(here, view)


def _why_not_served(tray: PlacementTray, view: GangSnapshot) -> str | None:
    """Why members that are to sit there may not, or that it lacks what they claim."""
    if view.record is None or view.record.gang is None or view.record.plan is None:
        return "the gang has no plan"
    groups = {group.name: group for group in view.record.gang.groups}
    here = [groups[seat.group] for seat in view.record.plan.seats if seat.tray == tray.name]
    closed = (tray.closed.get(one.terms.where) for one in here if one.terms is not None)
    rooms = {kind: room.now for kind, room in tray.rooms.items()}
    seats = Counter(group.devices for group in here)
    lacks = any(rooms.get(kind, 0) < count for kind, count in seats.items() if kind is not None)
    return next((why for why in closed if why is not None), "too few devices" if lacks else None)


# The placement search in production.


class PlacementSearch:
    """A `Planner`."""

    def plan_gang(self, site: PlacementSite, gang: Gang) -> GangPlan:
        """A seat for every member. Raises Refused with the nearest fix."""
        return plan_gang(site, gang)

    def replace_member(self, site: PlacementSite, gang: Gang, plan: GangPlan, lost: str) -> GangPlan:
        """The same with the members of `lost` on a spare tray of its clique. Raises Refused."""
        return replace_member(site, gang, plan, lost)
