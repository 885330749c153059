"""The resource.k8s.io/v1 objects that allocation reads and writes, as immutable values.

Field names are the API's own (camelCase on the wire). A struct refuses fields that the API does not
have, so a misspelt field is an error and not a request for something else. `Node` is the exception:
only its metadata is read, and other fields are ignored. Quantities keep the text in which they were
written.

The module imports nothing but msgspec, because commands that never run a selector load it as well.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec

Amount = str | int | float
"""A Kubernetes quantity as written: `"40Gi"`, or a plain number."""


class ApiValue(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """Base of all API values."""


V = TypeVar("V")


def readable(objects: Iterable[Mapping[str, Any]], kind: type[V]) -> Iterator[V]:
    """The readable ones of objects without `apiVersion` and `kind`. The others offer and request nothing."""
    for obj in objects:
        with suppress(msgspec.ValidationError):
            yield convert_object(obj, kind)


def convert_object(obj: Mapping[str, Any], kind: type[V]) -> V:
    """The value of an object. Raises `msgspec.ValidationError`.

    A null field counts as absent, as in Kubernetes: servers write some empty lists as null.
    """
    try:
        return msgspec.convert(obj, kind)
    except msgspec.ValidationError:
        return msgspec.convert(_without_nulls(obj), kind)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list | tuple) else value


class ObjectMeta(ApiValue, frozen=True, kw_only=True):
    """Object metadata. Only names, labels and uid take part in allocation."""

    name: str = ""
    generate_name: str | None = None
    namespace: str = ""
    uid: str = ""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    resource_version: str | None = None
    generation: int | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    self_link: str | None = None
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[Mapping[str, Any], ...] = ()
    managed_fields: tuple[Mapping[str, Any], ...] = ()


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node (core/v1): its name and labels are all that node selection reads."""

    metadata: ObjectMeta


class NodeSelectorRequirement(ApiValue, frozen=True, kw_only=True):
    """One requirement on a label, or on the field metadata.name."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeSelectorTerm(ApiValue, frozen=True, kw_only=True):
    """Requirements that must all hold."""

    match_expressions: tuple[NodeSelectorRequirement, ...] = ()
    match_fields: tuple[NodeSelectorRequirement, ...] = ()


class NodeSelector(ApiValue, frozen=True, kw_only=True):
    """Terms of which one must hold."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class DeviceAttribute(ApiValue, frozen=True, kw_only=True):
    """One attribute value: exactly one field is set. None set is a value that no selector can read."""

    int_: int | None = msgspec.field(default=None, name="int")
    bool_: bool | None = msgspec.field(default=None, name="bool")
    string: str | None = None
    version: str | None = None
    ints: tuple[int, ...] | None = None
    bools: tuple[bool, ...] | None = None
    strings: tuple[str, ...] | None = None
    versions: tuple[str, ...] | None = None


class CapacityRange(ApiValue, frozen=True, kw_only=True):
    """Allowed requests: from `min`, up to `max`, in steps from `min`."""

    min: Amount
    max: Amount | None = None
    step: Amount | None = None


class CapacityRequestPolicy(ApiValue, frozen=True, kw_only=True):
    """How requests for a capacity are defaulted, rounded and refused."""

    default: Amount | None = None
    valid_values: tuple[Amount, ...] | None = None
    valid_range: CapacityRange | None = None


class DeviceCapacity(ApiValue, frozen=True, kw_only=True):
    """The amount of a capacity that a device has."""

    value: Amount
    request_policy: CapacityRequestPolicy | None = None


class Counter(ApiValue, frozen=True, kw_only=True):
    """A number that devices of a pool draw from."""

    value: Amount


class CounterSet(ApiValue, frozen=True, kw_only=True):
    """Counters shared by the devices of a pool."""

    name: str
    counters: Mapping[str, Counter] = {}


class CounterConsumption(ApiValue, frozen=True, kw_only=True):
    """The draws of a device from one counter set while it is in use."""

    counter_set: str
    counters: Mapping[str, Counter] = {}
    compatibility_groups: tuple[str, ...] = ()


class DeviceTaint(ApiValue, frozen=True, kw_only=True):
    """A mark that keeps claims off a device unless they tolerate it."""

    key: str
    value: str = ""
    effect: str = ""
    time_added: str | None = None


class DeviceToleration(ApiValue, frozen=True, kw_only=True):
    """Taints that a request accepts."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""
    toleration_seconds: int | None = None


class Device(ApiValue, frozen=True, kw_only=True):
    """One device that a driver offers."""

    name: str
    attributes: Mapping[str, DeviceAttribute] = {}
    capacity: Mapping[str, DeviceCapacity] = {}
    consumes_counters: tuple[CounterConsumption, ...] = ()
    node_name: str | None = None
    node_selector: NodeSelector | None = None
    all_nodes: bool | None = None
    taints: tuple[DeviceTaint, ...] = ()
    binds_to_node: bool | None = None
    binding_conditions: tuple[str, ...] = ()
    binding_failure_conditions: tuple[str, ...] = ()
    allow_multiple_allocations: bool | None = None
    node_allocatable_resource_mappings: Mapping[str, Any] | None = None
    node_allocatable_resources: Mapping[str, Any] | None = None
    """Both are checked by the scheduler after allocation, not by the allocator."""


class ResourcePool(ApiValue, frozen=True, kw_only=True):
    """The pool of a slice: slices of an older generation are void."""

    name: str
    generation: int = 0
    resource_slice_count: int


class ResourceSliceSpec(ApiValue, frozen=True, kw_only=True):
    """Devices or counters, and the nodes that can reach them."""

    driver: str
    pool: ResourcePool
    node_name: str | None = None
    node_selector: NodeSelector | None = None
    all_nodes: bool | None = None
    per_device_node_selection: bool | None = None
    devices: tuple[Device, ...] = ()
    shared_counters: tuple[CounterSet, ...] = ()
    partition_type_attribute: str | None = None
    skip_node_operations: bool | None = None


class ResourceSlice(ApiValue, frozen=True, kw_only=True):
    """The devices that a driver publishes, or a part of them."""

    metadata: ObjectMeta
    spec: ResourceSliceSpec


class CelSelector(ApiValue, frozen=True, kw_only=True):
    """A CEL expression over `device`."""

    expression: str


class DeviceSelector(ApiValue, frozen=True, kw_only=True):
    """A condition on devices. Without `cel` it is of a kind that this version does not know."""

    cel: CelSelector | None = None


class OpaqueConfiguration(ApiValue, frozen=True, kw_only=True):
    """Parameters for a driver, passed on unread."""

    driver: str
    parameters: Any = None


class DeviceConfiguration(ApiValue, frozen=True, kw_only=True):
    """Configuration of a device class."""

    opaque: OpaqueConfiguration | None = None


class DeviceClaimConfiguration(ApiValue, frozen=True, kw_only=True):
    """Configuration of a claim, for some requests or (none named) for all."""

    requests: tuple[str, ...] = ()
    opaque: OpaqueConfiguration | None = None


class DeviceClassSpec(ApiValue, frozen=True, kw_only=True):
    """The devices of a class, and their configuration."""

    selectors: tuple[DeviceSelector, ...] = ()
    config: tuple[DeviceConfiguration, ...] = ()
    extended_resource_name: str | None = None


class DeviceClass(ApiValue, frozen=True, kw_only=True):
    """A named kind of device."""

    metadata: ObjectMeta
    spec: DeviceClassSpec = DeviceClassSpec()


class CapacityRequirements(ApiValue, frozen=True, kw_only=True):
    """The amounts of a device's capacities that a request needs."""

    requests: Mapping[str, Amount] = {}


class DerivedAttribute(ApiValue, frozen=True, kw_only=True):
    """An attribute that a CEL expression computes from each device, for constraints to compare."""

    name: str
    expression: str


class DeviceSubRequest(ApiValue, frozen=True, kw_only=True):
    """One alternative of a request."""

    name: str
    device_class_name: str = ""
    selectors: tuple[DeviceSelector, ...] = ()
    allocation_mode: str = ""
    count: int = 0
    tolerations: tuple[DeviceToleration, ...] = ()
    capacity: CapacityRequirements | None = None
    derived_attributes: tuple[DerivedAttribute, ...] = ()


class ExactDeviceRequest(ApiValue, frozen=True, kw_only=True):
    """A request without alternatives."""

    device_class_name: str = ""
    selectors: tuple[DeviceSelector, ...] = ()
    allocation_mode: str = ""
    count: int = 0
    admin_access: bool | None = None
    tolerations: tuple[DeviceToleration, ...] = ()
    capacity: CapacityRequirements | None = None
    derived_attributes: tuple[DerivedAttribute, ...] = ()


RequestSpec = ExactDeviceRequest | DeviceSubRequest


class DeviceRequest(ApiValue, frozen=True, kw_only=True):
    """A request: exactly this, or the first of several that can be had."""

    name: str
    exactly: ExactDeviceRequest | None = None
    first_available: tuple[DeviceSubRequest, ...] = ()

    @property
    def specs(self) -> tuple[RequestSpec, ...]:
        """The exact spec, or the alternatives."""
        return self.first_available if self.exactly is None else (self.exactly, *self.first_available)


class DeviceConstraint(ApiValue, frozen=True, kw_only=True):
    """An attribute that must match or differ across the named requests' devices (none named: of all)."""

    requests: tuple[str, ...] = ()
    match_attribute: str | None = None
    distinct_attribute: str | None = None


class DeviceClaim(ApiValue, frozen=True, kw_only=True):
    """The requested devices."""

    requests: tuple[DeviceRequest, ...] = ()
    constraints: tuple[DeviceConstraint, ...] = ()
    config: tuple[DeviceClaimConfiguration, ...] = ()


class DeviceAllocationConfiguration(ApiValue, frozen=True, kw_only=True):
    """Configuration that applies to allocated devices."""

    source: Literal["FromClass", "FromClaim"]
    requests: tuple[str, ...] = ()
    opaque: OpaqueConfiguration | None = None


class DeviceResult(ApiValue, frozen=True, kw_only=True):
    """One device, given to one request (DeviceRequestAllocationResult)."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None
    tolerations: tuple[DeviceToleration, ...] = ()
    binding_conditions: tuple[str, ...] = ()
    binding_failure_conditions: tuple[str, ...] = ()
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: Mapping[str, Amount] | None = None


class DeviceAllocationResult(ApiValue, frozen=True, kw_only=True):
    """The devices of a claim, in the order in which they were chosen."""

    results: tuple[DeviceResult, ...] = ()
    config: tuple[DeviceAllocationConfiguration, ...] = ()


class AllocationResult(ApiValue, frozen=True, kw_only=True):
    """The devices of a claim, and the nodes that can use them (no selector: all)."""

    devices: DeviceAllocationResult = DeviceAllocationResult()
    node_selector: NodeSelector | None = None
    allocation_timestamp: str | None = None


class ResourceClaimSpec(ApiValue, frozen=True, kw_only=True):
    """The spec of a claim."""

    devices: DeviceClaim = DeviceClaim()


class ResourceClaimStatus(ApiValue, frozen=True, kw_only=True):
    """The allocation of a claim, and its users."""

    allocation: AllocationResult | None = None
    reserved_for: tuple[Mapping[str, Any], ...] = ()
    devices: tuple[Mapping[str, Any], ...] = ()


class ResourceClaim(ApiValue, frozen=True, kw_only=True):
    """A claim for devices."""

    metadata: ObjectMeta = ObjectMeta()
    spec: ResourceClaimSpec = ResourceClaimSpec()
    status: ResourceClaimStatus = ResourceClaimStatus()

    def with_devices(self, **fields: object) -> "ResourceClaim":
        """The claim with some fields of `spec.devices` replaced."""
        devices = msgspec.structs.replace(self.spec.devices, **fields)
        return msgspec.structs.replace(self, spec=msgspec.structs.replace(self.spec, devices=devices))


class ResourceClaimTemplateSpec(ApiValue, frozen=True, kw_only=True):
    """Copied into every claim that is made from the template."""

    metadata: ObjectMeta = ObjectMeta()
    spec: ResourceClaimSpec = ResourceClaimSpec()


class ResourceClaimTemplate(ApiValue, frozen=True, kw_only=True):
    """The template from which each pod gets a separate claim."""

    metadata: ObjectMeta = ObjectMeta()
    spec: ResourceClaimTemplateSpec = ResourceClaimTemplateSpec()
