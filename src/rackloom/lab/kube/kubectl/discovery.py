"""Discovery documents: the groups, versions and resources that the simulated server serves.

The OpenAPI documents say that the server itself checks unknown fields, which kubectl requires, and
have the schemas of our custom resources for `kubectl explain`. Of other types they say that their fields are
not described here. The group `policy/v1` has no resources here, but `kubectl drain` evicts only
where the group of Eviction is served.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache

from rackloom.core.cluster.objects import POD, Object, ResourceKind
from rackloom.core.domains.crds import domain_crds
from rackloom.core.gangs.crd import gang_crd
from rackloom.lab.kube.objects import TypeSchema

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.4+simulated", "platform": "linux/amd64"}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_SHORT_NAMES = {
    "configmaps": ["cm"],
    "customresourcedefinitions": ["crd", "crds"],
    "daemonsets": ["ds"],
    "events": ["ev"],
    "namespaces": ["ns"],
    "nodes": ["no"],
    "pods": ["po"],
    "serviceaccounts": ["sa"],
    "services": ["svc"],
}
_POLICY_GROUP: tuple[str, str] = ("policy", "v1")
"""Has no resources here, but `kubectl drain` evicts only if the group of Eviction is served."""
_POD_SUBRESOURCES: list[Object] = [
    {"name": "pods/binding", "singularName": "", "namespaced": True, "kind": "Binding", "verbs": ["create"]},
    {
        "name": "pods/eviction",
        "singularName": "",
        "namespaced": True,
        "group": _POLICY_GROUP[0],
        "version": _POLICY_GROUP[1],
        "kind": "Eviction",
        "verbs": ["create"],
    },
]
_COMMON_FIELDS: Object = {
    "apiVersion": {"type": "string"},
    "kind": {"type": "string"},
    "metadata": {"type": "object"},
}
_FIELD_VALIDATION = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}


def discovery_document(path: str, schemas: Mapping[ResourceKind, TypeSchema]) -> Object | None:
    """The document at a path, or None if there is none."""
    parts = tuple(part for part in path.split("/") if part)
    match parts:
        case ("version",):
            return dict(VERSION)
        case ("api",):
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ("apis",):
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups(schemas)}
        case ("api", version):
            return _resources("", version, schemas)
        case ("apis", group, version):
            return _resources(group, version, schemas)
        case ("openapi", "v3"):
            return {
                "paths": {path: {"serverRelativeURL": f"/openapi/v3/{path}"} for path in _versions(schemas)}
            }
        case ("openapi", "v3", *version) if "/".join(version) in _versions(schemas):
            return _openapi_document("/".join(version), schemas)
    return None


def _groups(schemas: Iterable[ResourceKind]) -> list[Object]:
    versions: dict[str, set[str]] = defaultdict(set)
    versions[_POLICY_GROUP[0]].add(_POLICY_GROUP[1])
    for kind in schemas:
        versions[kind.group].add(kind.version)
    return [_group(name, sorted(found)) for name, found in sorted(versions.items()) if name]


def _group(name: str, versions: list[str]) -> Object:
    served = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": served, "preferredVersion": served[-1]}


def _resources(group: str, version: str, schemas: Mapping[ResourceKind, TypeSchema]) -> Object | None:
    kinds = [kind for kind in schemas if (kind.group, kind.version) == (group, version)]
    if not kinds and (group, version) != _POLICY_GROUP:
        return None
    resources = [resource for kind in kinds for resource in _resource(kind, schemas[kind])]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": resources,
    }


def _resource(kind: ResourceKind, schema: TypeSchema) -> list[Object]:
    resource: Object = {
        "name": kind.plural,
        "singularName": kind.kind.lower(),
        "namespaced": kind.namespaced,
        "kind": kind.kind,
        "verbs": _VERBS,
        "shortNames": _SHORT_NAMES.get(kind.plural, []),
    }
    status = {
        **resource,
        "name": f"{kind.plural}/status",
        "verbs": ["get", "patch", "update"],
        "shortNames": [],
    }
    return [resource, *([status] if schema.status else ()), *(_POD_SUBRESOURCES if kind == POD else ())]


def _versions(schemas: Iterable[ResourceKind]) -> set[str]:
    return {_version_path(kind) for kind in schemas}


def _version_path(kind: ResourceKind) -> str:
    return f"apis/{kind.api_version}" if kind.group else f"api/{kind.version}"


def _openapi_document(version: str, schemas: Iterable[ResourceKind]) -> Object:
    """The document of one version that kubectl reads."""
    kinds = [kind for kind in schemas if _version_path(kind) == version]
    return {
        "openapi": "3.0.0",
        "info": {"title": "rackloom twin", "version": VERSION["gitVersion"]},
        "paths": {f"/{version}/{kind.plural}/{{name}}": {"patch": _patch_operation(kind)} for kind in kinds},
        "components": {
            "schemas": {f"{kind.group}.{kind.version}.{kind.kind}": _schema(kind) for kind in kinds}
        },
    }


def _schema(kind: ResourceKind) -> Object:
    described = _custom_schemas().get((kind.group, kind.version, kind.kind))
    if described is None:
        unknown = f"{kind.kind}: the simulated API server does not describe its fields; a real one does."
        described = {"type": "object", "description": unknown, "properties": dict(_COMMON_FIELDS)}
    named = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    return {**described, "x-kubernetes-group-version-kind": [named]}


@cache
def _custom_schemas() -> Mapping[tuple[str, str, str], Object]:
    """The schemas of our custom resources, by group, version and kind."""
    specs = [crd["spec"] for crd in (*domain_crds(), gang_crd())]
    return {
        (spec["group"], version["name"], spec["names"]["kind"]): version["schema"]["openAPIV3Schema"]
        for spec in specs
        for version in spec["versions"]
    }


def _patch_operation(kind: ResourceKind) -> Object:
    named = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    return {
        "parameters": [_FIELD_VALIDATION],
        "x-kubernetes-group-version-kind": named,
        "responses": {"200": {"description": "OK"}},
    }
