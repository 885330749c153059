"""What the planner is asked about a gang, and what follows from its answer. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rackloom.claim.cluster.actions import Action
from rackloom.claim.cluster.gang.helpers import helpers_seated, plan_for_all
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.pins import send_away
from rackloom.claim.cluster.gang.record import Record, planned, withdrawn
from rackloom.claim.cluster.gang.request import (
    claimed_by_groups,
    is_asked_by,
    planned_within,
    request_of,
    site_for,
)
from rackloom.claim.cluster.gang.scene import Scene
from rackloom.claim.cluster.gang.seating import seating, stuck
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.terms import own_terms
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.place.values import Gang, Plan, Site, Tray
from rackloom.errors import Refused


class Planner(Protocol):
    """The planner of whole jobs (`claim/place`). Both raise Refused with the nearest fix."""

    def plan_gang(self, site: Site, gang: Gang) -> Plan:
        """A seat for every member."""
        ...

    def replace_member(self, site: Site, gang: Gang, plan: Plan, lost: str) -> Plan:
        """The same with the members of the tray `lost` on one other tray of its clique."""
        ...


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What follows for one gang."""

    actions: tuple[Action, ...] = ()
    checked: Plan | None = None
    """The plan whose trays were seen empty of others."""


def answer(view: View, scene: Scene, planner: Planner, settings: GangSettings) -> Answer:
    """Serve a gang that asks: place it, look at its reserved trays, or mend it. Raises Refused."""
    record = view.record
    if record is None or record.gang is None or record.plan is None:
        return Answer(actions=(place(view, scene, planner, settings),))
    own = [own_terms(one) for one in view.let_go if one.is_unschedulable]
    met = scene.met(view.living, [*(one.terms for one in record.gang.groups), *own])
    site = scene.furnished(met, claimed_by_groups(view, record.gang, scene))
    if view.let_go or view.lost(settings.lost_after):
        return Answer(actions=mend(view, site, planner, settings))
    if taken(view, site) or not is_asked_by(request_of(view, scene), record.gang, record.plan):
        return Answer(actions=(withdrawn(record),))
    return Answer(checked=record.plan)


def place(view: View, scene: Scene, planner: Planner, settings: GangSettings) -> Action:
    """Plan a gang whose members are all there. Raises Refused."""
    assert view.record is not None  # noqa: S101 (only recorded gangs ask)
    asked = request_of(view, scene)
    site = site_for(asked, scene.furnished(asked.met, asked.kinds))
    room = max(settings.max_spares - scene.spares, 0)
    plan = plan_for_all(site, asked.gang, lambda where: _planned(room, where, asked.gang, planner))
    return planned(view.record, asked.gang, plan, site)


def _planned(room: int, site: Site, gang: Gang, planner: Planner) -> Plan:
    return planned_within(room, gang, lambda one: planner.plan_gang(site, one))


def mend(view: View, site: Site, planner: Planner, settings: GangSettings) -> tuple[Action, ...]:
    """Move the members of one tray that is lost, or on which they cannot be bound. Raises Refused.

    Where there is room after all, something else kept a pod from its tray (a claim that was allocated
    elsewhere): its owner makes another. One tray at a time, so that each choice sees the last one.
    """
    record = view.record
    if record is None or record.gang is None or record.plan is None:
        return ()
    lost = view.lost(settings.lost_after)
    if lost:
        return (_moved(record, record.gang, record.plan, site, lost[0], planner),)
    seats = seating(view, record.plan)
    late = stuck(view, seats, settings)
    for tray in dict.fromkeys(one.tray for one in late if one.tray is not None):
        if (why := _why_no_room(site, view, tray)) is not None:
            try:
                return (_moved(record, record.gang, record.plan, site, tray, planner),)
            except Refused as refused:
                raise Refused(
                    f"{tray} ({why}): {refused.reason}", nearest_fix=refused.nearest_fix
                ) from refused
    return _made_anew(late, site)


def _made_anew(late: Sequence[Member], site: Site) -> tuple[Action, ...]:
    """The next pod may be bound; but not one that asks for another node by itself. Raises Refused."""
    closed = {one.name: one.closed for one in site.trays}
    others = {one.uid: closed.get(one.tray or "", {}).get(own_terms(one).where) for one in late}
    gone = tuple(send_away(one) for one in late if others[one.uid] is None)
    if gone or not late:
        return gone
    reason = f"pod {late[0].name} asks for another node than {late[0].tray} ({others[late[0].uid]})"
    fix = "end the job and make it anew: the gang was placed for pods that asked for something else"
    raise Refused(reason, nearest_fix=fix)


def _moved(record: Record, gang: Gang, plan: Plan, site: Site, tray: str, planner: Planner) -> Action:
    whole = _with_lost(site, record, tray)
    found = planner.replace_member(whole, gang, plan, tray)
    return planned(record, gang, helpers_seated(found, gang, whole), whole)


def _with_lost(site: Site, record: Record, tray: str) -> Site:
    """The site with a tray whose node is gone, where nothing may go."""
    if any(one.name == tray for one in site.trays):
        return site
    gone = Tray(name=tray, clique=record.cliques.get(tray), gpus=0, shut="its node is gone")
    return Site((*site.trays, gone), site.holds)


def taken(view: View, site: Site) -> tuple[str, ...]:
    """Reserved trays on which there is no room for the gang: somebody was faster than the taint."""
    trays = () if view.record is None else view.record.reserved
    return tuple(tray for tray in trays if _why_no_room(site, view, tray) is not None)


def _why_no_room(site: Site, view: View, tray: str) -> str | None:
    """What keeps members of the gang off one of its trays; None where nothing does."""
    here = next((one for one in site.trays if one.name == tray), None)
    if here is None:
        return "its node is gone"
    others = (one.owner for one in site.holds if one.tray == tray and one.owner != view.key.called)
    other = next(others, None)
    return here.shut or (None if other is None else f"in use by {other}") or _why_not_served(here, view)


def _why_not_served(tray: Tray, view: View) -> str | None:
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
