"""A site while one gang is being placed: members are put on its trays and taken off again."""

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
        use = self._use(at)
        if not use.members:
            return self.ground.slots(need)[at]
        if use.devices != need.devices:
            # Claims of two kinds are not mixed on a tray: whether both fit was not asked.
            return 0
        by_gpus = self.free(at) // need.gpus if need.gpus else None
        if need.devices is None:
            return by_gpus or 0
        by_room = self.ground.rooms(need.devices)[at] - use.members
        return by_room if by_gpus is None else min(by_gpus, by_room)

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

    def put_back(self, at: int, need: Need, members: int) -> None:
        """Undo a `take`."""
        use, uses = self._use(at), self._uses[self.ground.clique[at]]
        if use.members > members:
            uses[at] = _Use(use.gpus - members * need.gpus, use.devices, use.members - members)
        else:
            del uses[at]

    def _use(self, at: int) -> _Use:
        return self._uses.get(self.ground.clique[at], {}).get(at, _NOTHING)
