"""One gang onto a site, if it fits."""

from collections import Counter
from collections.abc import Sequence

from rackloom.claim.place.search.blocks import blocks_of
from rackloom.claim.place.search.board import Board
from rackloom.claim.place.search.choose import Chosen, can_be_chosen, choose
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.ground import Ground, ground_of
from rackloom.claim.place.search.holes import priced
from rackloom.claim.place.search.sit import sit, spares_for
from rackloom.claim.place.values import Gang, Plan, Seat, Site
from rackloom.errors import Refused


def try_gang(site: Site, gang: Gang, effort: Effort) -> Plan | None:
    """The plan, or None where the gang does not fit. Raises Refused for a gang that cannot be meant.

    `effort` is taken from, and is shared by all plans that are tried for the sake of one gang.
    """
    return try_on(ground_of(site, gang), gang, effort)


def try_on(ground: Ground, gang: Gang, effort: Effort) -> Plan | None:
    """The same on the ground of a gang of that name, for whoever asks it more than that."""
    board = Board(ground)
    chosen = choose(board, blocks_of(gang), gang.spares, effort)
    return None if chosen is None else _plan(gang, board, chosen)


def fits_on(ground: Ground, gang: Gang, effort: Effort) -> bool:
    """Whether there is a plan; the best is not looked for."""
    return can_be_chosen(Board(ground), blocks_of(gang), gang.spares, effort)


def plan_in(site: Site, gang: Gang, cliques: Sequence[str]) -> Plan:
    """The plan with a given clique for each block. Raises Refused where a block does not fit in its own."""
    board = Board(ground_of(site, gang))
    chosen = []
    for block, clique in zip(blocks_of(gang), cliques, strict=True):
        sitting = sit(board, clique, block)
        if sitting is None:
            raise Refused(
                f"{gang.name} does not fit in clique {clique}", nearest_fix="let its clique be chosen"
            )
        chosen.append(Chosen(block, clique, sitting))
    return _plan(gang, board, chosen)


def _plan(gang: Gang, board: Board, chosen: Sequence[Chosen]) -> Plan:
    ground = board.ground
    cliques = tuple(dict.fromkeys(one.clique for one in sorted(chosen, key=_first_member)))
    spares = [at for one in cliques for at in _spares(board, one, chosen)[: gang.spares]]
    kept = Counter(ground.clique[at] for at in spares if board.is_empty(at))
    after = [board.empty(clique) - kept[clique] for clique in ground.cliques]
    return Plan(
        gang=gang.name,
        seats=_seats(gang, board, chosen),
        cliques=cliques,
        spares=tuple(ground.trays[at].name for at in spares),
        price=priced(list(ground.empty.values()), after),
        reason=_reason(board, chosen, cliques),
    )


def _spares(board: Board, clique: str, chosen: Sequence[Chosen]) -> list[int]:
    return spares_for(board, clique, [one.sitting for one in chosen if one.clique == clique])


def _seats(gang: Gang, board: Board, chosen: Sequence[Chosen]) -> tuple[Seat, ...]:
    """All seats in the order of the gang; helpers stand beside the first member of their share."""
    taken = sorted(
        (
            Seat(place.part.group.name, member, board.ground.trays[place.at].name)
            for one in chosen
            for place in one.sitting
            for member in range(place.first, place.first + place.members)
        ),
        key=lambda seat: seat.member,
    )
    by_group = {group.name: [seat for seat in taken if seat.group == group.name] for group in gang.groups}
    serious = [group for group in gang.groups if not group.is_helper]
    for group in gang.groups:
        if group.is_helper:
            beside = next((one for one in serious if one.share == group.share), serious[0])
            tray = by_group[beside.name][0].tray
            by_group[group.name] = [Seat(group.name, member, tray) for member in range(group.members)]
    return tuple(seat for seats in by_group.values() for seat in seats)


def _first_member(chosen: Chosen) -> tuple[int, str]:
    part = chosen.block[0]
    return part.first, part.group.name


def _reason(board: Board, chosen: Sequence[Chosen], cliques: Sequence[str]) -> str:
    trays = {place.at for one in chosen for place in one.sitting}
    left = ", ".join(f"{clique} ({board.empty(clique)} empty trays left)" for clique in cliques)
    what = f"{len(chosen)} segments on " if len(chosen) > 1 else ""
    where = f"clique {left}" if len(cliques) == 1 else f"the {len(cliques)} cliques {left}"
    return f"{what}{len(trays)} trays of {where}: fewest cliques, then fewest holes closed, then tightest fit"
