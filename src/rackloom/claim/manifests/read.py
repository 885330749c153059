"""Manifests of claims, templates, classes, slices and nodes as values of the allocator.

Reading is strict. A field that the API server would refuse or drop is refused with its line, because a
claim that is planned without its misspelt selector is a plan for something else.

1. `as_v1` converts older versions and sets the server's defaults. v1beta1 has flat requests and wraps a
   device's fields in `basic`. v1beta2 and v1 are the same.
2. `decode_object` converts an object into its struct and names the field that does not fit. Kinds that
   play no part in allocation are skipped.
3. `check_claim_rules` has the checks of the API server beyond types: unique request names, no negative
   counts, constraints that name existing requests, and derived attributes that a constraint compares and
   that do not cost too much.

A ResourceClaimTemplate yields the claim that a pod would get from it, under the template's name.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rackloom.claim.manifests.documents import CLAIM_KINDS, Document, FieldPath, read_documents
from rackloom.core.allocate.objects import (
    DeviceClaim,
    DeviceClass,
    DeviceRequest,
    Node,
    ResourceClaim,
    ResourceClaimTemplate,
    ResourceSlice,
    convert_object,
)
from rackloom.core.allocate.sharing import SharedParts
from rackloom.core.allocate.taint_rules import DeviceTaintRule, with_taint_rules
from rackloom.core.cluster.objects import DEVICE_TAINT_RULES, NODE, title_in_file
from rackloom.errors import Refused

# API versions and server defaults.


GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
_OF_REQUEST = ("name", "firstAvailable")
Fields = dict[str, Any]


def as_v1(document: Document) -> Fields:
    """The object as resource.k8s.io/v1 with the server's defaults. Refused for an unknown version."""
    version = str(document.value.get("apiVersion", ""))
    group, _, number = version.partition("/")
    if group != GROUP or number not in VERSIONS:
        raise Refused(
            f"{document.where(('apiVersion',))}: apiVersion {version!r} is not known here",
            nearest_fix=f"use {GROUP}/v1",
        )
    value = document.value
    if number == "v1beta1":
        value = _from_v1beta1(value)
    return _list_changed(value, _requests_path(value), _request_with_defaults)


def _from_v1beta1(value: Fields) -> Fields:
    if value.get("kind") == "ResourceSlice":
        return _list_changed(value, ("spec", "devices"), _device_from_v1beta1)
    return _list_changed(value, _requests_path(value), _request_from_v1beta1)


def _device_from_v1beta1(device: Fields) -> Fields:
    basic = device.get("basic")
    if not isinstance(basic, dict):
        return device
    return {name: field for name, field in device.items() if name != "basic"} | basic


def _request_from_v1beta1(request: Fields) -> Fields:
    """A flat request is an exact one. A request with alternatives has the same form in all versions."""
    if "firstAvailable" in request or "exactly" in request:
        return request
    exact = {name: field for name, field in request.items() if name not in _OF_REQUEST}
    return {"name": request["name"], "exactly": exact} if "name" in request else {"exactly": exact}


def _request_with_defaults(request: Fields) -> Fields:
    changed = dict(request)
    if isinstance(request.get("exactly"), dict):
        changed["exactly"] = _exact_with_defaults(request["exactly"])
    if isinstance(request.get("firstAvailable"), list):
        changed["firstAvailable"] = [
            _exact_with_defaults(alternative) if isinstance(alternative, dict) else alternative
            for alternative in request["firstAvailable"]
        ]
    return changed


def _exact_with_defaults(ask: Fields) -> Fields:
    changed = {"allocationMode": "ExactCount", **ask}
    if changed["allocationMode"] == "ExactCount":
        # The API server takes 0 for "not given".
        changed["count"] = changed.get("count") or 1
    if isinstance(ask.get("tolerations"), list):
        changed["tolerations"] = [
            {"operator": "Equal", **toleration} if isinstance(toleration, dict) else toleration
            for toleration in ask["tolerations"]
        ]
    return changed


def _requests_path(value: Fields) -> tuple[str, ...]:
    inner = ("spec", "devices", "requests")
    return ("spec", *inner) if value.get("kind") == "ResourceClaimTemplate" else inner


def _list_changed(value: Fields, path: tuple[str, ...], change: Callable[[Fields], Fields]) -> Fields:
    """A copy in which `change` was applied to each mapping of the list at `path`, if there is one."""
    name, rest = path[0], path[1:]
    inner = value.get(name)
    if rest and isinstance(inner, dict):
        return value | {name: _list_changed(inner, rest, change)}
    if not rest and isinstance(inner, list):
        return value | {name: [change(item) if isinstance(item, dict) else item for item in inner]}
    return value


# Rules of the API server beyond types.


def check_claim_rules(document: Document, claim: DeviceClaim, at: FieldPath) -> None:
    """Refuse a claim that the API server would refuse, with the line of the field. `at` is its path."""
    names = [request.name for request in claim.requests]
    for number, request in enumerate(claim.requests):
        where = (*at, "requests", number)
        if request.name in names[:number]:
            raise _rule_violation(
                document, where, f"two requests are called {request.name!r}", "give each its own name"
            )
        if any(spec.count < 0 for spec in request.specs):
            raise _rule_violation(
                document, where, f"request {request.name!r} has a negative count", "ask for 1 or more"
            )
    known = {name for request in claim.requests for name in _request_names(request)}
    for number, constraint in enumerate(claim.constraints):
        unknown = [name for name in constraint.requests if name not in known]
        if unknown:
            raise _rule_violation(
                document,
                (*at, "constraints", number),
                f"the constraint names request {unknown[0]!r}, which the claim does not have",
                f"name {' or '.join(names)}",
            )
    if any(spec.derived_attributes for request in claim.requests for spec in request.specs):
        _check_derived_attributes(document, claim, at)


def _check_derived_attributes(document: Document, claim: DeviceClaim, at: FieldPath) -> None:
    # Few claims derive anything: the others do not load CEL.
    from rackloom.claim.manifests.derived import derived_violation

    wrong = derived_violation(claim)
    if wrong is not None:
        raise _rule_violation(document, (*at, *wrong.where), wrong.reason, wrong.fix)


def _request_names(request: DeviceRequest) -> list[str]:
    return [request.name, *(f"{request.name}/{spec.name}" for spec in request.first_available)]


def _rule_violation(document: Document, where: FieldPath, reason: str, fix: str) -> Refused:
    return Refused(f"{document.where(where)}: {reason}", nearest_fix=fix)


# Decoding.


T = TypeVar("T")
_KINDS: dict[str, type[Any]] = {
    "DeviceClass": DeviceClass,
    "ResourceClaim": ResourceClaim,
    "ResourceClaimTemplate": ResourceClaimTemplate,
    "ResourceSlice": ResourceSlice,
}
_SHAPES: dict[tuple[Any, str], type[Any]] = {
    (NODE.kind, NODE.api_version): Node,
    **{(kind.kind, kind.api_version): DeviceTaintRule for kind in DEVICE_TAINT_RULES},
}
"""Kinds of other API groups, of which only the fields of the value are read."""


class Manifests(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a set of files, in the order of the files."""

    claims: tuple[ResourceClaim, ...] = ()
    """Claims, and one claim of each template under the template's name."""
    classes: tuple[DeviceClass, ...] = ()
    slices: tuple[ResourceSlice, ...] = ()
    """With the taints of the DeviceTaintRules among the objects."""
    nodes: tuple[Node, ...] = ()


def read_manifests(paths: Iterable[Path]) -> Manifests:
    """All objects of the files. Refused with `file:line` and the path of the field."""
    return manifests_of(document for path in paths for document in read_documents(path, CLAIM_KINDS))


def manifests_of(documents: Iterable[Document]) -> Manifests:
    """All objects of the documents. Refused with `file:line` and the path of the field."""
    found: dict[type[Any], list[Any]] = {}
    parts = SharedParts()
    for document in documents:
        value = decode_object(document)
        if isinstance(value, ResourceClaimTemplate):
            found.setdefault(ResourceClaim, []).append(claim_from_template(value))
        elif isinstance(value, ResourceSlice) and document.decoded is None:
            found.setdefault(ResourceSlice, []).append(parts.of(value))
        elif value is not None:
            found.setdefault(type(value), []).append(value)
    return Manifests(
        claims=tuple(found.get(ResourceClaim, ())),
        classes=tuple(found.get(DeviceClass, ())),
        slices=with_taint_rules(found.get(ResourceSlice, ()), found.get(DeviceTaintRule, ())),
        nodes=tuple(found.get(Node, ())),
    )


def decode_object(document: Document) -> Any:
    """The value of a document, or None for a kind that plays no part here. Refused where it is malformed."""
    kind, version = str(document.value.get("kind")), str(document.value.get("apiVersion", ""))
    if isinstance(document.decoded, ResourceSlice):
        return document.decoded
    if document.decoded is not None and kind == NODE.kind:
        from rackloom.core.cluster.scheduling import allocator_node

        return allocator_node(document.decoded)
    if (shape := _SHAPES.get((kind, version))) is not None:
        fields = {name: document.value.get(name, {}) for name in shape.__struct_fields__}
        return _converted(document, fields, shape)
    if not version.startswith(f"{GROUP}/") or kind not in _KINDS:
        return None
    fields = {name: field for name, field in as_v1(document).items() if name not in ("apiVersion", "kind")}
    value = _converted(document, fields, _KINDS[kind])
    if isinstance(value, ResourceClaim):
        check_claim_rules(document, value.spec.devices, ("spec", "devices"))
    elif isinstance(value, ResourceClaimTemplate):
        check_claim_rules(document, value.spec.spec.devices, ("spec", "spec", "devices"))
    return value


def claim_from_template(template: ResourceClaimTemplate) -> ResourceClaim:
    """The claim that a pod gets from a template, named after the template."""
    meta = msgspec.structs.replace(
        template.spec.metadata, name=template.metadata.name, namespace=template.metadata.namespace
    )
    return ResourceClaim(metadata=meta, spec=template.spec.spec)


def _converted(document: Document, fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return convert_object(fields, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).removesuffix("`").partition(" - at `$")
        field = path.lstrip(".") or "the object"
        # `.spec.devices[0].name` as names and numbers, up to `[...]`, some key of a map.
        steps = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", path.partition("[...]")[0])
        where = tuple(name or int(number) for name, number in steps)
        raise Refused(
            f"{document.where(where)}: {title_in_file(document.value)}, {field}: {problem}",
            nearest_fix=f"correct {field} (see the {GROUP}/v1 reference)",
        ) from error
