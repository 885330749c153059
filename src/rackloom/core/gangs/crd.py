"""The CustomResourceDefinition of GangPlan (`rackloom.dev/v1alpha1`), as data.

`core.gangs.snapshot` reads and writes the objects. Gang and plan are written as msgspec encodes them, so
their fields are those of `Gang` and `GangPlan`.
"""

from collections.abc import Sequence
from typing import Any

from rackloom.core.cluster.objects import GANG_PLAN
from rackloom.core.domains.crds import conditions_schema

_Schema = dict[str, Any]

_TEXT: _Schema = {"type": "string"}
_COUNT: _Schema = {"type": "integer", "minimum": 0}
_FLAG: _Schema = {"type": "boolean"}


def gang_crd() -> _Schema:
    """The CustomResourceDefinition of GangPlan."""
    status = _object_schema({"conditions": conditions_schema()})
    columns = [
        {"name": type_, "type": "string", "jsonPath": f'.status.conditions[?(@.type=="{type_}")].status'}
        for type_ in ("Placed", "Reserved", "Bound")
    ]
    why = '.status.conditions[?(@.type=="Placed")].message'
    columns += [
        {"name": "Why", "type": "string", "jsonPath": why},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    version = {
        "name": GANG_PLAN.version,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": _object_schema({"spec": _spec_schema(), "status": status})},
    }
    named = {"kind": GANG_PLAN.kind, "listKind": f"{GANG_PLAN.kind}List", "plural": GANG_PLAN.plural}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{GANG_PLAN.plural}.{GANG_PLAN.group}"},
        "spec": {
            "group": GANG_PLAN.group,
            "names": named | {"singular": GANG_PLAN.kind.lower()},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _spec_schema() -> _Schema:
    terms = _object_schema(
        {"where": _TEXT, "likeness": _TEXT, "apart": _list_schema(_TEXT), "channel": _FLAG}
    )
    group = _object_schema(
        {"name": _TEXT, "members": _COUNT, "gpus": _COUNT, "devices": _TEXT, "terms": terms},
        required=["name", "members", "gpus"],
    )
    gang = {
        "name": _TEXT,
        "groups": _list_schema(group),
        "priority": {"type": "integer"},
        "segment": _COUNT,
        "apart": _FLAG,
        "spares": _COUNT,
        "exclusive": _FLAG,
    }
    plan = {
        "gang": _TEXT,
        "seats": _list_schema(
            _object_schema({"group": _TEXT, "member": _COUNT, "tray": _TEXT}, required=True)
        ),
        "cliques": _list_schema(_TEXT),
        "spares": _list_schema(_TEXT),
        "price": _list_schema(_object_schema({"trays": _COUNT, "before": _COUNT, "after": _COUNT})),
        "reason": _TEXT,
    }
    tray = _object_schema({"name": _TEXT, "clique": _TEXT}, required=True)
    return _object_schema(
        {
            "gang": _object_schema(gang, required=["name", "groups"]),
            "plan": _object_schema(plan, required=True),
            "trays": _list_schema(tray),
        }
    )


def _list_schema(item: _Schema) -> _Schema:
    return {"type": "array", "items": item, "x-kubernetes-list-type": "atomic"}


def _object_schema(properties: _Schema, *, required: Sequence[str] | bool = ()) -> _Schema:
    """An object with some required properties; True: all of them."""
    schema: _Schema = {"type": "object", "properties": properties}
    names = list(properties) if required is True else list(required or ())
    return schema | {"required": names} if names else schema
