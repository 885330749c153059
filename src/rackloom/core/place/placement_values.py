"""The placement problem and its solution as values: gang and plan. The site is in `core.cluster.trays`.

A `Gang` runs whole or not at all. Its groups have interchangeable members. Without a segment size, all
groups with the same `share` are in one clique; with one, each group is cut into segments, each in one
clique. A group whose members take no device (an MPI launcher) is a helper: it goes beside the first
member that does.

`PlacementTerms` are what a member asks beside devices: a kind of tray (`where`), the IMEX channel of its
node (there is one per node, and it belongs to one ComputeDomain at a time), and groups that it must not
share a tray with.

A `GangPlan` assigns every member to a tray, names the spare trays, and states the price in fragmentation.
"""

import msgspec


class PlacementTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a member requires beside devices: of its tray, and of the other members there."""

    where: str = ""
    """A key of `PlacementTray.closed`; "": any tray that is open."""
    channel: bool = False
    """It has the IMEX channel of its tray: a node has one, and belongs to one ComputeDomain at a time."""
    likeness: str = ""
    """Its name in `apart`."""
    apart: tuple[str, ...] = ()
    """Likenesses, perhaps its own, that are on no tray with it; the relation is symmetric."""

    def bar(self, other: "PlacementTerms") -> bool:
        """Whether two members with these terms are never on one tray."""
        return (self.channel and other.channel) or other.likeness in self.apart


class GangGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Interchangeable members of a gang."""

    name: str
    members: int
    gpus: int
    """GPUs of one member, whether counted (`nvidia.com/gpu`) or claimed."""
    devices: str | None = None
    """A kind of claims (GPUs, NICs) that each member has: a key of `PlacementTray.rooms`."""
    share: str = ""
    """Groups with the same word here are in one clique (prefill here, decode there); segments come first."""
    terms: PlacementTerms | None = None
    """None: it requires nothing else."""
    follows: bool = False
    """Its ranks go on from those of the group before it, so a segment may have members of both."""

    @property
    def has_channel(self) -> bool:
        """Each member has an IMEX channel."""
        return self.terms is not None and self.terms.channel

    @property
    def is_helper(self) -> bool:
        """It takes no device (an MPI launcher), so it goes beside the first member that does."""
        return self.gpus == 0 and self.devices is None and not self.has_channel


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """A job that runs whole or not at all."""

    name: str
    groups: tuple[GangGroup, ...]
    priority: int = 0
    preempts: bool = True
    """Jobs of lower priority may be ended for it."""
    segment: int | None = None
    """Members that must share a clique: each group, with those that follow it, is cut into segments of this
    many. None: all groups of the same `share` are in one clique."""
    spares: int = 0
    """Trays to leave free in each clique that is used, for a member whose tray is lost."""
    exclusive: bool = False
    """Takes only trays that are empty, and each of them whole (they are reserved by a taint)."""

    @property
    def device_groups(self) -> tuple[GangGroup, ...]:
        """All groups but the helpers."""
        return tuple(group for group in self.groups if not group.is_helper)


class MemberAssignment(msgspec.Struct, frozen=True):
    """One member on its tray."""

    group: str
    member: int
    """From 0 within the group."""
    tray: str


REGION_SIZES = (16, 8, 4, 2, 1)
"""Gang sizes in trays that are watched, largest first: the recommended segments (16 of an NVL72's 18)."""


class FreeRegionCount(msgspec.Struct, frozen=True):
    """How many gangs of a size the empty trays of the site can take, each in one clique."""

    trays: int
    before: int
    after: int


class GangPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A tray for every member, and why."""

    gang: str
    seats: tuple[MemberAssignment, ...]
    """Groups in the order of the gang, members from 0."""
    cliques: tuple[str, ...]
    """In the order of the members that use them."""
    spares: tuple[str, ...]
    """Trays left free for this gang, all in `cliques`."""
    price: tuple[FreeRegionCount, ...]
    """The free regions of each size that the plan closes: its cost in fragmentation."""
    reason: str

    @property
    def trays(self) -> tuple[str, ...]:
        """The trays that carry a member, each once."""
        return tuple(dict.fromkeys(member.tray for member in self.seats))
