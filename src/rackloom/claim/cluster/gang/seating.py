"""Which pod takes which seat of a recorded plan.

A pod that was let go keeps its seat, whatever else happens; the others take the free ones in order of rank.
Two may have been let go to one seat, by a controller that was stopped and did not know that another had taken
over. Then a pod that stays has it before one that is being deleted, else the job would lose both.
"""

from collections import Counter

import msgspec

from rackloom.claim.cluster.gang.ended import seekers
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.place.values import Plan


class Seating(msgspec.Struct, frozen=True):
    """Living members; gated ones that are in none of the three are surplus, and stay gated."""

    openings: tuple[tuple[Member, str], ...]
    """Gated members with the trays that they may go to."""
    misfits: tuple[Member, ...]
    """Members that were let go to a tray where the plan has no seat for them."""
    seated: tuple[Member, ...]


def seating(view: View, plan: Plan) -> Seating:
    """Seat the members of a gang."""
    free = Counter((seat.group, seat.tray) for seat in plan.seats)
    seated, misfits = [], []
    for member in sorted(view.let_go, key=lambda one: (one.going, one.node is None, one.rank)):
        place = (member.group, member.tray or "")
        if free[place] > 0:
            free[place] -= 1
            seated.append(member)
        elif not member.going:
            misfits.append(member)
    return Seating(_openings(view, plan, free), tuple(misfits), tuple(seated))


def stuck(view: View, seats: Seating, settings: GangSettings) -> tuple[Member, ...]:
    """Members that were let go and that the scheduler cannot bind, for so long.

    Where it says nothing, the tray is not to blame: the scheduler is away, or somebody else's gate is there.
    """
    waiting = (one for one in seats.seated if one.node is None and not one.going and one.is_unschedulable)
    return tuple(one for one in waiting if view.now - (one.released_at or 0.0) >= settings.bind_after)


def _openings(view: View, plan: Plan, free: Counter[tuple[str, str]]) -> tuple[tuple[Member, str], ...]:
    found: list[tuple[Member, str]] = []
    gated = seekers(view)
    for group in dict.fromkeys(seat.group for seat in plan.seats):
        trays = []
        for seat in plan.seats:
            place = (group, seat.tray)
            if seat.group == group and free[place] > 0:
                free[place] -= 1
                trays.append(seat.tray)
        mine = (one for one in gated if one.group == group)
        found += zip(sorted(mine, key=lambda one: one.rank), trays, strict=False)
    return tuple(found)
