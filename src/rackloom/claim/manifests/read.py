"""Manifests of claims, templates, classes, slices and nodes as values of the allocator.

Strict on purpose: what the API server would refuse or drop is refused here with the line, because a claim
that is planned without its misspelt selector is a plan for something else.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rackloom.claim.allocate.objects import (
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceClaimTemplate,
    ResourceSlice,
)
from rackloom.claim.manifests.documents import Document, FieldPath, read_documents
from rackloom.claim.manifests.rules import check_claim
from rackloom.claim.manifests.versions import GROUP, as_v1
from rackloom.errors import Refused

T = TypeVar("T")
_KINDS: dict[str, type[Any]] = {
    "DeviceClass": DeviceClass,
    "ResourceClaim": ResourceClaim,
    "ResourceClaimTemplate": ResourceClaimTemplate,
    "ResourceSlice": ResourceSlice,
}


class Manifests(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of files holds, in the order of the files."""

    claims: tuple[ResourceClaim, ...] = ()
    """Claims, and one claim of each template under the template's name."""
    classes: tuple[DeviceClass, ...] = ()
    slices: tuple[ResourceSlice, ...] = ()
    nodes: tuple[Node, ...] = ()
    skipped: tuple[str, ...] = ()
    """`file:line: kind` of objects that play no part in allocation (pods, services)."""


def read(paths: Iterable[Path]) -> Manifests:
    """All objects of the files. Refused with `file:line` and the path of the field."""
    return gathered(one for path in paths for one in read_documents(path))


def gathered(documents: Iterable[Document]) -> Manifests:
    """All objects of the documents. Refused with `file:line` and the path of the field."""
    found: dict[type[Any] | None, list[Any]] = {}
    for document in documents:
        value = decode(document)
        if value is None:
            kind = document.value.get("kind", "no kind")
            found.setdefault(None, []).append(f"{document.where()}: {kind}")
        elif isinstance(value, ResourceClaimTemplate):
            found.setdefault(ResourceClaim, []).append(claim_of(value))
        else:
            found.setdefault(type(value), []).append(value)
    return Manifests(
        claims=tuple(found.get(ResourceClaim, ())),
        classes=tuple(found.get(DeviceClass, ())),
        slices=tuple(found.get(ResourceSlice, ())),
        nodes=tuple(found.get(Node, ())),
        skipped=tuple(found.get(None, ())),
    )


def decode(document: Document) -> Any:
    """The value of a document, or None for a kind that plays no part here. Refused where it is malformed."""
    kind, version = document.value.get("kind"), str(document.value.get("apiVersion", ""))
    if kind == "Node" and version == "v1":
        return _converted(document, {"metadata": document.value.get("metadata", {})}, Node)
    if not version.startswith(f"{GROUP}/"):
        return None
    if kind not in _KINDS:
        return None
    fields = {name: field for name, field in as_v1(document).items() if name not in ("apiVersion", "kind")}
    value = _converted(document, fields, _KINDS[kind])
    if isinstance(value, ResourceClaim):
        check_claim(document, value.spec.devices, ("spec", "devices"))
    elif isinstance(value, ResourceClaimTemplate):
        check_claim(document, value.spec.spec.devices, ("spec", "spec", "devices"))
    return value


def claim_of(template: ResourceClaimTemplate) -> ResourceClaim:
    """The claim that a pod gets from a template, named after the template."""
    meta = msgspec.structs.replace(
        template.spec.metadata, name=template.metadata.name, namespace=template.metadata.namespace
    )
    return ResourceClaim(metadata=meta, spec=template.spec.spec)


def _converted(document: Document, fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        path = _path(place.removesuffix("`"))
        named = _title(document)
        field = place.removesuffix("`").lstrip(".") or "the object"
        raise Refused(
            f"{document.where(path)}: {named}, {field}: {problem}",
            nearest_fix=f"correct {field} (see the {GROUP}/v1 reference)",
        ) from error


def _title(document: Document) -> str:
    metadata = document.value.get("metadata")
    name = metadata.get("name", "(unnamed)") if isinstance(metadata, dict) else "(unnamed)"
    return f"{document.value.get('kind')} {name}"


def _path(place: str) -> FieldPath:
    """`.spec.devices[0].name` as the names and numbers on the way; `[...]` is some key of a map."""
    parts: list[str | int] = []
    for name, number in re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", place):
        parts.append(name or int(number))
    return tuple(parts)
