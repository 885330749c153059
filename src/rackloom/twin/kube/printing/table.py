"""Objects as rows (meta.k8s.io/v1 Table)."""

from collections.abc import Iterable, Mapping
from typing import Any

from rackloom.claim.cluster.gang.crd import gang_crd
from rackloom.claim.domain.crds import crds
from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube import answers
from rackloom.twin.kube.printing.builtin import COLUMNS
from rackloom.twin.kube.printing.columns import AGE, NAME, UNKNOWN, Column
from rackloom.twin.kube.printing.declared import columns_of

_VERSION = "meta.k8s.io/v1"
_COLUMNS: Mapping[Kind, tuple[Column, ...]] = {**COLUMNS, **columns_of((*crds(), gang_crd()))}


def wants_table(accept: str) -> bool:
    """Whether the first thing that a client accepts is a table."""
    first = accept.split(",")[0].replace(" ", "").split(";")
    return {"as=Table", "v=v1", "g=meta.k8s.io"} <= set(first[1:])


def printed(
    kind: Kind, items: Iterable[Object], metadata: Object, now: float, included: str = "Metadata"
) -> Object:
    """The table of objects of a kind, now (seconds since 1970); `metadata` is that of their list.

    `included`: what of each object stands beside its row, "None", "Metadata" or "Object". Raises `Rejected`.
    """
    columns = _COLUMNS.get(kind, (NAME, AGE))
    return {
        "kind": "Table",
        "apiVersion": _VERSION,
        "metadata": metadata,
        "columnDefinitions": [_definition(one) for one in columns],
        "rows": [
            {"cells": [_cell(one, obj, now) for one in columns], **_beside(obj, included)} for obj in items
        ],
    }


def _cell(column: Column, obj: Object, now: float) -> Any:
    """What the object says there; one that is written otherwise than its type costs its own cell only."""
    try:
        return column.cell(obj, now)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
        return UNKNOWN


def _definition(column: Column) -> Object:
    return {
        "name": column.name,
        "type": column.type,
        "format": column.format,
        "description": "",
        "priority": column.priority,
    }


def _beside(obj: Object, included: str) -> Object:
    match included:
        case "None":
            return {}
        case "Metadata" | "":
            partial = {"kind": "PartialObjectMetadata", "apiVersion": _VERSION}
            return {"object": {**partial, "metadata": obj["metadata"]}}
        case "Object":
            return {"object": obj}
    raise answers.bad_request(f'unrecognized includeObject value: "{included}"')
