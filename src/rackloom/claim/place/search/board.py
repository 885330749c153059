"""A site while one gang is being placed: members are put on its trays and taken off again."""

from collections import Counter
from typing import NamedTuple

from rackloom.claim.place.search.ground import Ground
from rackloom.claim.place.search.loads import Need


class _Use(NamedTuple):
    """What the gang has on a tray."""

    gpus: int
    devices: str | None
    members: int


_NOTHING = _Use(0, None, 0)


class Board:
    """What is left of the ground; only trays that the gang uses are told anew."""

    def __init__(self, ground: Ground) -> None:
        """Nobody is on it yet."""
        self.ground = ground
        self._uses: dict[str, dict[int, _Use]] = {}
        """By clique, then by tray."""
        self._choosy: dict[int, Counter[Need]] = {}
        """Members with terms, by tray."""

    def capacity(self, clique: str, need: Need) -> int:
        """Members that the clique can serve."""
        slots = self.ground.slots(need)
        changed = [self.slots(at, need) - slots[at] for at in self._uses.get(clique, ())]
        return self.ground.outlooks(need)[clique].capacity + sum(changed)

    def empty(self, clique: str) -> int:
        """Open trays of the clique on which nothing is in use."""
        begun = [self.ground.is_empty[at] and use.gpus > 0 for at, use in self._uses.get(clique, {}).items()]
        return self.ground.empty[clique] - sum(begun)

    def is_empty(self, at: int) -> bool:
        """Whether nothing is in use on the tray, and it is open."""
        return self.ground.is_empty[at] and not self._use(at).gpus

    def slots(self, at: int, need: Need) -> int:
        """Members that the tray can serve."""
        use, most = self._use(at), self.ground.slots(need)[at]
        if not use.members:
            return most
        # Claims of two kinds are not mixed on a tray: whether both fit was not asked.
        if use.devices != need.devices or self._is_barred(at, need):
            return 0
        by_gpus = self.free(at) // need.gpus if need.gpus else most
        by_room = most if need.devices is None else self.ground.rooms(need)[at] - use.members
        return min(most, by_gpus, by_room)

    def free(self, at: int) -> int:
        """GPUs of the tray that nobody has."""
        return self.ground.free[at] - self._use(at).gpus

    def members(self, at: int) -> int:
        """Members of this gang on the tray."""
        return self._use(at).members

    def take(self, at: int, need: Need, members: int) -> None:
        """Put members on a tray."""
        use = self._use(at)
        now = _Use(use.gpus + members * need.gpus, need.devices, use.members + members)
        self._uses.setdefault(self.ground.clique[at], {})[at] = now
        if need.terms is not None:
            self._choosy.setdefault(at, Counter())[need] += members

    def put_back(self, at: int, need: Need, members: int) -> None:
        """Undo a `take`."""
        use, uses = self._use(at), self._uses[self.ground.clique[at]]
        if use.members > members:
            uses[at] = _Use(use.gpus - members * need.gpus, use.devices, use.members - members)
        else:
            del uses[at]
        if need.terms is not None:
            self._choosy[at][need] -= members

    def _is_barred(self, at: int, need: Need) -> bool:
        """Whether somebody of the gang on the tray keeps such a member off."""
        return need.terms is not None and any(
            members and need.bars(other) for other, members in self._choosy.get(at, Counter()).items()
        )

    def _use(self, at: int) -> _Use:
        return self._uses.get(self.ground.clique[at], {}).get(at, _NOTHING)
