"""Instance types over REST: a provider's own, and those that a tenant has an allocation for."""

from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import PlainTextResponse, Response

from rackloom.carve.api import inventory_shapes as shapes
from rackloom.carve.api import respond
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.bodies import (
    NO_NUL,
    InstanceTypeCreate,
    InstanceTypeUpdate,
    MachineAssociation,
    MachineCapability,
)
from rackloom.carve.api.deps import Deps, ProviderAdmin, ProviderReader, Reader
from rackloom.carve.api.inventory_answers import InstanceType, MachineAssociationAnswer
from rackloom.carve.api.parties import Select, party
from rackloom.carve.api.queries import InstanceTypeIncludes, InstanceTypeQuery, PageQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.site import instance_types, tenants
from rackloom.carve.site.paging import fetch, matches, order_of
from rackloom.carve.site.problems import not_found
from rackloom.carve.site.tables import (
    allocation,
    allocation_constraint,
    instance_type,
    machine,
    site,
)
from rackloom.carve.site.values import Ids

router = APIRouter()

ONE = "/instance/type/{instanceTypeId}"
TypeId = Annotated[UUID, Path(alias="instanceTypeId")]


@router.get("/instance/type", operation_id="get-all-instance-type", response_model=list[InstanceType])
async def list_types(deps: Deps, caller: Reader, query: Annotated[InstanceTypeQuery, Param()]) -> Response:
    """The instance types that the caller may see."""
    found, total = await deps.store.read(_list_types, caller, query)
    return respond.listing(found, total, query.page)


@router.post(
    "/instance/type", operation_id="create-instance-type", status_code=201, response_model=InstanceType
)
async def create_type(deps: Deps, caller: ProviderAdmin, body: InstanceTypeCreate) -> Response:
    """A new instance type."""
    return respond.created(await deps.store.run(_create_type, caller, body, deps.clock(), deps.ids))


@router.get(ONE, operation_id="get-instance-type", response_model=InstanceType)
async def get_type(
    deps: Deps, caller: Reader, type_id: TypeId, query: Annotated[InstanceTypeIncludes, Param()]
) -> Response:
    """One instance type."""
    return respond.ok(await deps.store.read(_get_type, caller, str(type_id), query))


@router.patch(ONE, operation_id="update-instance-type", response_model=InstanceType)
async def update_type(
    deps: Deps, caller: ProviderAdmin, type_id: TypeId, body: InstanceTypeUpdate
) -> Response:
    """Change an instance type."""
    return respond.ok(await deps.store.run(_update_type, caller, str(type_id), body, deps.clock()))


@router.delete(ONE, operation_id="delete-instance-type", status_code=202, response_class=PlainTextResponse)
async def delete_type(deps: Deps, caller: ProviderAdmin, type_id: TypeId) -> Response:
    """Delete an instance type that nothing refers to."""

    def delete(conn: sa.Connection) -> None:
        instance_types.delete(conn, tenants.provider_of(conn, caller.org).id, str(type_id))

    await deps.store.run(delete)
    return respond.deleting()


@router.get(
    f"{ONE}/machine",
    operation_id="get-instance-type-machine-association",
    response_model=list[MachineAssociationAnswer],
)
async def list_machines(
    deps: Deps, caller: ProviderReader, type_id: TypeId, query: Annotated[PageQuery, Param()]
) -> Response:
    """The machines of an instance type."""
    found, total = await deps.store.read(_list_machines, caller, str(type_id), query)
    return respond.listing(found, total, query.page)


@router.post(
    f"{ONE}/machine",
    operation_id="create-instance-type-machine-association",
    status_code=201,
    response_model=list[MachineAssociationAnswer],
)
async def assign_machines(
    deps: Deps, caller: ProviderAdmin, type_id: TypeId, body: MachineAssociation
) -> Response:
    """Make machines of the site machines of this type."""
    return respond.created(
        await deps.store.run(_assign, caller, str(type_id), body.machine_ids, deps.clock())
    )


@router.delete(
    f"{ONE}/machine/{{machineAssociationId}}",
    operation_id="delete-instance-type-machine-association",
    status_code=202,
    response_class=PlainTextResponse,
)
async def remove_machine(
    deps: Deps,
    caller: ProviderAdmin,
    type_id: TypeId,
    machine_id: Annotated[str, Path(alias="machineAssociationId", max_length=64, pattern=NO_NUL)],
) -> Response:
    """Take an empty machine out of the type."""

    def remove(conn: sa.Connection) -> None:
        provider_id = tenants.provider_of(conn, caller.org).id
        instance_types.remove_machine(conn, provider_id, str(type_id), machine_id, deps.clock())

    await deps.store.run(remove)
    return respond.deleting()


def _types(conn: sa.Connection, caller: Caller) -> Select:
    provider_id, tenant_id = party(conn, caller)
    return (
        sa.select(instance_type, site.c.provider_id)
        .join(site, site.c.id == instance_type.c.site_id)
        .where(sa.or_(site.c.provider_id == provider_id, instance_type.c.id.in_(_allocated(tenant_id))))
    )


def _allocated(tenant_id: str | None) -> sa.Select[tuple[str]]:
    """Types that a tenant (None: any) has an allocation for."""
    found = sa.select(allocation_constraint.c.instance_type_id).join(
        allocation, allocation.c.id == allocation_constraint.c.allocation_id
    )
    return found if tenant_id is None else found.where(allocation.c.tenant_id == tenant_id)


def _list_types(conn: sa.Connection, caller: Caller, query: InstanceTypeQuery) -> tuple[list[Json], int]:
    listing = _types(conn, caller)
    if query.site_id is not None:
        listing = listing.where(instance_type.c.site_id == str(query.site_id))
    if query.infrastructure_provider_id is not None:
        listing = listing.where(site.c.provider_id == str(query.infrastructure_provider_id))
    if query.tenant_id is not None or query.exclude_unallocated:
        tenant_id = None if query.tenant_id is None else str(query.tenant_id)
        listing = listing.where(instance_type.c.id.in_(_allocated(tenant_id)))
    if query.status is not None:
        listing = listing.where(instance_type.c.status == query.status)
    if query.query:
        columns = (instance_type.c.name, instance_type.c.description, instance_type.c.status)
        listing = listing.where(matches(query.query, *columns))
    rows, total = fetch(conn, listing, query.page, order_of(instance_type, "name", "status"))
    return shapes.instance_types(conn, rows, query), total


def _get_type(conn: sa.Connection, caller: Caller, type_id: str, query: InstanceTypeIncludes) -> Json:
    row = conn.execute(_types(conn, caller).where(instance_type.c.id == type_id)).one_or_none()
    if row is None:
        raise not_found("Could not find Instance Type with specified ID")
    return shapes.instance_types(conn, [row], query)[0]


def _create_type(conn: sa.Connection, caller: Caller, body: InstanceTypeCreate, now: float, ids: Ids) -> Json:
    new = instance_types.create(
        conn,
        tenants.provider_of(conn, caller.org).id,
        site_id=str(body.site_id),
        name=body.name,
        description=body.description,
        labels=body.labels,
        capabilities=_kept(body.machine_capabilities),
        now=now,
        ids=ids,
    )
    return _get_type(conn, caller, new, InstanceTypeIncludes())


def _update_type(
    conn: sa.Connection, caller: Caller, type_id: str, body: InstanceTypeUpdate, now: float
) -> Json:
    instance_types.update(
        conn,
        tenants.provider_of(conn, caller.org).id,
        type_id,
        name=body.name,
        description=body.description,
        labels=body.labels,
        capabilities=None if body.machine_capabilities is None else _kept(body.machine_capabilities),
        now=now,
    )
    return _get_type(conn, caller, type_id, InstanceTypeIncludes())


def _kept(capabilities: list[MachineCapability]) -> list[Json]:
    return [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in capabilities]


def _associations(conn: sa.Connection, caller: Caller, type_id: str) -> Select:
    instance_types.of_provider(conn, tenants.provider_of(conn, caller.org).id, type_id)
    return sa.select(machine).where(machine.c.instance_type_id == type_id)


def _list_machines(
    conn: sa.Connection, caller: Caller, type_id: str, query: PageQuery
) -> tuple[list[Json], int]:
    rows, total = fetch(conn, _associations(conn, caller, type_id), query.page, order_of(machine))
    return [shapes.association(row) for row in rows], total


def _assign(
    conn: sa.Connection, caller: Caller, type_id: str, machine_ids: list[str], now: float
) -> list[Json]:
    provider_id = tenants.provider_of(conn, caller.org).id
    instance_types.assign_machines(conn, provider_id, type_id, machine_ids, now)
    chosen = _associations(conn, caller, type_id).where(machine.c.id.in_(machine_ids))
    return [shapes.association(row) for row in conn.execute(chosen.order_by(machine.c.id))]
