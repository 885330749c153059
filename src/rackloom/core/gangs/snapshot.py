"""The snapshot that a decision about one gang is based on, and the sources from which it is taken.

A `GangSnapshot` holds the GangPlan, the member pods, the nodes of the plan and every node that carries
its taint, competing plans on the same nodes, what the owners of the pods said, and the last answer of
the placement search. It is taken at about one moment and never changed.

`take_snapshot` reads from a `GangObjects` source. There are three: the informer caches; the caches with
plan and pods read again from the API server, before anything is taken back (a stale cache would take
back what another leader has ungated); and fresh lists, for one placement pass. Nodes need no second
read: a write to a node fails if it has changed.

A competing plan is one whose taint is on a tray of ours because two controllers wrote at the same time.
A plan that was given up removes its taints by itself and does not compete.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from rackloom.core.gangs import spec
from rackloom.core.gangs.members import GangMember, OwnerWorkloads, read_member
from rackloom.core.gangs.record import GangKey, GangRecord, TrayNode, read_record, read_tray_node
from rackloom.core.gangs.spec import GangSpec, read_gang_spec
from rackloom.core.kubernetes.objects import Object
from rackloom.core.kubernetes.pods import GANG_LABEL
from rackloom.core.place.placement_values import GangPlan
from rackloom.errors import Refused


class CompetingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan whose taint is on a tray of ours: two controllers wrote at once."""

    uid: str
    created: str
    is_whole: bool
    """All of its trays are reserved for it."""


class TrayUse(msgspec.Struct, frozen=True):
    """All of a gang that bears on which of its trays are needed, beside its Job."""

    plan: GangPlan | None
    pods: frozenset[tuple[object, ...]]
    """UID, tray, node; whether it is done, is going, has ended."""


class OwnerCheck(msgspec.Struct, frozen=True):
    """When the owners of the pods were asked last."""

    use: TrayUse
    since: float
    """When they were asked first while the use was this one; seconds since the epoch, as `at`."""
    at: float
    are_fewer: bool
    """Fewer pods are to come than the gang had at first."""

    def again_at(self, pause: float) -> float:
        """When they are asked again: no event tells of it when they say something else."""
        return self.at + max(pause, self.at - self.since)


class GangSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One gang."""

    key: GangKey
    now: float
    """Seconds since the epoch."""
    record: GangRecord | None
    members: tuple[GangMember, ...] = ()
    nodes: Mapping[str, TrayNode] = msgspec.field(default_factory=dict)
    """The trays of the plan that exist, and every node that carries its taint."""
    rivals: tuple[CompetingPlan, ...] = ()
    checked: GangPlan | None = None
    """The plan whose trays were seen empty of others after they were reserved."""
    makers: OwnerWorkloads | None = None
    """Who makes the members; None where nobody asked."""
    looked: OwnerCheck | None = None
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
    def living(self) -> tuple[GangMember, ...]:
        """Members that have not ended; those whose deletion is under way still hold their devices."""
        return tuple(member for member in self.members if not member.ended)

    @property
    def let_go(self) -> tuple[GangMember, ...]:
        """Living members that were let go to a tray."""
        return tuple(one for one in self.living if one.tray is not None)

    @property
    def strays(self) -> tuple[GangMember, ...]:
        """Living members that nobody held or let go: they go where the scheduler likes."""
        return tuple(one for one in self.living if one.gate is None and one.tray is None)

    @property
    def held(self) -> tuple[str, ...]:
        """Nodes that carry the plan's taint."""
        return tuple(name for name, node in self.nodes.items() if self.uid in node.holders)

    @property
    def use(self) -> TrayUse:
        """What its seats are used for."""
        pods = (
            (member.uid, member.tray, member.node, member.is_done, member.going, member.ended)
            for member in self.members
        )
        return TrayUse(None if self.record is None else self.record.plan, frozenset(pods))

    def lost(self, after: float) -> tuple[str, ...]:
        """Trays of members that are gone, or not ready for so many seconds."""
        trays = () if self.record is None or self.record.plan is None else self.record.plan.trays
        return tuple(name for name in trays if self.is_lost(name, after))

    def is_lost(self, tray: str, after: float) -> bool:
        """Whether a node is gone, or not ready for so many seconds."""
        return tray not in self.nodes or self.nodes[tray].is_lost(self.now, after)

    def wish(self) -> GangSpec:
        """What all living members say of their gang. Raises Refused where they say nothing useful."""
        wishes = {read_gang_spec(one.annotations) for one in self.living}
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


# Fresh lists for one placement pass.


class ClusterLists(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh lists of what bears on a placement."""

    nodes: tuple[Object, ...]
    pods: tuple[Object, ...]
    claims: tuple[Object, ...] = ()
    slices: tuple[Object, ...] = ()
    classes: tuple[Object, ...] = ()
    templates: tuple[Object, ...] = ()


# Claims and claim templates of one namespace.


class NamespaceClaims:
    """Claim templates and claims of one namespace, by name. Raises Refused for what is not there."""

    def __init__(self, objects: ClusterLists, namespace: str) -> None:
        self._templates = _by_name(objects.templates, namespace)
        self._claims = _by_name(objects.claims, namespace)

    def template(self, name: str) -> Object:
        """The spec of the claims that are made from a template."""
        return _existing(self._templates, "claim template", name)["spec"]["spec"]  # type: ignore[no-any-return]

    def claim(self, name: str) -> Object:
        """The spec of a claim."""
        return _existing(self._claims, "claim", name)["spec"]  # type: ignore[no-any-return]


def _by_name(objects: Iterable[Object], namespace: str) -> dict[str, Object]:
    return {obj["metadata"]["name"]: obj for obj in objects if obj["metadata"].get("namespace") == namespace}


def _existing(objects: Mapping[str, Object], what: str, name: str) -> Object:
    if name not in objects:
        raise Refused(f"{what} {name} does not exist", nearest_fix="create it")
    return objects[name]


# Sources of snapshots, and how a snapshot is taken from one.


class GangObjects(Protocol):
    """Objects as last seen, or as just listed."""

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of a gang."""
        ...

    def plan_of(self, uid: str) -> Object | None:
        """The GangPlan of a UID."""
        ...

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of a gang."""
        ...

    def node(self, name: str) -> Object | None:
        """A node."""
        ...

    def held(self, uid: str) -> Sequence[Object]:
        """The nodes that carry the taint of a plan."""
        ...


def gang_key_of(obj: Object) -> GangKey | None:
    """The gang of a pod."""
    meta = obj["metadata"]
    name = (meta.get("labels") or {}).get(GANG_LABEL)
    has_size = spec.SIZE_ANNOTATION in (meta.get("annotations") or {})
    return GangKey(meta["namespace"], name) if name and has_size else None


def reserving_plans(node: Object) -> tuple[str, ...]:
    """UIDs of the plans whose taint a node carries."""
    taints = (node.get("spec") or {}).get("taints") or ()
    return tuple(taint.get("value", "") for taint in taints if taint["key"] == spec.GANG_TAINT)


def take_snapshot(seen: GangObjects, key: GangKey, now: float) -> GangSnapshot:
    """Everything about one gang. `now` is in seconds since the epoch."""
    found = seen.plan(key)
    record = None if found is None else read_record(found)
    nodes = {} if record is None else _plan_nodes(seen, record)
    return GangSnapshot(
        key=key,
        now=now,
        record=record,
        members=tuple(read_member(pod) for pod in seen.pods(key)),
        nodes=nodes,
        rivals=() if record is None else tuple(_competing_plans(seen, record, nodes)),
    )


def _plan_nodes(seen: GangObjects, record: GangRecord) -> dict[str, TrayNode]:
    named = (seen.node(name) for name in record.reserved)
    views = (read_tray_node(one) for one in (*named, *seen.held(record.uid)) if one is not None)
    return {view.name: view for view in views}


def _competing_plans(
    seen: GangObjects, record: GangRecord, nodes: Mapping[str, TrayNode]
) -> Iterable[CompetingPlan]:
    uids = {uid for name in record.reserved if name in nodes for uid in nodes[name].holders}
    for uid in sorted(uids - {record.uid}):
        found = seen.plan_of(uid)
        other = None if found is None else read_record(found)
        # One that was given up takes its taints off by itself.
        if other is not None and other.plan is not None:
            held = {one["metadata"]["name"] for one in seen.held(uid)}
            yield CompetingPlan(uid=uid, created=other.created, is_whole=held >= set(other.reserved))


class ConfirmedGangObjects:
    """A `Seen` with the plan and the pods of one gang as the API server has them; the rest is as last seen.

    Nodes need no second look: what is written to them fails if they have changed.
    """

    def __init__(self, seen: GangObjects, plan: Object | None, pods: Sequence[Object]) -> None:
        self._plan = plan
        self._pods = pods
        self.plan_of = seen.plan_of
        self.node = seen.node
        self.held = seen.held

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of the gang."""
        return self._plan

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of the gang."""
        return [pod for pod in self._pods if gang_key_of(pod) == key]


class ListedGangObjects:
    """A `Seen` of fresh lists. `record` takes in a plan that was written since."""

    def __init__(self, plans: Iterable[Object], pods: Iterable[Object], nodes: Iterable[Object]) -> None:
        self._plans: dict[GangKey, Object] = {}
        self._records: dict[GangKey, GangRecord] = {}
        for plan in plans:
            self.record(plan)
        self._nodes = {one["metadata"]["name"]: one for one in nodes}
        self._pods: dict[GangKey, list[Object]] = {}
        self._held: dict[str, list[Object]] = {}
        for pod in pods:
            key = gang_key_of(pod)
            if key is not None:
                self._pods.setdefault(key, []).append(pod)
        for node in self._nodes.values():
            for uid in reserving_plans(node):
                self._held.setdefault(uid, []).append(node)

    @property
    def records(self) -> tuple[GangRecord, ...]:
        """All plans."""
        return tuple(self._records.values())

    def record(self, plan: Object) -> None:
        """Know a plan as it was just written."""
        record = read_record(plan)
        self._plans[record.key], self._records[record.key] = plan, record

    def plan(self, key: GangKey) -> Object | None:
        """The GangPlan of a gang."""
        return self._plans.get(key)

    def plan_of(self, uid: str) -> Object | None:
        """The GangPlan of a UID."""
        return next((plan for plan in self._plans.values() if plan["metadata"]["uid"] == uid), None)

    def pods(self, key: GangKey) -> Sequence[Object]:
        """The pods of a gang."""
        return self._pods.get(key, [])

    def node(self, name: str) -> Object | None:
        """A node."""
        return self._nodes.get(name)

    def held(self, uid: str) -> Sequence[Object]:
        """The nodes that carry the taint of a plan."""
        return self._held.get(uid, [])
