"""What the planner is asked about a gang, and what follows from its answer. Pure."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from rackloom.claim.cluster.actions import Action
from rackloom.claim.cluster.gang.demand import Demand, group_gpus
from rackloom.claim.cluster.gang.pins import send_away
from rackloom.claim.cluster.gang.record import Record, planned, withdrawn
from rackloom.claim.cluster.gang.seating import seating, stuck
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.place.values import Gang, Group, Plan, Site, Tray
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


def answer(
    view: View, site: Site, templates: Mapping[str, Demand], planner: Planner, settings: GangSettings
) -> Answer:
    """Serve a gang that asks: place it, look at its reserved trays, or mend it. Raises Refused."""
    record = view.record
    if record is None or record.plan is None:
        return Answer(actions=(place(view, site, templates, planner),))
    if view.let_go or view.lost(settings.lost_after):
        return Answer(actions=mend(view, site, planner, settings))
    if taken(view, site):
        return Answer(actions=(withdrawn(record),))
    return Answer(checked=record.plan)


def place(view: View, site: Site, templates: Mapping[str, Demand], planner: Planner) -> Action:
    """Plan a gang whose members are all there. Raises Refused."""
    assert view.record is not None  # noqa: S101 (only recorded gangs ask)
    missing = {name for one in view.living for name in one.pod.templates if name not in templates}
    if missing:
        raise Refused(f"claim template {min(missing)} does not exist", nearest_fix="create it")
    gang = asked(view, site, templates)
    return planned(view.record, gang, planner.plan_gang(site, gang), site)


def asked(view: View, site: Site, templates: Mapping[str, Demand]) -> Gang:
    """The gang as the planner takes it; its trays are reserved whole, so it wants empty ones."""
    wish = view.wish()
    most = max((tray.gpus for tray in site.trays), default=0)
    return Gang(
        name=view.key.called,
        groups=tuple(
            Group(
                name=name,
                members=size,
                gpus=group_gpus((one for one in view.living if one.group == name), templates, most),
            )
            for name, size in wish.sizes
        ),
        priority=max((one.priority for one in view.living), default=0),
        segment=wish.segment,
        spares=wish.spares,
        exclusive=True,
    )


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
    full = next((tray for tray in late if not _has_room(site, view, tray)), None)
    if full is not None:
        return (_moved(record, record.gang, record.plan, site, full, planner),)
    return tuple(send_away(one) for one in seats.seated if _is_late(one.tray, one.node, late))


def _moved(record: Record, gang: Gang, plan: Plan, site: Site, tray: str, planner: Planner) -> Action:
    whole = _with_lost(site, record, tray)
    return planned(record, gang, planner.replace_member(whole, gang, plan, tray), whole)


def _with_lost(site: Site, record: Record, tray: str) -> Site:
    """The site with a tray whose node is gone, where nothing may go."""
    if any(one.name == tray for one in site.trays):
        return site
    gone = Tray(name=tray, clique=record.cliques.get(tray), gpus=0, shut="its node is gone")
    return Site((*site.trays, gone), site.holds)


def _is_late(tray: str | None, node: str | None, late: tuple[str, ...]) -> bool:
    return node is None and tray in late


def taken(view: View, site: Site) -> tuple[str, ...]:
    """Reserved trays on which there is no room for the gang: somebody was faster than the taint."""
    trays = () if view.record is None else view.record.reserved
    return tuple(tray for tray in trays if not _has_room(site, view, tray))


def _has_room(site: Site, view: View, tray: str) -> bool:
    is_open = any(one.name == tray and one.shut is None for one in site.trays)
    others = (one for one in site.holds if one.tray == tray and one.owner != view.key.called)
    return is_open and not any(others)
