"""The objects of the service. Written by `make client`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, field

from rackloom.client.call import Model


class AllocationCounts(Model, frozen=True, kw_only=True):
    """Machines by allocation."""

    allocated_in_use: int
    allocated_not_in_use: int
    unallocated: int


class AllocationStats(Model, frozen=True, kw_only=True):
    """The numbers of machines of an instance type, by use."""

    assigned: int | None
    total: int
    used: int
    unused: int
    unused_usable: int
    max_allocatable: int | None


class AuditEntry(Model, frozen=True, kw_only=True):
    """A request, its caller and its outcome."""

    id: str
    endpoint: str | None
    query_params: str | None
    method: str | None
    body: str | None
    status_code: int
    status_message: str | None
    client_ip: str | None = field(name="clientIP")
    user_id: str | None = field(name="userID")
    user: dict[str, Any] | None
    org_name: str | None
    extra_data: dict[str, Any]
    timestamp: datetime
    duration_ms: int | None
    api_version: str
    request_id: str | None
    operation_id: str
    roles: list[str]
    object_kind: str | None
    object_id: str | None
    object_name: str | None
    fields: list[str]
    requests: int
    first_timestamp: datetime | None
    last_timestamp: datetime | None
    by_site_operator: bool
    channel: str | None = None
    tenant_org: str | None = None
    rpc_status: str | None = None
    reason: str | None = None


class BlockedGpu(Model, frozen=True, kw_only=True):
    """A GPU whose intended move is blocked, with the reason. If `fix` is null, the site cannot resolve it."""

    gpu_guid: str
    reason: str
    fix: str | None
    since: datetime


class Capability(Model, frozen=True, kw_only=True):
    """A capability of the machines of an instance type."""

    type: Literal["CPU", "Memory", "Storage", "Network", "GPU", "InfiniBand", "DPU"]
    name: str
    count: int | None = None
    device_type: Literal["DPU", "NVLink"] | None = None


class CautionAnswer(Model, frozen=True, kw_only=True):
    """A warning: the request is allowed, but its effect may be unintended."""

    type: Literal["LogicalPartitionSpansDomains", "TraySplit", "ForeignPartition"]
    message: str


class GpuStats(Model, frozen=True, kw_only=True):
    """GPUs of one product."""

    name: str
    gpus: int
    machines: int


class HealthCounts(Model, frozen=True, kw_only=True):
    """Machines by health. Machines of unknown health are in neither number."""

    healthy: int
    unhealthy: int


class InstanceStats(Model, frozen=True, kw_only=True):
    """Instances by status. `unknown` are those without a valid reading."""

    total: int
    pending: int
    provisioning: int
    configuring: int
    ready: int
    repairing: int
    updating: int
    registering: int
    terminating: int
    error: int
    unknown: int


class InterfaceBody(Model, frozen=True, kw_only=True):
    """One GPU and the logical partition that it shall join."""

    nv_link_logical_partition_id: str
    device_instance: int


class InterfaceSummary(Model, frozen=True, kw_only=True):
    """An NVLink interface in one line."""

    id: str
    instance_id: str
    nv_link_logical_partition_id: str
    device_instance: int
    status: Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]


JsonValue: TypeAlias = Any


class LogicalPartitionCreate(Model, frozen=True, kw_only=True):
    """A new NVLink logical partition."""

    name: str
    site_id: str
    description: str | None = None


class LogicalPartitionPlan(Model, frozen=True, kw_only=True):
    """A logical partition that a request would make. Nothing was changed."""

    dry_run: bool
    name: str
    site_id: str


class MachineAssociationAnswer(Model, frozen=True, kw_only=True):
    """A machine of an instance type. The id of the association is that of the machine."""

    created: datetime
    updated: datetime
    machine_id: str
    instance_type_id: str


class MachineReservation(Model, frozen=True, kw_only=True):
    """The organisation for which a machine is reserved, and the end of the reservation."""

    reservation_id: str
    tenant_id: str
    org: str
    until: datetime


class MachineStats(Model, frozen=True, kw_only=True):
    """The machines of a site by status, health and allocation. Statuses of no machine are left out."""

    total: int
    total_by_status: dict[str, int]
    total_by_health: HealthCounts
    total_by_status_and_health: dict[str, HealthCounts]
    total_by_allocation: AllocationCounts


class Message(Model, frozen=True, kw_only=True):
    """The outcome of a request that has no other answer."""

    message: str


class Metadata(Model, frozen=True, kw_only=True):
    """The served versions of the contract, the groups of operations that are missing, and the build."""

    version: str
    contracts: list[str]
    unserved: list[str]
    implementation: str
    build_time: datetime


class NVLinkGpu(Model, frozen=True, kw_only=True):
    """A GPU of a machine, as a switch controller named it."""

    device_instance: int
    module_id: int
    slot_id: int
    tray_index: int
    guid: str | None
    source: str | None
    health: str


class NVLinkInfo(Model, frozen=True, kw_only=True):
    """The place of a machine in the NVLink fabric."""

    domain_uuid: str | None
    chassis_serial: str
    gpus: list[NVLinkGpu]


class ObjectStats(Model, frozen=True, kw_only=True):
    """Objects by status."""

    total: int
    pending: int
    provisioning: int
    ready: int
    error: int
    deleting: int


class OwnPartition(Model, frozen=True, kw_only=True):
    """A logical partition of the caller that reaches into the domain."""

    id: str
    gpus: int


class PartitionStats(Model, frozen=True, kw_only=True):
    """The number of GPUs that a logical partition has or will have, and the number of their instances."""

    total_gpus: int
    total_distinct_instances: int


class PlannedInterface(Model, frozen=True, kw_only=True):
    """A GPU and the logical partition that it would join."""

    nv_link_logical_partition_id: str
    device_instance: int


class Problem(Model, frozen=True, kw_only=True):
    """The body of every error."""

    source: Literal["nico"]
    message: str
    data: dict[str, Any] | None


QuotaKind: TypeAlias = Annotated[
    Literal["nvLinkLogicalPartitions", "vpcs", "instances", "nvLinkInterfaces", "reservedTrays"],
    Meta(description="The kinds of object that are counted, by their name in REST."),
]


class ReservedMachine(Model, frozen=True, kw_only=True):
    """A tray of a reservation. `state` is `Ready`, or the reason why it cannot take a new instance."""

    machine_id: str
    nv_link_domain_id: str | None
    rack: str
    state: str


class SiteCapabilitiesAnswer(Model, frozen=True, kw_only=True):
    """The capabilities of a site."""

    native_networking: bool
    network_security_group: bool
    nv_link_partition: bool
    flow: bool
    image_based_operating_system: bool


class StatusDetail(Model, frozen=True, kw_only=True):
    """One entry of a status history."""

    created: datetime
    updated: datetime
    status: str
    message: str | None


class TenantAccountStats(Model, frozen=True, kw_only=True):
    """Tenant accounts by status. There are none."""

    total: int
    pending: int
    invited: int
    ready: int
    error: int


class TenantCapabilities(Model, frozen=True, kw_only=True):
    """Additional rights of a tenant."""

    targeted_instance_creation: bool


class TenantStats(Model, frozen=True, kw_only=True):
    """The objects of a tenant, by status."""

    instance: InstanceStats
    vpc: ObjectStats
    subnet: ObjectStats
    tenant_account: TenantAccountStats


class TrayInForeignPartition(Model, frozen=True, kw_only=True):
    """A tray with GPUs in a partition that the site did not make."""

    machine_id: str
    partition_id: int
    partition_name: str


class TrayReservedForOthers(Model, frozen=True, kw_only=True):
    """A tray that is reserved for an organisation."""

    machine_id: str
    reservation_id: str
    tenant_id: str
    org: str
    until: datetime


class TrayWithUnlistedGpus(Model, frozen=True, kw_only=True):
    """A tray with GPUs that its controller does not list."""

    machine_id: str
    device_instances: list[int]


class TypeCapacity(Model, frozen=True, kw_only=True):
    """Room for machines of one instance type."""

    instance_type_id: str
    free_trays: int
    largest_batch: int


class VpcCreate(Model, frozen=True, kw_only=True):
    """A new VPC."""

    name: str
    site_id: str
    id: str | None = None
    description: str | None = None
    vni: int | None = None
    labels: dict[str, str] | None = None
    network_virtualization_type: Literal["ETHERNET_VIRTUALIZER", "FNN", "FLAT"] | None = None
    nv_link_logical_partition_id: str | None = None


class VpcPlan(Model, frozen=True, kw_only=True):
    """A VPC that a request would make. Nothing was changed."""

    dry_run: bool
    name: str
    site_id: str
    nv_link_logical_partition_id: str | None


class VpcVirtualization(Model, frozen=True, kw_only=True):
    """The network virtualization of a VPC. It is stored, and nothing acts on it."""

    network_virtualization_type: Literal["FNN"]


class Stored(Model, frozen=True, kw_only=True):
    """An object that the service keeps."""

    created: datetime
    updated: datetime
    id: str


class Named(Stored, frozen=True, kw_only=True):
    """A kept object with a name."""

    name: str
    description: str | None


class Reference(Model, frozen=True, kw_only=True):
    """An object by id and name."""

    id: str
    name: str


class Renaming(Model, frozen=True, kw_only=True):
    """Another name or description."""

    name: str | None = None
    description: str | None = None


class AllocationConstraintAnswer(Stored, frozen=True, kw_only=True):
    """A number of machines of one instance type."""

    allocation_id: str
    resource_type: Literal["InstanceType"]
    resource_type_id: str
    constraint_type: Literal["Reserved"]
    constraint_value: int


class InstanceBatchCreate(Model, frozen=True, kw_only=True):
    """Several new instances: all or none."""

    vpc_id: str
    instance_type_id: str
    name_prefix: str
    count: int
    labels: dict[str, str] | None = None
    description: str | None = None
    nv_link_interfaces: list[InterfaceBody] | None = None
    allow_unhealthy_machine: bool | None = None
    require_same_domain: bool | None = None
    topology_optimized: bool | None = None


class InstanceCreate(Model, frozen=True, kw_only=True):
    """A new instance, of a type or on a chosen machine."""

    vpc_id: str
    name: str
    labels: dict[str, str] | None = None
    instance_type_id: str | None = None
    description: str | None = None
    nv_link_interfaces: list[InterfaceBody] | None = None
    allow_unhealthy_machine: bool | None = None
    require_same_domain: bool | None = None
    machine_id: str | None = None


class InstanceType(Named, frozen=True, kw_only=True):
    """An instance type."""

    site_id: str
    infrastructure_provider_id: str
    labels: dict[str, str]
    machine_capabilities: list[Capability]
    status: Literal["Pending", "Registering", "Ready", "Deleting", "Error"]
    status_history: list[StatusDetail]
    machine_instance_types: list[MachineAssociationAnswer] | None = None
    allocation_stats: AllocationStats | None = None


class InstanceUpdate(Model, frozen=True, kw_only=True):
    """Changes of an instance. A list of interfaces replaces the present one."""

    labels: dict[str, str] | None = None
    name: str | None = None
    description: str | None = None
    nv_link_interfaces: list[InterfaceBody] | None = None


class LogicalPartitionUpdate(Renaming, frozen=True, kw_only=True):
    """Changes of an NVLink logical partition."""


class MachineMetadata(Model, frozen=True, kw_only=True):
    """The known hardware of a machine."""

    nv_link_info: NVLinkInfo
    rack: str


class NVLinkDomain(Model, frozen=True, kw_only=True):
    """A domain: its state, its capacity, and the caller's objects in it."""

    id: str
    site_id: str | None
    status: Literal["Observed", "Unknown"]
    observed_at: datetime | None
    observation_age_seconds: float | None
    unknown_since: datetime | None
    status_message: str | None
    is_paused: bool
    pause_reason: str | None
    total_trays: int
    free_trays: int
    unhealthy_trays: int
    foreign_trays: int
    trays_in_foreign_partitions: list[TrayInForeignPartition] | None
    unlisted_trays: int
    trays_with_unlisted_gpus: list[TrayWithUnlistedGpus] | None
    trays_reserved_for_others: list[TrayReservedForOthers] | None
    own_reserved_trays: int
    closed_trays: int
    largest_batch: int
    fragmentation: float
    blocked_gpus: list[BlockedGpu] | None
    instance_types: list[TypeCapacity]
    own_instances: int
    own_gpus: int
    own_logical_partitions: list[OwnPartition]


class Org(Stored, frozen=True, kw_only=True):
    """A tenant or provider."""

    org: str


class PlannedInstance(Model, frozen=True, kw_only=True):
    """An instance that would be made."""

    name: str
    machine_id: str
    nv_link_domain_id: str | None
    nv_link_interfaces: list[PlannedInterface]


class Quota(Model, frozen=True, kw_only=True):
    """The limit on a tenant's objects of a kind, and the number that it has."""

    resource: QuotaKind
    limit: int
    used: int


class Site(Named, frozen=True, kw_only=True):
    """A site."""

    org: str
    infrastructure_provider_id: str
    is_online: bool
    capabilities: SiteCapabilitiesAnswer
    status: Literal["Pending", "Registered", "Deleting", "Error"]
    status_history: list[StatusDetail]
    machine_stats: MachineStats | None = None
    gpu_stats: list[GpuStats] | None = None


class SiteSummary(Reference, frozen=True, kw_only=True):
    """A site in one line."""

    infrastructure_provider_id: str
    status: str


class Summary(Reference, frozen=True, kw_only=True):
    """An object in one line."""

    site_id: str
    status: str


class Tenant(Stored, frozen=True, kw_only=True):
    """A tenant."""

    org: str
    capabilities: TenantCapabilities


class TrayReservation(Stored, frozen=True, kw_only=True):
    """Trays that are reserved for a tenant until a time."""

    tenant_id: str
    site_id: str
    instance_type_id: str
    status: Literal["Active", "Ended"]
    until: datetime
    trays: int
    ready_trays: int
    in_use_trays: int
    nv_link_domain_ids: list[str]
    org: str | None
    reason: str | None
    asked_by: str | None
    machines: list[ReservedMachine] | None


class Vpc(Named, frozen=True, kw_only=True):
    """A VPC."""

    org: str
    site_id: str
    tenant_id: str
    controller_vpc_id: str
    nv_link_logical_partition_id: str | None
    nv_link_logical_partition_summary: Summary | None
    status: Literal["Pending", "Provisioning", "Configuring", "Ready", "Deleting", "Error"]
    status_history: list[StatusDetail]


class VpcUpdate(Renaming, frozen=True, kw_only=True):
    """Changes of a VPC. An empty nvLinkLogicalPartitionId clears the default."""

    labels: dict[str, str] | None = None
    nv_link_logical_partition_id: str | Literal[""] | None = None


class Allocation(Named, frozen=True, kw_only=True):
    """The machines of a site that a tenant may use."""

    infrastructure_provider_id: str
    tenant_id: str
    site_id: str
    allocation_constraints: list[AllocationConstraintAnswer]
    status: Literal["Pending", "Registered", "Deleting", "Error"]
    status_history: list[StatusDetail]


class InstancePlan(Model, frozen=True, kw_only=True):
    """The instances that a request would make. Nothing was changed."""

    dry_run: bool
    plan_id: str
    reason: str
    nv_link_domain_ids: list[str | None]
    instances: list[PlannedInstance]
    warnings: list[CautionAnswer]


class Machine(Stored, frozen=True, kw_only=True):
    """A machine."""

    infrastructure_provider_id: str
    site_id: str
    instance_type_id: str | None
    instance_id: str | None
    tenant_id: str | None
    controller_machine_id: str
    hw_sku_device_type: Literal["gpu"] | None
    serial_number: str | None
    machine_capabilities: list[Capability]
    maintenance_message: str | None
    is_missing_on_site: bool
    is_usable_by_tenant: bool
    foreign_partition_ids: list[int]
    status: Literal[
        "Initializing", "Ready", "Reset", "Maintenance", "InUse", "Error", "Decommissioned", "Unknown"
    ]
    status_history: list[StatusDetail]
    labels: dict[str, str] | None
    reservation: MachineReservation | None = None
    metadata: MachineMetadata | None = None


class NVLinkInterface(Stored, frozen=True, kw_only=True):
    """An NVLink interface, with the observation of its GPU."""

    instance_id: str
    nv_link_logical_partition_id: str
    device_instance: int
    status: Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]
    site_id: str
    nv_link_domain_id: str | None
    gpu_guid: str | None
    status_message: str | None
    site: SiteSummary | None = None
    instance: Summary | None = None
    nv_link_logical_partition: Summary | None = None


class NVLinkLogicalPartition(Named, frozen=True, kw_only=True):
    """An NVLink logical partition."""

    site_id: str
    tenant_id: str
    nv_link_logical_partition_stats: PartitionStats | None
    status: Literal["Pending", "Provisioning", "Configuring", "Ready", "Deleting", "Error"]
    status_history: list[StatusDetail]
    site: SiteSummary | None = None
    tenant: Org | None = None
    vpcs: list[Summary] | None = None
    nv_link_interfaces: list[InterfaceSummary] | None = None


class Instance(Named, frozen=True, kw_only=True):
    """An instance."""

    tenant_id: str
    infrastructure_provider_id: str
    site_id: str
    instance_type_id: str | None
    vpc_id: str
    machine_id: str
    controller_instance_id: str
    nv_link_interfaces: list[NVLinkInterface]
    is_update_pending: bool
    placement_reason: str
    status: Literal[
        "Pending",
        "Provisioning",
        "Configuring",
        "Ready",
        "Updating",
        "Repairing",
        "Rebooting",
        "Terminating",
        "Error",
    ]
    unknown_since: datetime | None
    status_history: list[StatusDetail]
    warnings: list[CautionAnswer] | None = None
