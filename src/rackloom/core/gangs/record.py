"""The GangPlan object (`rackloom.dev/v1alpha1`), its CRD, and the taint that reserves a node for it.

A GangPlan is the one object in which a gang and its plan are recorded. Gang and plan are written
together, in one patch that carries the resourceVersion, so it fails if anybody changed the object since
it was read. A GangPlan without a readable plan counts as not placed. Its finalizer stays while trays
may be reserved, so the record that names them outlives them.

A tray is reserved by a NoSchedule taint whose value is the UID of the GangPlan. The list of taints is
replaced as a whole together with the resourceVersion: another writer's change is never undone.
Releasing removes the taint of one plan and no other.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.core.domains.compute_domain import Condition
from rackloom.core.domains.crds import conditions_schema
from rackloom.core.gangs import spec
from rackloom.core.kubernetes.objects import (
    GANG_PLAN,
    NODE,
    CreateObject,
    DeleteObject,
    Object,
    PatchObject,
    not_ready_since,
)
from rackloom.core.place.placement_values import Gang, GangPlan, PlacementSite


class GangKey(msgspec.Struct, frozen=True, order=True):
    """A gang. Its pods are in one namespace and carry its name."""

    namespace: str
    name: str

    @property
    def full_name(self) -> str:
        """`namespace/name`: for messages, and the name of the gang in placement requests."""
        return f"{self.namespace}/{self.name}"


class GangRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A GangPlan as read. `gang` and `plan` are None until the gang is placed."""

    key: GangKey
    uid: str
    resource_version: str
    created: str
    finalizers: tuple[str, ...]
    gang: Gang | None = None
    plan: GangPlan | None = None
    cliques: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The clique of each tray. It is recorded because the node may be gone when it is needed."""
    conditions: tuple[Condition, ...] = ()

    @property
    def reserved(self) -> tuple[str, ...]:
        """The trays reserved for the gang: those with slots, and its spares."""
        return () if self.plan is None else _reserved_trays(self.plan)

    def condition(self, type_: str) -> Condition | None:
        """The condition of a type."""
        return next((condition for condition in self.conditions if condition.type == type_), None)


def read_record(obj: Object) -> GangRecord:
    """Read a GangPlan; the API server has checked it against the schema."""
    meta, spec = obj["metadata"], obj.get("spec") or {}
    conditions = (obj.get("status") or {}).get("conditions") or ()
    gang, plan = _read_gang_and_plan(spec)
    return GangRecord(
        key=GangKey(meta["namespace"], meta["name"]),
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        created=meta.get("creationTimestamp", ""),
        finalizers=tuple(meta.get("finalizers") or ()),
        gang=gang,
        plan=plan,
        cliques={tray["name"]: tray["clique"] for tray in spec.get("trays") or ()},
        conditions=tuple(msgspec.convert(condition, Condition) for condition in conditions),
    )


def _read_gang_and_plan(spec: Object) -> tuple[Gang, GangPlan] | tuple[None, None]:
    """Gang and plan are valid only together: if a person removed a part, the rest counts as no plan."""
    if not spec.get("gang") or not (spec.get("plan") or {}).get("seats"):
        return None, None
    try:
        return msgspec.convert(spec["gang"], Gang), msgspec.convert(spec["plan"], GangPlan)
    except msgspec.ValidationError:
        return None, None


def create_record(key: GangKey) -> CreateObject:
    """Create the record of a gang, without a plan."""
    meta = {"namespace": key.namespace, "name": key.name, "finalizers": [spec.GANG_FINALIZER]}
    obj = {"apiVersion": GANG_PLAN.api_version, "kind": GANG_PLAN.kind, "metadata": meta, "spec": {}}
    return CreateObject(kind=GANG_PLAN, obj=obj)


def record_plan(record: GangRecord, gang: Gang, plan: GangPlan, site: PlacementSite) -> PatchObject:
    """Record a plan: one write, which fails if anybody has changed the record since it was read."""
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
    """Record what is left of a plan when trays of it are released."""
    cliques = [
        {"name": tray, "clique": record.cliques[tray]}
        for tray in _reserved_trays(plan)
        if tray in record.cliques
    ]
    return _patch_spec(record, {"plan": msgspec.to_builtins(plan), "trays": cliques})


def close_record(record: GangRecord) -> tuple[PatchObject, DeleteObject]:
    """End the record. Its finalizer is removed first, so that a deletion under way can finish."""
    left = [finalizer for finalizer in record.finalizers if finalizer != spec.GANG_FINALIZER]
    meta = {"resourceVersion": record.resource_version, "finalizers": left}
    # Both writes are safe to repeat: a record that is gone after the first one needs no deletion.
    return _patch_record(record, {"metadata": meta}), DeleteObject(
        kind=GANG_PLAN, namespace=record.key.namespace, name=record.key.name, uid=record.uid
    )


def gang_status_json(conditions: tuple[Condition, ...]) -> Object:
    """The status as it is written."""
    return {"conditions": [msgspec.to_builtins(condition) for condition in conditions]}


def _reserved_trays(plan: GangPlan) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*plan.trays, *plan.spares)))


def _patch_spec(record: GangRecord, spec: Object) -> PatchObject:
    # A merge patch keeps fields that it does not name, so gang and plan are always written with all fields.
    meta = {"resourceVersion": record.resource_version}
    return _patch_record(record, {"metadata": meta, "spec": spec})


def _patch_record(record: GangRecord, patch: Object) -> PatchObject:
    return PatchObject(kind=GANG_PLAN, namespace=record.key.namespace, name=record.key.name, patch=patch)


# Nodes as a gang sees them: whether they are ready, and for which plans they are reserved.


class NodeTaint(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A taint of a node."""

    key: str
    effect: str
    value: str = ""
    time_added: str | None = None


class TrayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is a gang's tray, or was."""

    name: str
    resource_version: str
    taints: tuple[NodeTaint, ...] = ()
    not_ready_since: float | None = None
    """Seconds since the epoch; None while it is ready."""

    @property
    def holders(self) -> tuple[str, ...]:
        """UIDs of the GangPlans for which it is reserved: at most one, unless a person added one."""
        return tuple(taint.value for taint in self.taints if taint.key == spec.GANG_TAINT)

    def is_lost(self, now: float, after: float) -> bool:
        """Whether it has not been ready for `after` seconds."""
        return self.not_ready_since is not None and now - self.not_ready_since >= after


def read_tray_node(obj: Object) -> TrayNode:
    """Read a node."""
    meta = obj["metadata"]
    return TrayNode(
        name=meta["name"],
        resource_version=meta["resourceVersion"],
        taints=msgspec.convert((obj.get("spec") or {}).get("taints") or (), tuple[NodeTaint, ...]),
        not_ready_since=not_ready_since(obj),
    )


def reserve_tray(node: TrayNode, uid: str) -> PatchObject:
    """Add the taint of a plan, so that only pods that tolerate it are scheduled to the node."""
    return _with_taints(node, (*node.taints, NodeTaint(spec.GANG_TAINT, "NoSchedule", uid)))


def release_tray(node: TrayNode, uid: str) -> PatchObject:
    """Remove the taint of one plan from a node."""
    return _with_taints(
        node, tuple(taint for taint in node.taints if (taint.key, taint.value) != (spec.GANG_TAINT, uid))
    )


def release_trays(nodes: Mapping[str, TrayNode], names: tuple[str, ...], uid: str) -> tuple[PatchObject, ...]:
    """Remove the taint of one plan from several nodes."""
    return tuple(release_tray(nodes[name], uid) for name in names)


def _with_taints(node: TrayNode, taints: tuple[NodeTaint, ...]) -> PatchObject:
    # A merge patch replaces the whole list. The resourceVersion makes it fail if another writer was faster.
    patch = {
        "metadata": {"resourceVersion": node.resource_version},
        "spec": {"taints": [msgspec.to_builtins(taint) for taint in taints] or None},
    }
    return PatchObject(kind=NODE, namespace=None, name=node.name, patch=patch)


# The CustomResourceDefinition of GangPlan, as data.


_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string"}
_COUNT: _Schema = {"type": "integer", "minimum": 0}


def gang_crd() -> _Schema:
    """The CustomResourceDefinition of GangPlan."""
    singular = GANG_PLAN.kind.lower()
    named = {"kind": GANG_PLAN.kind, "listKind": f"{GANG_PLAN.kind}List", "plural": GANG_PLAN.plural}
    version = {
        "name": GANG_PLAN.version,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": _columns(),
        "schema": {"openAPIV3Schema": _object_schema({"spec": _spec_schema(), "status": _status_schema()})},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{GANG_PLAN.plural}.{GANG_PLAN.group}"},
        "spec": {
            "group": GANG_PLAN.group,
            "names": named | {"singular": singular},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _columns() -> list[_Schema]:
    shown = [
        {"name": type_, "type": "string", "jsonPath": f'.status.conditions[?(@.type=="{type_}")].status'}
        for type_ in ("Placed", "Reserved", "Bound")
    ]
    why = '.status.conditions[?(@.type=="Placed")].message'
    return [
        *shown,
        {"name": "Why", "type": "string", "jsonPath": why},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]


def _spec_schema() -> _Schema:
    tray = _object_schema({"name": _TEXT, "clique": _TEXT}, required=["name", "clique"])
    return _object_schema({"gang": _gang_schema(), "plan": _plan_schema(), "trays": _list_schema(tray)})


def _gang_schema() -> _Schema:
    group = _object_schema(
        {
            "name": _TEXT,
            "members": _COUNT,
            "gpus": _COUNT,
            "devices": _TEXT,
            "terms": _terms_schema(),
        },
        required=["name", "members", "gpus"],
    )
    flag = {"type": "boolean"}
    properties = {
        "name": _TEXT,
        "groups": _list_schema(group),
        "priority": {"type": "integer"},
        "segment": _COUNT,
        "apart": flag,
        "spares": _COUNT,
        "exclusive": flag,
    }
    return _object_schema(properties, required=["name", "groups"])


def _terms_schema() -> _Schema:
    return _object_schema(
        {"where": _TEXT, "likeness": _TEXT, "apart": _list_schema(_TEXT), "channel": {"type": "boolean"}}
    )


def _plan_schema() -> _Schema:
    seat = _object_schema(
        {"group": _TEXT, "member": _COUNT, "tray": _TEXT}, required=["group", "member", "tray"]
    )
    hole = _object_schema({"trays": _COUNT, "before": _COUNT, "after": _COUNT})
    properties = {
        "gang": _TEXT,
        "seats": _list_schema(seat),
        "cliques": _list_schema(_TEXT),
        "spares": _list_schema(_TEXT),
        "price": _list_schema(hole),
        "reason": _TEXT,
    }
    return _object_schema(properties, required=["gang", "seats", "cliques", "spares", "price", "reason"])


def _status_schema() -> _Schema:
    return _object_schema({"conditions": conditions_schema()})


def _list_schema(item: _Schema) -> _Schema:
    return {"type": "array", "items": item, "x-kubernetes-list-type": "atomic"}


def _object_schema(properties: _Schema, *, required: list[str] | None = None) -> _Schema:
    schema: _Schema = {"type": "object", "properties": properties}
    return schema if required is None else schema | {"required": required}
