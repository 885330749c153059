"""What the planner is asked about a gang, and what follows from its answer. Pure."""

from collections import Counter
from typing import Protocol

import msgspec

from rackloom.claim.cluster.actions import Action
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
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.place.values import Gang, Plan, Site, Tray


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
    site = scene.furnished(claimed_by_groups(view, record.gang, scene))
    if view.let_go or view.lost(settings.lost_after):
        return Answer(actions=mend(view, site, planner, settings))
    if taken(view, site) or not is_asked_by(request_of(view, scene), record.gang, record.plan):
        return Answer(actions=(withdrawn(record),))
    return Answer(checked=record.plan)


def place(view: View, scene: Scene, planner: Planner, settings: GangSettings) -> Action:
    """Plan a gang whose members are all there. Raises Refused."""
    assert view.record is not None  # noqa: S101 (only recorded gangs ask)
    asked = request_of(view, scene)
    site = site_for(asked, scene.furnished(asked.kinds))
    room = max(settings.max_spares - scene.spares, 0)
    plan = planned_within(room, asked.gang, lambda gang: planner.plan_gang(site, gang))
    return planned(view.record, asked.gang, plan, site)


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
    trays = (one.tray for one in late if one.tray is not None)
    full = next((tray for tray in trays if not _has_room(site, view, tray)), None)
    if full is not None:
        return (_moved(record, record.gang, record.plan, site, full, planner),)
    return tuple(send_away(one) for one in late)


def _moved(record: Record, gang: Gang, plan: Plan, site: Site, tray: str, planner: Planner) -> Action:
    whole = _with_lost(site, record, tray)
    return planned(record, gang, planner.replace_member(whole, gang, plan, tray), whole)


def _with_lost(site: Site, record: Record, tray: str) -> Site:
    """The site with a tray whose node is gone, where nothing may go."""
    if any(one.name == tray for one in site.trays):
        return site
    gone = Tray(name=tray, clique=record.cliques.get(tray), gpus=0, shut="its node is gone")
    return Site((*site.trays, gone), site.holds)


def taken(view: View, site: Site) -> tuple[str, ...]:
    """Reserved trays on which there is no room for the gang: somebody was faster than the taint."""
    trays = () if view.record is None else view.record.reserved
    return tuple(tray for tray in trays if not _has_room(site, view, tray))


def _has_room(site: Site, view: View, tray: str) -> bool:
    here = next((one for one in site.trays if one.name == tray), None)
    others = (one for one in site.holds if one.tray == tray and one.owner != view.key.called)
    return here is not None and here.shut is None and not any(others) and _serves(here, view)


def _serves(tray: Tray, view: View) -> bool:
    """Whether it has what the members claim that are to sit there."""
    if view.record is None or view.record.gang is None or view.record.plan is None:
        return False
    kinds = {group.name: group.devices for group in view.record.gang.groups}
    seats = Counter(kinds[seat.group] for seat in view.record.plan.seats if seat.tray == tray.name)
    rooms = {kind: room.now for kind, room in tray.rooms.items()}
    return all(rooms.get(kind, 0) >= members for kind, members in seats.items() if kind is not None)
