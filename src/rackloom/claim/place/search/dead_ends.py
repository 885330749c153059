"""What a search has found out to lead nowhere: who was in which clique, whatever alike cliques are called."""

from collections.abc import Hashable
from functools import cached_property

from rackloom.claim.place.search.blocks import Wanted
from rackloom.claim.place.search.ground import Ground
from rackloom.claim.place.search.loads import in_order


class DeadEnds:
    """Choices for the first blocks with which the others were not placed. What fits depends on no more.

    Blocks that are alike may have changed places, and so may whole cliques that are alike. A choice is one
    number, with a digit for each thing that a clique can have inside: how many alike cliques have that. So
    the next choice is told from the last one by the digits of one clique, however many are in use.
    """

    def __init__(self, ground: Ground, wanted: Wanted) -> None:
        """None yet, for a gang that wants so much, and nobody in a clique."""
        self._ground = ground
        self._needs = in_order(wanted)
        self._bits = len(ground.cliques).bit_length()
        """Of a digit."""
        self._ones: dict[Hashable, int] = {}
        """A one in each digit."""
        self._counted: dict[str, int] = {}
        """What each clique adds to the choice."""
        self._changed: dict[str, Wanted] = {}
        """What was not counted yet: most searches come to no dead end."""
        self._choice = 0
        self._known: set[int] = set()

    def __len__(self) -> int:
        return len(self._known)

    def changed(self, clique: str, inside: Wanted) -> None:
        """The clique has these members of the gang now."""
        self._changed[clique] = inside

    def add(self) -> None:
        """Nothing comes of the choice that stands."""
        self._count()
        self._known.add(self._choice)

    def has(self, clique: str, inside: Wanted) -> bool:
        """Whether it is known that nothing comes of the choice that stands with these in a clique instead."""
        if not self._known:
            return False
        self._count()
        one = self._ones.get(self._digit(clique, inside))
        return one is not None and self._choice - self._counted.get(clique, 0) + one in self._known

    def _count(self) -> None:
        for clique, inside in self._changed.items():
            now = self._one(self._digit(clique, inside)) if inside else 0
            self._choice += now - self._counted.get(clique, 0)
            self._counted[clique] = now
        self._changed.clear()

    def _one(self, digit: Hashable) -> int:
        if digit not in self._ones:
            self._ones[digit] = 1 << self._bits * len(self._ones)
        return self._ones[digit]

    def _digit(self, clique: str, inside: Wanted) -> Hashable:
        return self._likeness[clique], frozenset(inside.items())

    @cached_property
    def _likeness(self) -> dict[str, int]:
        """A number for each clique, the same where their trays have the same left."""
        left = {
            clique: tuple(sorted(self._ground.vacancies(clique, self._needs)))
            for clique in self._ground.cliques
        }
        numbers = {trays: number for number, trays in enumerate(set(left.values()))}
        return {clique: numbers[trays] for clique, trays in left.items()}
