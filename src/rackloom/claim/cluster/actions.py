"""What a decision asks of the API server: few writes, each safe to send twice."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.claim.cluster.things import Thing
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Kind, Object


class Create(msgspec.Struct, frozen=True, kw_only=True):
    """Create an object; that it exists already means that the cache was old."""

    kind: Kind
    obj: Object

    @property
    def what(self) -> str:
        """For logs and messages."""
        return f"create {_called(self.kind, self.obj['metadata'])}"


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """Change an object: a mapping is a merge patch, a tuple of operations a JSON patch."""

    kind: Kind
    namespace: str | None
    name: str
    patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...]
    subresource: str = ""

    @property
    def what(self) -> str:
        """For logs and messages."""
        return f"change {_called(self.kind, {'namespace': self.namespace, 'name': self.name})}"


class Delete(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the deletion of one object, not of another that took its name."""

    kind: Kind
    namespace: str | None
    name: str
    uid: str
    resource_version: str | None = None
    """Only if nobody has changed it since; None: whatever it says by now."""
    grace_seconds: int | None = None
    """0 removes a pod whose kubelet does not answer; None leaves it to the object."""

    @property
    def what(self) -> str:
        """For logs and messages."""
        return f"delete {_called(self.kind, {'namespace': self.namespace, 'name': self.name})}"


Action = Create | Patch | Delete


def delete(thing: Thing, *, unchanged: bool = False) -> Delete:
    """Ask for the deletion of what was seen; `unchanged`: only as it was seen."""
    version = thing.resource_version if unchanged else None
    return Delete(
        kind=thing.kind, namespace=thing.namespace, name=thing.name, uid=thing.uid, resource_version=version
    )


def adopt(domain: Thing) -> Patch:
    """Put our finalizer on a ComputeDomain, and its own UID as a label, by which node plugins find it."""
    meta = {
        "resourceVersion": domain.resource_version,
        "finalizers": [*(one for one in domain.finalizers if one != names.FINALIZER), names.FINALIZER],
        "labels": {names.COMPUTE_DOMAIN_LABEL: domain.uid},
    }
    return Patch(kind=domain.kind, namespace=domain.namespace, name=domain.name, patch={"metadata": meta})


def release(thing: Thing) -> Patch:
    """Remove our finalizer, and nobody else's."""
    left = [one for one in thing.finalizers if one != names.FINALIZER]
    # A merge patch replaces the whole list: with the resourceVersion it cannot undo another writer's change.
    meta = {"resourceVersion": thing.resource_version, "finalizers": left}
    return Patch(kind=thing.kind, namespace=thing.namespace, name=thing.name, patch={"metadata": meta})


def unlabel(thing: Thing, label: str, value: str) -> Patch:
    """Take a label off an object if it still has this value: another writer may have set it since."""
    path = f"/metadata/labels/{label.replace('~', '~0').replace('/', '~1')}"
    test = {"op": "test", "path": path, "value": value}
    remove = {"op": "remove", "path": path}
    return Patch(kind=thing.kind, namespace=thing.namespace, name=thing.name, patch=(test, remove))


def let_node_go(node: Thing) -> Patch:
    """Take the label of its ComputeDomain off a node that has not changed since it was seen."""
    meta = {"resourceVersion": node.resource_version, "labels": {names.COMPUTE_DOMAIN_LABEL: None}}
    return Patch(kind=node.kind, namespace=None, name=node.name, patch={"metadata": meta})


def _called(kind: Kind, meta: Mapping[str, Any]) -> str:
    place = f"{meta['namespace']}/{meta['name']}" if meta.get("namespace") else meta["name"]
    return f"{kind.kind} {place}"
