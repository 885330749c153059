"""What operators see of the switch controllers over REST: endpoints, found partitions, and the audit."""

from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import PlainTextResponse, Response

from rackloom.carve.api import fabric_shapes, respond
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.bodies import NO_NUL
from rackloom.carve.api.deps import Deps, ProviderAdmin, ProviderReader
from rackloom.carve.api.fabric_answers import NmxcEndpoint, NVLinkOperation, NVLinkPartition, OperatorStep
from rackloom.carve.api.operator_bodies import Adoption, EndpointCreate, EndpointUpdate, FoundPartition
from rackloom.carve.api.orders import order
from rackloom.carve.api.queries import FabricQuery, OperationQuery, PageQuery, PhysicalPartitionQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.site import adoption, authority, endpoint_registry, physical_partitions, tenants
from rackloom.carve.site.operator_steps import Order
from rackloom.carve.site.paging import TIE_BREAKER, fetch
from rackloom.carve.site.tables import endpoint, endpoint_chassis, machine, operation, operator_step
from rackloom.carve.site.values import Changed

router = APIRouter()

Serial = Annotated[str, Path(alias="chassisSerial", max_length=256, pattern=NO_NUL)]
ENDPOINTS = "/nvlink-nmxc-endpoint"
ENDPOINT = f"{ENDPOINTS}/{{chassisSerial}}"


@router.get(ENDPOINTS, operation_id="get-all-nvlink-nmxc-endpoint", response_model=list[NmxcEndpoint])
async def list_endpoints(
    deps: Deps, caller: ProviderReader, query: Annotated[PageQuery, Param()]
) -> Response:
    """The switch controllers that the provider has registered, one row for each chassis."""
    found, total = await deps.store.read(_endpoints, caller, query)
    return respond.listing(found, total, query.page)


@router.post(
    ENDPOINTS, operation_id="create-nvlink-nmxc-endpoint", status_code=201, response_model=NmxcEndpoint
)
async def create_endpoint(deps: Deps, caller: ProviderAdmin, body: EndpointCreate) -> Response:
    """Register the switch controller of a chassis; it is used at once."""
    serial = body.chassis_serial

    def change(conn: sa.Connection) -> Changed[Json]:
        authority.check_chassis(conn, tenants.provider_of(conn, caller.org).id, serial)
        made = endpoint_registry.create(conn, serial, body.endpoint, order(deps, caller, body), deps.ids)
        return Changed(fabric_shapes.endpoint(endpoint_registry.get(conn, serial)), made.domains)

    return respond.created(await deps.change(change))


@router.get(ENDPOINT, operation_id="get-nvlink-nmxc-endpoint", response_model=NmxcEndpoint)
async def get_endpoint(deps: Deps, caller: ProviderReader, serial: Serial) -> Response:
    """The switch controller of one chassis."""

    def read(conn: sa.Connection) -> Json:
        authority.check_chassis(conn, tenants.provider_of(conn, caller.org).id, serial)
        return fabric_shapes.endpoint(endpoint_registry.get(conn, serial))

    return respond.ok(await deps.store.read(read))


@router.patch(ENDPOINT, operation_id="update-nvlink-nmxc-endpoint", response_model=NmxcEndpoint)
async def update_endpoint(
    deps: Deps, caller: ProviderAdmin, serial: Serial, body: EndpointUpdate
) -> Response:
    """Let another URL speak for a chassis."""

    def change(conn: sa.Connection) -> Changed[Json]:
        authority.check_chassis(conn, tenants.provider_of(conn, caller.org).id, serial)
        asked = order(deps, caller, body)
        changed = endpoint_registry.update(conn, serial, body.endpoint, asked, deps.ids)
        return Changed(fabric_shapes.endpoint(endpoint_registry.get(conn, serial)), changed.domains)

    return respond.ok(await deps.change(change))


@router.delete(
    ENDPOINT,
    operation_id="delete-nvlink-nmxc-endpoint",
    status_code=202,
    response_class=PlainTextResponse,
)
async def delete_endpoint(deps: Deps, caller: ProviderAdmin, serial: Serial) -> Response:
    """Speak for a chassis no more."""

    def change(conn: sa.Connection) -> Changed[None]:
        authority.check_chassis(conn, tenants.provider_of(conn, caller.org).id, serial)
        asked = Order(caller.subject, "deleted over REST", deps.clock())
        return endpoint_registry.delete(conn, serial, asked)

    await deps.change(change)
    return respond.deleting()


@router.get(
    "/nvlink-partition", operation_id="get-all-nvlink-partition", response_model=list[NVLinkPartition]
)
async def list_partitions(
    deps: Deps, caller: ProviderReader, query: Annotated[PhysicalPartitionQuery, Param()]
) -> Response:
    """The partitions in the newest observations, and whose they are."""
    return respond.sliced(await deps.store.read(_partitions, caller, query), query.page)


@router.post("/nvlink-partition/adopt", operation_id="adopt-nvlink-partition", response_model=NVLinkPartition)
async def adopt(deps: Deps, caller: ProviderAdmin, body: Adoption) -> Response:
    """Make a found partition the physical partition of a logical partition; no GPU is moved."""

    def change(conn: sa.Connection) -> Changed[Json]:
        domain = body.nvlink_domain_id
        authority.check_domain(conn, tenants.provider_of(conn, caller.org).id, domain)
        wanted = str(body.nvlink_logical_partition_id)
        done = adoption.adopt(conn, domain, body.name, wanted, order(deps, caller, body))
        return Changed(_partition(conn, domain, body.name), done.domains)

    return respond.ok(await deps.change(change))


@router.post(
    "/nvlink-partition/release", operation_id="release-nvlink-partition", response_model=NVLinkPartition
)
async def release(deps: Deps, caller: ProviderAdmin, body: FoundPartition) -> Response:
    """Let a found partition be taken apart."""

    def change(conn: sa.Connection) -> Changed[Json]:
        domain = body.nvlink_domain_id
        authority.check_domain(conn, tenants.provider_of(conn, caller.org).id, domain)
        done = adoption.release(conn, domain, body.name, order(deps, caller, body))
        return Changed(_partition(conn, domain, body.name), done.domains)

    return respond.ok(await deps.change(change))


@router.get(
    "/nvlink-operation", operation_id="get-all-nvlink-operation", response_model=list[NVLinkOperation]
)
async def list_operations(
    deps: Deps, caller: ProviderReader, query: Annotated[OperationQuery, Param()]
) -> Response:
    """What was asked of the switch controllers, for whom, why, and what came of it."""
    found, total = await deps.store.read(_operations, caller, query)
    return respond.listing(found, total, query.page)


@router.get("/operator-step", operation_id="get-all-operator-step", response_model=list[OperatorStep])
async def list_steps(deps: Deps, caller: ProviderReader, query: Annotated[FabricQuery, Param()]) -> Response:
    """What operators did, and why."""
    found, total = await deps.store.read(_steps, caller, query)
    return respond.listing(found, total, query.page)


def _endpoints(conn: sa.Connection, caller: Caller, query: PageQuery) -> tuple[list[Json], int]:
    provider_id = tenants.provider_of(conn, caller.org).id
    serial = endpoint_chassis.c.chassis_serial
    listing = endpoint_registry.listing().where(authority.operates_chassis(provider_id, serial))
    order_by = {"CREATED": endpoint.c.created, "UPDATED": endpoint.c.updated, TIE_BREAKER: serial}
    rows, total = fetch(conn, listing, query.page, order_by)
    return [fabric_shapes.endpoint(row) for row in rows], total


def _partitions(conn: sa.Connection, caller: Caller, query: PhysicalPartitionQuery) -> list[Json]:
    mine = authority.domains(tenants.provider_of(conn, caller.org).id).subquery()
    wanted = sa.select(mine.c.domain)
    if query.nvlink_domain_id is not None:
        wanted = wanted.where(mine.c.domain == query.nvlink_domain_id)
    logical = query.nvlink_logical_partition_id
    return [
        fabric_shapes.partition(one)
        for one in physical_partitions.of_domains(conn, conn.execute(wanted).scalars().all())
        if query.owner in (None, one.owner) and (logical is None or one.logical_partition == str(logical))
    ]


def _partition(conn: sa.Connection, domain: str, name: str) -> Json:
    found = physical_partitions.of_domains(conn, [domain])
    return next(fabric_shapes.partition(one) for one in found if one.seen.name == name)


def _operations(conn: sa.Connection, caller: Caller, query: OperationQuery) -> tuple[list[Json], int]:
    mine = authority.domains(tenants.provider_of(conn, caller.org).id)
    listing: sa.Select[Any] = sa.select(operation).where(operation.c.domain.in_(mine))
    if query.nvlink_domain_id is not None:
        listing = listing.where(operation.c.domain == query.nvlink_domain_id)
    if query.state is not None:
        listing = listing.where(operation.c.state == query.state)
    order_by = {"CREATED": operation.c.started, TIE_BREAKER: operation.c.id}
    rows, total = fetch(conn, listing, query.page, order_by)
    return [fabric_shapes.operation(row) for row in rows], total


def _steps(conn: sa.Connection, caller: Caller, query: FabricQuery) -> tuple[list[Json], int]:
    provider_id = tenants.provider_of(conn, caller.org).id
    table = operator_step
    machines = sa.select(machine.c.id).where(authority.operates_machine(provider_id))
    mine = sa.or_(
        table.c.domain.in_(authority.domains(provider_id)),
        table.c.subject.in_(machines),
        sa.and_(table.c.domain.is_(None), authority.operates_chassis(provider_id, table.c.subject)),
    )
    listing: sa.Select[Any] = sa.select(table).where(mine)
    if query.nvlink_domain_id is not None:
        listing = listing.where(table.c.domain == query.nvlink_domain_id)
    rows, total = fetch(conn, listing, query.page, {"CREATED": table.c.created, TIE_BREAKER: table.c.id})
    return [fabric_shapes.step(row) for row in rows], total
