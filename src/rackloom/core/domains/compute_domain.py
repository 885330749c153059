"""ComputeDomain: the object and its status as values, from and to the JSON of the API server.

Source: `resource.nvidia.com/v1beta1` of NVIDIA's DRA driver for GPUs, version 0.5; the conditions are an
addition of Rackloom. Reading takes the fields that are needed and ignores the rest. A spec that the CRD
would not admit raises Refused; a status that cannot be read counts as empty, because it is computed again
anyway. A node without an NVLink fabric has index -1 instead of an IMEX index.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from rackloom.core.cluster.metadata import Condition
from rackloom.core.domains.clique import JsonObject, Readiness
from rackloom.errors import Refused

# The object as a value, from and to the JSON of the API server.


NO_INDEX = -1
"""What a node without an NVLink fabric has in a ComputeDomain's status instead of an IMEX index."""


class AllocationMode(StrEnum):
    """How many of a node's IMEX channels a claim gets."""

    SINGLE = "Single"
    ALL = "All"


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
    """When its deletion was requested, RFC 3339; empty before."""
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


def read_compute_domain(obj: JsonObject) -> ComputeDomain:
    """Read a ComputeDomain. Raises Refused when its spec is not one that the CRD admits."""
    meta = obj["metadata"]
    try:
        spec = msgspec.convert(obj.get("spec", {}), _ComputeDomainSpec)
    except msgspec.ValidationError as error:
        raise Refused(
            f"ComputeDomain {meta['namespace']}/{meta['name']}: spec: {error}",
            nearest_fix="create it anew with spec.channel.resourceClaimTemplate.name: a spec is immutable",
        ) from error
    return ComputeDomain(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        generation=meta.get("generation", 0),
        template=spec.channel.resource_claim_template.name,
        allocation_mode=spec.channel.allocation_mode,
        num_nodes=spec.num_nodes,
        deleted_at=meta.get("deletionTimestamp") or "",
        finalizers=tuple(meta.get("finalizers", ())),
        labels=meta.get("labels") or {},
        annotations=meta.get("annotations") or {},
        status=read_compute_domain_status(obj),
    )


def read_compute_domain_status(obj: JsonObject) -> ComputeDomainStatus:
    """Read a ComputeDomain's status; an unreadable one counts as empty, because it is computed again."""
    try:
        return msgspec.convert(obj.get("status") or {}, ComputeDomainStatus)
    except msgspec.ValidationError:
        return ComputeDomainStatus()


def compute_domain_status_json(status: ComputeDomainStatus) -> JsonObject:
    """A status as it is written."""
    return {
        "status": status.status.value,
        "nodes": [msgspec.to_builtins(node) for node in status.nodes],
        "conditions": [msgspec.to_builtins(condition) for condition in status.conditions],
    }
