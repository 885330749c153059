"""GangPlan (`rackloom.dev/v1alpha1`): the one object in which a gang and its plan are recorded."""

from collections.abc import Mapping

import msgspec

from rackloom.claim.cluster.actions import Create, Delete, Patch
from rackloom.claim.cluster.gang import marks
from rackloom.claim.domain.objects import Condition
from rackloom.claim.kube.api import Object
from rackloom.claim.kube.kinds import GANG_PLAN
from rackloom.claim.place.values import Gang, Plan, Site


class GangKey(msgspec.Struct, frozen=True, order=True):
    """Which gang: its pods are in one namespace and carry its name."""

    namespace: str
    name: str

    @property
    def called(self) -> str:
        """For messages, and the name by which the planner knows it."""
        return f"{self.namespace}/{self.name}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A GangPlan as read. `gang` and `plan` are None until the gang is placed."""

    key: GangKey
    uid: str
    resource_version: str
    created: str
    finalizers: tuple[str, ...]
    gang: Gang | None = None
    plan: Plan | None = None
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique of each tray: of a node that is gone nobody else knows it."""
    conditions: tuple[Condition, ...] = ()

    @property
    def reserved(self) -> tuple[str, ...]:
        """The trays that are this gang's: those with members, and its spares."""
        return () if self.plan is None else _trays(self.plan)

    def condition(self, type_: str) -> Condition | None:
        """The condition of a type."""
        return next((one for one in self.conditions if one.type == type_), None)


def record_of(obj: Object) -> Record:
    """Read a GangPlan; the API server has checked it against the schema."""
    meta, spec = obj["metadata"], obj.get("spec") or {}
    conditions = (obj.get("status") or {}).get("conditions") or ()
    gang, plan = _placed(spec)
    return Record(
        key=GangKey(meta["namespace"], meta["name"]),
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        created=meta.get("creationTimestamp", ""),
        finalizers=tuple(meta.get("finalizers") or ()),
        gang=gang,
        plan=plan,
        cliques={one["name"]: one["clique"] for one in spec.get("trays") or ()},
        conditions=tuple(msgspec.convert(one, Condition) for one in conditions),
    )


def _placed(spec: Object) -> tuple[Gang, Plan] | tuple[None, None]:
    """Gang and plan are written as one: where a person took a part of them away, the rest moves nobody."""
    if not spec.get("gang") or not (spec.get("plan") or {}).get("seats"):
        return None, None
    try:
        return msgspec.convert(spec["gang"], Gang), msgspec.convert(spec["plan"], Plan)
    except msgspec.ValidationError:
        return None, None


def opened(key: GangKey) -> Create:
    """Begin the record of a gang."""
    meta = {"namespace": key.namespace, "name": key.name, "finalizers": [marks.FINALIZER]}
    obj = {"apiVersion": GANG_PLAN.api_version, "kind": GANG_PLAN.kind, "metadata": meta, "spec": {}}
    return Create(kind=GANG_PLAN, obj=obj)


def planned(record: Record, gang: Gang, plan: Plan, site: Site) -> Patch:
    """Record a plan: one write, which fails if anybody has changed the record since it was read."""
    mine = set(_trays(plan))
    cliques = [
        {"name": one.name, "clique": one.clique} for one in site.trays if one.name in mine and one.clique
    ]
    spec = {"gang": msgspec.to_builtins(gang), "plan": msgspec.to_builtins(plan), "trays": cliques}
    return _respecified(record, spec)


def withdrawn(record: Record) -> Patch:
    """Forget a plan of which no pod was let go."""
    return _respecified(record, {"gang": None, "plan": None, "trays": None})


def reduced(record: Record, plan: Plan) -> Patch:
    """Record what is left of a plan when trays of it are given back."""
    cliques = [{"name": one, "clique": record.cliques[one]} for one in _trays(plan) if one in record.cliques]
    return _respecified(record, {"plan": msgspec.to_builtins(plan), "trays": cliques})


def closed(record: Record) -> tuple[Patch, Delete]:
    """End the record; its finalizer goes first, so that whoever deletes it sees it go."""
    left = [one for one in record.finalizers if one != marks.FINALIZER]
    meta = {"resourceVersion": record.resource_version, "finalizers": left}
    return _patch(record, {"metadata": meta}), Delete(
        kind=GANG_PLAN, namespace=record.key.namespace, name=record.key.name, uid=record.uid
    )


def status_json(conditions: tuple[Condition, ...]) -> Object:
    """The status as it is written."""
    return {"conditions": [msgspec.to_builtins(one) for one in conditions]}


def _trays(plan: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*plan.trays, *plan.spares)))


def _respecified(record: Record, spec: Object) -> Patch:
    # A merge patch goes into objects field by field: gang and plan are written with all of theirs each time.
    meta = {"resourceVersion": record.resource_version}
    return _patch(record, {"metadata": meta, "spec": spec})


def _patch(record: Record, patch: Object) -> Patch:
    return Patch(kind=GANG_PLAN, namespace=record.key.namespace, name=record.key.name, patch=patch)
