"""What of a gang must share a clique."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rackloom.claim.place.search.loads import Need
from rackloom.claim.place.values import Gang, Group
from rackloom.errors import Refused


class Part(NamedTuple):
    """Consecutive members of one group."""

    group: Group
    need: Need
    """Of each member."""
    first: int
    members: int


Block = tuple[Part, ...]
"""Parts that must share a clique."""
Wanted = Mapping[Need, int]
"""Members of each need."""
Inside = Mapping[str, Wanted]
"""The members in each clique that is used."""
Shape = tuple[tuple[Need, int], ...]
"""The same as a key."""


def blocks_of(gang: Gang) -> list[Block]:
    """The blocks, largest first. Raises Refused for a gang that asks for nothing, or not clearly."""
    check(gang)
    serious = [group for group in gang.groups if not group.is_helper]
    if gang.segment is not None:
        blocks: list[Block] = [(part,) for group in serious for part in _cut(group, gang.segment)]
    else:
        shares = dict.fromkeys(group.share for group in serious)
        blocks = [
            tuple(Part(group, Need.of(group), 0, group.members) for group in serious if group.share == share)
            for share in shares
        ]
    return sorted(blocks, key=weight, reverse=True)


def weight(block: Block) -> tuple[int, int]:
    """GPUs, then members."""
    return (sum(part.group.gpus * part.members for part in block), sum(part.members for part in block))


def check(gang: Gang) -> None:
    """Refuse a gang that cannot be meant."""
    faults = [
        (bool(gang.name), "a gang needs a name", "name it"),
        (len({g.name for g in gang.groups}) == len(gang.groups), "two groups have one name", "rename one"),
        (all(g.members > 0 for g in gang.groups), "a group has no member", "ask for 1 member or more"),
        (all(g.gpus >= 0 for g in gang.groups), "a member asks for fewer than 0 GPUs", "ask for 0 or more"),
        (gang.segment is None or gang.segment > 0, "a segment has no member", "set segments of 1 or more"),
        (gang.spares >= 0, "fewer than 0 spare trays", "set 0 spare trays or more"),
        (
            any(not g.is_helper for g in gang.groups),
            "no member takes a GPU or has a claim: there is nothing to place",
            "give the workers a limit nvidia.com/gpu or a resource claim",
        ),
    ]
    for holds, reason, fix in faults:
        if not holds:
            raise Refused(f"{gang.name or 'the gang'}: {reason}", nearest_fix=fix)


def _cut(group: Group, segment: int) -> Iterator[Part]:
    need = Need.of(group)
    for first in range(0, group.members, segment):
        yield Part(group, need, first, min(segment, group.members - first))


def wanted_by(blocks: Iterable[Block]) -> Wanted:
    """Who is in the blocks."""
    return both({}, ((part.need, part.members) for block in blocks for part in block))


def both(wanted: Wanted, more: Iterable[tuple[Need, int]]) -> Wanted:
    """The members together."""
    total = dict(wanted)
    for need, members in more:
        total[need] = total.get(need, 0) + members
    return total


def shape_of(block: Block) -> Shape:
    """What the block asks for, whoever its members are."""
    return tuple(sorted(wanted_by([block]).items(), key=str))
