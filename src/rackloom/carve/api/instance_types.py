"""Instance types over REST: a provider's own, and those that a tenant has an allocation for."""

from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import inventory_shapes as shapes
from rackloom.carve.api import respond
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.bodies import InstanceTypeCreate, MachineAssociation
from rackloom.carve.api.deps import Deps, ProviderAdmin, Reader
from rackloom.carve.api.parties import Select, party
from rackloom.carve.api.queries import (
    InstanceTypeQuery,
)
from rackloom.carve.api.respond import Json
from rackloom.carve.site import instance_types, tenants
from rackloom.carve.site.paging import fetch, matches, order_of
from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import (
    allocation,
    allocation_constraint,
    instance_type,
    site,
)
from rackloom.carve.site.values import Ids

router = APIRouter()

TypeId = Annotated[UUID, Path(alias="instanceTypeId")]


@router.get("/instance/type", operation_id="get-all-instance-type")
async def list_types(deps: Deps, caller: Reader, query: Annotated[InstanceTypeQuery, Param()]) -> Response:
    """The instance types that the caller may see."""
    found, total = await deps.store.read(_list_types, caller, query)
    return respond.listing(found, total, query.page)


@router.post("/instance/type", operation_id="create-instance-type", status_code=201)
async def create_type(deps: Deps, caller: ProviderAdmin, body: InstanceTypeCreate) -> Response:
    """A new instance type."""
    return respond.created(await deps.store.run(_create_type, caller, body, deps.clock(), deps.ids))


@router.get("/instance/type/{instanceTypeId}", operation_id="get-instance-type")
async def get_type(
    deps: Deps, caller: Reader, type_id: TypeId, query: Annotated[InstanceTypeQuery, Param()]
) -> Response:
    """One instance type."""
    return respond.ok(await deps.store.read(_get_type, caller, str(type_id), query))


@router.post(
    "/instance/type/{instanceTypeId}/machine",
    operation_id="create-instance-type-machine-association",
    status_code=201,
)
async def assign_machines(
    deps: Deps, caller: ProviderAdmin, type_id: TypeId, body: MachineAssociation
) -> Response:
    """Make machines machines of this type."""
    return respond.created(
        await deps.store.run(_assign, caller, str(type_id), body.machine_ids, deps.clock())
    )


def _types(conn: sa.Connection, caller: Caller) -> Select:
    provider_id, tenant_id = party(conn, caller)
    allocated = (
        sa.select(allocation_constraint.c.instance_type_id)
        .join(allocation, allocation.c.id == allocation_constraint.c.allocation_id)
        .where(allocation.c.tenant_id == tenant_id)
    )
    return (
        sa.select(instance_type, site.c.provider_id)
        .join(site, site.c.id == instance_type.c.site_id)
        .where(sa.or_(site.c.provider_id == provider_id, instance_type.c.id.in_(allocated)))
    )


def _list_types(conn: sa.Connection, caller: Caller, query: InstanceTypeQuery) -> tuple[list[Json], int]:
    listing = _types(conn, caller)
    if query.site_id is not None:
        listing = listing.where(instance_type.c.site_id == str(query.site_id))
    if query.status is not None:
        listing = listing.where(instance_type.c.status == query.status)
    if query.query:
        columns = (instance_type.c.name, instance_type.c.description, instance_type.c.status)
        listing = listing.where(matches(query.query, *columns))
    rows, total = fetch(conn, listing, query.page, order_of(instance_type, "name", "status"))
    return shapes.instance_types(conn, rows, with_machines=query.include_machine_assignment), total


def _get_type(conn: sa.Connection, caller: Caller, type_id: str, query: InstanceTypeQuery) -> Json:
    row = conn.execute(_types(conn, caller).where(instance_type.c.id == type_id)).one_or_none()
    if row is None:
        raise not_found("Could not find Instance Type with specified ID")
    return shapes.instance_types(conn, [row], with_machines=query.include_machine_assignment)[0]


def _create_type(conn: sa.Connection, caller: Caller, body: InstanceTypeCreate, now: float, ids: Ids) -> Json:
    new = instance_types.create(
        conn,
        tenants.provider_of(conn, caller.org).id,
        site_id=str(body.site_id),
        name=body.name,
        description=body.description,
        labels=body.labels,
        capabilities=[
            one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in body.machine_capabilities
        ],
        now=now,
        ids=ids,
    )
    return _get_type(conn, caller, new, InstanceTypeQuery())


def _assign(
    conn: sa.Connection, caller: Caller, type_id: str, machine_ids: list[str], now: float
) -> list[Json]:
    provider_id = tenants.provider_of(conn, caller.org).id
    instance_types.assign_machines(conn, provider_id, type_id, machine_ids, now)
    return [{"instanceTypeId": type_id, "machineId": machine_id} for machine_id in machine_ids]
