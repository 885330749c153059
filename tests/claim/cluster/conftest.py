"""A cluster as a dict: the semantics of the API server that the controller relies on, without a server."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.claim.cluster.fake_site import Site

from rackloom.claim.kube.api import Conflict, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import compute_domain_status_json
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    CreateObject,
    DeleteObject,
    Object,
    ObjectWrite,
    PatchObject,
    ResourceKind,
)
from rackloom.core.domains.observe import INDEXES
from rackloom.core.domains.reconcile import DomainDecision
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings
from rackloom.core.domains.snapshot import delete_object, owned_object

NOW = "2026-01-01T00:00:00Z"
CLIQUE = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"


class World:
    """Objects by kind, namespace and name, with uids, resourceVersions and finalizers."""

    def __init__(self) -> None:
        self.objects: dict[tuple[ResourceKind, str | None, str], Object] = {}
        self.version = 0
        self.writes = 0

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        return self.objects.get((kind, namespace, name))

    def by(self, kind: ResourceKind, index: str, value: str) -> list[Object]:
        indexer = INDEXES[kind][index]
        return [obj for key, obj in self.objects.items() if key[0] == kind and value in indexer(obj)]

    def of(self, kind: ResourceKind) -> list[Object]:
        return [obj for key, obj in self.objects.items() if key[0] == kind]

    def put(self, kind: ResourceKind, obj: Object) -> Object:
        key = _key(kind, obj)
        self.version += 1
        obj = copy.deepcopy(obj)
        meta = obj["metadata"]
        meta.setdefault("uid", f"uid-{self.version}")
        meta.setdefault("creationTimestamp", NOW)
        meta["resourceVersion"] = str(self.version)
        self.objects[key] = obj
        if meta.get("deletionTimestamp") and not meta.get("finalizers"):
            del self.objects[key]
        return obj

    def carry_out(self, decision: DomainDecision, uid: str = "") -> None:
        for action in decision.actions:
            self.do(action)
        found = self.by(COMPUTE_DOMAIN, "domain", uid)
        if decision.status is not None and found:
            self.writes += 1
            self.put(COMPUTE_DOMAIN, {**found[0], "status": compute_domain_status_json(decision.status)})

    def do(self, action: ObjectWrite) -> None:
        self.writes += 1
        if isinstance(action, CreateObject):
            if _key(action.kind, action.obj) in self.objects:
                raise Conflict(409, "AlreadyExists", action.what)
            self.put(action.kind, action.obj)
            return
        obj = self.at(action.kind, action.namespace, action.name)
        if obj is None:
            raise NotFound(404, "NotFound", action.what)
        if isinstance(action, DeleteObject):
            self._delete(action, obj)
        else:
            self._patch(action, obj)

    def delete(self, kind: ResourceKind, obj: Object) -> None:
        self._delete(delete_object(owned_object(kind, obj)), obj)

    def _delete(self, action: DeleteObject, obj: Object) -> None:
        version = obj["metadata"]["resourceVersion"]
        if obj["metadata"]["uid"] != action.uid or action.resource_version not in (None, version):
            raise Conflict(409, "Conflict", action.what)
        meta = {**obj["metadata"]}
        meta.setdefault("deletionTimestamp", NOW)
        self.put(action.kind, {**obj, "metadata": meta})

    def _patch(self, action: PatchObject, obj: Object) -> None:
        if isinstance(action.patch, tuple):
            self.put(action.kind, _json_patch(obj, action.patch))
            return
        wanted = action.patch.get("metadata", {}).get("resourceVersion")
        if wanted not in (None, obj["metadata"]["resourceVersion"]):
            raise Conflict(409, "Conflict", action.what)
        self.put(action.kind, _merge(obj, action.patch))


def _key(kind: ResourceKind, obj: Object) -> tuple[ResourceKind, str | None, str]:
    return (kind, obj["metadata"].get("namespace"), obj["metadata"]["name"])


def _merge(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            new.pop(name, None)
        else:
            new[name] = _merge(new.get(name), value)
    return new


def _json_patch(obj: Object, operations: tuple) -> Object:
    new = copy.deepcopy(obj)
    for operation in operations:
        *path, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"][1:].split("/")
        ]
        parent = new
        for part in path:
            parent = parent[part]
        if operation["op"] == "test" and parent.get(last) != operation["value"]:
            raise Conflict(409, "Conflict", "test")
        if operation["op"] == "remove":
            del parent[last]
    return new


def compute_domain(
    name: str = "job", *, uid: str = "cd-1", template: str = "imex-channel-0", **more: Any
) -> Object:
    spec = {"channel": {"resourceClaimTemplate": {"name": template}}}
    meta = {"namespace": "team", "name": name, "uid": uid, "generation": 1, **more}
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomain",
        "metadata": meta,
        "spec": spec,
    }


def node(
    name: str,
    domain: str | None = None,
    clique: str | None = CLIQUE,
    *,
    not_ready_since: str | None = None,
    **labels: str,
) -> Object:
    found = labels | ({} if clique is None else {names.GPU_CLIQUE_LABEL: clique})
    if domain is not None:
        found[names.COMPUTE_DOMAIN_LABEL] = domain
    ready = {"type": "Ready", "status": "False" if not_ready_since else "True"}
    ready["lastTransitionTime"] = not_ready_since or NOW
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": found},
        "status": {"conditions": [ready]},
    }


def daemon_pod(
    name: str,
    domain: str,
    *,
    ready: bool = True,
    ip: str = "",
    clique: str = CLIQUE,
    mesh: str | None = None,
    error: str | None = None,
) -> Object:
    annotations = {names.MESH_ANNOTATION: mesh, names.IMEX_ERROR_ANNOTATION: error}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "rackloom-imex",
            "name": f"daemon-{domain}-{name}",
            "uid": f"pod-{domain}-{name}",
            "annotations": {name: text for name, text in annotations.items() if text is not None},
            "labels": {names.COMPUTE_DOMAIN_LABEL: domain, names.CLIQUE_ID_LABEL: clique},
        },
        "spec": {"nodeName": name},
        "status": {"phase": "Running", "podIP": ip or f"10.0.0.{name[-1]}", "conditions": conditions},
    }


def claim(
    domain: str, *, name: str = "c", pods: tuple[str, ...] = (), device: tuple[str, str] | None = None
) -> Object:
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "ComputeDomainChannelConfig",
        "domainID": domain,
    }
    opaque = {"driver": names.IMEX_DRIVER, "parameters": parameters}
    status: dict[str, Any] = {"reservedFor": [{"resource": "pods", "name": pod, "uid": pod} for pod in pods]}
    if device is not None:
        result = {"driver": names.IMEX_DRIVER, "pool": device[0], "device": device[1], "request": "channel"}
        status["allocation"] = {"devices": {"results": [result]}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "team", "name": name},
        "spec": {"devices": {"config": [{"opaque": opaque}]}},
        "status": status,
    }


@pytest.fixture(scope="session")
def settings() -> ControllerSettings:
    return ControllerSettings(daemon=ImexDaemonSettings(image="rackloom:test"))


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """Worlds and objects for them."""
    return SimpleNamespace(
        world=World, domain=compute_domain, node=node, pod=daemon_pod, claim=claim, now=NOW, clique=CLIQUE
    )


@pytest.fixture
def site(settings: ControllerSettings, make: SimpleNamespace) -> Callable[..., Site]:
    """Fake clusters with a controller of changed settings."""

    def build(nodes: int = 4, seed: int = 1, **changes: Any) -> Site:
        return Site(msgspec.structs.replace(settings, **changes), make.clique, nodes, seed)

    return build
