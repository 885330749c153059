"""Validate the core/v1 fields that placement reads, once, where an object enters.

The API server validates every object; a file was validated by no one. `check_shape` compares a pod,
a pod template or a node with the field types of core/v1, and raises Refused with the path of the first
mismatch. Fields that placement does not read are ignored, and null counts as absent, as it does for the
API server. The terms of a node affinity are validated by `pod_constraints`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from rackloom.core.cluster.scheduling import REQUIRED_DURING_SCHEDULING, TaintEffect, Toleration
from rackloom.errors import Refused

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""What a priority may be."""
_Texts = dict[str, str] | None
_Amounts = dict[str, str | int | float] | None
_TYPE_WORDS = {
    "array": "a list",
    "object": "a map",
    "str": "text",
    "int": "a whole number",
    "bool": "true or false",
}


class _Shape(msgspec.Struct, frozen=True, rename="camel"):
    """Base of all shapes. Null counts as absent, as it does for the API server."""


class _Requirement(_Shape, frozen=True):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] | None = None


class _LabelSelector(_Shape, frozen=True):
    match_labels: _Texts = None
    match_expressions: tuple[_Requirement, ...] | None = None


class _PodAffinityTerm(_Shape, frozen=True):
    topology_key: str
    label_selector: _LabelSelector | None = None
    namespaces: tuple[str, ...] | None = None
    namespace_selector: _LabelSelector | None = None
    match_label_keys: tuple[str, ...] | None = None
    mismatch_label_keys: tuple[str, ...] | None = None


class _PodAffinityTerms(_Shape, frozen=True):
    required: tuple[_PodAffinityTerm, ...] | None = msgspec.field(
        name=REQUIRED_DURING_SCHEDULING, default=None
    )


class _NodeAffinity(_Shape, frozen=True):
    """Its terms are read, and refused, by `node_rules`."""

    required: dict[str, Any] | None = msgspec.field(name=REQUIRED_DURING_SCHEDULING, default=None)


class _Affinity(_Shape, frozen=True):
    node_affinity: _NodeAffinity | None = None
    pod_affinity: _PodAffinityTerms | None = None
    pod_anti_affinity: _PodAffinityTerms | None = None


class _Spread(_Shape, frozen=True):
    topology_key: str
    max_skew: int | None = None
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] | None = None
    label_selector: _LabelSelector | None = None


class _Port(_Shape, frozen=True):
    host_port: int | None = None


class _Resources(_Shape, frozen=True):
    limits: _Amounts = None
    requests: _Amounts = None


class _Container(_Shape, frozen=True):
    name: str | None = None
    resources: _Resources | None = None
    ports: tuple[_Port, ...] | None = None


class _PodClaim(_Shape, frozen=True):
    name: str | None = None
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class _PodSpec(_Shape, frozen=True):
    containers: tuple[_Container, ...] | None = None
    init_containers: tuple[_Container, ...] | None = None
    affinity: _Affinity | None = None
    node_selector: _Texts = None
    node_name: str | None = None
    tolerations: tuple[Toleration, ...] | None = None
    topology_spread_constraints: tuple[_Spread, ...] | None = None
    resource_claims: tuple[_PodClaim, ...] | None = None
    priority: Int32 | None = None
    priority_class_name: str | None = None
    preemption_policy: Literal["Never", "PreemptLowerPriority"] | None = None


class _OwnerShape(_Shape, frozen=True):
    name: str
    controller: bool | None = None


class _Metadata(_Shape, frozen=True):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    labels: _Texts = None
    annotations: _Texts = None
    owner_references: tuple[_OwnerShape, ...] | None = None


class _PodStatus(_Shape, frozen=True):
    phase: str | None = None


class PodShape(_Shape, frozen=True):
    """A pod, or the template of some."""

    metadata: _Metadata | None = None
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _Taint(_Shape, frozen=True):
    key: str
    effect: TaintEffect
    value: str | None = None


class _NodeSpec(_Shape, frozen=True):
    taints: tuple[_Taint, ...] | None = None
    unschedulable: bool | None = None


class _Condition(_Shape, frozen=True):
    type: str
    status: str


class _NodeStatus(_Shape, frozen=True):
    allocatable: _Amounts = None
    capacity: _Amounts = None
    conditions: tuple[_Condition, ...] | None = None


class _NodeMetadata(_Metadata, frozen=True, kw_only=True):
    name: str


class NodeShape(_Shape, frozen=True):
    """A node."""

    metadata: _NodeMetadata
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


class OwnedShape(_Shape, frozen=True):
    """Any object: only its metadata are read."""

    metadata: _Metadata | None = None


class _Reference(_Shape, frozen=True):
    name: str | None = None
    uid: str | None = None


class _ClaimMetadata(_Shape, frozen=True):
    name: str
    namespace: str | None = None
    owner_references: tuple[_Reference, ...] | None = None


class _DeviceResult(_Shape, frozen=True):
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class _DeviceResults(_Shape, frozen=True):
    results: tuple[_DeviceResult, ...] | None = None


class _Allocation(_Shape, frozen=True):
    devices: _DeviceResults | None = None


class _ClaimStatus(_Shape, frozen=True):
    allocation: _Allocation | None = None
    reserved_for: tuple[_Reference, ...] | None = None


class ClaimShape(_Shape, frozen=True):
    """A ResourceClaim, as far as it says who holds what."""

    metadata: _ClaimMetadata
    status: _ClaimStatus | None = None


class _Pool(_Shape, frozen=True):
    name: str
    generation: int | None = None


class _KindValue(_Shape, frozen=True):
    string: str | None = None


class _DeviceAttributes(_Shape, frozen=True):
    type: _KindValue | None = None


class _Device(_Shape, frozen=True):
    name: str
    attributes: _DeviceAttributes | None = None


class _SliceSpec(_Shape, frozen=True):
    driver: str
    pool: _Pool
    node_name: str | None = None
    devices: tuple[_Device, ...] | None = None


class SliceShape(_Shape, frozen=True):
    """A ResourceSlice, as far as GPUs are counted in it."""

    spec: _SliceSpec


def check_shape(value: object, shape: type[_Shape], title: str, at: str = "") -> None:
    """Raises Refused, with `title` and the path from `at`, where something that is read has another shape."""
    try:
        msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        what, _, inside = str(error).partition(" - at `$")
        path = ".".join(part for part in (at, inside.rstrip("`").lstrip(".")) if part)
        raise Refused(
            f"{title}: {path or 'it'}: {_type_error_text(what)}",
            nearest_fix="change it there; `kubectl explain` tells what its kind takes",
        ) from error


def object_title(value: Mapping[str, Any]) -> str:
    """Kind and name of an object in whatever shape."""
    metadata = value.get("metadata")
    names = [metadata.get(key) for key in ("name", "generateName")] if isinstance(metadata, Mapping) else []
    name = next((name for name in names if isinstance(name, str) and name), "(unnamed)")
    return f"{value.get('kind')} {name}"


def _type_error_text(what: str) -> str:
    """Expected `array`, got `object`: expected a list, got a map."""
    for kind, words in _TYPE_WORDS.items():
        what = what.replace(f"`{kind}", f"`{words}")
    return what[:1].lower() + what[1:].replace(" | null`", "`").replace("`", "")
