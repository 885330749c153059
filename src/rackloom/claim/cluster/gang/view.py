"""All that a decision about one gang rests on, read from the cluster at about one moment."""

from collections.abc import Mapping

import msgspec

from rackloom.claim.cluster.gang.makers import Makers
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.record import GangKey, Record
from rackloom.claim.cluster.gang.trays import NodeView
from rackloom.claim.cluster.gang.wishes import Wish, read_wish
from rackloom.claim.place.values import Plan
from rackloom.errors import Refused


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan whose taint is on a tray of ours: two controllers wrote at once."""

    uid: str
    created: str
    is_whole: bool
    """All of its trays are reserved for it."""


class Use(msgspec.Struct, frozen=True):
    """All of a gang that bears on which of its trays are needed, beside its Job."""

    plan: Plan | None
    pods: frozenset[tuple[object, ...]]
    """UID, tray, node; whether it is done, is going, has ended."""


class Looked(msgspec.Struct, frozen=True):
    """When the owners of the pods were asked last."""

    use: Use
    since: float
    """When they were asked first while the use was this one; seconds since the epoch, as `at`."""
    at: float
    are_fewer: bool
    """Fewer pods are to come than the gang had at first."""

    def again_at(self, pause: float) -> float:
        """When they are asked again: no event tells of it when they say something else."""
        return self.at + max(pause, self.at - self.since)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One gang."""

    key: GangKey
    now: float
    """Seconds since the epoch."""
    record: Record | None
    members: tuple[Member, ...] = ()
    nodes: Mapping[str, NodeView] = msgspec.field(default_factory=dict)
    """The trays of the plan that exist, and every node that carries its taint."""
    rivals: tuple[Rival, ...] = ()
    checked: Plan | None = None
    """The plan whose trays were seen empty of others after they were reserved."""
    makers: Makers | None = None
    """Who makes the members; None where nobody asked."""
    looked: Looked | None = None
    """None where the owners were not asked since the controller began."""
    refusal: str = ""
    """Why the planner could not help when it was asked last; empty if it could, or was not asked."""

    @property
    def is_answered(self) -> bool:
        """Whether the owners of the pods were asked about just this use of the trays."""
        return self.makers is not None or (self.looked is not None and self.looked.use == self.use)

    @property
    def uid(self) -> str:
        """The value of the plan's taint."""
        return "" if self.record is None else self.record.uid

    @property
    def living(self) -> tuple[Member, ...]:
        """Members that have not ended; those whose deletion is under way still hold their devices."""
        return tuple(one for one in self.members if not one.ended)

    @property
    def let_go(self) -> tuple[Member, ...]:
        """Living members that were let go to a tray."""
        return tuple(one for one in self.living if one.tray is not None)

    @property
    def strays(self) -> tuple[Member, ...]:
        """Living members that nobody held or let go: they go where the scheduler likes."""
        return tuple(one for one in self.living if one.gate is None and one.tray is None)

    @property
    def held(self) -> tuple[str, ...]:
        """Nodes that carry the plan's taint."""
        return tuple(name for name, node in self.nodes.items() if self.uid in node.holders)

    @property
    def use(self) -> Use:
        """What its seats are used for."""
        pods = ((one.uid, one.tray, one.node, one.is_done, one.going, one.ended) for one in self.members)
        return Use(None if self.record is None else self.record.plan, frozenset(pods))

    def lost(self, after: float) -> tuple[str, ...]:
        """Trays of members that are gone, or not ready for so many seconds."""
        trays = () if self.record is None or self.record.plan is None else self.record.plan.trays
        return tuple(name for name in trays if self.is_lost(name, after))

    def is_lost(self, tray: str, after: float) -> bool:
        """Whether a node is gone, or not ready for so many seconds."""
        return tray not in self.nodes or self.nodes[tray].is_lost(self.now, after)

    def wish(self) -> Wish:
        """What all living members say of their gang. Raises Refused where they say nothing useful."""
        wishes = {read_wish(one.annotations) for one in self.living}
        if len(wishes) != 1:
            fix = "give all pods of the gang the same rackloom.dev/gang-* annotations"
            raise Refused("its pods disagree about the gang", nearest_fix=fix)
        (wish,) = wishes
        outside = next((one for one in self.living if not wish.has(one.group)), None)
        if outside is not None:
            groups = " or ".join(name for name, _ in wish.sizes)
            fix = f"set its label rackloom.dev/gang-group to {groups}"
            raise Refused(f"pod {outside.name} is of group {outside.group!r}", nearest_fix=fix)
        return wish
