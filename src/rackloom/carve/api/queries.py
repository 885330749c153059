"""Query parameters: paging, filters and what to include, checked before any record is read."""

from collections.abc import Collection
from typing import Annotated, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rackloom.carve.site.paging import Page
from rackloom.carve.site.problems import invalid

PartitionStatus = Literal["Pending", "Provisioning", "Configuring", "Ready", "Deleting", "Error"]
InterfaceStatus = Literal["Pending", "Provisioning", "Ready", "Deleting", "Error"]
InstanceStatus = Literal[
    "Pending", "Provisioning", "Configuring", "Ready", "Updating", "Repairing", "Rebooting",
    "Terminating", "Terminated", "Error", "Unknown",
]  # fmt: skip
MachineStatus = Literal[
    "Initializing", "Ready", "Reset", "Maintenance", "InUse", "Error", "Decommissioned", "Unknown"
]
Ids = Annotated[list[UUID], Field(max_length=100)]


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
    query: str | None = None


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

    site_id: UUID | None = None
    name: str | None = None
    status: PartitionStatus | None = None
    query: str | None = None
    nvlink_logical_partition_id: Ids = Field([], alias="nvLinkLogicalPartitionId")


class InstanceQuery(PageQuery):
    """Filters on instances."""

    infrastructure_provider_id: UUID | None = None
    site_id: UUID | None = None
    vpc_id: UUID | None = None
    instance_type_id: UUID | None = None
    operating_system_id: UUID | None = None
    network_security_group_id: UUID | None = None
    machine_id: str | None = None
    name: str | None = None
    status: InstanceStatus | None = None
    query: str | None = None


class SiteQuery(PageQuery):
    """Filters on sites."""

    is_nvlink_partition_enabled: bool | None = Field(None, alias="isNVLinkPartitionEnabled")
    status: Literal["Pending", "Registered", "Error"] | None = None
    query: str | None = None


class InstanceTypeQuery(PageQuery):
    """Filters on instance types."""

    site_id: UUID | None = None
    status: PartitionStatus | None = None
    query: str | None = None
    include_machine_assignment: bool = False


class MachineIncludes(Query):
    """What to add to a machine."""

    include_metadata: bool = False


class MachineQuery(PageQuery, MachineIncludes):
    """Filters on machines."""

    site_id: UUID | None = None
    id: list[str] = []
    instance_type_id: UUID | None = None
    has_instance_type: bool | None = None
    has_instance: bool | None = None
    status: MachineStatus | None = None


class AllocationQuery(PageQuery):
    """Filters on allocations."""

    site_id: UUID | None = None
    tenant_id: UUID | None = None
