"""Field ownership and server-side apply (metadata.managedFields, structured merge).

A field is a path of elements in the spelling of FieldsV1: `f:name` for a map key, `k:{...}` for an item
of a list that merges by keys, `v:...` for a member of a set. Atomic lists and maps are one field.

`record_update` assigns the fields that a create, replace or patch changed to its writer. Others lose
them. `apply_fields` merges the applied object over the live one. It raises a conflict when another
manager owns a field that would get another value, unless forced. A field that the manager applied
before and leaves out now is removed, unless it has another owner. An apply and an update by the same
manager are two owners.

The first server-side apply by kubectl may take over the fields of its last-applied annotation, which is
kept up to date for clients that go back to client-side apply.

`clone` copies an object as a trip over the wire would. `copied` does so for objects in the store.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from rackloom.core.cluster.objects import Object
from rackloom.lab.kube import refusals
from rackloom.lab.kube.objects import TypeSchema

T = TypeVar("T")

# Paths: sets of fields, and reading, removing and merging along a path.


FieldPath = tuple[str, ...]
Fields = frozenset[FieldPath]

ABSENT: Any = object()
"""The answer of `find` if a path leads nowhere."""

_UNOWNED_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "selfLink",
)
_SERVER_METADATA = ("managedFields", "deletionTimestamp", "deletionGracePeriodSeconds", "generateName")


def owned_fields(obj: Object, schema: TypeSchema) -> Fields:
    """The fields of `obj` that can have an owner: not its type, its name, nor fields that the server sets."""
    return frozenset(owned_values(obj, schema))


def owned_values(obj: Object, schema: TypeSchema) -> dict[FieldPath, Any]:
    """The fields that can have an owner, with their values. An item of a list has the value True."""
    body = {key: value for key, value in obj.items() if key not in ("apiVersion", "kind", "metadata")}
    metadata = {
        key: value
        for key, value in obj.get("metadata", {}).items()
        if key not in _UNOWNED_METADATA and key not in _SERVER_METADATA
    }
    if metadata:
        body["metadata"] = metadata
    found: dict[FieldPath, Any] = {}
    if body:
        _add_leaves(found, body, schema, "", ())
    return found


def _add_leaves(
    found: dict[FieldPath, Any], value: Any, schema: TypeSchema, at: str, path: FieldPath
) -> None:
    """Add every field below a value. Each write needs this twice, so plain values take no call."""
    if isinstance(value, dict) and value and at not in schema.atoms:
        for key, child in value.items():
            here = (*path, f"f:{key}")
            if isinstance(child, dict | list):
                _add_leaves(found, child, schema, f"{at}.{key}" if at else key, here)
            else:
                found[here] = child
        return
    keys = schema.merging(at) if isinstance(value, list) and value else None
    if keys is None:
        found[path] = value
        return
    for item in value:
        here = (*path, element_of(item, keys))
        found[here] = True
        if keys:
            _add_leaves(found, item, schema, at, here)


def element_of(item: Any, keys: tuple[str, ...]) -> str:
    """How a path names one item of a merging list."""
    if not keys:
        return f"v:{msgspec.json.encode(item).decode()}"
    found = {key: item[key] for key in keys if key in item}
    return f"k:{msgspec.json.encode(found, order='sorted').decode()}"


def find_value(value: Any, path: FieldPath) -> Any:
    """The value that a path leads to, or ABSENT."""
    for element in path:
        value = _follow_element(value, element)
        if value is ABSENT:
            return ABSENT
    return value


def _follow_element(value: Any, element: str) -> Any:
    if element.startswith("f:"):
        return value.get(element[2:], ABSENT) if isinstance(value, dict) else ABSENT
    index = _position(value, element)
    return ABSENT if index is None else value[index]


def _position(items: Any, element: str) -> int | None:
    if not isinstance(items, list):
        return None
    wanted = json.loads(element[2:])
    for index, item in enumerate(items):
        if item == wanted or (element[0] == "k" and wanted.items() <= item.items()):
            return index
    return None


def remove_field(obj: Any, path: FieldPath) -> None:
    """Take a field out of `obj` (in place), and the maps and lists that it leaves empty.

    A field by which its list merges stays: it is the item's name.
    """
    above = path[-2] if len(path) > 1 else ""
    if above.startswith("k:") and path[-1][2:] in json.loads(above[2:]):
        return
    parents = [obj]
    for element in path[:-1]:
        parents.append(_follow_element(parents[-1], element))
        if parents[-1] is ABSENT:
            return
    for parent, element in zip(reversed(parents), reversed(path), strict=True):
        _drop_element(parent, element)
        if parent:
            return


def _drop_element(parent: Any, element: str) -> None:
    if element.startswith("f:"):
        parent.pop(element[2:], None)
        return
    index = _position(parent, element)
    if index is not None:
        del parent[index]


def merge_applied(live: Any, applied: Any, schema: TypeSchema, at: str = "") -> Any:
    """`applied` laid over `live`: maps by key, merging lists by theirs, everything else replaced."""
    if isinstance(live, dict) and isinstance(applied, dict) and at not in schema.atoms:
        laid = {
            key: merge_applied(live.get(key), value, schema, f"{at}.{key}" if at else key)
            for key, value in applied.items()
        }
        return {**live, **laid}
    keys = schema.merging(at) if isinstance(live, list) and isinstance(applied, list) else None
    return applied if keys is None else _merge_list_items(live, applied, schema, at, keys)


def _merge_list_items(
    live: list[Any], applied: list[Any], schema: TypeSchema, at: str, keys: tuple[str, ...]
) -> Any:
    merged = {element_of(item, keys): item for item in live}
    for item in applied:
        element = element_of(item, keys)
        merged[element] = merge_applied(merged.get(element), item, schema, at) if keys else item
    return list(merged.values())


def encode_fields(paths: Iterable[FieldPath]) -> dict[str, Any]:
    """FieldsV1: nested maps, with `.` where an item of a list is itself owned."""
    nested: dict[str, Any] = {}
    for path in sorted(paths):
        here = nested
        for element in path:
            here = here.setdefault(element, {})
        if path[-1][0] == "k":
            here["."] = {}
    return nested


def decode_fields(nested: dict[str, Any], path: FieldPath = ()) -> Fields:
    """The paths of a FieldsV1."""
    if not nested:
        return frozenset({path})
    paths: set[FieldPath] = set()
    for element, below in nested.items():
        paths |= {path} if element == "." else decode_fields(below, (*path, element))
    return frozenset(paths)


def path_text(path: FieldPath) -> str:
    """A path as conflict messages spell it: `.spec.nodes[name="a"].index`."""
    return "".join(_element_text(element) for element in path)


def _element_text(element: str) -> str:
    if element.startswith("f:"):
        return f".{element[2:]}"
    if element.startswith("v:"):
        return f"[={element[2:]}]"
    keys = json.loads(element[2:])
    return f"[{','.join(f'{key}={json.dumps(value)}' for key, value in keys.items())}]"


# Handover from client-side to server-side apply.


LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_KUBECTL = "kubectl"


def fields_handed_over(obj: Object, manager: str, schema: TypeSchema) -> Fields:
    """The fields that a first server-side apply by this manager may take over without a conflict."""
    applied = _last_applied(obj)
    if manager != _KUBECTL or applied is None:
        return frozenset()
    try:
        return owned_fields(msgspec.json.decode(applied), schema)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return frozenset()


def with_last_applied(merged: Object, applied: Object, manager: str) -> Object:
    """`merged` with the applied object in its annotation, if it has that and kubectl applied."""
    if manager != _KUBECTL or _last_applied(merged) is None:
        return merged
    metadata, text = merged["metadata"], msgspec.json.encode(applied, order="sorted").decode() + "\n"
    return {
        **merged,
        "metadata": {**metadata, "annotations": {**metadata["annotations"], LAST_APPLIED: text}},
    }


def _last_applied(obj: Object) -> str | None:
    annotations: dict[str, str] = obj["metadata"].get("annotations") or {}
    return annotations.get(LAST_APPLIED)


# Owners, and server-side apply.


@dataclass(frozen=True, slots=True)
class FieldWriter:
    """The writer: a field manager, by `Apply` or `Update`, through the object or a subresource of it."""

    manager: str
    operation: str
    api_version: str
    subresource: str = ""

    def __str__(self) -> str:
        through = f' with subresource "{self.subresource}"' if self.subresource else ""
        by = f" using {self.api_version}" if self.operation == "Update" else ""
        return f'"{self.manager}"{through}{by}'

    def same_owner(self, other: "FieldWriter") -> bool:
        """Whether both are one owner: an apply and an update of one manager are two."""
        own = (self.manager, self.operation, self.subresource)
        return own == (other.manager, other.operation, other.subresource)


@dataclass(frozen=True, slots=True)
class OwnedFields:
    """The fields that one writer owns, and since when (RFC 3339)."""

    writer: FieldWriter
    fields: Fields
    time: str
    entry: Object | None = None
    """Its entry in metadata.managedFields, if it is as it was read."""

    def but(self, owned: Fields) -> "OwnedFields":
        """The same writer with these fields."""
        return self if owned == self.fields else replace(self, fields=owned, entry=None)


FieldOwners = tuple[OwnedFields, ...]
_APPLICABLE_METADATA = ("labels", "annotations", "ownerReferences", "finalizers")
"""The fields of metadata that an apply can set. The server sets the rest."""


def clone(obj: T) -> T:
    """A copy that shares nothing with its original, as a trip over the wire makes it (no tuples)."""
    copy: T = msgspec.json.decode(msgspec.json.encode(obj))
    return copy


def copied(stored: Object) -> Object:
    """A copy of a stored object that shares no map or list with it.

    Stored objects came over the wire, so this equals the result of `clone`, in a third of the time. The texts
    are shared, which keeps the copies of many clients small.
    """
    copy: Object = msgspec.to_builtins(stored)
    return copy


def owners_of(obj: Object) -> FieldOwners:
    """The owners that an object names."""
    return tuple(_decode_owner(entry) for entry in obj["metadata"].get("managedFields", ()))


def _decode_owner(entry: Object) -> OwnedFields:
    writer = FieldWriter(
        entry["manager"], entry["operation"], entry["apiVersion"], entry.get("subresource", "")
    )
    return OwnedFields(writer, decode_fields(entry["fieldsV1"]), entry.get("time", ""), entry)


def _encode_owner(owner: OwnedFields) -> Object:
    if owner.entry is not None:
        return owner.entry
    writer = owner.writer
    entry: Object = {
        "manager": writer.manager,
        "operation": writer.operation,
        "apiVersion": writer.api_version,
        "fieldsType": "FieldsV1",
        "fieldsV1": encode_fields(owner.fields),
    }
    # Fields that kubectl hands over to itself have no time.
    if owner.time:
        entry["time"] = owner.time
    if writer.subresource:
        entry["subresource"] = writer.subresource
    return entry


def with_owners(obj: Object, owners: FieldOwners) -> Object:
    """`obj` with these owners, without those that own nothing any more."""
    entries = [_encode_owner(owner) for owner in owners if owner.fields]
    return {**obj, "metadata": {**obj["metadata"], "managedFields": entries}}


def record_update(
    old: Object | None, new: Object, writer: FieldWriter, schema: TypeSchema, now: str
) -> Object:
    """`new` with its owners after a create, replace or patch: what changed now belongs to the writer."""
    before = {} if old is None else owned_values(old, schema)
    values = owned_values(new, schema)
    changed = frozenset(path for path in values if before.get(path, ABSENT) != values[path])
    owners = () if old is None else _owners_before(old, new)
    # Others lose the fields that changed or are gone. The writer keeps its fields and gains the changed ones.
    present = frozenset(values)
    own = _owner_of(owners, writer, now)
    after = [owner.but((owner.fields & present) - changed) for owner in owners if owner is not own]
    kept = (own.fields & present) | changed
    # The time of an entry changes only with its fields, so that an update without effect changes nothing.
    return with_owners(new, (*after, own if kept == own.fields else OwnedFields(writer, kept, now)))


def _owners_before(old: Object, new: Object) -> FieldOwners:
    """The owners before a write: a patch may have changed them, as `kubectl apply --server-side` does.

    As in a real server, unreadable entries are ignored.
    """
    if new["metadata"].get("managedFields") == old["metadata"].get("managedFields"):
        return owners_of(old)
    try:
        return owners_of(new)
    except (KeyError, TypeError, ValueError, AttributeError):
        return owners_of(old)


def _owner_of(owners: FieldOwners, writer: FieldWriter, now: str) -> OwnedFields:
    """The entry of a writer, which is empty if it owns nothing yet."""
    found = (owner for owner in owners if owner.writer.same_owner(writer))
    return next(found, OwnedFields(writer, frozenset(), now))


def apply_fields(
    old: Object, applied: Object, writer: FieldWriter, schema: TypeSchema, now: str, *, force: bool
) -> Object:
    """`old` after a server-side apply. Raises `Conflict` when another manager owns a field of it.

    A field that the writer applied before and leaves out now is removed, unless someone else owns it too.
    """
    requested = owned_fields(applied, schema)
    owners = owners_of(old)
    others = tuple(owner for owner in owners if not owner.writer.same_owner(writer))
    # The fields that another owns and that would get another value.
    # An item of a merging list (k:, v:) has no value: two managers may own it, and only the fields below it
    # can differ. A field that is absent from the object is free, even if it had an owner.
    conflicts = [
        (other, path)
        for other in others
        for path in sorted(other.fields & requested)
        if path[-1][0] == "f" and find_value(old, path) not in (ABSENT, find_value(applied, path))
    ]
    # Only the first apply of a manager may take fields over from kubectl's client-side apply.
    first = len(others) == len(owners)
    yielding = fields_handed_over(old, writer.manager, schema) if first else frozenset()
    if not force and not {path for _, path in conflicts} <= yielding:
        raise refusals.apply_conflict([(str(other.writer), path_text(path)) for other, path in conflicts])
    # From here on the writer wins: what it applies is its own, also where another value was forced over.
    own = _owner_of(owners, writer, now)
    taken = frozenset(path for _, path in conflicts)
    others = tuple(other.but(other.fields - taken) for other in others)
    given = applied["metadata"]
    metadata = {key: given[key] for key in _APPLICABLE_METADATA if key in given}
    merged = clone(merge_applied(old, {**applied, "metadata": metadata}, schema))
    # Remove fields without an owner from `merged`, whole list items before their fields.
    owned = requested.union(*(other.fields for other in others))
    for path in sorted(own.fields - requested - owned, key=len):
        if not any(kept[: len(path)] == path for kept in owned):
            remove_field(merged, path)
    # A field may have several owners. It goes only when the writer drops it and no other owner is left.
    entry = own if requested == own.fields and not taken else OwnedFields(writer, requested, now)
    present = owned_fields(merged, schema)
    return with_owners(merged, tuple(other.but(other.fields & present) for other in (*others, entry)))
