"""The CustomResourceDefinition of GangPlan (`rackloom.dev/v1alpha1`), as data.

`core.gangs.snapshot` reads and writes the objects. Gang and plan are written as msgspec encodes them, so
their fields are those of `Gang` and `GangPlan`.
"""

from typing import Any

from rackloom.core.domains.crds import conditions_schema
from rackloom.core.kubernetes.objects import GANG_PLAN

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
