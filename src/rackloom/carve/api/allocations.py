"""Allocations over REST: those that a provider gave, and those that a tenant was given."""

from typing import Annotated, Any
from uuid import UUID

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import PlainTextResponse, Response

from rackloom.carve.api import inventory_shapes as shapes
from rackloom.carve.api import respond
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.bodies import AllocationConstraintUpdate, AllocationCreate, AllocationUpdate
from rackloom.carve.api.deps import Deps, ProviderAdmin, Reader
from rackloom.carve.api.filters import narrowed
from rackloom.carve.api.inventory_answers import Allocation, AllocationConstraintAnswer
from rackloom.carve.api.parties import Select, party
from rackloom.carve.api.queries import AllocationQuery, Query
from rackloom.carve.api.respond import Json
from rackloom.carve.site import allocations, tenants
from rackloom.carve.site.paging import fetch, matches, order_of
from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import (
    allocation,
    allocation_constraint,
    instance_type,
    site,
    tenant,
)
from rackloom.carve.site.values import Ids

router = APIRouter()

ONE = "/allocation/{allocationId}"
AllocationId = Annotated[UUID, Path(alias="allocationId")]


@router.get("/allocation", operation_id="get-all-allocation", response_model=list[Allocation])
async def list_allocations(
    deps: Deps, caller: Reader, query: Annotated[AllocationQuery, Param()]
) -> Response:
    """The allocations that the caller gave or was given."""
    found, total = await deps.store.read(_list_allocations, caller, query)
    return respond.listing(found, total, query.page)


@router.post("/allocation", operation_id="create-allocation", response_model=Allocation, status_code=201)
async def create_allocation(deps: Deps, caller: ProviderAdmin, body: AllocationCreate) -> Response:
    """Let a tenant use machines of a site."""
    return respond.created(await deps.store.run(_create_allocation, caller, body, deps.clock(), deps.ids))


@router.get(ONE, operation_id="get-allocation", response_model=Allocation)
async def get_allocation(
    deps: Deps, caller: Reader, allocation_id: AllocationId, query: Annotated[Query, Param()]
) -> Response:
    """One allocation."""
    return respond.ok(await deps.store.read(_get_allocation, caller, str(allocation_id), query))


@router.patch(ONE, operation_id="update-allocation", response_model=Allocation)
async def update_allocation(
    deps: Deps, caller: ProviderAdmin, allocation_id: AllocationId, body: AllocationUpdate
) -> Response:
    """Change the name or description."""
    return respond.ok(
        await deps.store.run(_update_allocation, caller, str(allocation_id), body, deps.clock())
    )


@router.patch(
    f"{ONE}/constraint/{{allocationConstraintId}}",
    operation_id="update-allocation-constraint",
    response_model=AllocationConstraintAnswer,
)
async def update_constraint(
    deps: Deps,
    caller: ProviderAdmin,
    allocation_id: AllocationId,
    constraint_id: Annotated[UUID, Path(alias="allocationConstraintId")],
    body: AllocationConstraintUpdate,
) -> Response:
    """Change how many machines an allocation gives; never fewer than are in use."""

    def update(conn: sa.Connection) -> Json:
        provider_id = tenants.provider_of(conn, caller.org).id
        chosen = (str(allocation_id), str(constraint_id))
        allocations.set_constraint(conn, provider_id, *chosen, body.constraint_value, deps.clock())
        found = allocations.constraints_of(conn, [str(allocation_id)])
        return next(shapes.constraint(row) for row in found if row.id == str(constraint_id))

    return respond.ok(await deps.store.run(update))


@router.delete(ONE, operation_id="delete-allocation", status_code=202, response_class=PlainTextResponse)
async def delete_allocation(deps: Deps, caller: ProviderAdmin, allocation_id: AllocationId) -> Response:
    """Take an allocation back that its tenant does not use."""

    def delete(conn: sa.Connection) -> None:
        provider_id = tenants.provider_of(conn, caller.org).id
        allocations.delete(conn, provider_id, str(allocation_id), deps.clock())

    await deps.store.run(delete)
    return respond.deleting()


def _allocations(conn: sa.Connection, caller: Caller) -> Select:
    provider_id, tenant_id = party(conn, caller)
    return (
        sa.select(allocation, site.c.provider_id)
        .join(site, site.c.id == allocation.c.site_id)
        .where(sa.or_(site.c.provider_id == provider_id, allocation.c.tenant_id == tenant_id))
    )


def _list_allocations(conn: sa.Connection, caller: Caller, query: AllocationQuery) -> tuple[list[Json], int]:
    listing = _allocations(conn, caller)
    if query.infrastructure_provider_id is not None:
        listing = listing.where(site.c.provider_id == str(query.infrastructure_provider_id))
    listing = narrowed(
        listing,
        (allocation.c.id, query.id),
        (allocation.c.site_id, query.site_id),
        (allocation.c.tenant_id, query.tenant_id),
        (allocation.c.status, query.status),
    )
    if (constraint := _constraint_filter(query)) is not None:
        listing = listing.where(allocation.c.id.in_(constraint))
    if query.query:
        columns = (allocation.c.name, allocation.c.description, allocation.c.status)
        listing = listing.where(matches(query.query, *columns))
    rows, total = fetch(conn, listing, query.page, _order())
    return shapes.allocations(conn, rows, query), total


def _constraint_filter(query: AllocationQuery) -> Select | None:
    """Allocations by what they give; every constraint is a reservation of an instance type."""
    table = allocation_constraint
    if not (query.resource_type_id or query.constraint_value or query.resource_type or query.constraint_type):
        return None
    return narrowed(
        sa.select(table.c.allocation_id),
        (table.c.instance_type_id, query.resource_type_id),
        (table.c.value, query.constraint_value),
        (sa.literal("InstanceType"), query.resource_type),
        (sa.literal("Reserved"), query.constraint_type),
    )


def _order() -> dict[str, sa.ColumnElement[Any]]:
    """An allocation of several types stands where the first of them does; none gives IP blocks."""
    given = allocation_constraint
    mine = given.c.allocation_id == allocation.c.id
    org = sa.select(tenant.c.org).where(tenant.c.id == allocation.c.tenant_id)
    kinds = sa.select(sa.func.min(instance_type.c.name)).join(
        given, given.c.instance_type_id == instance_type.c.id
    )
    values = sa.select(sa.func.min(given.c.value)).where(mine)
    return order_of(allocation, "name", "status") | {
        "SITE_NAME": site.c.name,
        "TENANT_ORG_DISPLAY_NAME": org.scalar_subquery(),
        "INSTANCE_TYPE_NAME": kinds.where(mine).scalar_subquery(),
        "IP_BLOCK_NAME": sa.cast(sa.null(), sa.Text),
        "CONSTRAINT_VALUE": values.scalar_subquery(),
    }


def _get_allocation(conn: sa.Connection, caller: Caller, allocation_id: str, query: Query) -> Json:
    row = conn.execute(_allocations(conn, caller).where(allocation.c.id == allocation_id)).one_or_none()
    if row is None:
        raise not_found("Could not find Allocation with specified ID")
    return shapes.allocations(conn, [row], query)[0]


def _update_allocation(
    conn: sa.Connection, caller: Caller, allocation_id: str, body: AllocationUpdate, now: float
) -> Json:
    provider_id = tenants.provider_of(conn, caller.org).id
    allocations.update(
        conn, provider_id, allocation_id, name=body.name, description=body.description, now=now
    )
    return _get_allocation(conn, caller, allocation_id, Query())


def _create_allocation(
    conn: sa.Connection, caller: Caller, body: AllocationCreate, now: float, ids: Ids
) -> Json:
    new = allocations.create(
        conn,
        tenants.provider_of(conn, caller.org).id,
        name=body.name,
        description=body.description,
        tenant_id=str(body.tenant_id),
        site_id=str(body.site_id),
        types={str(one.resource_type_id): one.constraint_value for one in body.allocation_constraints},
        now=now,
        ids=ids,
    )
    return _get_allocation(conn, caller, new, Query())
