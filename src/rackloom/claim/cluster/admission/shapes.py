"""What admission reads of claims and pods. Fields that it does not need are ignored.

The three served versions of resource.k8s.io differ in a claim's requests only, which are not read here.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rackloom.claim.cluster.admission.marks import GANG_LABEL, GATE
from rackloom.errors import Refused


class _Read(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base: the API server writes an empty list as none at all, or as null."""


class Opaque(_Read, frozen=True, kw_only=True):
    """A driver's own settings; `parameters` is any JSON."""

    driver: str
    parameters: Any = None


class DeviceConfig(_Read, frozen=True, kw_only=True):
    """One entry of `devices.config`."""

    opaque: Opaque | None = None


class Devices(_Read, frozen=True, kw_only=True):
    """What a claim asks for."""

    config: tuple[DeviceConfig, ...] | None = None


class ClaimSpec(_Read, frozen=True, kw_only=True):
    """Of a claim, and under `spec.spec` of a template."""

    devices: Devices | None = None

    @property
    def configs(self) -> tuple[DeviceConfig, ...]:
        """Its configs in order."""
        return (self.devices.config if self.devices else None) or ()


class Claim(_Read, frozen=True, kw_only=True):
    """A ResourceClaim."""

    spec: ClaimSpec


class TemplateSpec(_Read, frozen=True, kw_only=True):
    """Of a ResourceClaimTemplate."""

    spec: ClaimSpec


class ClaimTemplate(_Read, frozen=True, kw_only=True):
    """A ResourceClaimTemplate."""

    spec: TemplateSpec


class Named(_Read, frozen=True, kw_only=True):
    """A reference by name: a scheduling gate, or a claim in a container's resources."""

    name: str


class PodClaim(_Read, frozen=True, kw_only=True):
    """One entry of a pod's `resourceClaims`."""

    name: str
    resource_claim_template_name: str | None = None
    resource_claim_name: str | None = None


class Resources(_Read, frozen=True, kw_only=True):
    """Of a container."""

    claims: tuple[Named, ...] | None = None


class Container(_Read, frozen=True, kw_only=True):
    """One container."""

    resources: Resources | None = None

    @property
    def claims(self) -> frozenset[str]:
        """Names of the pod's claims that it uses."""
        return frozenset(one.name for one in (self.resources.claims if self.resources else None) or ())


class Requirement(_Read, frozen=True, kw_only=True):
    """One expression of a node selector."""

    key: str
    operator: str = ""


class NodeTerm(_Read, frozen=True, kw_only=True):
    """A term of a node selector: all its expressions together."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """An empty term selects no node."""
        return not self.match_expressions and not self.match_fields


class NodeSelector(_Read, frozen=True, kw_only=True):
    """Terms of which one must hold."""

    node_selector_terms: tuple[NodeTerm, ...] | None = None


class PreferredNodes(_Read, frozen=True, kw_only=True):
    """A wish for nodes."""

    preference: NodeTerm


class NodeAffinity(_Read, frozen=True, kw_only=True):
    """Which nodes."""

    required: NodeSelector | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )
    preferred: tuple[PreferredNodes, ...] | None = msgspec.field(
        default=None, name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class PodTerm(_Read, frozen=True, kw_only=True):
    """Near which pods; only what "near" means is read."""

    topology_key: str


class PreferredPods(_Read, frozen=True, kw_only=True):
    """A wish for nearness."""

    pod_affinity_term: PodTerm


class PodAffinity(_Read, frozen=True, kw_only=True):
    """Near which pods."""

    required: tuple[PodTerm, ...] | None = msgspec.field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )
    preferred: tuple[PreferredPods, ...] | None = msgspec.field(
        default=None, name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(_Read, frozen=True, kw_only=True):
    """Where a pod may go."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None


class PodSpec(_Read, frozen=True, kw_only=True):
    """What of a pod's spec bears on its claims."""

    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    resource_claims: tuple[PodClaim, ...] | None = None
    scheduling_gates: tuple[Named, ...] | None = None
    affinity: Affinity | None = None
    node_selector: Mapping[str, str] | None = None
    node_name: str | None = None


class Owner(_Read, frozen=True, kw_only=True):
    """An owner reference."""

    kind: str
    api_version: str = ""
    name: str
    uid: str
    controller: bool | None = None


class Metadata(_Read, frozen=True, kw_only=True):
    """Of a pod."""

    name: str = ""
    uid: str = ""
    creation_timestamp: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    owner_references: tuple[Owner, ...] | None = None


class Pod(_Read, frozen=True, kw_only=True):
    """A pod, as it was sent or as it is stored."""

    metadata: Metadata = Metadata()
    spec: PodSpec

    @property
    def claims(self) -> tuple[PodClaim, ...]:
        """Its claims in order."""
        return self.spec.resource_claims or ()

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of the claim templates that it refers to, each once."""
        named = (claim.resource_claim_template_name for claim in self.claims)
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def named_claims(self) -> tuple[str, ...]:
        """Names of the claims that it refers to instead of a template, each once."""
        named = (claim.resource_claim_name for claim in self.claims)
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        return self.metadata.labels or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        """Its annotations."""
        return self.metadata.annotations or {}

    @property
    def is_of_a_gang(self) -> bool:
        """Whether somebody else sees to its clique."""
        return GANG_LABEL in self.labels

    @property
    def owner(self) -> Owner | None:
        """The controller that made it; None for a pod that a person made."""
        return next((one for one in self.metadata.owner_references or () if one.controller), None)

    @property
    def gate_index(self) -> int | None:
        """The place of our gate among its gates; None where it has it not."""
        gates = [gate.name for gate in self.spec.scheduling_gates or ()]
        return gates.index(GATE) if GATE in gates else None

    @property
    def is_bound(self) -> bool:
        """Whether it has a node."""
        return bool(self.spec.node_name)


T = TypeVar("T", Claim, ClaimTemplate, Pod)


def read(obj: object, shape: type[T]) -> T:
    """Read an object. Raises Refused for one that no API server would send."""
    try:
        return msgspec.convert(obj, shape)
    except msgspec.ValidationError as error:
        raise Refused(f"the object is no {shape.__name__}: {error}") from error
