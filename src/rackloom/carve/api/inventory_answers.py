"""The shapes of answers about sites, instance types, machines and allocations."""

from typing import Literal
from uuid import UUID

from pydantic import Field

from rackloom.carve.api.answers import Answer, StatusDetail, Timed
from rackloom.carve.api.queries import CapabilityType, MachineStatus, SiteStatus, TypeStatus


class SiteCapabilitiesAnswer(Answer):
    """What a site can do."""

    native_networking: bool
    network_security_group: bool
    nvlink_partition: bool = Field(alias="nvLinkPartition")
    flow: bool
    image_based_operating_system: bool


class Site(Timed):
    """A site."""

    id: UUID
    name: str
    description: str | None
    org: str
    infrastructure_provider_id: UUID
    is_online: bool
    capabilities: SiteCapabilitiesAnswer
    status: SiteStatus
    status_history: list[StatusDetail]


class Capability(Answer):
    """What machines of a type have."""

    type: CapabilityType
    name: str
    count: int | None = None
    device_type: Literal["DPU", "NVLink"] | None = None


class MachineAssociationAnswer(Timed):
    """A machine of an instance type; the id of the association is that of the machine."""

    id: str
    machine_id: str
    instance_type_id: UUID


class AllocationStats(Answer):
    """How many machines of a type there are, and how many are spoken for."""

    assigned: int
    total: int
    used: int
    unused: int
    unused_usable: int
    max_allocatable: int


class InstanceType(Timed):
    """An instance type."""

    id: UUID
    name: str
    description: str | None
    site_id: UUID
    infrastructure_provider_id: UUID
    labels: dict[str, str]
    machine_capabilities: list[Capability]
    status: TypeStatus
    status_history: list[StatusDetail]
    machine_instance_types: list[MachineAssociationAnswer] | None = None
    allocation_stats: AllocationStats | None = None


class NVLinkGpu(Answer):
    """A GPU of a machine, as a switch controller named it."""

    device_instance: int
    module_id: int
    slot_id: int
    tray_index: int
    guid: str | None
    source: str | None
    health: str


class NVLinkInfo(Answer):
    """Where a machine sits in the NVLink fabric."""

    domain_uuid: str | None
    chassis_serial: str
    gpus: list[NVLinkGpu]


class MachineMetadata(Answer):
    """What is known of the hardware of a machine."""

    nvlink_info: NVLinkInfo = Field(alias="nvLinkInfo")
    rack: str


class Machine(Timed):
    """A machine."""

    id: str
    infrastructure_provider_id: UUID
    site_id: UUID
    instance_type_id: UUID | None
    instance_id: UUID | None
    tenant_id: UUID | None
    controller_machine_id: str
    hw_sku_device_type: Literal["gpu"] | None
    serial_number: str | None
    machine_capabilities: list[Capability]
    maintenance_message: str | None
    is_missing_on_site: bool
    is_usable_by_tenant: bool
    status: MachineStatus
    status_history: list[StatusDetail]
    metadata: MachineMetadata | None = None


class GpuStats(Answer):
    """GPUs of one product."""

    name: str
    gpus: int
    machines: int


class AllocationConstraintAnswer(Timed):
    """So many machines of a type."""

    id: UUID
    allocation_id: UUID
    resource_type: Literal["InstanceType"]
    resource_type_id: UUID
    constraint_type: Literal["Reserved"]
    constraint_value: int


class Allocation(Timed):
    """What a tenant may use of a site."""

    id: UUID
    name: str
    description: str | None
    infrastructure_provider_id: UUID
    tenant_id: UUID
    site_id: UUID
    allocation_constraints: list[AllocationConstraintAnswer]
    status: SiteStatus
    status_history: list[StatusDetail]
