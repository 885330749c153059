"""Why a gang does not fit, in one sentence about the clique that comes nearest."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.search.blocks import Block, Part, blocks_of
from rackloom.claim.place.search.ground import Ground
from rackloom.claim.place.search.loads import Need
from rackloom.claim.place.values import Gang, Group, Site, Terms

NAMED = 3
"""Trays that a sentence names; it counts the others."""


def shortage(ground: Ground, gang: Gang, clique_label: str = Labels().clique) -> str:
    """What is asked for, the most that one clique has of it, and what is in the way there."""
    blocks = blocks_of(gang)
    best = nearest_clique(ground, blocks[0])
    if best is None:
        return f"{_asked(gang, blocks)}, but the site has no tray with GPUs"
    if all(tray.is_unfit for tray in ground.trays):
        why = ", ".join(dict.fromkeys(tray.shut or "" for tray in ground.trays))
        return f"{_asked(gang, blocks)}, but it may use none of the {len(ground.trays)} nodes ({why})"
    has = _has(ground, best, blocks[0])
    found = f"{_asked(gang, blocks)}; the nearest, clique {best}, has room for {has}"
    spare = f" and is to keep {gang.spares} spare" if gang.spares else ""
    blocking = ", ".join(in_the_way(ground, best, blocks[0][0].need))
    alone = "" if has_cliques(ground.site) else f"; no node carries {clique_label}, so each is a clique alone"
    return f"{found}{spare}" + (f": {blocking}" if blocking else "") + alone


def has_cliques(site: Site) -> bool:
    """Whether any node says to which clique it belongs: without its label nobody shares memory."""
    return any(tray.clique is not None for tray in site.trays)


def nearest_clique(ground: Ground, block: Block) -> str | None:
    """The clique that can serve most of the block."""
    return max(ground.cliques, key=lambda clique: _served(ground, clique, block), default=None)


def in_the_way(ground: Ground, clique: str, need: Need) -> Iterator[str]:
    """Trays of the clique that cannot serve a member, with the reason."""
    owners: dict[str, list[str]] = {}
    for hold in ground.site.holds:
        owners.setdefault(hold.tray, []).append(hold.owner)
    why = Counter[str]()
    named: dict[str, list[str]] = {}
    slots = ground.slots(need)
    for at in ground.cliques[clique]:
        if slots[at]:
            continue
        tray = ground.trays[at]
        text = _why_not(ground, at, need.terms, sorted(set(owners.get(tray.name, []))))
        why[text] += 1
        named.setdefault(text, []).append(tray.name)
    for text, count in why.most_common():
        more = f" and {count - NAMED} more" if count > NAMED else ""
        yield f"{', '.join(named[text][:NAMED])}{more} ({text})"


def _why_not(ground: Ground, at: int, terms: Terms | None, owners: Sequence[str]) -> str:
    tray, by = ground.trays[at], f" by {' and '.join(owners)}" if owners else ""
    if tray.shut is not None:
        return tray.shut
    if terms is not None and terms.where in tray.closed:
        return tray.closed[terms.where]
    if terms is not None and (barred := ground.why_barred(at, terms)) is not None:
        return f"{barred}{by}"
    return f"in use{by}" if owners else "has too few devices for a member"


def _served(ground: Ground, clique: str, block: Block) -> int:
    return sum([min(_room(ground, clique, part), part.members) for part in block])


def _has(ground: Ground, clique: str, block: Block) -> str:
    return " and ".join(
        f"{_room(ground, clique, part)} of {part.members} {part.group.name}" for part in block
    )


def _room(ground: Ground, clique: str, part: Part) -> int:
    return ground.outlooks(part.need)[clique].capacity


def _asked(gang: Gang, blocks: list[Block]) -> str:
    groups = [group for group in gang.groups if not group.is_helper]
    asked = " and ".join(_members(group) for group in groups)
    if len(blocks) == 1:
        return f"{gang.name} asks for {asked} in one clique"
    return f"{gang.name} asks for {asked} in {len(blocks)} segments, each in one clique"


def _members(group: Group) -> str:
    devices = f"{group.gpus} GPUs" if group.gpus else "devices" if group.devices else "an IMEX channel"
    return f"{group.members} {group.name} with {devices} each"
