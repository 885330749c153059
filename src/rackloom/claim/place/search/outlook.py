"""How a clique stands to members of a gang, by counting: if they fit, and how many empty trays they open.

Counting is exact where every size divides the next larger one, since then a larger member can change places
with smaller ones; elsewhere it says the least that is needed.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rackloom.claim.place.search.loads import Need


class Outlook(NamedTuple):
    """What a clique has for members of one need while the gang has nobody there."""

    capacity: int
    """Members on all trays."""
    in_part: int
    """Those of them on trays of which a part is in use."""
    on_empty: int
    """Members on the empty tray that takes most."""
    is_level: bool
    """No tray takes more members than any empty one: it does not matter which of these are used."""


Outlooks = Mapping[Need, Outlook]


def outlook_on(slots: Sequence[int], is_empty: Sequence[bool]) -> Outlook:
    """That of a clique of which each tray can serve so many members."""
    on_empty = [here for here, empty in zip(slots, is_empty, strict=True) if empty]
    return Outlook(
        capacity=sum(slots),
        in_part=sum(slots) - sum(on_empty),
        on_empty=max(on_empty, default=0),
        is_level=not on_empty or min(on_empty) == max(slots),
    )


def opened(outlooks: Outlooks, wanted: Mapping[Need, int]) -> int | None:
    """Empty trays that the members use at least; None where they cannot fit."""
    most = 0
    for need in wanted:
        outlook, places = outlooks[need], _places(need, wanted)
        if places > outlook.capacity:
            return None
        if places > outlook.in_part:
            most = max(most, -(-(places - outlook.in_part) // outlook.on_empty))
    return most


def count_that_fit(outlooks: Outlooks, inside: Mapping[Need, int], block: Mapping[Need, int]) -> int:
    """How many blocks that are alike fit at most beside the members that are `inside`."""
    together = {**block, **inside}
    return min(
        (outlooks[need].capacity - _places(need, inside)) // places
        for need in together
        if (places := _places(need, block))
    )


def is_exact(outlooks: Outlooks, wanted: Iterable[Need], spares: int) -> bool:
    """Whether counting tells if, and with how many empty trays, members fit, however they are seated.

    Larger ones have to be seated first, on the tray with least room for them.
    """
    needs = list(wanted)
    if spares or not all(outlooks[need].is_level for need in needs):
        return False
    sizes = sorted(need.gpus for need in needs)
    counted = all(need.devices is None and need.terms is None for need in needs)
    return len(needs) == 1 or (counted and all(large % small == 0 for small, large in pairwise(sizes)))


def _places(need: Need, wanted: Mapping[Need, int]) -> int:
    """Places for a member of `need` that members of its size, and of multiples of it, take."""
    if need.devices is not None or need.terms is not None:
        return wanted.get(need, 0)
    return sum(
        members * (other.gpus // need.gpus)
        for other, members in wanted.items()
        if other.devices is None and other.gpus % need.gpus == 0
    )
