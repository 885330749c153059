"""The facts that every Kubernetes object has: identity, labels, owners, deletion, conditions.

Outside `core.cluster`, an object is a handle: it is passed on, and these functions answer questions about it.
So each question has one answer, and a later format changes one place.

An object of the API server has a name, a UID and a version. An object of a file may lack each of them, and an
absent text is "". A list or a map may be absent or null, which means empty.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster.objects import JsonMapping, Object, ResourceKind, epoch_seconds, object_title


class OwnerReference(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An owner reference."""

    kind: str = ""
    api_version: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None

    def is_of(self, kind: ResourceKind) -> bool:
        """Whether the owner is of this kind and API version."""
        return (self.api_version, self.kind) == (kind.api_version, kind.kind)


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A condition in the usual form of Kubernetes; `status` is True, False or Unknown."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    last_transition_time: str = ""
    """RFC 3339; empty until it is written."""


def name_of(obj: JsonMapping) -> str:
    """The name of an object."""
    return str(_metadata(obj).get("name") or "")


def object_name(obj: JsonMapping) -> Any:
    """The name of an object of a file, or the generateName, with which the API server begins one."""
    return _metadata(obj).get("name") or _metadata(obj).get("generateName") or ""


def namespace_of(obj: JsonMapping) -> str | None:
    """The namespace of an object, or None for one of the whole cluster."""
    return _metadata(obj).get("namespace") or None


def full_name(obj: JsonMapping) -> str:
    """`namespace/name`; the name alone for an object of the whole cluster."""
    namespace = namespace_of(obj)
    return f"{namespace}/{name_of(obj)}" if namespace else name_of(obj)


def title_of(kind: ResourceKind, obj: JsonMapping) -> str:
    """`Kind namespace/name`, for messages."""
    return object_title(kind, namespace_of(obj), name_of(obj))


def title_in_file(obj: JsonMapping) -> str:
    """`Kind name` of an object of a file, whatever its shape. It may have only a generateName."""
    metadata = obj.get("metadata")
    names = [metadata.get(key) for key in ("name", "generateName")] if isinstance(metadata, Mapping) else []
    name = next((name for name in names if isinstance(name, str) and name), "(unnamed)")
    return f"{obj.get('kind')} {name}"


def uid_of(obj: JsonMapping) -> str:
    """The UID of an object. No other object ever has it, also none of the same name."""
    return str(_metadata(obj).get("uid") or "")


def version_of(obj: JsonMapping) -> str:
    """The `resourceVersion`: another value means another state."""
    return str(_metadata(obj).get("resourceVersion") or "")


def generation_of(obj: JsonMapping) -> int:
    """The generation: the API server counts it up when the spec changes."""
    return int(_metadata(obj).get("generation") or 0)


def identity_of(obj: JsonMapping, *fields: str) -> dict[str, str]:
    """Those of these fields of the metadata that it has. A write names an object or its version by them."""
    metadata = _metadata(obj)
    return {field: metadata[field] for field in fields if field in metadata}


def labels_of(obj: JsonMapping) -> Mapping[str, str]:
    """The labels of an object."""
    return _metadata(obj).get("labels") or {}


def annotations_of(obj: JsonMapping) -> Mapping[str, str]:
    """The annotations of an object."""
    return _metadata(obj).get("annotations") or {}


def finalizers_of(obj: JsonMapping) -> Sequence[str]:
    """The finalizers of an object. It stays until all of them are gone."""
    return _metadata(obj).get("finalizers") or ()


def owners_of(obj: JsonMapping) -> tuple[OwnerReference, ...]:
    """The owners of an object."""
    written = _metadata(obj).get("ownerReferences")
    return msgspec.convert(written, tuple[OwnerReference, ...]) if written else ()


def controller_of(obj: JsonMapping) -> OwnerReference | None:
    """The owner that made an object, or None if a person made it."""
    return next((owner for owner in owners_of(obj) if owner.controller), None)


def created_at(obj: JsonMapping) -> float | None:
    """When an object was created, in seconds since 1970. An object of a file gives None."""
    return epoch_seconds(_metadata(obj).get("creationTimestamp") or "")


def is_being_deleted(obj: JsonMapping) -> bool:
    """Whether the deletion of an object was requested. It is there until its finalizers are gone."""
    return bool(_metadata(obj).get("deletionTimestamp"))


def deletion_time(obj: JsonMapping) -> float | None:
    """When an object that is being deleted should be gone, in seconds since 1970, or None if it is not."""
    return epoch_seconds(_metadata(obj).get("deletionTimestamp") or "")


def has_same_spec(one: JsonMapping, other: JsonMapping) -> bool:
    """Whether two states of an object have the same spec."""
    return bool(one.get("spec") == other.get("spec"))


def field_managers(obj: JsonMapping, label: str | None = None) -> Iterator[str]:
    """The programs that wrote fields of an object, or one label of it."""
    return (manager for manager, _ in field_writes(obj, label))


def field_writes(obj: JsonMapping, label: str | None = None) -> Iterator[tuple[str, float | None]]:
    """The same programs, and when each last changed any of its fields, in seconds since 1970."""
    for entry in _metadata(obj).get("managedFields") or ():
        fields = (entry.get("fieldsV1") or {}).get("f:metadata") or {}
        if label is None or f"f:{label}" in (fields.get("f:labels") or {}):
            yield entry.get("manager") or "", epoch_seconds(entry.get("time") or "")


def conditions_of(obj: JsonMapping) -> tuple[Condition, ...]:
    """The conditions of an object. The API server writes a time that a condition lacks as null."""
    written = (obj.get("status") or {}).get("conditions") or ()
    present = [{key: value for key, value in entry.items() if value is not None} for entry in written]
    return msgspec.convert(present, tuple[Condition, ...])


def condition_of(obj: JsonMapping, type_: str) -> Condition | None:
    """The condition of a type."""
    return next((condition for condition in conditions_of(obj) if condition.type == type_), None)


def dated_condition(obj: JsonMapping, new: Condition, now: str) -> Condition:
    """A condition as it is to be written on this state of an object. `now` is RFC 3339.

    The time is that of the last change of its status.
    """
    old = condition_of(obj, new.type)
    since = old.last_transition_time if old is not None and old.status == new.status else ""
    return replace(new, last_transition_time=since or now, observed_generation=generation_of(obj))


def changed_conditions(obj: JsonMapping, changed: Sequence[Condition], now: str) -> list[Object]:
    """All conditions of an object as JSON, with these in place of those of their types. `now` is RFC 3339."""
    types = {condition.type for condition in changed}
    written = (obj.get("status") or {}).get("conditions") or ()
    kept = [condition for condition in written if condition.get("type") not in types]
    return [*kept, *(msgspec.to_builtins(dated_condition(obj, condition, now)) for condition in changed)]


def _metadata(obj: JsonMapping) -> JsonMapping:
    return obj.get("metadata") or {}
