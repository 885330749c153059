"""What an object may say of itself: the types of metadata's fields (k8s.io/apimachinery, ObjectMeta)."""

from typing import Any

import msgspec

from rackloom.claim.kube.api import Kind
from rackloom.twin.kube import answers


class _Owner(msgspec.Struct, rename="camel"):
    uid: str = ""
    kind: str = ""
    name: str = ""
    api_version: str = ""


class _Metadata(msgspec.Struct, rename="camel"):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resource_version: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None
    owner_references: list[_Owner] | None = None


def check(kind: Kind, obj: Any) -> None:
    """Raise `Rejected`: 400 where a field has another type, 422 where an owner is not told whole."""
    if not isinstance(obj, dict):
        raise answers.bad_request(f"{kind.kind} is not an object but: {type(obj).__name__}")
    try:
        metadata = msgspec.convert(obj.get("metadata") or {}, _Metadata)
    except msgspec.ValidationError as error:
        raise answers.bad_request(f"{kind.kind} in version {kind.version}, metadata: {error}") from error
    missing = [
        f'metadata.ownerReferences.{field}: Invalid value: "": must not be empty'
        for owner in metadata.owner_references or ()
        for field, value in msgspec.to_builtins(owner).items()
        if not value
    ]
    if missing:
        raise answers.invalid(kind, metadata.name or "", *missing)
