"""The CustomResourceDefinition of GangPlan, as data."""

from typing import Any

from rackloom.claim.domain.crds import conditions_schema
from rackloom.claim.kube.kinds import GANG_PLAN

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def gang_crd() -> Schema:
    """Ready to be applied."""
    singular = GANG_PLAN.kind.lower()
    named = {"kind": GANG_PLAN.kind, "listKind": f"{GANG_PLAN.kind}List", "plural": GANG_PLAN.plural}
    version = {
        "name": GANG_PLAN.version,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": _columns(),
        "schema": {"openAPIV3Schema": _object({"spec": _spec(), "status": _status()})},
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


def _columns() -> list[Schema]:
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


def _spec() -> Schema:
    tray = _object({"name": _TEXT, "clique": _TEXT}, required=["name", "clique"])
    return _object({"gang": _gang(), "plan": _plan(), "trays": _list(tray)})


def _gang() -> Schema:
    group = _object(
        {
            "name": _TEXT,
            "members": _COUNT,
            "gpus": _COUNT,
            "devices": _TEXT,
            "terms": _terms(),
        },
        required=["name", "members", "gpus"],
    )
    flag = {"type": "boolean"}
    properties = {
        "name": _TEXT,
        "groups": _list(group),
        "priority": {"type": "integer"},
        "segment": _COUNT,
        "apart": flag,
        "spares": _COUNT,
        "exclusive": flag,
    }
    return _object(properties, required=["name", "groups"])


def _terms() -> Schema:
    return _object({"where": _TEXT, "likeness": _TEXT, "apart": _list(_TEXT), "channel": {"type": "boolean"}})


def _plan() -> Schema:
    seat = _object({"group": _TEXT, "member": _COUNT, "tray": _TEXT}, required=["group", "member", "tray"])
    hole = _object({"trays": _COUNT, "before": _COUNT, "after": _COUNT})
    properties = {
        "gang": _TEXT,
        "seats": _list(seat),
        "cliques": _list(_TEXT),
        "spares": _list(_TEXT),
        "price": _list(hole),
        "reason": _TEXT,
    }
    return _object(properties, required=["gang", "seats", "cliques", "spares", "price", "reason"])


def _status() -> Schema:
    return _object({"conditions": conditions_schema()})


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item, "x-kubernetes-list-type": "atomic"}


def _object(properties: Schema, *, required: list[str] | None = None) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    return schema if required is None else schema | {"required": required}
