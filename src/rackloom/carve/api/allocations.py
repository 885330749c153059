"""Allocations over REST: those that a provider gave, and those that a tenant was given."""

from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import inventory_shapes as shapes
from rackloom.carve.api import respond
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.bodies import AllocationCreate
from rackloom.carve.api.deps import Deps, ProviderAdmin, Reader
from rackloom.carve.api.parties import Select, party
from rackloom.carve.api.queries import (
    AllocationQuery,
)
from rackloom.carve.api.respond import Json
from rackloom.carve.site import allocations, tenants
from rackloom.carve.site.paging import fetch, order_of
from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import (
    allocation,
    site,
)
from rackloom.carve.site.values import Ids

router = APIRouter()

AllocationId = Annotated[UUID, Path(alias="allocationId")]


@router.get("/allocation", operation_id="get-all-allocation")
async def list_allocations(
    deps: Deps, caller: Reader, query: Annotated[AllocationQuery, Param()]
) -> Response:
    """The allocations that the caller gave or was given."""
    found, total = await deps.store.read(_list_allocations, caller, query)
    return respond.listing(found, total, query.page)


@router.post("/allocation", operation_id="create-allocation", status_code=201)
async def create_allocation(deps: Deps, caller: ProviderAdmin, body: AllocationCreate) -> Response:
    """Let a tenant use machines of a site."""
    return respond.created(await deps.store.run(_create_allocation, caller, body, deps.clock(), deps.ids))


@router.get("/allocation/{allocationId}", operation_id="get-allocation")
async def get_allocation(deps: Deps, caller: Reader, allocation_id: AllocationId) -> Response:
    """One allocation."""
    return respond.ok(await deps.store.read(_get_allocation, caller, str(allocation_id)))


def _allocations(conn: sa.Connection, caller: Caller) -> Select:
    provider_id, tenant_id = party(conn, caller)
    return (
        sa.select(allocation, site.c.provider_id)
        .join(site, site.c.id == allocation.c.site_id)
        .where(sa.or_(site.c.provider_id == provider_id, allocation.c.tenant_id == tenant_id))
    )


def _list_allocations(conn: sa.Connection, caller: Caller, query: AllocationQuery) -> tuple[list[Json], int]:
    listing = _allocations(conn, caller)
    if query.site_id is not None:
        listing = listing.where(allocation.c.site_id == str(query.site_id))
    if query.tenant_id is not None:
        listing = listing.where(allocation.c.tenant_id == str(query.tenant_id))
    rows, total = fetch(conn, listing, query.page, order_of(allocation, "name", "status"))
    return shapes.allocations(conn, rows), total


def _get_allocation(conn: sa.Connection, caller: Caller, allocation_id: str) -> Json:
    row = conn.execute(_allocations(conn, caller).where(allocation.c.id == allocation_id)).one_or_none()
    if row is None:
        raise not_found("Could not find Allocation with specified ID")
    return shapes.allocations(conn, [row])[0]


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
    return _get_allocation(conn, caller, new)
