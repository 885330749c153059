"""Seats for members without devices (an MPI launcher) where they may go. Pure.

The planner sits them beside the first member that has devices, whatever they ask of their tray.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from rackloom.claim.place.values import Gang, Group, Plan, Seat, Site, Terms
from rackloom.errors import Refused


def plan_for_all(site: Site, gang: Gang, plan: Callable[[Site], Plan]) -> Plan:
    """A plan whose helpers may sit where they do; `plan` makes one on a site. Raises Refused."""
    found = plan(site)
    try:
        return helpers_seated(found, gang, site)
    except Refused as refused:
        try:
            return helpers_seated(plan(_open_to_helpers(site, gang)), gang, site)
        except Refused:
            raise refused from None


def helpers_seated(plan: Plan, gang: Gang, site: Site) -> Plan:
    """The plan with helpers on other trays of it, where they may not be on theirs. Raises Refused."""
    groups = {one.name: one for one in gang.groups}
    if not any(one.is_helper and one.terms is not None for one in gang.groups):
        return plan
    seats = [one for one in plan.seats if not groups[one.group].is_helper]
    trays = tuple(dict.fromkeys(one.tray for one in seats))
    moved = {}
    for seat in (one for one in plan.seats if groups[one.group].is_helper):
        moved[seat] = _seated(seat, trays, seats, groups, site)
        seats.append(moved[seat])
    return replace(plan, seats=tuple(moved.get(one, one) for one in plan.seats))


def _seated(
    seat: Seat, trays: Sequence[str], seats: Sequence[Seat], groups: dict[str, Group], site: Site
) -> Seat:
    terms = groups[seat.group].terms
    if terms is None:
        return seat
    closed = _closed(site, terms)
    barred = {one.tray for one in seats if terms.bar(groups[one.group].terms or Terms())}
    found = next((tray for tray in (seat.tray, *trays) if tray not in closed and tray not in barred), None)
    if found is None:
        why = closed.get(seat.tray) or "it keeps apart from members there"
        fix = f"let {seat.group} go where the other members do, or leave it out of the gang"
        raise Refused(
            f"{seat.group} may go to none of the gang's trays ({seat.tray}: {why})", nearest_fix=fix
        )
    return replace(seat, tray=found)


def _closed(site: Site, terms: Terms) -> dict[str, str]:
    """Trays that members with the terms may not go to, and why."""
    found = {one.name: one.closed.get(terms.where) or one.shut for one in site.trays}
    return {name: why for name, why in found.items() if why is not None}


def _open_to_helpers(site: Site, gang: Gang) -> Site:
    terms = [one.terms for one in gang.groups if one.is_helper and one.terms is not None]
    closed = {name: why for one in terms for name, why in _closed(site, one).items()}
    return Site(tuple(replace(one, shut=closed.get(one.name)) for one in site.trays), site.holds)
