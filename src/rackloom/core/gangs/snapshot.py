"""The objects of one gang: its GangPlan, the nodes reserved for it, and the snapshot that a decision uses.

A GangPlan (`rackloom.dev/v1alpha1`) is the one object in which a gang and its plan are recorded. Gang and
plan are written together, in one patch that carries the resourceVersion, so it fails if the object has
changed since it was read. A GangPlan without a readable plan counts as not placed. Its finalizer stays while
trays may be reserved, so the record that names them outlives them.

A tray is reserved by a NoSchedule taint with the UID of the GangPlan as its value. The list of taints is
replaced as a whole together with the resourceVersion: another writer's change is never undone.
Releasing removes the taint of one plan and no other.

A `GangSnapshot` holds the GangPlan, the member pods, the nodes of the plan and every node that carries
its taint, competing plans on the same nodes, the reported state of the pods' owners, and the last result of
the placement search. It describes one moment and never changes. `take_snapshot` reads `GangObjects`. They
come from the informer caches. Plan and pods are read again from the API server before anything is released,
deleted or planned: a stale cache would undo the writes of another leader.

A competing plan has its taint on a node of this plan, because two controllers wrote at the same time. A
withdrawn plan removes its taints and does not compete.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from rackloom.core.allocate.objects import convert_object, readable
from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import (
    GANG_FINALIZER,
    GANG_TAINT,
    GangKey,
    GangMember,
    GangSpec,
    TrayNode,
    read_gang_spec,
    read_member,
    read_tray_node,
)
from rackloom.core.cluster.gang_owners import OwnerWorkloads
from rackloom.core.cluster.nodes import Taint
from rackloom.core.cluster.objects import (
    GANG_PLAN,
    NODE,
    Condition,
    CreateObject,
    DeleteObject,
    Object,
    ObjectWrite,
    PatchObject,
    conditions_of,
    created_at,
    finalizers_of,
    name_of,
    namespace_of,
    uid_of,
    version_of,
)
from rackloom.core.cluster.state import ClusterState, TrayHold
from rackloom.core.cluster.trays import Gang, GangPlan, PlacementSite
from rackloom.core.domains.quota import SpareQuotas
from rackloom.core.domains.settings import QuotaMode
from rackloom.core.place.gang_planner import NodeUse
from rackloom.errors import Refused

# The operator's settings for the gang controller.


class GangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    settle: float = 2.0
    """Between the reservation of the last tray and the check of all trays: kube-scheduler may still bind a
    pod that it decided on before it saw the taint."""
    lost_after: float = 300.0
    """A tray that is not ready for this time is lost: its members are deleted and move to another tray. The
    node controller evicts pods after the same time."""
    bind_after: float = 120.0
    """A pod that was ungated and is unschedulable for this time is moved or recreated. A plan of which no pod
    was ungated is withdrawn when pods are missing for this time. For the last pods of a Job, its longest
    back-off is added."""
    again: float = 15.0
    """Between two attempts to repair a plan, and the shortest time between two reads of the owners of pods. A
    gang that does not fit is placed again when the cluster offers more."""
    max_spares: int = 8
    """Spare trays that all gangs of a namespace may keep together. No ResourceQuota counts them, since no pod
    runs on them."""
    clique_label: str = names.GPU_CLIQUE_LABEL
    """The node label that names the NVLink clique."""


class BesideKueue(msgspec.Struct, frozen=True, kw_only=True):
    """The effects of Kueue on gangs."""

    has_plans: bool = False
    """Workloads have plans. No gang takes their trays."""
    quota: QuotaMode = QuotaMode.NONE
    """Which ComputeDomains need quota. A gang's spare trays may not exceed the quota of those it uses."""


WITHOUT_KUEUE = BesideKueue()


def checked_gang_settings(settings: GangSettings) -> GangSettings:
    """The settings, unchanged. Raises Refused for invalid values."""
    for name in ("settle", "lost_after", "bind_after", "again"):
        if not 0 < getattr(settings, name) < float("inf"):
            raise Refused(f"{name} is {getattr(settings, name)}", nearest_fix="use seconds above 0")
    if settings.max_spares < 0:
        raise Refused(f"max_spares is {settings.max_spares}", nearest_fix="use 0 for none")
    if not settings.clique_label:
        raise Refused("clique_label is empty", nearest_fix=f"use {names.GPU_CLIQUE_LABEL}")
    return settings


# The GangPlan.


PLACED, RESERVED, BOUND = "Placed", "Reserved", "Bound"
"""Types of the conditions of a GangPlan."""
AWAITING_LAST_PODS = ("Unknown", "WaitingForMembers")
"""Status and reason of Placed while all pods have ended and slots are kept for those that the Job owes."""


class GangStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The status of a GangPlan, from which its schema is made (`crd`). It is written with all fields."""

    conditions: tuple[Condition, ...] = ()

    def condition(self, type_: str) -> Condition | None:
        """The condition of a type."""
        return next((condition for condition in self.conditions if condition.type == type_), None)


class GangRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A GangPlan as read. `gang` and `plan` are None until the gang is placed."""

    key: GangKey
    uid: str
    resource_version: str
    created: float
    """Seconds since the epoch."""
    finalizers: tuple[str, ...]
    gang: Gang | None = None
    plan: GangPlan | None = None
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique of each tray. It is recorded because the node may be gone when it is needed."""
    status: GangStatus = GangStatus()

    @property
    def reserved(self) -> tuple[str, ...]:
        """The trays reserved for the gang: those with slots, and its spares."""
        return () if self.plan is None else _reserved_trays(self.plan)


class _TrayClique(msgspec.Struct, frozen=True):
    name: str
    clique: str


class RecordSpec(msgspec.Struct, frozen=True):
    """The spec of a GangPlan, from which its schema is made (`crd`)."""

    gang: Gang | None = None
    plan: GangPlan | None = None
    trays: tuple[_TrayClique, ...] | None = None


class _RecordObject(msgspec.Struct, frozen=True):
    """A GangPlan as it is stored, perhaps under another schema, or changed by a person."""

    spec: Any = None


class _RecordStatus(msgspec.Struct, frozen=True):
    status: GangStatus | None = None


def read_record(obj: Object) -> GangRecord:
    """Read a GangPlan. A part that cannot be read counts as absent, since one object must stop no pass."""
    written = msgspec.convert(obj, _RecordObject).spec
    written = written if isinstance(written, Mapping) else {}
    trays = written.get("trays")
    # Gang and plan are valid only together: if a person removed a part, the rest counts as no plan.
    spec, is_placed = RecordSpec(), False
    with suppress(msgspec.ValidationError):
        spec = msgspec.convert({key: written.get(key) for key in ("gang", "plan")}, RecordSpec)
    if spec.gang is not None and spec.plan is not None and spec.plan.seats:
        is_placed = {slot.group for slot in spec.plan.seats} <= {group.name for group in spec.gang.groups}
    try:
        status = convert_object(obj, _RecordStatus).status or GangStatus()
    except msgspec.ValidationError:
        status = GangStatus(conditions=conditions_of(obj))
    return GangRecord(
        key=GangKey(namespace_of(obj) or "", name_of(obj)),
        uid=uid_of(obj),
        resource_version=version_of(obj),
        created=created_at(obj) or 0.0,
        finalizers=tuple(finalizers_of(obj)),
        gang=spec.gang if is_placed else None,
        plan=spec.plan if is_placed else None,
        cliques={
            tray.name: tray.clique for tray in readable(trays if isinstance(trays, list) else (), _TrayClique)
        },
        status=status,
    )


def create_record(key: GangKey) -> CreateObject:
    """Create the record of a gang, without a plan."""
    meta = {"namespace": key.namespace, "name": key.name, "finalizers": [GANG_FINALIZER]}
    obj = {"apiVersion": GANG_PLAN.api_version, "kind": GANG_PLAN.kind, "metadata": meta, "spec": {}}
    return CreateObject(kind=GANG_PLAN, obj=obj)


def record_plan(record: GangRecord, gang: Gang, plan: GangPlan, site: PlacementSite) -> PatchObject:
    """Record a plan: one write, which fails if the record has changed since it was read."""
    reserved = set(_reserved_trays(plan))
    cliques = [
        {"name": tray.name, "clique": tray.clique}
        for tray in site.trays
        if tray.name in reserved and tray.clique
    ]
    spec = {"gang": msgspec.to_builtins(gang), "plan": msgspec.to_builtins(plan), "trays": cliques}
    return _patch_spec(record, spec)


def withdraw_plan(record: GangRecord) -> PatchObject:
    """Withdraw a plan of which no pod was ungated."""
    return _patch_spec(record, {"gang": None, "plan": None, "trays": None})


def reduce_plan(record: GangRecord, plan: GangPlan) -> PatchObject:
    """Record the rest of a plan when some of its trays are released."""
    cliques = [
        {"name": tray, "clique": record.cliques[tray]}
        for tray in _reserved_trays(plan)
        if tray in record.cliques
    ]
    return _patch_spec(record, {"plan": msgspec.to_builtins(plan), "trays": cliques})


def close_record(record: GangRecord) -> tuple[PatchObject, DeleteObject]:
    """End the record. Its finalizer is removed first, so that a deletion under way can finish."""
    left = [finalizer for finalizer in record.finalizers if finalizer != GANG_FINALIZER]
    meta = {"resourceVersion": record.resource_version, "finalizers": left}
    # Both writes are safe to repeat: a record that is gone after the first one needs no deletion.
    return _patch_record(record, {"metadata": meta}), DeleteObject(
        kind=GANG_PLAN, namespace=record.key.namespace, name=record.key.name, uid=record.uid
    )


def planned_trays(writes: Iterable[ObjectWrite]) -> tuple[str, ...]:
    """The trays of the plans that writes record."""
    patches = (write.patch for write in writes if isinstance(write, PatchObject) and write.kind == GANG_PLAN)
    specs = (msgspec.convert(patch, _RecordObject).spec or {} for patch in patches)
    plans = (msgspec.convert(spec["plan"], GangPlan) for spec in specs if spec.get("plan"))
    return tuple(tray for plan in plans for tray in _reserved_trays(plan))


def _reserved_trays(plan: GangPlan) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*plan.trays, *plan.spares)))


def _patch_spec(record: GangRecord, spec: Object) -> PatchObject:
    # A merge patch keeps fields that it does not name, so gang and plan are always written with all fields.
    meta = {"resourceVersion": record.resource_version}
    return _patch_record(record, {"metadata": meta, "spec": spec})


def _patch_record(record: GangRecord, patch: Object) -> PatchObject:
    return PatchObject(kind=GANG_PLAN, namespace=record.key.namespace, name=record.key.name, patch=patch)


# Reservations: the taint of a plan on a node.


def reserve_tray(node: TrayNode, uid: str) -> PatchObject:
    """Add the taint of a plan, so that only pods that tolerate it are scheduled to the node."""
    return _with_taints(node, (*node.taints, Taint(GANG_TAINT, "NoSchedule", uid)))


def release_tray(node: TrayNode, uid: str) -> PatchObject:
    """Remove the taint of one plan from a node."""
    return _with_taints(
        node, tuple(taint for taint in node.taints if (taint.key, taint.value) != (GANG_TAINT, uid))
    )


def release_trays(nodes: Mapping[str, TrayNode], names: tuple[str, ...], uid: str) -> tuple[PatchObject, ...]:
    """Remove the taint of one plan from several nodes."""
    return tuple(release_tray(nodes[name], uid) for name in names)


def _with_taints(node: TrayNode, taints: tuple[Taint, ...]) -> PatchObject:
    # A merge patch replaces the whole list. The resourceVersion makes it fail if another writer was faster.
    patch = {
        "metadata": {"resourceVersion": node.resource_version},
        "spec": {"taints": [msgspec.to_builtins(taint) for taint in taints] or None},
    }
    return PatchObject(kind=NODE, namespace=None, name=node.name, patch=patch)


# The snapshot and its parts.


class CompetingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan with its taint on a tray of this one."""

    uid: str
    created: float
    is_whole: bool
    """All of its trays are reserved for it."""


class TrayUse(msgspec.Struct, frozen=True):
    """Everything that decides which trays of a gang are needed, except the state of its owners."""

    plan: GangPlan | None
    pods: frozenset[tuple[object, ...]]
    """UID, tray, node, and whether it succeeded, is being deleted, has ended."""


class OwnerCheck(msgspec.Struct, frozen=True):
    """The last read of the owners of the pods. Times are seconds since the epoch."""

    use: TrayUse
    since: float
    """When they were first read during this use."""
    at: float
    are_fewer: bool
    """Fewer pods are to come than the gang had at first."""

    def next_at(self, interval: float) -> float:
        """When to read them again. No event reports changes, so the interval doubles while there are none."""
        return self.at + max(interval, self.at - self.since)


class ClusterLists(msgspec.Struct, frozen=True, kw_only=True):
    """All facts for a placement. `trays.follow_lists` derives `running` and `use`, once per pass."""

    slices: tuple[Object, ...] = ()
    classes: tuple[Object, ...] = ()
    templates: tuple[Object, ...] = ()
    taint_rules: tuple[Object, ...] = ()
    """DeviceTaintRules."""
    state: ClusterState = ClusterState()
    """Nodes, pods, claims and devices."""
    running: PlacementSite = PlacementSite(())
    """All trays, and the holds of pods and claims on them (`trays.running_site`)."""
    use: NodeUse | None = None
    """The remaining CPU, memory and the like of each node. None if it is not counted."""
    records: tuple[GangRecord, ...] = ()
    """All GangPlans, including those written during this pass."""
    planned: Mapping[tuple[str, str], tuple[TrayHold, ...]] = msgspec.field(default_factory=dict)
    """Holds planned for workloads of Kueue with pods still to come, by namespace and UID."""
    spare_quotas: SpareQuotas | None = None
    """The spare trays for which ComputeDomains have quota. None if it is not counted."""


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
    """The plan if its trays were found free of other pods after they were reserved."""
    owners: OwnerWorkloads | None = None
    """The owners of the members. None if they were not read."""
    owner_check: OwnerCheck | None = None
    """None if the owners were not read since the controller started."""
    refusal: str = ""
    """The last refusal of the placement search. Empty if it did not refuse, or did not run."""
    cluster: ClusterLists = ClusterLists()
    """The rest of the cluster. It is filled in for the placement search only."""

    @property
    def is_answered(self) -> bool:
        """Whether the owners of the pods were read for exactly this use of the trays."""
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
        """Members that have not ended. Members that are being deleted still hold their devices."""
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
        """The use of its slots."""
        pods = (
            (member.uid, member.tray, member.node, member.is_done, member.is_being_deleted, member.ended)
            for member in self.members
        )
        return TrayUse(self.plan, frozenset(pods))

    def lost(self, after: float) -> tuple[str, ...]:
        """Trays of members that are gone, or not ready for some seconds."""
        trays = () if self.plan is None else self.plan.trays
        return tuple(name for name in trays if self.is_lost(name, after))

    def is_lost(self, tray: str, after: float) -> bool:
        """Whether a node is gone, or not ready for some seconds."""
        return tray not in self.nodes or self.nodes[tray].is_lost(self.now, after)

    def declared_spec(self) -> GangSpec:
        """The declaration of all living members. Raises Refused if it is not usable."""
        declarations = {read_gang_spec(member.annotations) for member in self.living}
        if len(declarations) != 1:
            fix = "give all pods of the gang the same rackloom.dev/gang-* annotations"
            raise Refused("its pods disagree about the gang", nearest_fix=fix)
        (declared,) = declarations
        outside = next((member for member in self.living if member.group not in dict(declared.sizes)), None)
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
    """By UID: at least the GangPlans with their taint on a node of the plan."""


def take_snapshot(objects: GangObjects, key: GangKey, now: float) -> GangSnapshot:
    """Everything about one gang. `now` is in seconds since the epoch."""
    record, nodes = None if objects.plan is None else read_record(objects.plan), dict[str, TrayNode]()
    if record is not None:
        # Nodes of the plan that are gone are missing. Nodes that left the plan may still carry its taint.
        planned = (objects.nodes[name] for name in record.reserved if name in objects.nodes)
        for node in map(read_tray_node, (*planned, *objects.reserved.get(record.uid, ()))):
            nodes[node.name] = node
    return GangSnapshot(
        key=key,
        now=now,
        record=record,
        members=tuple(map(read_member, objects.pods)),
        nodes=nodes,
        competitors=() if record is None else tuple(_competing_plans(objects, record, nodes)),
    )


def _competing_plans(
    objects: GangObjects, record: GangRecord, nodes: Mapping[str, TrayNode]
) -> Iterator[CompetingPlan]:
    uids = {uid for name in record.reserved if name in nodes for uid in nodes[name].holders}
    for uid in sorted(uids - {record.uid}):
        competitor = read_record(objects.plans[uid]) if uid in objects.plans else None
        # A withdrawn plan removes its own taints.
        if competitor is not None and competitor.plan is not None:
            reserved = set(map(name_of, objects.reserved.get(uid, ())))
            is_whole = reserved >= set(competitor.reserved)
            yield CompetingPlan(uid=uid, created=competitor.created, is_whole=is_whole)
