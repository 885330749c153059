"""What a placement costs the jobs that come later: the large gangs that no longer find a clique.

Holes count before tightness. Two trays taken from a clique of 18 leave room for a gang of 16, from one of 17
they do not, although the second is the tighter fit.
"""

from collections.abc import Sequence

from rackloom.claim.place.values import Hole

SIZES = (16, 8, 4, 2, 1)
"""Gang sizes in trays that are watched, largest first: the recommended segments (16 of an NVL72's 18)."""


def closed(empty: int, taken: int) -> tuple[int, ...]:
    """Holes of each size that a clique with `empty` trays loses with `taken` of them."""
    return tuple(empty // size - (empty - taken) // size for size in SIZES)


def priced(before: Sequence[int], after: Sequence[int]) -> tuple[Hole, ...]:
    """The holes that change, given the empty trays of each clique."""
    counts = (
        Hole(size, sum(empty // size for empty in before), sum(empty // size for empty in after))
        for size in SIZES
    )
    return tuple(hole for hole in counts if hole.before != hole.after)
