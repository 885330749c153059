"""The objects of ComputeDomains as values: ComputeDomains, cliques, IMEX daemon pods, claims for channels.

`ComputeDomain` and `ComputeDomainClique` are read from the JSON of the API server and written to it. Reading
takes the fields that are needed and ignores the rest. A spec that the CRD would not admit raises Refused. A
status that cannot be read counts as empty, because the controller computes it again. A clique object is
written with only its members changed, so that fields of other writers survive. A node without an NVLink
fabric has index -1 instead of an IMEX index.

A daemon runs on a tenant's node, so its reports about nvidia-imex are cut to a limit and to one line.

Source: `resource.nvidia.com/v1beta1` of NVIDIA's DRA driver for GPUs, version 0.5. The conditions are an
addition of Rackloom.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.claims import allocated_devices, claim_consumers
from rackloom.core.cluster.device_configs import ChannelConfig, decode_imex_config_leniently
from rackloom.core.cluster.names import AllocationMode
from rackloom.core.cluster.objects import (
    Condition,
    JsonMapping,
    Object,
    annotations_of,
    finalizers_of,
    full_name,
    generation_of,
    has_pod_ended,
    is_being_deleted,
    is_pod_ready,
    labels_of,
    name_of,
    namespace_of,
    owners_of,
    uid_of,
)
from rackloom.core.cluster.pods import node_of, pod_address
from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import clean_line, decode_json


class Readiness(StrEnum):
    """Of a daemon, a node or a whole ComputeDomain."""

    READY = "Ready"
    NOT_READY = "NotReady"


# ComputeDomains.


NO_INDEX = -1
"""The index of a node without an NVLink fabric in the status of a ComputeDomain."""


class ComputeDomainNode(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One node in a ComputeDomain's status."""

    name: str
    ip_address: str
    clique_id: str = msgspec.field(name="cliqueID")
    index: int = NO_INDEX
    status: Readiness = Readiness.NOT_READY


class ComputeDomainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A ComputeDomain's status."""

    status: Readiness = Readiness.NOT_READY
    nodes: tuple[ComputeDomainNode, ...] = ()
    conditions: tuple[Condition, ...] = ()

    def condition(self, type_: str) -> Condition | None:
        """The condition of a type."""
        return next((condition for condition in self.conditions if condition.type == type_), None)


class _ClaimTemplateName(msgspec.Struct, frozen=True):
    name: str


class _ChannelSpec(msgspec.Struct, frozen=True, rename="camel"):
    resource_claim_template: _ClaimTemplateName
    allocation_mode: AllocationMode = AllocationMode.SINGLE


class _ComputeDomainSpec(msgspec.Struct, frozen=True, rename="camel"):
    channel: _ChannelSpec
    num_nodes: int = 0


class ComputeDomain(msgspec.Struct, frozen=True, kw_only=True):
    """One ComputeDomain."""

    namespace: str
    name: str
    uid: str
    generation: int = 0
    template: str
    """Name of the claim template that pods refer to, in the ComputeDomain's namespace."""
    allocation_mode: AllocationMode = AllocationMode.SINGLE
    num_nodes: int = 0
    deleted_at: str = ""
    """When its deletion was requested, RFC 3339. Empty before."""
    finalizers: tuple[str, ...] = ()
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    status: ComputeDomainStatus = ComputeDomainStatus()

    @property
    def deleting(self) -> bool:
        """Whether its deletion was requested."""
        return bool(self.deleted_at)

    @property
    def key(self) -> str:
        """`namespace/name`, as people write it."""
        return f"{self.namespace}/{self.name}"


def read_compute_domain(obj: JsonMapping) -> ComputeDomain:
    """Read a ComputeDomain. Raises Refused when its spec is not one that the CRD admits."""
    try:
        spec = msgspec.convert(obj.get("spec", {}), _ComputeDomainSpec)
    except msgspec.ValidationError as error:
        raise Refused(
            f"ComputeDomain {full_name(obj)}: spec: {error}",
            nearest_fix="create it anew with spec.channel.resourceClaimTemplate.name: a spec is immutable",
        ) from error
    return ComputeDomain(
        namespace=namespace_of(obj) or "",
        name=name_of(obj),
        uid=uid_of(obj),
        generation=generation_of(obj),
        template=spec.channel.resource_claim_template.name,
        allocation_mode=spec.channel.allocation_mode,
        num_nodes=spec.num_nodes,
        deleted_at=obj["metadata"].get("deletionTimestamp") or "",
        finalizers=tuple(finalizers_of(obj)),
        labels=labels_of(obj),
        annotations=annotations_of(obj),
        status=read_compute_domain_status(obj),
    )


def read_any_compute_domain(obj: JsonMapping) -> tuple[ComputeDomain, str]:
    """A ComputeDomain, and why its spec cannot be read: its template then has no name. Empty if it can."""
    try:
        return read_compute_domain(obj), ""
    except Refused as refused:
        unnamed = {"channel": {"resourceClaimTemplate": {"name": ""}}}
        return read_compute_domain({**obj, "spec": unnamed}), str(refused)


def readable_compute_domains(objects: Iterable[JsonMapping]) -> Iterator[ComputeDomain]:
    """The ComputeDomains that can be read. The controller reports the others, and no pod can use them."""
    for obj in objects:
        with suppress(Refused):
            yield read_compute_domain(obj)


def read_compute_domain_status(obj: JsonMapping) -> ComputeDomainStatus:
    """Read a ComputeDomain's status. An unreadable one counts as empty, because it is computed again."""
    try:
        return msgspec.convert(obj.get("status") or {}, ComputeDomainStatus)
    except msgspec.ValidationError:
        return ComputeDomainStatus()


def compute_domain_status_json(status: ComputeDomainStatus) -> Object:
    """A status as it is written."""
    return {
        "status": status.status.value,
        "nodes": [msgspec.to_builtins(node) for node in status.nodes],
        "conditions": [msgspec.to_builtins(condition) for condition in status.conditions],
    }


# ComputeDomainCliques: the IMEX daemons of one ComputeDomain in one NVLink clique.


class ObjectRef(msgspec.Struct, frozen=True):
    """A daemon pod, as an owner or in a message."""

    name: str
    uid: str


class DaemonInfo(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One IMEX daemon in a clique object: who it is and which IMEX node index it has."""

    node_name: str
    ip_address: str
    clique_id: str = msgspec.field(name="cliqueID")
    index: int = 0
    status: Readiness = Readiness.NOT_READY


class ComputeDomainClique(msgspec.Struct, frozen=True, kw_only=True):
    """One ComputeDomainClique: the daemons of one ComputeDomain in one clique."""

    compute_domain: str
    """UID of the ComputeDomain."""
    clique_id: str
    """`<clusterUUID>.<cliqueId>`."""
    daemons: tuple[DaemonInfo, ...] = ()
    owners: tuple[ObjectRef, ...] = ()
    """The daemon pods. The object is collected when none of them is left."""

    @property
    def name(self) -> str:
        """The object's name in the driver's namespace."""
        return names.clique_object_name(self.compute_domain, self.clique_id)

    def on(self, node: str) -> DaemonInfo | None:
        """The daemon of a node."""
        return next((daemon for daemon in self.daemons if daemon.node_name == node), None)


def read_clique(obj: JsonMapping) -> ComputeDomainClique:
    """Read a ComputeDomainClique. Its labels name the domain and the clique, or else its name does."""
    labels = labels_of(obj)
    uid, _, clique_id = name_of(obj).partition(".")
    return ComputeDomainClique(
        compute_domain=labels.get(names.COMPUTE_DOMAIN_LABEL, uid),
        clique_id=labels.get(names.CLIQUE_ID_LABEL, clique_id),
        daemons=msgspec.convert(obj.get("daemons") or (), tuple[DaemonInfo, ...]),
        owners=tuple(ObjectRef(owner.name, owner.uid) for owner in owners_of(obj)),
    )


def clique_json(value: ComputeDomainClique, namespace: str, read: JsonMapping | None = None) -> Object:
    """The object to write: changes to the object that was read, or a new one in the driver's `namespace`."""
    base = read or {"apiVersion": names.API_VERSION, "kind": "ComputeDomainClique"}
    labels = {names.COMPUTE_DOMAIN_LABEL: value.compute_domain, names.CLIQUE_ID_LABEL: value.clique_id}
    metadata = base.get("metadata") or {"name": value.name, "namespace": namespace}
    metadata = {**metadata, "labels": {**labels_of(base), **labels}}
    return {**base, **clique_members_json(value, metadata)}


def clique_members_json(value: ComputeDomainClique, metadata: JsonMapping) -> Object:
    """The fields of a clique object that change with its members, and these of its metadata."""
    owners = [
        {"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid} for owner in value.owners
    ]
    daemons = [msgspec.to_builtins(daemon) for daemon in value.daemons]
    return {"metadata": {**metadata, "ownerReferences": owners}, "daemons": daemons}


# Pods of IMEX daemons.


LONGEST_ERROR = 500
"""Characters of a daemon's report that go into a status: it comes from a tenant's node."""


class DaemonMesh(msgspec.Struct, frozen=True):
    """The connections that a daemon reports in an annotation."""

    complete: bool
    missing: tuple[str, ...] = ()


class DaemonPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of a ComputeDomain's DaemonSet."""

    ref: ObjectRef
    node: str
    ip_address: str
    clique_id: str | None
    """None until the daemon has reported it. Empty on a node without an NVLink fabric."""
    ready: bool
    mesh: DaemonMesh | None = None
    """Whether it reaches all its peers. None until the daemon has reported it."""
    imex_error: str = ""
    """Why nvidia-imex does not run in it, in one line. Empty while it runs, and if that is unknown."""
    alive: bool
    """False once all its containers have ended for good."""
    deleting: bool = False


def read_daemon_pod(obj: JsonMapping) -> DaemonPod | None:
    """Read a daemon pod. None if it has no node yet."""
    if not (node := node_of(obj)):
        return None
    deleting = is_being_deleted(obj)
    return DaemonPod(
        ref=ObjectRef(name_of(obj), uid_of(obj)),
        node=node,
        ip_address=pod_address(obj),
        clique_id=labels_of(obj).get(names.CLIQUE_ID_LABEL),
        ready=not deleting and is_pod_ready(obj),
        mesh=daemon_mesh(obj),
        imex_error=clean_line(annotations_of(obj).get(names.IMEX_ERROR_ANNOTATION) or "", LONGEST_ERROR),
        alive=not has_pod_ended(obj),
        deleting=deleting,
    )


def daemon_mesh(pod: JsonMapping) -> DaemonMesh | None:
    """The connections that the daemon of a pod reports, or None until it has reported any."""
    text = annotations_of(pod).get(names.MESH_ANNOTATION) or ""
    try:
        mesh = decode_json(text, names.MESH_ANNOTATION, DaemonMesh)
    except Undecodable:  # none, malformed JSON, a lone surrogate, or endless nesting
        return None
    return DaemonMesh(mesh.complete, tuple(clean_line(peer, LONGEST_ERROR) for peer in mesh.missing))


# Claims for IMEX channels.


class ChannelClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim for IMEX channels."""

    namespace: str
    name: str
    domain: str
    """UID of the ComputeDomain that its config names."""
    created: str
    """RFC 3339."""
    reserved_for: tuple[str, ...]
    """Names of the pods that may use it now."""
    device: tuple[str, str] | None
    """Pool and device allocated to it."""


def read_channel_claim(obj: JsonMapping) -> ChannelClaim | None:
    """Read a claim. None if it names no ComputeDomain for a channel."""
    domain = claimed_domain_uid(obj)
    if domain is None:
        return None
    ours = [device for device in allocated_devices(obj) if device.driver == names.IMEX_DRIVER]
    return ChannelClaim(
        namespace=namespace_of(obj) or "",
        name=name_of(obj),
        domain=domain,
        created=obj["metadata"].get("creationTimestamp", ""),
        reserved_for=tuple(pod.name for pod in claim_consumers(obj)),
        device=(ours[0].pool, ours[0].device) if ours else None,
    )


def claimed_domain_uid(claim: JsonMapping) -> str | None:
    """UID of the ComputeDomain that a claim requests a channel of, or None if it requests none."""
    for entry in ((claim.get("spec") or {}).get("devices") or {}).get("config") or ():
        opaque = entry.get("opaque") or {}
        if opaque.get("driver") == names.IMEX_DRIVER:
            with suppress(Refused):
                config = decode_imex_config_leniently(opaque.get("parameters") or {})
                if isinstance(config, ChannelConfig):
                    return config.domain_id
    return None
