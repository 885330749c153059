"""The shapes of answers about NVLink domains, and about what operators see and do."""

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import Field

from rackloom.carve.api.answers import Answer, Timed
from rackloom.carve.site.operator_steps import Step
from rackloom.carve.site.physical_partitions import Owner


class TypeCapacity(Answer):
    """Room for machines of one instance type."""

    instance_type_id: UUID
    free_trays: int
    largest_batch: int


class OwnPartition(Answer):
    """A logical partition of the caller that reaches into the domain."""

    id: UUID
    gpus: int


class BlockedGpu(Answer):
    """A GPU that is wanted somewhere, and what stands in the way; without a fix the site can do nothing."""

    gpu_guid: str
    reason: str
    fix: str | None
    since: datetime


class NVLinkDomain(Answer):
    """What is known of a domain, how much room it has, and what the caller has in it."""

    id: str
    site_id: UUID | None
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
    closed_trays: int
    largest_batch: int
    fragmentation: float
    blocked_gpus: list[BlockedGpu] | None
    """For whoever operates the domain; null for its tenants."""
    instance_types: list[TypeCapacity]
    own_instances: int
    own_gpus: int
    own_logical_partitions: list[OwnPartition]


class NmxcEndpoint(Timed):
    """The switch controller of a chassis."""

    chassis_serial: str
    endpoint: str
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    observed_at: datetime | None
    unknown_since: datetime | None
    status_message: str | None


class NVLinkPartition(Answer):
    """A partition as the switch controller shows it, and whose it is."""

    id: int
    name: str
    nvlink_domain_id: str = Field(alias="nvLinkDomainId")
    owner: Owner
    nvlink_logical_partition_id: UUID | None = Field(alias="nvLinkLogicalPartitionId")
    gpu_guids: list[str]
    health: str
    is_guid_based: bool
    multicast_groups: int
    observed_at: datetime


class NVLinkOperation(Answer):
    """Something that was asked of a switch controller, and what came of it."""

    id: int
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    plan_id: str
    kind: str
    partition_name: str
    asked_by: str
    reason: str
    detail: dict[str, Any]
    state: Literal["pending", "done", "refused", "unknown"]
    code: str | None
    message: str | None
    observed_at: datetime
    started: datetime
    finished: datetime | None
    observed_after: datetime | None


class OperatorStep(Answer):
    """Something that an operator did."""

    id: int
    step: Step
    subject: str
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    asked_by: str
    reason: str
    created: datetime


class Drain(Answer):
    """The drain of a tray."""

    id: UUID
    machine_id: str
    instance_id: UUID | None
    status: Literal["Draining", "Drained", "Ended"]
    message: str
    reason: str
    asked_by: str
    started: datetime
    drained: datetime | None
    ended: datetime | None
