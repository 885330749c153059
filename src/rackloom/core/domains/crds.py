"""The CustomResourceDefinitions of ComputeDomain and ComputeDomainClique, as data.

Fields, defaults and the immutability rule of the spec are those of NVIDIA's DRA driver 0.5, so that its
objects are valid here and those of Rackloom are valid there. Rackloom adds conditions and printer
columns, and restricts the daemon address of a clique to one IPv4 or IPv6 address, because it becomes a
line of a hosts file. `conditions_schema` is the usual Kubernetes list of conditions, keyed by type.
"""

from typing import Any

from rackloom.core.cluster import names
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, ResourceKind

JsonSchema = dict[str, Any]

_READINESS: JsonSchema = {"type": "string", "enum": ["Ready", "NotReady"], "default": "NotReady"}
_STRING: JsonSchema = {"type": "string"}
_ADDRESS: JsonSchema = {"type": "string", "maxLength": 45, "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}
"""It becomes a line of the peers' hosts files."""
_RFC1123: JsonSchema = {"type": "string", "minLength": 1, "maxLength": 253}


def domain_crds() -> tuple[JsonSchema, ...]:
    """All CRDs, ready to be applied."""
    return (_compute_domain_crd(), _clique_crd())


def _compute_domain_crd() -> JsonSchema:
    schema = object_schema({"spec": _spec(), "status": _status()})
    return resource_crd(COMPUTE_DOMAIN, schema, _printer_columns(), STATUS_SUBRESOURCE)


def _clique_crd() -> JsonSchema:
    entry = _node_entry("nodeName")
    entry["properties"]["ipAddress"] = _ADDRESS
    daemons = _keyed("nodeName", entry)
    # A JSON path needs its dots escaped within a key.
    domain, clique = (
        label.replace(".", r"\.") for label in (names.COMPUTE_DOMAIN_LABEL, names.CLIQUE_ID_LABEL)
    )
    columns = [
        printer_column("CD", f".metadata.labels.{domain}"),
        printer_column("Clique", f".metadata.labels.{clique}"),
        printer_column("Age", ".metadata.creationTimestamp", type_="date"),
    ]
    return resource_crd(COMPUTE_DOMAIN_CLIQUE, object_schema({"daemons": daemons}), columns, {})


STATUS_SUBRESOURCE: JsonSchema = {"subresources": {"status": {}}}


def resource_crd(
    kind: ResourceKind, schema: JsonSchema, columns: list[JsonSchema], more: JsonSchema
) -> JsonSchema:
    """The CustomResourceDefinition of a kind with one version."""
    version = {
        "name": kind.version,
        "served": True,
        "storage": True,
        **more,
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
    }
    name = {"kind": kind.kind, "listKind": f"{kind.kind}List", "plural": kind.plural}
    name["singular"] = kind.kind.lower()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{kind.group}"},
        "spec": {"group": kind.group, "names": name, "scope": "Namespaced", "versions": [version]},
    }


def _printer_columns() -> list[JsonSchema]:
    def condition(type_: str, field: str) -> str:
        return f'.status.conditions[?(@.type=="{type_}")].{field}'

    return [
        printer_column("Status", ".status.status"),
        printer_column("Reason", condition("Ready", "reason")),
        printer_column("Degraded", condition("Degraded", "reason")),
        printer_column("Template", ".spec.channel.resourceClaimTemplate.name"),
        printer_column("SpansCliques", condition(names.SPANS_CLIQUES, "status"), priority=1),
        printer_column("Message", condition("Ready", "message"), priority=1),
        printer_column("Age", ".metadata.creationTimestamp", type_="date"),
    ]


def printer_column(name: str, path: str, *, type_: str = "string", priority: int = 0) -> JsonSchema:
    """A column of `kubectl get`. One with a priority needs `-o wide`."""
    column: JsonSchema = {"name": name, "type": type_, "jsonPath": path}
    return column | ({"priority": priority} if priority else {})


def _spec() -> JsonSchema:
    template = object_schema({"name": _RFC1123}, required=["name"])
    mode = {"type": "string", "enum": ["All", "Single"], "default": "Single"}
    channel = object_schema(
        {"resourceClaimTemplate": template, "allocationMode": mode}, required=["resourceClaimTemplate"]
    )
    # Deprecated: the status is not Ready until this number of nodes has joined. Nothing else depends on it.
    nodes = {"type": "integer", "default": 0, "minimum": 0}
    spec = object_schema({"numNodes": nodes, "channel": channel}, required=["channel"])
    rule = {"rule": "self == oldSelf", "message": "A computeDomain.spec is immutable"}
    return spec | {"x-kubernetes-validations": [rule]}


def _status() -> JsonSchema:
    properties = {
        "status": _READINESS,
        "nodes": _keyed("name", _node_entry("name")),
        "conditions": conditions_schema(),
    }
    return object_schema(properties, required=["status"])


def _node_entry(key: str) -> JsonSchema:
    properties = {
        key: _STRING,
        "ipAddress": _STRING,
        "cliqueID": _STRING,
        "index": {"type": "integer"},
        "status": _READINESS,
    }
    return object_schema(properties, required=[key, "ipAddress", "cliqueID"])


def conditions_schema() -> JsonSchema:
    """The usual `status.conditions` of Kubernetes."""
    properties = {
        "type": {"type": "string", "maxLength": 316},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
        "message": {"type": "string", "maxLength": 32768},
        "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
    }
    required = ["type", "status", "reason", "message", "lastTransitionTime"]
    return _keyed("type", object_schema(properties, required=required))


def _keyed(key: str, item: JsonSchema) -> JsonSchema:
    return {
        "type": "array",
        "items": item,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": [key],
    }


def object_schema(properties: JsonSchema, *, required: list[str] | None = None) -> JsonSchema:
    """An object with these properties."""
    schema: JsonSchema = {"type": "object", "properties": properties}
    return schema if required is None else schema | {"required": required}
