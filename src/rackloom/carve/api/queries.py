"""Query parameters: paging, filters and what to include, checked before any record is read."""

from collections.abc import Collection
from typing import Annotated, Literal
from uuid import UUID

from fastapi import Query as QueryParam
from pydantic import BaseModel, ConfigDict, Field, IPvAnyAddress
from pydantic.alias_generators import to_camel

from rackloom.carve.site.paging import Page
from rackloom.carve.site.physical_partitions import Owner
from rackloom.carve.site.problems import invalid

PartitionStatus = Literal["Pending", "Provisioning", "Configuring", "Ready", "Deleting", "Error"]
InterfaceStatus = Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]
InstanceStatus = Literal[
    "Pending", "Provisioning", "Configuring", "Ready", "Updating", "Repairing", "Rebooting",
    "Terminating", "Error",
]  # fmt: skip
MachineStatus = Literal[
    "Initializing", "Ready", "Reset", "Maintenance", "InUse", "Error", "Decommissioned", "Unknown"
]
CapabilityType = Literal["CPU", "Memory", "Storage", "Network", "GPU", "InfiniBand", "DPU"]
SiteStatus = Literal["Pending", "Registered", "Deleting", "Error"]
TypeStatus = Literal["Pending", "Registering", "Ready", "Deleting", "Error"]
DryRun = Annotated[bool, QueryParam(alias="dryRun")]
"""Whether to say what would be done, and do nothing."""
Text = Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")]
Ids = Annotated[list[UUID], Field(max_length=100)]
Texts = Annotated[list[Text], Field(max_length=100)]


class Query(BaseModel):
    """camelCase on the wire; unknown parameters are ignored."""

    model_config = ConfigDict(alias_generator=to_camel)

    include_relation: list[str] = []

    def relations(self, *known: str) -> Collection[str]:
        """The related objects to include, when each is one of `known`."""
        for name in self.include_relation:
            if name not in known:
                raise invalid(f"Invalid includeRelation value in query: {name}")
        return frozenset(self.include_relation)


class PageQuery(Query):
    """A page of a listing."""

    page_number: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    page_size: Annotated[int, Field(ge=1, le=100)] = 20
    order_by: Annotated[str, Field(pattern=r"^[A-Z0-9_]+_(ASC|DESC)$")] | None = None

    @property
    def page(self) -> Page:
        """As the records take it."""
        return Page(self.page_number, self.page_size, self.order_by)


class PartitionIncludes(Query):
    """What to add to a logical partition."""

    include_interfaces: bool = False
    include_vpcs: bool = False
    include_stats: bool = False


class PartitionQuery(PageQuery, PartitionIncludes):
    """Filters on logical partitions."""

    site_id: UUID | None = None
    status: PartitionStatus | None = None
    query: Text | None = None


class InstanceInterfaceQuery(PageQuery):
    """Filters on the interfaces of one instance."""

    nvlink_logical_partition_id: Ids = Field([], alias="nvLinkLogicalPartitionId")
    nvlink_domain_id: Ids = Field([], alias="nvLinkDomainId")
    status: list[InterfaceStatus] = []


class InterfaceQuery(InstanceInterfaceQuery):
    """Filters on all interfaces of a tenant."""

    site_id: Ids = []
    instance_id: Ids = []


class VpcQuery(PageQuery):
    """Filters on VPCs."""

    site_id: Ids = []
    name: Text | None = None
    status: list[PartitionStatus] = []
    network_security_group_id: Ids = []
    query: Text | None = None
    nvlink_logical_partition_id: Ids = Field([], alias="nvLinkLogicalPartitionId")


class KeptInterfaceQuery(PageQuery):
    """Filters on network interfaces, which are kept and not acted on."""

    status: list[InterfaceStatus] = []


class InstanceQuery(PageQuery):
    """Filters on instances."""

    infrastructure_provider_id: UUID | None = None
    site_id: Ids = []
    vpc_id: Ids = []
    instance_type_id: Ids = []
    operating_system_id: Ids = []
    network_security_group_id: Ids = []
    machine_id: Texts = []
    name: Text | None = None
    status: list[InstanceStatus | Literal["Terminated", "Unknown"]] = []
    ip_address: Annotated[list[IPvAnyAddress], Field(max_length=100)] = []
    query: Text | None = None


class SiteQuery(PageQuery):
    """Filters on sites."""

    infrastructure_provider_id: UUID | None = None
    is_native_networking_enabled: bool | None = None
    is_network_security_group_enabled: bool | None = None
    is_nvlink_partition_enabled: bool | None = Field(None, alias="isNVLinkPartitionEnabled")
    is_flow_enabled: bool | None = None
    status: list[SiteStatus] = []
    query: Text | None = None


class InstanceTypeIncludes(Query):
    """What to add to an instance type."""

    include_machine_assignment: bool = False
    include_allocation_stats: bool = False


class InstanceTypeQuery(PageQuery, InstanceTypeIncludes):
    """Filters on instance types."""

    site_id: UUID | None = None
    infrastructure_provider_id: UUID | None = None
    tenant_id: UUID | None = None
    status: TypeStatus | None = None
    query: Text | None = None
    exclude_unallocated: bool = False


class MachineIncludes(Query):
    """What to add to a machine."""

    include_metadata: bool = False


class MachineQuery(PageQuery, MachineIncludes):
    """Filters on machines."""

    site_id: UUID | None = None
    id: Texts = []
    instance_type_id: Ids = []
    tenant_id: Ids = []
    has_instance_type: bool | None = None
    has_instance: bool | None = None
    is_missing_on_site: bool | None = None
    status: list[MachineStatus] = []
    capability_type: CapabilityType | None = None
    capability_name: Texts = []
    hw_sku_device_type: Texts = []
    query: Text | None = None


class GpuStatsQuery(BaseModel):
    """Of which site."""

    model_config = ConfigDict(alias_generator=to_camel)

    site_id: UUID | None = None


class AllocationQuery(PageQuery):
    """Filters on allocations."""

    infrastructure_provider_id: UUID | None = None
    site_id: Ids = []
    tenant_id: Ids = []
    id: Ids = []
    resource_type: list[Literal["InstanceType", "IPBlock"]] = []
    resource_type_id: Ids = []
    constraint_type: list[Literal["Reserved", "OnDemand", "Preemptible"]] = []
    constraint_value: Annotated[list[Annotated[int, Field(ge=1, le=1_000_000)]], Field(max_length=100)] = []
    status: list[SiteStatus] = []
    query: Text | None = None


class DomainQuery(PageQuery):
    """Filters on NVLink domains."""

    site_id: UUID | None = None


class FabricQuery(PageQuery):
    """Filters on what operators see of domains."""

    nvlink_domain_id: Text | None = Field(None, alias="nvLinkDomainId")


class OperationQuery(FabricQuery):
    """Filters on the audit of operations."""

    state: Literal["pending", "done", "refused", "unknown"] | None = None


class PhysicalPartitionQuery(FabricQuery):
    """Filters on physical partitions."""

    owner: Owner | None = None
    nvlink_logical_partition_id: UUID | None = Field(None, alias="nvLinkLogicalPartitionId")


class DrainQuery(PageQuery):
    """Filters on drains."""

    machine_id: Text | None = None
    is_active: bool | None = None
