"""What would make a refused gang fit, nearest first; each was planned before it is named."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from rackloom.claim.place.refusal.cures import (
    CLIQUES,
    Cured,
    Remedy,
    awaited,
    cliques_by_lack,
    fits,
    moved_away,
    preempted,
    returned,
)
from rackloom.claim.place.refusal.moves import Move
from rackloom.claim.place.search.board import Board
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import try_gang
from rackloom.claim.place.search.loads import Need
from rackloom.claim.place.values import Gang, Group, Plan, Site

SEGMENTS = (16, 8, 4, 2, 1)
"""Segments that are offered: 16 of an NVL72's 18 trays, then its halves."""


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the request or of the site, and the plan that it makes possible."""

    text: str
    site: Site
    gang: Gang
    plan: Plan
    moves: tuple[Move, ...] = ()


def fixes(site: Site, gang: Gang, effort: Effort) -> Iterator[Fix]:
    """The request is eased first; then nothing that runs is lost; then something is.

    `effort`: what the gang itself, which was tried before, has left of it.
    """
    yield from _eased(site, _fewer_spares(site, gang, effort), effort)
    for remedy in (returned, moved_away):
        yield from _cured(site, gang, remedy, effort)
    yield from _eased(site, [*_apart(gang), *_segmented(gang)], effort)
    yield from _cured(site, gang, preempted, effort)
    yield from _eased(site, _fewer_members(site, gang), effort)
    yield from _cured(site, gang, awaited, effort)


def _eased(site: Site, wishes: Iterable[tuple[str, Gang]], effort: Effort) -> Iterator[Fix]:
    """The first wish of the list that fits."""
    for text, wish in wishes:
        plan = try_gang(site, wish, effort)
        if plan is not None:
            yield Fix(text=text, site=site, gang=wish, plan=plan)
            return


def _cured(site: Site, gang: Gang, remedy: Remedy, effort: Effort) -> Iterator[Fix]:
    """One clique cured if that is enough, else several."""
    cliques = cliques_by_lack(site, gang)
    cured = [one for clique in cliques if (one := remedy(site, clique, gang, effort)) is not None]
    for one in cured:
        plan = try_gang(one.site, gang, effort)
        if plan is not None:
            yield Fix(text=one.text, site=one.site, gang=gang, plan=plan, moves=one.moves)
            return
    if len(cured) > 1:
        yield from _all_cured(site, gang, remedy, effort)


def _all_cured(site: Site, gang: Gang, remedy: Remedy, effort: Effort) -> Iterator[Fix]:
    """For segments, of which each may need a clique that is cured."""
    done = Cured(site, "")
    for number in range(CLIQUES):
        one = next(
            (
                found
                for clique in cliques_by_lack(done.site, gang)
                if not fits(clique, gang, effort)
                and (found := remedy(done.site, clique, gang, effort)) is not None
            ),
            None,
        )
        if one is None:
            return
        text = f"{done.text}; {one.text}" if number else one.text
        done = Cured(one.site, text, (*done.moves, *one.moves))
        plan = try_gang(done.site, gang, effort)
        if plan is not None:
            yield Fix(text=done.text, site=done.site, gang=gang, plan=plan, moves=done.moves)
            return


def _fewer_spares(site: Site, gang: Gang, effort: Effort) -> Iterator[tuple[str, Gang]]:
    """The most spares with which it fits; where some fit, fewer do."""
    wishes = [replace(gang, spares=spares) for spares in range(min(gang.spares, _widest(site) + 1))]
    fitting = bisect_left(wishes, True, key=lambda wish: try_gang(site, wish, effort) is None)
    if fitting:
        wish = wishes[fitting - 1]
        yield f"keep {wish.spares} spare trays instead of {gang.spares}", wish


def _widest(site: Site) -> int:
    """Trays of the largest clique."""
    return max(Counter(tray.clique or tray.name for tray in site.trays).values(), default=0)


def _apart(gang: Gang) -> Iterator[tuple[str, Gang]]:
    shares = [group.share for group in gang.groups if not group.is_helper]
    if gang.segment is None and len(set(shares)) < len(shares):
        groups = tuple(replace(group, share=group.name) for group in gang.groups)
        yield "let each group have a clique of its own", replace(gang, groups=groups)


def _segmented(gang: Gang) -> Iterator[tuple[str, Gang]]:
    largest = max(group.members for group in gang.groups if not group.is_helper)
    for segment in SEGMENTS:
        if segment < min(largest, gang.segment or largest):
            text = f"cut it into segments of {segment}: GPUs of different segments share no memory"
            yield text, replace(gang, segment=segment)


def _fewer_members(site: Site, gang: Gang) -> Iterator[tuple[str, Gang]]:
    """The most members that fit, where one group alone takes devices."""
    serious = [group for group in gang.groups if not group.is_helper]
    if len(serious) > 1:
        return
    only = serious[0]
    board = Board(site, owner=gang.name, exclusive=gang.exclusive)
    need = Need.of(only)
    segment = gang.segment or only.members
    most = sum(board.capacity(clique, need) // segment * segment for clique in board.cliques)
    if gang.segment is None:
        most = max((board.capacity(clique, need) for clique in board.cliques), default=0)
    least = max(0, most - min(gang.spares, _widest(site)) - 1)
    for members in range(min(most, only.members - 1), least, -1):
        yield f"ask for {members} {only.name} instead of {only.members}", _sized(gang, only, members)


def _sized(gang: Gang, only: Group, members: int) -> Gang:
    groups = tuple(replace(one, members=members) if one is only else one for one in gang.groups)
    return replace(gang, groups=groups)
