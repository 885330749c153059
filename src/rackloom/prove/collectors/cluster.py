"""Reads from a Kubernetes API server what the checks of ComputeDomains need.

`collect_cluster` turns five lists (ComputeDomains, ResourceClaimTemplates, ResourceClaims, pods, nodes)
into `ClusterEvidence` and changes nothing. The caller passes in the function that reads a list. Its errors
pass through, because half a reading would show faults that are not there. Objects that cannot be parsed
are left out, as are pods without claims and pods that have ended.

IMEX daemons are recognised by the name of their container and by the label with the ComputeDomain's UID,
and only in the one namespace given: anybody may set labels and name containers in a namespace of their
own. The state of a mesh comes from the annotation that each daemon writes on its pod.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Protocol, TypeVar

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.device_configs import ChannelConfig, decode_imex_config_leniently
from rackloom.core.cluster.domain_objects import readable_compute_domains
from rackloom.core.cluster.nodes import node_clique
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    ResourceKind,
)
from rackloom.core.diagnosis.evidence import ClusterEvidence
from rackloom.core.diagnosis.snapshot import ClaimRecord, ImexMeshRecord, PodRecord, TemplateRecord
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json

Json = dict[str, Any]
V = TypeVar("V")
ListReader = Callable[[ResourceKind], Awaitable[list[Json]]]
"""Lists all objects of a kind, in all namespaces. Raises if the API server does not answer or refuses."""
DAEMON_CONTAINER = "compute-domain-daemon"
"""The container by which pods of IMEX daemons are recognised."""


class _MeshAnnotation(msgspec.Struct, frozen=True):
    """The content of a daemon's annotation."""

    complete: bool
    missing: tuple[str, ...] = ()


class ObjectMapper(Protocol):
    """Applies a function to objects, as `map` does; an implementation may cache results."""

    def __call__(self, decode: Callable[[Json], V], objects: Iterable[Json], /) -> Iterable[V]:
        """`decode` of each object, in order."""
        ...


async def collect_cluster(read: ListReader, namespace: str, each: ObjectMapper = map) -> ClusterEvidence:
    """Read everything that the checks need; IMEX daemons only from `namespace`, where tenants have no pods.

    Errors of `read` pass through: a partial reading would show faults that do not exist.
    """
    pods = await read(POD)
    daemons = [pod for pod in pods if _is_daemon(pod, namespace)]
    users = [pod for pod in pods if _claims_devices(pod) and not _is_daemon(pod, namespace)]
    return ClusterEvidence(
        domains=tuple(readable_compute_domains(await read(COMPUTE_DOMAIN))),
        templates=tuple(each(_template, await read(RESOURCE_CLAIM_TEMPLATE))),
        claims=tuple(each(_claim, await read(RESOURCE_CLAIM))),
        pods=tuple(each(_pod, users)),
        daemons=tuple(each(_daemon, daemons)),
        daemons_in=namespace,
        cliques={
            node["metadata"]["name"]: clique
            for node in await read(NODE)
            if (clique := node_clique(node, names.GPU_CLIQUE_LABEL))
        },
    )


def _template(obj: Json) -> TemplateRecord:
    meta = obj["metadata"]
    return TemplateRecord(
        namespace=meta["namespace"],
        name=meta["name"],
        domain=_labels(obj).get(names.COMPUTE_DOMAIN_LABEL, ""),
    )


def _claim(obj: Json) -> ClaimRecord:
    meta, status = obj["metadata"], obj.get("status") or {}
    return ClaimRecord(
        namespace=meta["namespace"],
        name=meta["name"],
        domain=_domain_of_claim(obj),
        allocated="allocation" in status,
        reserved_for=tuple(user["uid"] for user in status.get("reservedFor") or ()),
        since=_created(obj),
    )


def _domain_of_claim(obj: Json) -> str:
    for entry in (obj["spec"].get("devices") or {}).get("config") or ():
        opaque = entry.get("opaque") or {}
        if opaque.get("driver") != names.IMEX_DRIVER:
            continue
        try:
            config = decode_imex_config_leniently(opaque.get("parameters") or {})
        except Refused:
            continue
        if isinstance(config, ChannelConfig):
            return config.domain_id
    return ""


def _claims_devices(pod: Json) -> bool:
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return bool(pod["spec"].get("resourceClaims")) and not ended


def _pod(obj: Json) -> PodRecord:
    meta, spec = obj["metadata"], obj["spec"]
    claims = spec["resourceClaims"]
    generated = (obj.get("status") or {}).get("resourceClaimStatuses") or ()
    return PodRecord(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        node=spec.get("nodeName", ""),
        owner=pod_owner(obj),
        since=_created(obj),
        gated=bool(spec.get("schedulingGates")),
        templates=_by_claim_name(claims, "resourceClaimTemplateName"),
        claims=_by_claim_name((*claims, *generated), "resourceClaimName"),
    )


def _by_claim_name(entries: Iterable[Json], field: str) -> dict[str, str]:
    return {entry["name"]: entry[field] for entry in entries if entry.get(field)}


def pod_owner(obj: Json) -> str:
    """The controller that recreates a pod, as `Job team/train`; empty: none."""
    meta = obj["metadata"]
    found = (reference for reference in meta.get("ownerReferences") or () if reference.get("controller"))
    return next((f"{owner['kind']} {meta['namespace']}/{owner['name']}" for owner in found), "")


def _created(obj: Json) -> float | None:
    created = obj["metadata"].get("creationTimestamp")
    return None if created is None else datetime.fromisoformat(created).timestamp()


def _is_daemon(pod: Json, namespace: str) -> bool:
    # Anybody may name a container and set labels, but only the controller creates pods in this namespace.
    if pod["metadata"]["namespace"] != namespace or not _labels(pod).get(names.COMPUTE_DOMAIN_LABEL):
        return False
    return any(container.get("name") == DAEMON_CONTAINER for container in pod["spec"].get("containers") or ())


def _daemon(pod: Json) -> ImexMeshRecord:
    mesh = _mesh(pod)
    return ImexMeshRecord(
        domain=_labels(pod).get(names.COMPUTE_DOMAIN_LABEL, ""),
        node=pod["spec"].get("nodeName", ""),
        clique=_labels(pod).get(names.CLIQUE_ID_LABEL),
        complete=None if mesh is None else mesh.complete,
        missing=() if mesh is None else mesh.missing,
    )


def _mesh(pod: Json) -> _MeshAnnotation | None:
    text = (pod["metadata"].get("annotations") or {}).get(names.MESH_ANNOTATION)
    try:
        return None if text is None else decode_json(text, names.MESH_ANNOTATION, _MeshAnnotation)
    except Undecodable:
        return None


def _labels(obj: Json) -> Mapping[str, str]:
    return obj["metadata"].get("labels") or {}
