"""The CustomResourceDefinition of GangPlan (`rackloom.dev/v1alpha1`), as data.

`core.gangs.snapshot` reads and writes the objects. The schema is made from `RecordSpec` and `GangStatus`
there, so a new field is in it, and the API server does not prune it.
"""

from msgspec import inspect

from rackloom.core.cluster.objects import GANG_PLAN, Condition
from rackloom.core.domains.crds import (
    STATUS_SUBRESOURCE,
    JsonSchema,
    conditions_schema,
    object_schema,
    printer_column,
    resource_crd,
)
from rackloom.core.gangs.snapshot import GangStatus, RecordSpec


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
    spec, status = _schema_of(inspect.type_info(RecordSpec)), _schema_of(inspect.type_info(GangStatus))
    schema = object_schema({"spec": spec, "status": status})
    return resource_crd(GANG_PLAN, schema, columns, STATUS_SUBRESOURCE)


def _schema_of(kind: inspect.Type) -> JsonSchema:
    """The schema of a type in a record. A field that may be null is not required."""
    match kind:
        case inspect.StructType():
            properties = {field.encode_name: _schema_of(field.type) for field in kind.fields}
            required = [field.encode_name for field in kind.fields if field.required]
            return object_schema(properties, required=required or None)
        case inspect.VarTupleType(item_type=inspect.StructType(cls=item)) if item is Condition:
            return conditions_schema()
        case inspect.VarTupleType():
            items = _schema_of(kind.item_type)
            return {"type": "array", "items": items, "x-kubernetes-list-type": "atomic"}
        case inspect.UnionType():
            (written,) = (option for option in kind.types if not isinstance(option, inspect.NoneType))
            return _schema_of(written)
        case inspect.IntType():
            return {"type": "integer"} if kind.ge is None else {"type": "integer", "minimum": kind.ge}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.StrType():
            return {"type": "string"}
    raise TypeError(f"{kind} has no schema")
