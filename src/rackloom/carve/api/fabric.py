"""REST for providers: controller endpoints, partitions on switches, operations, operator steps.

Endpoints are registered per chassis. A found partition can be adopted for a logical partition, or
released. The operation list is the audit of everything that was requested from controllers. Operations
of one plan share a plan id. A provider sees only the domains, chassis and machines that it operates.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field, StringConstraints
from pydantic import model_validator as validator

from rackloom.carve.api import routing
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import ApiDeps, Deps, Page, Params, ProviderAdmin, ProviderReader, Row, Rows
from rackloom.carve.api.wire import (
    NO_NUL,
    Answer,
    Because,
    Body,
    Json,
    Name,
    PageQuery,
    Reason,
    Text,
    Timed,
    Url,
    shape,
)
from rackloom.carve.inventory import adoption, endpoints
from rackloom.carve.inventory.adoption import PartitionOwner
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.partitions import found
from rackloom.carve.partitions.found import FoundPartitionView, Owner
from rackloom.carve.store.journal import OperatorOrder, Step
from rackloom.carve.store.schema import endpoint, endpoint_chassis, machine, operation, operator_step
from rackloom.carve.store.values import Changed, IdFactory
from rackloom.carve.tenancy import entitlements
from rackloom.core.partitions.domain import PartitionHealth

# Request models of operator steps.


class EndpointCreate(Because):
    """The switch controller of a chassis."""

    chassis_serial: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256)]
    endpoint: Url
    reason: Reason = "registered over REST"


class EndpointUpdate(Because):
    """A new URL for the switch controller of a chassis."""

    endpoint: Url
    reason: Reason = "changed over REST"


class FoundPartition(Because):
    """A partition that was found on a switch, by its name."""

    nvlink_domain_id: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        alias="nvLinkDomainId"
    )
    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=255)]


class AdoptionOwner(Body):
    """The owner of an adopted partition, by names. Missing objects of these names are created."""

    tenant_org: Name
    vpc_name: Name
    nvlink_logical_partition_name: Name = Field(alias="nvLinkLogicalPartitionName")


class Adoption(FoundPartition):
    """A found partition, and the logical partition or the owner that gets it."""

    nvlink_logical_partition_id: UUID | None = Field(None, alias="nvLinkLogicalPartitionId")
    owner: AdoptionOwner | None = None

    @validator(mode="after")
    def _one_choice(self) -> Self:
        if (self.nvlink_logical_partition_id is None) == (self.owner is None):
            raise ValueError("exactly one of nvLinkLogicalPartitionId and owner must be specified")
        return self


# Query parameters.


class FabricQuery(PageQuery):
    """Filters by domain."""

    nvlink_domain_id: Text | None = Field(None, alias="nvLinkDomainId")


class OperationQuery(FabricQuery):
    """Filters on the audit of operations."""

    state: Literal["pending", "done", "refused", "unknown"] | None = None


class PhysicalPartitionQuery(FabricQuery):
    """Filters on physical partitions."""

    owner: Owner | None = None
    nvlink_logical_partition_id: UUID | None = Field(None, alias="nvLinkLogicalPartitionId")


# Response models.


class NmxcEndpoint(Timed):
    """The switch controller of a chassis."""

    chassis_serial: str
    endpoint: str
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    observed_at: datetime | None
    unknown_since: datetime | None
    status_message: str | None


class NVLinkPartition(Answer):
    """A partition as the switch controller shows it, with its owner."""

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
    """A request to a switch controller, and its outcome."""

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
    """An action of an operator."""

    id: int
    step: Step
    subject: str
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    asked_by: str
    reason: str
    created: datetime


# From rows to responses.


def _endpoint_shape(row: Row) -> Json:
    known = {"nvlink_domain_id": row.domain, "status_message": row.unknown_reason}
    return shape(NmxcEndpoint, row, endpoint=row.url, **known)


def _partition_shape(found_partition: FoundPartitionView) -> Json:
    partition = found_partition.partition
    return shape(
        NVLinkPartition,
        partition,
        nvlink_domain_id=found_partition.domain,
        owner=found_partition.owner,
        nvlink_logical_partition_id=found_partition.logical_partition,
        gpu_guids=[str(guid) for guid in sorted(partition.members)],
        health=PartitionHealth(partition.health).name.lower(),
        is_guid_based=partition.guid_based,
        observed_at=found_partition.observed_at,
    )


def _operation_shapes(_conn: sa.Connection, rows: Rows, _query: OperationQuery) -> list[Json]:
    """Operations of the controllers. All operations of a plan have its plan id."""
    return [
        shape(
            NVLinkOperation,
            row,
            nvlink_domain_id=row.domain,
            plan_id=f"{row.endpoint_id}@{rfc3339(row.observed_at)}",
        )
        for row in rows
    ]


# Routes.


router = routing.Operations()

Serial = Annotated[str, Path(alias="chassisSerial", max_length=256, pattern=NO_NUL)]
ENDPOINTS = "/nvlink-nmxc-endpoint"
ENDPOINT = f"{ENDPOINTS}/{{chassisSerial}}"


@router.page(ENDPOINTS, "get-all-nvlink-nmxc-endpoint", list[NmxcEndpoint])
def list_endpoints(conn: sa.Connection, deps: Deps, caller: ProviderReader, query: Params[PageQuery]) -> Page:
    """The switch controllers that the provider has registered, one row for each chassis."""
    provider_id = entitlements.provider_id_of(conn, caller.org)
    mine = entitlements.operates_chassis(provider_id, endpoint_chassis.c.chassis_serial)
    visible = endpoints.chassis_endpoint_listing().where(mine)
    return ENDPOINT_LISTING.page(conn, visible, query, valid_from=deps.valid_from())


@router.create(ENDPOINTS, "create-nvlink-nmxc-endpoint", NmxcEndpoint)
def create_endpoint(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, body: EndpointCreate
) -> Changed[Json]:
    """Register the switch controller of a chassis. It is used at once."""
    return _register(conn, deps, caller, body.chassis_serial, body, endpoints.create_chassis_endpoint)


@router.get(ENDPOINT, "get-nvlink-nmxc-endpoint", NmxcEndpoint)
def get_endpoint(conn: sa.Connection, deps: Deps, caller: ProviderReader, serial: Serial) -> Json:
    """The switch controller of one chassis."""
    entitlements.check_operates_chassis(conn, caller.org, serial)
    return _endpoint_shape(endpoints.get_chassis_endpoint(conn, serial, deps.valid_from()))


@router.patch(ENDPOINT, "update-nvlink-nmxc-endpoint", NmxcEndpoint)
def update_endpoint(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, serial: Serial, body: EndpointUpdate
) -> Changed[Json]:
    """Change the URL of the switch controller of a chassis."""
    return _register(conn, deps, caller, serial, body, endpoints.update_chassis_endpoint)


@router.delete(ENDPOINT, "delete-nvlink-nmxc-endpoint")
def delete_endpoint(conn: sa.Connection, deps: Deps, caller: ProviderAdmin, serial: Serial) -> Changed[None]:
    """Remove the switch controller of a chassis."""
    entitlements.check_operates_chassis(conn, caller.org, serial)
    order = OperatorOrder(caller.subject, "deleted over REST", deps.clock())
    return endpoints.delete_chassis_endpoint(conn, serial, order)


@router.page("/nvlink-partition", "get-all-nvlink-partition", list[NVLinkPartition])
def list_partitions(
    conn: sa.Connection, deps: Deps, caller: ProviderReader, query: Params[PhysicalPartitionQuery]
) -> list[Json]:
    """The partitions in the newest observations, with their owners."""
    mine = entitlements.operated_domains(entitlements.provider_id_of(conn, caller.org)).subquery()
    wanted = sa.select(mine.c.domain)
    if query.nvlink_domain_id is not None:
        wanted = wanted.where(mine.c.domain == query.nvlink_domain_id)
    logical = query.nvlink_logical_partition_id
    return [
        _partition_shape(partition)
        for partition in found.partitions_of_domains(
            conn, conn.execute(wanted).scalars().all(), deps.valid_from()
        )
        if query.owner in (None, partition.owner)
        and (logical is None or partition.logical_partition == str(logical))
    ]


@router.post("/nvlink-partition/adopt", "adopt-nvlink-partition", NVLinkPartition)
def adopt(conn: sa.Connection, deps: Deps, caller: ProviderAdmin, body: Adoption) -> Changed[Json]:
    """Make a found partition the physical partition of a logical partition. No GPU is moved."""

    def adopt(conn: sa.Connection, domain: str, name: str, order: OperatorOrder) -> Changed[Any]:
        if body.owner is None:
            return found.adopt_partition(conn, domain, name, str(body.nvlink_logical_partition_id), order)
        owner = PartitionOwner(
            org=body.owner.tenant_org.lower(),
            vpc=body.owner.vpc_name,
            logical_partition=body.owner.nvlink_logical_partition_name,
        )
        return adoption.adopt_for_owner(conn, domain, name, owner, order, deps.ids)

    return _take_over(conn, deps, caller, body, adopt)


@router.post("/nvlink-partition/release", "release-nvlink-partition", NVLinkPartition)
def release(conn: sa.Connection, deps: Deps, caller: ProviderAdmin, body: FoundPartition) -> Changed[Json]:
    """Allow a found partition to be taken apart."""
    return _take_over(conn, deps, caller, body, found.release_partition)


@router.page("/nvlink-operation", "get-all-nvlink-operation", list[NVLinkOperation])
def list_operations(conn: sa.Connection, caller: ProviderReader, query: Params[OperationQuery]) -> Page:
    """The requests to the switch controllers, with their requesters, reasons and outcomes."""
    mine = entitlements.operated_domains(entitlements.provider_id_of(conn, caller.org))
    return OPERATION_LISTING.page(conn, sa.select(operation).where(operation.c.domain.in_(mine)), query)


@router.page("/operator-step", "get-all-operator-step", list[OperatorStep])
def list_steps(conn: sa.Connection, caller: ProviderReader, query: Params[FabricQuery]) -> Page:
    """The actions of operators, with their reasons."""
    provider_id = entitlements.provider_id_of(conn, caller.org)
    machines = sa.select(machine.c.id).where(entitlements.operates_machine(provider_id))
    mine = sa.or_(
        operator_step.c.domain.in_(entitlements.operated_domains(provider_id)),
        operator_step.c.subject.in_(machines),
        sa.and_(
            operator_step.c.domain.is_(None),
            entitlements.operates_chassis(provider_id, operator_step.c.subject),
        ),
    )
    return STEP_LISTING.page(conn, sa.select(operator_step).where(mine), query)


def _register(
    conn: sa.Connection,
    deps: ApiDeps,
    caller: Caller,
    serial: str,
    body: EndpointCreate | EndpointUpdate,
    step: Callable[[sa.Connection, str, str, OperatorOrder, IdFactory], Changed[None]],
) -> Changed[Json]:
    entitlements.check_operates_chassis(conn, caller.org, serial)
    changed = step(conn, serial, body.endpoint, routing.operator_order(deps, caller, body), deps.ids)
    return Changed(_endpoint_shape(endpoints.get_chassis_endpoint(conn, serial)), changed.domains)


def _take_over(
    conn: sa.Connection,
    deps: ApiDeps,
    caller: Caller,
    body: FoundPartition,
    step: Callable[[sa.Connection, str, str, OperatorOrder], Changed[Any]],
) -> Changed[Json]:
    domain = body.nvlink_domain_id
    entitlements.check_operates_domain(conn, caller.org, domain)
    changed = step(conn, domain, body.name, routing.operator_order(deps, caller, body))
    views = found.partitions_of_domains(conn, [domain])
    shown = next(_partition_shape(view) for view in views if view.partition.name == body.name)
    return Changed(shown, changed.domains)


ENDPOINT_LISTING = routing.Listing(
    shapes=lambda _conn, rows, _query: [_endpoint_shape(row) for row in rows],
    order={
        "CREATED": endpoint.c.created,
        "UPDATED": endpoint.c.updated,
        routing.TIE_BREAKER: endpoint_chassis.c.chassis_serial,
    },
)
OPERATION_LISTING = routing.Listing(
    shapes=_operation_shapes,
    order=routing.order_by_creation(operation.c.started, operation.c.id),
    filters={"nvlink_domain_id": operation.c.domain, "state": operation.c.state},
)
STEP_LISTING = routing.Listing(
    shapes=lambda _conn, rows, _query: [
        shape(OperatorStep, row, nvlink_domain_id=row.domain) for row in rows
    ],
    order=routing.order_by_creation(operator_step.c.created, operator_step.c.id),
    filters={"nvlink_domain_id": operator_step.c.domain},
)
