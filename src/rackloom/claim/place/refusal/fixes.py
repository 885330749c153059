"""What would make a refused gang fit, nearest first; each was tried before it is named."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

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
from rackloom.claim.place.refusal.shortage import has_cliques
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import fits_on
from rackloom.claim.place.search.ground import Ground, ground_of
from rackloom.claim.place.search.loads import Need
from rackloom.claim.place.values import Gang, Group, Site

SEGMENTS = (16, 8, 4, 2, 1)
"""Segments that are offered: 16 of an NVL72's 18 trays, then its halves."""


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the request or of the site, with which the gang was found to fit."""

    text: str
    site: Site
    gang: Gang
    moves: tuple[Move, ...] = ()


def fixes(ground: Ground, gang: Gang, effort: Effort) -> Iterator[Fix]:
    """The request is eased first; then nothing that runs is lost; then something is.

    `effort`: what the gang itself, which was tried before on the same ground, has left of it.
    """
    yield from _eased(ground, _fewer_spares(ground, gang, effort), effort)
    cliques = cliques_by_lack(ground.site, gang)
    for remedy in (returned, moved_away):
        yield from _cured(ground.site, cliques, gang, remedy, effort)
    # Where no node tells its clique, segments of one would hide that its label is missing.
    segmented = _segmented(gang) if has_cliques(ground.site) else ()
    yield from _eased(ground, [*_apart(gang), *segmented], effort)
    yield from _cured(ground.site, cliques, gang, preempted, effort)
    yield from _eased(ground, _fewer_members(ground, gang), effort)
    yield from _cured(ground.site, cliques, gang, awaited, effort)


def _eased(ground: Ground, wishes: Iterable[tuple[str, Gang]], effort: Effort) -> Iterator[Fix]:
    """The first wish of the list that fits."""
    for text, wish in wishes:
        if fits_on(ground, wish, effort):
            yield Fix(text=text, site=ground.site, gang=wish)
            return


def _cured(site: Site, cliques: Sequence[Site], gang: Gang, remedy: Remedy, effort: Effort) -> Iterator[Fix]:
    """One of the cliques cured if that is enough, else several."""
    cured = [one for clique in cliques if (one := remedy(site, clique, gang, effort)) is not None]
    for one in cured:
        if fits_on(ground_of(one.site, gang), gang, effort):
            yield Fix(text=one.text, site=one.site, gang=gang, moves=one.moves)
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
        if fits_on(ground_of(done.site, gang), gang, effort):
            yield Fix(text=done.text, site=done.site, gang=gang, moves=done.moves)
            return


def _fewer_spares(ground: Ground, gang: Gang, effort: Effort) -> Iterator[tuple[str, Gang]]:
    """The most spares with which it fits; where some fit, fewer do."""
    wishes = [replace(gang, spares=spares) for spares in range(min(gang.spares, _widest(ground) + 1))]
    fitting = bisect_left(wishes, True, key=lambda wish: not fits_on(ground, wish, effort))
    if fitting:
        wish = wishes[fitting - 1]
        yield f"keep {wish.spares} spare trays instead of {gang.spares}", wish


def _widest(ground: Ground) -> int:
    """Trays of the largest clique."""
    return max(map(len, ground.cliques.values()), default=0)


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


def _fewer_members(ground: Ground, gang: Gang) -> Iterator[tuple[str, Gang]]:
    """The most members that fit, where one group alone takes devices."""
    serious = [group for group in gang.groups if not group.is_helper]
    if len(serious) > 1:
        return
    only = serious[0]
    capacities = [outlook.capacity for outlook in ground.outlooks(Need.of(only)).values()]
    if gang.segment is None:
        most = max(capacities, default=0)
    else:
        most = sum(one // gang.segment * gang.segment for one in capacities)
    least = max(0, most - min(gang.spares, _widest(ground)) - 1)
    for members in range(min(most, only.members - 1), least, -1):
        yield f"ask for {members} {only.name} instead of {only.members}", _sized(gang, only, members)


def _sized(gang: Gang, only: Group, members: int) -> Gang:
    groups = tuple(replace(one, members=members) if one is only else one for one in gang.groups)
    return replace(gang, groups=groups)
