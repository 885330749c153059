"""How a controller marks what it makes as its own, and finds from it the object that it made it for."""

from collections.abc import Iterator

from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube.lifecycle import owners
from rackloom.twin.kube.store import Key


def owned_by(kind: Kind, owner: Object) -> list[Object]:
    """The ownerReferences of an object that is made for `owner`, of this kind."""
    metadata = owner["metadata"]
    reference = {"apiVersion": kind.api_version, "kind": kind.kind}
    reference |= {"name": metadata["name"], "uid": metadata["uid"]}
    return [reference | {"controller": True, "blockOwnerDeletion": True}]


def owner_keys(obj: Object, kind: Kind) -> Iterator[Key]:
    """The owners of this kind that an object names."""
    for owner in owners(obj):
        if owner["kind"] == kind.kind:
            yield obj["metadata"].get("namespace"), owner["name"]
