"""One lost tray of a placed gang: its members go to a spare of the same clique, and nobody else moves."""

from msgspec.structs import replace

from rackloom.claim.place.refusal.moves import listed
from rackloom.claim.place.search.board import Board
from rackloom.claim.place.search.ground import Ground
from rackloom.claim.place.search.loads import Need
from rackloom.claim.place.values import Gang, Plan, Seat, Site
from rackloom.errors import Refused


def replace_member(site: Site, gang: Gang, plan: Plan, lost: str) -> Plan:
    """The plan without the tray `lost`; the reserved spares are asked first.

    Holds of the gang itself do not count. Raises Refused where no tray of the clique can take over.
    """
    clique = next((tray.sharing for tray in site.trays if tray.name == lost), None)
    moving = [seat for seat in plan.seats if seat.tray == lost]
    if not moving:
        raise Refused(f"{plan.gang} has no member on {lost}", nearest_fix=f"name one of {listed(plan.trays)}")
    if clique is None:
        raise Refused(
            f"{lost} is not in the site that was observed", nearest_fix="pass it, shut, with its clique"
        )
    chosen = _stand_in(
        Board(Ground(site, owner=plan.gang, exclusive=gang.exclusive)), gang, plan, clique, lost
    )
    if chosen is None:
        raise Refused(
            f"{plan.gang}: no other tray of clique {clique} can take over what ran on {lost}",
            nearest_fix=f"return {lost} to service, or start {plan.gang} anew in another clique",
        )
    seats = tuple(replace(seat, tray=chosen) if seat.tray == lost else seat for seat in plan.seats)
    kept = tuple(spare for spare in plan.spares if spare not in (chosen, lost))
    why = f"{lost} was lost: {chosen} of the same clique took over; {plan.reason}"
    return replace(plan, seats=seats, spares=kept, reason=why)


def _stand_in(board: Board, gang: Gang, plan: Plan, clique: str, lost: str) -> str | None:
    mine = set(plan.trays)
    trays = board.ground.trays
    able = [
        trays[at].name
        for at in board.ground.cliques[clique]
        if trays[at].name not in mine and _carries(board, at, gang, plan, lost)
    ]
    return min(able, key=lambda name: name not in plan.spares, default=None)


def _carries(board: Board, at: int, gang: Gang, plan: Plan, lost: str) -> bool:
    """Whether the tray can take all members of the lost one."""
    taken: list[tuple[Need, int]] = []
    seats: list[Seat] = [seat for seat in plan.seats if seat.tray == lost]
    fits = True
    for group in gang.groups:
        members = sum(seat.group == group.name for seat in seats)
        if not members or group.is_helper:
            continue
        fits = fits and board.slots(at, Need.of(group)) >= members
        if fits:
            board.take(at, Need.of(group), members)
            taken.append((Need.of(group), members))
    for need, members in taken:
        board.put_back(at, need, members)
    return fits
