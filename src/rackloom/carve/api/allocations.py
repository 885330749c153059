"""REST: allocations that a provider gave, and allocations that a tenant received.

Every constraint is a reservation of machines of one instance type.
"""

from typing import Annotated, Any, Literal
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field, StrictInt

from rackloom.carve.api import routing, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import AnySelect, Deps, Page, Params, ProviderAdmin, Reader, Row, Rows
from rackloom.carve.api.wire import Json
from rackloom.carve.store import journal
from rackloom.carve.store.prepared import require
from rackloom.carve.store.schema import allocation, allocation_constraint, instance_type, site, tenant
from rackloom.carve.tenancy import entitlements
from rackloom.carve.tenancy.entitlements import NewAllocation

# Request models.


class AllocationConstraint(wire.Body):
    """A number of machines of one instance type."""

    resource_type: Literal["InstanceType"]
    resource_type_id: UUID
    constraint_type: Literal["Reserved"]
    constraint_value: Annotated[StrictInt, Field(ge=1, le=1_000_000)]


class AllocationCreate(wire.Body):
    """The machines of a site that a tenant may use."""

    name: wire.Name
    description: wire.Description | None = None
    tenant_id: UUID
    site_id: UUID
    allocation_constraints: Annotated[list[AllocationConstraint], Field(max_length=256)] = []


class AllocationUpdate(wire.Body):
    """Changes of an allocation."""

    name: wire.Name | None = None
    description: wire.Description | None = None


class AllocationConstraintUpdate(wire.Body):
    """A new number of machines."""

    constraint_value: Annotated[StrictInt, Field(ge=1, le=1_000_000)]


# Query parameters.


class AllocationRead(wire.RelationQuery):
    """Related objects to add to an allocation, and the provider or tenant that it must have."""

    infrastructure_provider_id: UUID | None = None
    tenant_id: UUID | None = None


ANYBODYS = AllocationRead()


class AllocationQuery(wire.PageQuery, wire.RelationQuery):
    """Filters on allocations."""

    infrastructure_provider_id: UUID | None = None
    site_id: wire.UuidFilter = []
    tenant_id: wire.UuidFilter = []
    id: wire.UuidFilter = []
    resource_type: list[Literal["InstanceType", "IPBlock"]] = []
    resource_type_id: wire.UuidFilter = []
    constraint_type: list[Literal["Reserved", "OnDemand", "Preemptible"]] = []
    constraint_value: Annotated[list[Annotated[int, Field(ge=1, le=1_000_000)]], Field(max_length=100)] = []
    status: list[wire.SiteStatus] = []
    query: wire.Text | None = None


# Response models.


class AllocationConstraintAnswer(wire.Timed):
    """A number of machines of one instance type."""

    id: UUID
    allocation_id: UUID
    resource_type: Literal["InstanceType"]
    resource_type_id: UUID
    constraint_type: Literal["Reserved"]
    constraint_value: int


class Allocation(wire.Timed):
    """The machines of a site that a tenant may use."""

    id: UUID
    name: str
    description: str | None
    infrastructure_provider_id: UUID
    tenant_id: UUID
    site_id: UUID
    allocation_constraints: list[AllocationConstraintAnswer]
    status: wire.SiteStatus
    status_history: list[wire.StatusDetail]


# From rows to responses.


def _allocation_shapes(conn: sa.Connection, rows: Rows, query: wire.RelationQuery) -> list[Json]:
    ids = [row.id for row in rows]
    histories = journal.status_histories(conn, ids)
    constraints: dict[str, list[Json]] = {allocation_id: [] for allocation_id in ids}
    for constraint in entitlements.constraints_of_allocations(conn, ids):
        constraints[constraint.allocation_id].append(_constraint_shape(constraint))
    shapes = [
        wire.shape(
            Allocation,
            row,
            infrastructure_provider_id=row.provider_id,
            allocation_constraints=constraints[row.id],
            status_history=routing.status_history_shape(histories[row.id]),
        )
        for row in rows
    ]
    routing.add_relations(conn, shapes, query.relations("InfrastructureProvider", "Tenant", "Site"))
    return shapes


def _constraint_shape(row: Row) -> Json:
    return wire.shape(
        AllocationConstraintAnswer,
        row,
        resource_type="InstanceType",
        resource_type_id=row.instance_type_id,
        constraint_type="Reserved",
        constraint_value=row.value,
    )


# Routes.


router = routing.Operations()

ONE = "/allocation/{allocationId}"
AllocationId = Annotated[UUID, Path(alias="allocationId")]


@router.page("/allocation", "get-all-allocation", list[Allocation])
def list_allocations(conn: sa.Connection, caller: Reader, query: Params[AllocationQuery]) -> Page:
    """The allocations that the caller gave or was given."""
    visible = _allocations(conn, caller)
    if (constraint := _constraint_filter(query)) is not None:
        visible = visible.where(constraint)
    return LISTING.page(conn, visible, query)


@router.create("/allocation", "create-allocation", Allocation)
def create_allocation(conn: sa.Connection, deps: Deps, caller: ProviderAdmin, body: AllocationCreate) -> Json:
    """Let a tenant use machines of a site."""
    types = {
        str(constraint.resource_type_id): constraint.constraint_value
        for constraint in body.allocation_constraints
    }
    wanted = NewAllocation(str(body.tenant_id), str(body.site_id), body.name, body.description, types)
    provider_id = entitlements.provider_id_of(conn, caller.org)
    new = entitlements.create_allocation(conn, provider_id, wanted, deps.clock(), deps.ids)
    return get_allocation(conn, caller, UUID(new), ANYBODYS)


@router.get(ONE, "get-allocation", Allocation)
def get_allocation(
    conn: sa.Connection, caller: Reader, allocation_id: AllocationId, query: Params[AllocationRead]
) -> Json:
    """One allocation."""
    mine = routing.filter_rows(
        _allocations(conn, caller).where(allocation.c.id == str(allocation_id)),
        (site.c.provider_id, query.infrastructure_provider_id),
        (allocation.c.tenant_id, query.tenant_id),
    )
    row = require(conn.execute(mine).one_or_none(), "Could not find Allocation with specified ID")
    return _allocation_shapes(conn, [row], query)[0]


@router.patch(ONE, "update-allocation", Allocation)
def update_allocation(
    conn: sa.Connection,
    deps: Deps,
    caller: ProviderAdmin,
    allocation_id: AllocationId,
    body: AllocationUpdate,
) -> Json:
    """Change the name or description."""
    provider_id, now = entitlements.provider_id_of(conn, caller.org), deps.clock()
    entitlements.update_allocation(
        conn, provider_id, str(allocation_id), name=body.name, description=body.description, now=now
    )
    return get_allocation(conn, caller, allocation_id, ANYBODYS)


@router.patch(
    f"{ONE}/constraint/{{allocationConstraintId}}", "update-allocation-constraint", AllocationConstraintAnswer
)
def update_constraint(
    conn: sa.Connection,
    deps: Deps,
    caller: ProviderAdmin,
    allocation_id: AllocationId,
    constraint_id: Annotated[UUID, Path(alias="allocationConstraintId")],
    body: AllocationConstraintUpdate,
) -> Json:
    """Change the number of machines that an allocation gives. It cannot be less than the number in use."""
    provider_id = entitlements.provider_id_of(conn, caller.org)
    chosen = (str(allocation_id), str(constraint_id))
    entitlements.update_allocation_constraint(conn, provider_id, *chosen, body.constraint_value, deps.clock())
    found = entitlements.constraints_of_allocations(conn, [str(allocation_id)])
    return next(_constraint_shape(row) for row in found if row.id == str(constraint_id))


@router.delete(ONE, "delete-allocation")
def delete_allocation(
    conn: sa.Connection, deps: Deps, caller: ProviderAdmin, allocation_id: AllocationId
) -> None:
    """Take back an allocation that its tenant does not use."""
    provider_id = entitlements.provider_id_of(conn, caller.org)
    entitlements.delete_allocation(conn, provider_id, str(allocation_id), deps.clock())


def _allocations(conn: sa.Connection, caller: Caller) -> AnySelect:
    mine = routing.of_caller(*routing.provider_and_tenant(conn, caller), allocation)
    return sa.select(allocation, site.c.provider_id).join(site, site.c.id == allocation.c.site_id).where(mine)


def _constraint_filter(query: AllocationQuery) -> sa.ColumnElement[bool] | None:
    """Filter allocations by their constraints: each constraint reserves an instance type."""
    if not (query.resource_type_id or query.constraint_value or query.resource_type or query.constraint_type):
        return None
    return routing.filter_rows(
        sa.select(allocation_constraint.c.id).where(allocation_constraint.c.allocation_id == allocation.c.id),
        (allocation_constraint.c.instance_type_id, query.resource_type_id),
        (allocation_constraint.c.value, query.constraint_value),
        (sa.literal("InstanceType"), query.resource_type),
        (sa.literal("Reserved"), query.constraint_type),
    ).exists()


def _order() -> dict[str, sa.ColumnElement[Any]]:
    """An allocation of several types is sorted by the first type name. No allocation has IP blocks."""
    mine = allocation_constraint.c.allocation_id == allocation.c.id
    org = sa.select(tenant.c.org).where(tenant.c.id == allocation.c.tenant_id)
    kinds = sa.select(sa.func.min(instance_type.c.name)).join(
        allocation_constraint, allocation_constraint.c.instance_type_id == instance_type.c.id
    )
    values = sa.select(sa.func.min(allocation_constraint.c.value)).where(mine)
    return routing.order_of(allocation, "name", "status") | {
        "SITE_NAME": site.c.name,
        "TENANT_ORG_DISPLAY_NAME": org.scalar_subquery(),
        "INSTANCE_TYPE_NAME": kinds.where(mine).scalar_subquery(),
        "IP_BLOCK_NAME": sa.cast(sa.null(), sa.Text),
        "CONSTRAINT_VALUE": values.scalar_subquery(),
    }


LISTING = routing.Listing(
    shapes=_allocation_shapes,
    order=_order(),
    filters={
        "infrastructure_provider_id": site.c.provider_id,
        "id": allocation.c.id,
        "site_id": allocation.c.site_id,
        "tenant_id": allocation.c.tenant_id,
        "status": allocation.c.status,
    },
    searched=(allocation.c.name, allocation.c.description, allocation.c.status),
)
