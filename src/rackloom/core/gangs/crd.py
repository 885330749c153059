"""The CustomResourceDefinition of GangPlan (`rackloom.dev/v1alpha1`), as data.

`core.gangs.snapshot` reads and writes the objects. Gang and plan are written as msgspec encodes them, so
their fields are those of `Gang` and `GangPlan`.
"""

from rackloom.core.cluster.objects import GANG_PLAN
from rackloom.core.domains.crds import (
    STATUS_SUBRESOURCE,
    JsonSchema,
    conditions_schema,
    object_schema,
    printer_column,
    resource_crd,
)

_TEXT: JsonSchema = {"type": "string"}
_COUNT: JsonSchema = {"type": "integer", "minimum": 0}
_FLAG: JsonSchema = {"type": "boolean"}


def gang_crd() -> JsonSchema:
    """The CustomResourceDefinition of GangPlan."""
    columns = [
        printer_column(type_, f'.status.conditions[?(@.type=="{type_}")].status')
        for type_ in ("Placed", "Reserved", "Bound")
    ]
    columns += [
        printer_column("Why", '.status.conditions[?(@.type=="Placed")].message'),
        printer_column("Age", ".metadata.creationTimestamp", type_="date"),
    ]
    status = object_schema({"conditions": conditions_schema()})
    schema = object_schema({"spec": _spec_schema(), "status": status})
    return resource_crd(GANG_PLAN, schema, columns, STATUS_SUBRESOURCE)


def _spec_schema() -> JsonSchema:
    terms = object_schema({"where": _TEXT, "likeness": _TEXT, "apart": _list_schema(_TEXT), "channel": _FLAG})
    group = object_schema(
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
        "seats": _list_schema(_whole_object({"group": _TEXT, "member": _COUNT, "tray": _TEXT})),
        "cliques": _list_schema(_TEXT),
        "spares": _list_schema(_TEXT),
        "price": _list_schema(object_schema({"trays": _COUNT, "before": _COUNT, "after": _COUNT})),
        "reason": _TEXT,
    }
    return object_schema(
        {
            "gang": object_schema(gang, required=["name", "groups"]),
            "plan": _whole_object(plan),
            "trays": _list_schema(_whole_object({"name": _TEXT, "clique": _TEXT})),
        }
    )


def _list_schema(item: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": item, "x-kubernetes-list-type": "atomic"}


def _whole_object(properties: JsonSchema) -> JsonSchema:
    """An object that has all of its properties."""
    return object_schema(properties, required=list(properties))
