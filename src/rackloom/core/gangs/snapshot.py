"""The snapshot that a decision about one gang is based on, and the objects from which it is taken.

A `GangSnapshot` holds the GangPlan, the member pods, the nodes of the plan and every node that carries
its taint, competing plans on the same nodes, what the owners of the pods report, and the last result of
the placement search. It describes one moment and never changes.

`take_snapshot` reads `GangObjects`. They come from three places: the informer caches; the caches with
plan and pods read again from the API server, before anything is released or deleted (a stale cache
would undo what another leader has done since); and fresh lists, for one placement pass. Nodes need no
second read: a write to a node fails if the node has changed.

A competing plan is one whose taint is on a node of this plan, because two controllers wrote at the same
time. A plan that was withdrawn removes its taints by itself and does not compete.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from rackloom.core.gangs import spec
from rackloom.core.gangs.members import GangMember, OwnerWorkloads, read_member
from rackloom.core.gangs.record import GangKey, GangRecord, TrayNode, read_record, read_tray_node
from rackloom.core.gangs.spec import GangSpec, read_gang_spec
from rackloom.core.kubernetes.objects import Object
from rackloom.core.kubernetes.pods import GANG_LABEL
from rackloom.core.place.placement_values import GangPlan, PlacementSite
from rackloom.errors import Refused

# The snapshot and its parts.


class CompetingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan whose taint is on a tray of this one."""

    uid: str
    created: str
    is_whole: bool
    """All of its trays are reserved for it."""


class TrayUse(msgspec.Struct, frozen=True):
    """Everything that decides which trays of a gang are needed, except the state of its owners."""

    plan: GangPlan | None
    pods: frozenset[tuple[object, ...]]
    """UID, tray, node; whether it succeeded, is being deleted, has ended."""


class OwnerCheck(msgspec.Struct, frozen=True):
    """The last time when the owners of the pods were asked. Times are seconds since the epoch."""

    use: TrayUse
    since: float
    """When they were first asked while the use was this one."""
    at: float
    are_fewer: bool
    """Fewer pods are to come than the gang had at first."""

    def next_at(self, interval: float) -> float:
        """When to ask again. No event reports a change, so the interval doubles while nothing changes."""
        return self.at + max(interval, self.at - self.since)


class ClusterLists(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh lists of everything that bears on a placement, and what is derived from them once per pass."""

    nodes: tuple[Object, ...] = ()
    pods: tuple[Object, ...] = ()
    claims: tuple[Object, ...] = ()
    slices: tuple[Object, ...] = ()
    classes: tuple[Object, ...] = ()
    templates: tuple[Object, ...] = ()
    running: PlacementSite = PlacementSite(())
    """All trays, and what pods and claims hold on them (`trays.running_site`)."""
    records: tuple[GangRecord, ...] = ()
    """All GangPlans, including those written during this pass."""


class GangSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One gang."""

    key: GangKey
    now: float
    """Seconds since the epoch."""
    record: GangRecord | None
    members: tuple[GangMember, ...] = ()
    nodes: Mapping[str, TrayNode] = msgspec.field(default_factory=dict)
    """The trays of the plan that exist, and every node that carries its taint."""
    competitors: tuple[CompetingPlan, ...] = ()
    checked: GangPlan | None = None
    """The plan whose trays were found empty of others after they were reserved."""
    owners: OwnerWorkloads | None = None
    """The owners of the members; None where nobody asked."""
    owner_check: OwnerCheck | None = None
    """None where the owners were not asked since the controller started."""
    refusal: str = ""
    """Why the placement search refused last; empty if it did not, or was not asked."""
    cluster: ClusterLists = ClusterLists()
    """The rest of the cluster; filled in for the placement search only."""

    @property
    def is_answered(self) -> bool:
        """Whether the owners of the pods were asked about exactly this use of the trays."""
        return self.owners is not None or (
            self.owner_check is not None and self.owner_check.use == self.tray_use
        )

    @property
    def plan(self) -> GangPlan | None:
        """The recorded plan."""
        return None if self.record is None else self.record.plan

    @property
    def uid(self) -> str:
        """The value of the plan's taint."""
        return "" if self.record is None else self.record.uid

    @property
    def living(self) -> tuple[GangMember, ...]:
        """Members that have not ended; those whose deletion is under way still hold their devices."""
        return tuple(member for member in self.members if not member.ended)

    @property
    def gated(self) -> tuple[GangMember, ...]:
        """Living members that wait at the gate, and are to stay."""
        living = (member for member in self.living if not member.is_being_deleted)
        return tuple(member for member in living if member.gate is not None)

    @property
    def ungated(self) -> tuple[GangMember, ...]:
        """Living members that were ungated for a tray."""
        return tuple(member for member in self.living if member.tray is not None)

    @property
    def unmanaged(self) -> tuple[GangMember, ...]:
        """Living members that were never gated, so that kube-scheduler places them freely."""
        return tuple(member for member in self.living if member.gate is None and member.tray is None)

    @property
    def held(self) -> tuple[str, ...]:
        """Nodes that carry the plan's taint."""
        return tuple(name for name, node in self.nodes.items() if self.uid in node.holders)

    @property
    def tray_use(self) -> TrayUse:
        """What its slots are used for."""
        pods = (
            (member.uid, member.tray, member.node, member.is_done, member.is_being_deleted, member.ended)
            for member in self.members
        )
        return TrayUse(self.plan, frozenset(pods))

    def lost(self, after: float) -> tuple[str, ...]:
        """Trays of members that are gone, or not ready for so many seconds."""
        trays = () if self.plan is None else self.plan.trays
        return tuple(name for name in trays if self.is_lost(name, after))

    def is_lost(self, tray: str, after: float) -> bool:
        """Whether a node is gone, or not ready for so many seconds."""
        return tray not in self.nodes or self.nodes[tray].is_lost(self.now, after)

    def declared_spec(self) -> GangSpec:
        """What all living members declare. Raises Refused where they declare nothing usable."""
        declarations = {read_gang_spec(member.annotations) for member in self.living}
        if len(declarations) != 1:
            fix = "give all pods of the gang the same rackloom.dev/gang-* annotations"
            raise Refused("its pods disagree about the gang", nearest_fix=fix)
        (declared,) = declarations
        outside = next((member for member in self.living if not declared.has(member.group)), None)
        if outside is not None:
            groups = " or ".join(name for name, _ in declared.sizes)
            fix = f"set its label rackloom.dev/gang-group to {groups}"
            raise Refused(f"pod {outside.name} is of group {outside.group!r}", nearest_fix=fix)
        return declared


# The objects from which a snapshot is taken.


class GangObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that concern one gang. The mappings may hold objects of other gangs too."""

    plan: Object | None = None
    pods: tuple[Object, ...] = ()
    nodes: Mapping[str, Object] = msgspec.field(default_factory=dict)
    """By name: at least the nodes of the plan that exist."""
    reserved: Mapping[str, Iterable[Object]] = msgspec.field(default_factory=dict)
    """By UID of a GangPlan, the nodes that carry its taint."""
    plans: Mapping[str, Object] = msgspec.field(default_factory=dict)
    """By UID: at least the GangPlans whose taint is on a node of the plan."""


def objects_by_gang(
    plans: Iterable[Object], pods: Iterable[Object], nodes: Iterable[Object]
) -> dict[GangKey, GangObjects]:
    """The objects of every gang, from lists of the whole cluster."""
    plans_by_uid = {plan["metadata"]["uid"]: plan for plan in plans}
    plan_of = {read_record(plan).key: plan for plan in plans_by_uid.values()}
    nodes_by_name = {node["metadata"]["name"]: node for node in nodes}
    pods_of: dict[GangKey, list[Object]] = defaultdict(list)
    reserved: dict[str, list[Object]] = defaultdict(list)
    for pod in pods:
        if (key := gang_key_of(pod)) is not None:
            pods_of[key].append(pod)
    for node in nodes_by_name.values():
        for uid in reserving_plans(node):
            reserved[uid].append(node)
    return {
        key: GangObjects(
            plan=plan_of.get(key),
            pods=tuple(pods_of.get(key, ())),
            nodes=nodes_by_name,
            reserved=reserved,
            plans=plans_by_uid,
        )
        for key in plan_of.keys() | pods_of.keys()
    }


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


def take_snapshot(objects: GangObjects, key: GangKey, now: float) -> GangSnapshot:
    """Everything about one gang. `now` is in seconds since the epoch."""
    record = None if objects.plan is None else read_record(objects.plan)
    nodes = {} if record is None else _plan_nodes(objects, record)
    return GangSnapshot(
        key=key,
        now=now,
        record=record,
        members=tuple(map(read_member, objects.pods)),
        nodes=nodes,
        competitors=() if record is None else tuple(_competing_plans(objects, record, nodes)),
    )


def _plan_nodes(objects: GangObjects, record: GangRecord) -> dict[str, TrayNode]:
    planned = (objects.nodes[name] for name in record.reserved if name in objects.nodes)
    nodes = map(read_tray_node, (*planned, *objects.reserved.get(record.uid, ())))
    return {node.name: node for node in nodes}


def _competing_plans(
    objects: GangObjects, record: GangRecord, nodes: Mapping[str, TrayNode]
) -> Iterator[CompetingPlan]:
    uids = {uid for name in record.reserved if name in nodes for uid in nodes[name].holders}
    for uid in sorted(uids - {record.uid}):
        competitor = read_record(objects.plans[uid]) if uid in objects.plans else None
        # A plan that was withdrawn takes its taints off by itself.
        if competitor is not None and competitor.plan is not None:
            reserved = {node["metadata"]["name"] for node in objects.reserved.get(uid, ())}
            is_whole = reserved >= set(competitor.reserved)
            yield CompetingPlan(uid=uid, created=competitor.created, is_whole=is_whole)
