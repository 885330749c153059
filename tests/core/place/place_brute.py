"""Every way to place a small gang, checked one by one."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, product

from rackloom.core.cluster.trays import Gang, GangGroup, PlacementSite, PlacementTray
from rackloom.core.place.search.clique_search import regions_closed
from rackloom.core.place.search.gang_needs import ColocationGroup, colocation_groups

Load = tuple[int, ...]
"""Members of each group on one tray."""
Answer = tuple[int, tuple[int, ...]]
"""Cliques, then the holes of each size that are closed."""


def best_ways(site: PlacementSite, gang: Gang) -> Answer | None:
    """The fewest cliques that take the gang, and the fewest holes that are closed with them."""
    blocks = colocation_groups(gang)
    cliques = _cliques(site)
    answers = []
    for way in product(cliques, repeat=len(blocks)):
        inside = {name: [b for b, at in zip(blocks, way, strict=True) if at == name] for name in set(way)}
        opened = {name: _opened(site, gang, cliques[name], some) for name, some in inside.items()}
        taken = [(_empty(site, cliques[name]), count) for name, count in opened.items() if count is not None]
        if len(taken) == len(inside):
            holes = [regions_closed(empty, count) for empty, count in taken]
            answers.append((len(inside), tuple(map(sum, zip(*holes, strict=True)))))
    return min(answers, default=None)


def _cliques(site: PlacementSite) -> dict[str, list[PlacementTray]]:
    found: dict[str, list[PlacementTray]] = {}
    for tray in site.trays:
        found.setdefault(tray.clique or tray.name, []).append(tray)
    return found


def _free(site: PlacementSite, tray: PlacementTray) -> int:
    return tray.gpus - sum(hold.gpus for hold in site.holds if hold.tray == tray.name)


def _is_untouched(site: PlacementSite, tray: PlacementTray) -> bool:
    return not any(hold.tray == tray.name and (hold.gpus or hold.channel) for hold in site.holds)


def _empty(site: PlacementSite, trays: Sequence[PlacementTray]) -> int:
    return sum(not tray.shut and tray.gpus > 0 and _is_untouched(site, tray) for tray in trays)


def _opened(
    site: PlacementSite, gang: Gang, trays: Sequence[PlacementTray], blocks: Sequence[ColocationGroup]
) -> int | None:
    """The fewest empty trays of a clique that the blocks use or keep, or None if they do not fit."""
    members = {group.name: 0 for group in gang.groups if not group.is_helper}
    for part in (part for block in blocks for part in block):
        members[part.group.name] += part.members
    groups = [group for group in gang.groups if group.name in members]
    loads = {tray.name: frozenset(_loads(site, gang, groups, tray, members)) for tray in trays}
    ways = []
    for spares in combinations(trays, gang.spares):
        allowed = [loads[tray.name] for tray in spares]
        rest = [tray for tray in trays if tray not in spares]
        options = tuple(
            (loads[tray.name].intersection(*allowed), not tray.shut and _is_untouched(site, tray))
            for tray in rest
        )
        found = _fewest(options, tuple(members.values()))
        ways += [] if found is None else [found + _empty(site, spares)]
    return min(ways, default=None)


@lru_cache(100_000)
def _fewest(options: tuple[tuple[frozenset[Load], bool], ...], left: Load) -> int | None:
    if not options:
        return None if any(left) else 0
    loads, is_empty = options[0]
    ways = []
    for load in loads:
        then = tuple(a - b for a, b in zip(left, load, strict=True))
        if min(then) >= 0 and (rest := _fewest(options[1:], then)) is not None:
            ways.append(rest + (is_empty and any(load)))
    return min(ways, default=None)


def _loads(
    site: PlacementSite,
    gang: Gang,
    groups: Sequence[GangGroup],
    tray: PlacementTray,
    members: Mapping[str, int],
) -> Iterator[Load]:
    """Every load of the tray, the empty load included."""
    for load in product(*(range(min(members[group.name], max(tray.gpus, 4)) + 1) for group in groups)):
        if can_carry(site, gang, tray, list(zip(groups, load, strict=True))):
            yield load


def can_carry(
    site: PlacementSite, gang: Gang, tray: PlacementTray, load: Sequence[tuple[GangGroup, int]]
) -> bool:
    """Whether the tray can carry these members of each group."""
    some = [(group, count) for group, count in load if count]
    free, kinds = _free(site, tray), {group.devices for group, _ in some}
    untouched = _is_untouched(site, tray)
    return not some or (
        not tray.shut
        and len(kinds) == 1
        and not (gang.exclusive and not untouched)
        and not _is_barred(site, tray, some)
        and sum(group.gpus * count for group, count in some) <= free
        and _served(tray, kinds.pop(), sum(count for _, count in some), untouched)
    )


def _is_barred(site: PlacementSite, tray: PlacementTray, some: Sequence[tuple[GangGroup, int]]) -> bool:
    """Whether the terms of the members keep one of them off the tray, or off each other."""
    members = [group.terms for group, count in some for _ in range(count) if group.terms is not None]
    linked = any(hold.channel and hold.tray == tray.name for hold in site.holds)
    return any(member.where in tray.closed or (member.channel and linked) for member in members) or any(
        terms.bar(other) for terms, other in combinations(members, 2)
    )


def _served(tray: PlacementTray, kind: str | None, members: int, untouched: bool) -> bool:
    if kind is None:
        return True
    room = tray.rooms.get(kind)
    return room is not None and members <= (room.empty if untouched else room.now)
