"""The shapes of answers, for the description of the API; the answers themselves are plain values.

Only what this service gives a meaning is declared: fields that are kept for clients of the wider API come
back as they were sent.
"""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rackloom.carve.api.queries import InstanceStatus, InterfaceStatus, PartitionStatus


class Answer(BaseModel):
    """camelCase on the wire."""

    model_config = ConfigDict(alias_generator=to_camel)


class Timed(Answer):
    """Something with a beginning and a last change."""

    created: datetime
    updated: datetime


class Problem(Answer):
    """The one error body there is."""

    source: Literal["nico"]
    message: str
    data: dict[str, Any] | None


class StatusDetail(Timed):
    """One entry of a status history."""

    status: str
    message: str | None


class Summary(Answer):
    """An object in one line."""

    id: UUID
    name: str
    site_id: UUID
    status: str


class SiteSummary(Answer):
    """A site in one line."""

    id: UUID
    name: str
    infrastructure_provider_id: UUID
    status: str


class Org(Timed):
    """A tenant or provider."""

    id: UUID
    org: str


class TenantCapabilities(Answer):
    """What a tenant may do beyond the usual."""

    targeted_instance_creation: bool


class Tenant(Org):
    """A tenant."""

    capabilities: TenantCapabilities


class ServiceAccount(Answer):
    """Whether an org is provider and tenant in one."""

    enabled: bool
    infrastructure_provider_id: UUID | None
    tenant_id: UUID | None


class Metadata(Answer):
    """Which version of the contract this keeps, and which build it is."""

    version: str
    implementation: str
    build_time: datetime


class InterfaceSummary(Answer):
    """An NVLink interface in one line; its partition id is spelt both ways for generated clients."""

    id: UUID
    instance_id: UUID
    nvlink_logical_partition_id: UUID = Field(alias="nvLinkLogicalPartitionId")
    nvlink_logical_partition_id_too: UUID = Field(alias="nvLinklogicalPartitionId")
    device_instance: int
    status: InterfaceStatus


class NVLinkInterface(InterfaceSummary, Timed):
    """An NVLink interface and what the fabric told of its GPU."""

    site_id: UUID
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    gpu_guid: Annotated[str, Field(pattern=r"^\d+$")] | None
    status_message: str | None
    site: SiteSummary | None = None
    instance: Summary | None = None
    nvlink_logical_partition: Summary | None = Field(None, alias="nvLinkLogicalPartition")


class PartitionStats(Answer):
    """How many GPUs are, or shall be, in a logical partition, and of how many instances."""

    total_gpus: int
    total_distinct_instances: int


class NVLinkLogicalPartition(Timed):
    """An NVLink logical partition."""

    id: UUID
    name: str
    description: str | None
    site_id: UUID
    tenant_id: UUID
    nvlink_logical_partition_stats: PartitionStats | None = Field(alias="nvLinkLogicalPartitionStats")
    status: PartitionStatus
    status_history: list[StatusDetail]
    site: SiteSummary | None = None
    tenant: Org | None = None
    vpcs: list[Summary] = []
    nvlink_interfaces: list[InterfaceSummary] = Field([], alias="nvLinkInterfaces")


class Vpc(Timed):
    """A VPC."""

    id: UUID
    name: str
    description: str | None
    org: str
    site_id: UUID
    tenant_id: UUID
    controller_vpc_id: UUID
    nvlink_logical_partition_id: UUID | None = Field(alias="nvLinkLogicalPartitionId")
    nvlink_logical_partition_summary: Summary | None = Field(alias="nvLinkLogicalPartitionSummary")
    status: PartitionStatus
    status_history: list[StatusDetail]


class CautionAnswer(Answer):
    """What is allowed and probably not meant."""

    type: Literal["LogicalPartitionSpansDomains", "TraySplit"]
    message: str


class Instance(Timed):
    """An instance."""

    id: UUID
    name: str
    description: str | None
    tenant_id: UUID
    infrastructure_provider_id: UUID
    site_id: UUID
    instance_type_id: UUID | None
    vpc_id: UUID
    machine_id: str
    controller_instance_id: UUID
    nvlink_interfaces: list[NVLinkInterface] = Field(alias="nvLinkInterfaces")
    is_update_pending: bool
    placement_reason: str
    status: InstanceStatus
    unknown_since: datetime | None
    status_history: list[StatusDetail]
    warnings: list[CautionAnswer] = []


class PlannedInterface(Answer):
    """A GPU and the logical partition that it would join."""

    nvlink_logical_partition_id: UUID = Field(alias="nvLinkLogicalPartitionId")
    device_instance: int


class PlannedInstance(Answer):
    """An instance that would be made."""

    name: str
    machine_id: str
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    nvlink_interfaces: list[PlannedInterface] = Field(alias="nvLinkInterfaces")


class InstancePlan(Answer):
    """What a request would make; nothing was changed."""

    dry_run: Literal[True]
    reason: str
    nvlink_domain_ids: list[str | None] = Field(alias="nvLinkDomainIds")
    instances: list[PlannedInstance]
    warnings: list[CautionAnswer]


class KeptInterface(Timed):
    """A network interface as the request asked for it; nothing here acts on it."""

    id: UUID
    instance_id: UUID
    status: InterfaceStatus
