"""Writes that only kubectl makes: strategic merge patches and protobuf bodies.

A strategic merge patch is a merge patch in which lists may merge by a key of their elements.
`MERGE_KEYS` holds the patch strategies of the OpenAPI document of Kubernetes 1.36: those of server-side
apply, with few exceptions. Directives of the patch replace or delete (`$patch`), retain keys
(`$retainKeys`), set the order of elements (`$setElementOrder`) and delete from sets
(`$deleteFromPrimitiveList`). The rules, including the order of elements, are those of strategicpatch in
k8s.io/apimachinery. Custom resources take no such patch.

kubectl's typed clients write small objects in protobuf (`create namespace`, evictions) and do not fall
back to JSON (client-go 0.32). `read_protobuf` reads those kinds only.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.lab.kube import refusals
from rackloom.lab.kube.kubectl import bodies_pb2 as wire
from rackloom.lab.kube.objects import METADATA_LISTS, TYPE_SCHEMAS, Lists

# Patch strategies of built-in types.


MergeKeys = Mapping[str, str]
"""The key by the path of the list, or "" if the elements are plain values, merged as a set."""

_CUSTOM = (objects.COMPUTE_DOMAIN, objects.GANG_PLAN, objects.COMPUTE_DOMAIN_CLIQUE)
_ONLY_PATCHED: Mapping[ResourceKind, Lists] = {
    objects.POD: {"status.hostIPs": ("ip",)},
    objects.JOB: {"status.conditions": ("type",)},
}
"""Lists that merge in a strategic merge patch, and are atomic in a server-side apply."""
_ONLY_APPLIED = {(objects.CRD, "status.conditions"), (objects.RESOURCE_CLAIM, "status.devices")}
"""The opposite, beside the claims of containers' resources."""


def _merge_keys(kind: ResourceKind, lists: Lists) -> MergeKeys:
    """If server-side apply merges by several keys, a patch merges by the first of them."""
    return {
        path: keys[0] if keys else ""
        for path, keys in (METADATA_LISTS | lists | _ONLY_PATCHED.get(kind, {})).items()
        if (kind, path) not in _ONLY_APPLIED and not path.endswith(".resources.claims")
    }


MERGE_KEYS: Mapping[ResourceKind, MergeKeys] = {
    kind: _merge_keys(kind, schema.lists) for kind, schema in TYPE_SCHEMAS.items() if kind not in _CUSTOM
}
"""Every built-in type that is served."""


# Strategic merge.


_PATCH, _RETAIN = "$patch", "$retainKeys"
_ORDER, _WITHOUT = "$setElementOrder/", "$deleteFromPrimitiveList/"
_Map = Mapping[str, Any]
_List = list[Any]


def strategic_merge(target: Any, patch: Any, keys: MergeKeys, at: str = "") -> Any:
    """The value at the path `at` after `patch`. Raises `Rejected` (400) if it cannot be read."""
    if not isinstance(patch, Mapping):
        return patch
    directive = patch.get(_PATCH, "merge")
    if directive == "delete":
        return {}
    if directive == "replace":
        return {name: value for name, value in patch.items() if name != _PATCH}
    if directive != "merge":
        raise refusals.bad_request(f"unknown patch type: {directive}")
    merged = _retain_keys(target if isinstance(target, Mapping) else {}, patch)
    for name in _patched_names(patch):
        _set_field(merged, name, patch, keys, f"{at}.{name}" if at else name)
    return merged


def _retain_keys(target: _Map, patch: _Map) -> dict[str, Any]:
    if _RETAIN not in patch:
        return dict(target)
    kept = _list_of(patch, _RETAIN)
    if any(name not in kept for name in _patched_names(patch) if patch.get(name) is not None):
        raise refusals.bad_request(f"{_RETAIN} must name every field of the patch")
    return {name: value for name, value in target.items() if name in kept}


def _patched_names(patch: _Map) -> list[str]:
    """The fields that a patch names, each once."""
    names = (key.removeprefix(_ORDER).removeprefix(_WITHOUT) for key in patch)
    return [name for name in dict.fromkeys(names) if name not in (_PATCH, _RETAIN)]


def _set_field(merged: dict[str, Any], name: str, patch: _Map, keys: MergeKeys, at: str) -> None:
    if name in patch and patch[name] is None:
        merged.pop(name, None)
    elif name not in merged:
        # An order or a deletion has no effect on a list that is absent.
        merged.update({name: _without_directives(patch[name])} if name in patch else {})
    elif at in keys and isinstance(patch.get(name, []), list):
        have = merged.get(name)
        merged[name] = _merged_list(have if isinstance(have, list) else [], name, patch, keys, at)
    elif name in patch:
        merged[name] = strategic_merge(merged[name], patch[name], keys, at)


def _merged_list(present: _List, name: str, patch: _Map, keys: MergeKeys, at: str) -> _List:
    key, elements = keys[at], patch.get(name, [])
    if key:
        _check_keyed(elements, key, at)
    plain = [item for item in elements if _directive_of(item) is None]
    if any(_directive_of(item) == "replace" for item in elements):
        return [_without_directives(item) for item in plain]
    merged = list(present)
    for item in plain:
        _merge_element(merged, item, key, keys, at)
    gone = [item.get(key) for item in elements if _directive_of(item) == "delete"] + _list_of(
        patch, _WITHOUT + name
    )
    merged = [item for item in merged if _element_id(item, key) not in gone]
    order = _list_of(patch, _ORDER + name) if _ORDER + name in patch else plain
    wanted = [_element_id(item, key) for item in order]
    named = [_element_id(item, key) for item in plain]
    positions = [wanted.index(name) for name in named if name in wanted]
    if len(positions) < len(named) or positions != sorted(positions):
        raise refusals.bad_request(f"the order in the patch of {at} does not match its {_ORDER} list")
    return _ordered(merged, wanted, [_element_id(item, key) for item in present], key)


def _merge_element(merged: _List, patched: Any, key: str, keys: MergeKeys, at: str) -> None:
    """Merge one element into the one of its key, or add it."""
    index = next(
        (i for i, item in enumerate(merged) if _element_id(item, key) == _element_id(patched, key)), None
    )
    if index is None:
        merged.append(_without_directives(patched))
    else:
        merged[index] = strategic_merge(merged[index], patched, keys, at)


def _without_directives(value: Any) -> Any:
    """The value that a patch sets where none was: without directives and nulls.

    So an element that is marked to be deleted is added by its key alone, as a real server does.
    """
    if isinstance(value, Mapping):
        return {
            name: _without_directives(item)
            for name, item in value.items()
            if item is not None and not name.startswith("$")
        }
    return [_without_directives(item) for item in value] if isinstance(value, list) else value


def _ordered(merged: _List, wanted: _List, before: _List, key: str) -> _List:
    """The merged elements in the order that a real server gives them."""
    named = sorted(
        (item for item in merged if _element_id(item, key) in wanted),
        key=lambda item: wanted.index(_element_id(item, key)),
    )
    others = [item for item in merged if _element_id(item, key) not in wanted]
    # Merge two orders: named elements keep the order of the patch, and each other element goes before the
    # first named one that it preceded before.
    ordered: _List = []
    for item in named:
        while others and _stood_first(_element_id(others[0], key), _element_id(item, key), before):
            ordered.append(others.pop(0))
        ordered.append(item)
    return ordered + others


def _stood_first(first: Any, second: Any, before: _List) -> bool:
    return first in before and second in before and before.index(first) < before.index(second)


def _check_keyed(elements: _List, key: str, at: str) -> None:
    """Each element has the merge key, except the directive that replaces the whole list."""
    if any(
        _directive_of(item) != "replace" and key not in item for item in elements if isinstance(item, Mapping)
    ):
        raise refusals.bad_request(f"an element of {at} does not contain declared merge key: {key}")
    if not all(isinstance(item, Mapping) for item in elements):
        raise refusals.bad_request(f"an element of {at} is not an object")


def _directive_of(item: Any) -> Any:
    """The directive of an element: `delete` concerns itself, `replace` the whole list."""
    return item.get(_PATCH) if isinstance(item, Mapping) else None


def _list_of(patch: _Map, name: str) -> _List:
    value = patch.get(name, [])
    if not isinstance(value, list):
        raise refusals.bad_request(f"{name} must be a list")
    return value


def _element_id(item: Any, key: str) -> Any:
    return item.get(key) if key and isinstance(item, Mapping) else item


# Protobuf bodies.


PROTOBUF_CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_MESSAGES: Mapping[str, type[Message]] = {
    "ConfigMap": wire.ConfigMap,
    "DeleteOptions": wire.DeleteOptions,
    "Eviction": wire.Eviction,
    "Namespace": wire.Namespace,
    "Secret": wire.Secret,
    "ServiceAccount": wire.ServiceAccount,
}


class UnreadableProtobuf(Exception):
    """The body is no object in protobuf, or its kind is not read. The text gives the reason."""


def read_protobuf(body: bytes) -> Object:
    """The object. Raises `Unreadable`."""
    try:
        if not body.startswith(_MAGIC):
            raise UnreadableProtobuf("it does not begin as Kubernetes' protobuf does")
        envelope = wire.Unknown.FromString(body.removeprefix(_MAGIC))
        kind = envelope.typeMeta.kind
        if kind not in _MESSAGES:
            raise UnreadableProtobuf(f"kind {kind!r}")
        message = _MESSAGES[kind].FromString(envelope.raw)
        fields = MessageToDict(message, preserving_proto_field_name=True)
        return {"apiVersion": envelope.typeMeta.apiVersion, "kind": kind, **fields}
    except DecodeError as error:
        raise UnreadableProtobuf(str(error)) from error
