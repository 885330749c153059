"""VPCs over REST."""

from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import PlainTextResponse, Response

from rackloom.carve.api import histories, respond
from rackloom.carve.api.answers import StatusDetail, Vpc
from rackloom.carve.api.bodies import VpcCreate, VpcUpdate, VpcVirtualization
from rackloom.carve.api.deps import Deps, TenantAdmin
from rackloom.carve.api.filters import narrowed
from rackloom.carve.api.queries import PageQuery, Query, VpcQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Rows, partition_summary, relate, status_history, times
from rackloom.carve.site import history, tenants, vpcs
from rackloom.carve.site.paging import fetch, matches, order_of
from rackloom.carve.site.problems import invalid
from rackloom.carve.site.tables import logical_partition
from rackloom.carve.site.tables import vpc as table
from rackloom.carve.site.values import Ids

router = APIRouter(prefix="/vpc")

RELATIONS = (
    "Site", "Tenant", "NVLinkLogicalPartition", "InfrastructureProvider", "NetworkSecurityGroup",
)  # fmt: skip
VpcId = Annotated[UUID, Path(alias="vpcId")]


@router.get("", operation_id="get-all-vpc", response_model=list[Vpc])
async def list_all(deps: Deps, caller: TenantAdmin, query: Annotated[VpcQuery, Param()]) -> Response:
    """The tenant's VPCs."""
    found, total = await deps.store.read(_list, caller.org, query)
    return respond.listing(found, total, query.page)


@router.post("", operation_id="create-vpc", response_model=Vpc, status_code=201)
async def create(deps: Deps, caller: TenantAdmin, body: VpcCreate) -> Response:
    """A new VPC."""
    return respond.created(await deps.store.run(_create, caller.org, body, deps.clock(), deps.ids))


@router.get("/{vpcId}", operation_id="get-vpc", response_model=Vpc)
async def get(deps: Deps, caller: TenantAdmin, vpc_id: VpcId, query: Annotated[Query, Param()]) -> Response:
    """One VPC."""
    return respond.ok(await deps.store.read(_get, caller.org, str(vpc_id), query))


@router.patch("/{vpcId}", operation_id="update-vpc", response_model=Vpc)
async def update(deps: Deps, caller: TenantAdmin, vpc_id: VpcId, body: VpcUpdate) -> Response:
    """Change a VPC."""
    return respond.ok(await deps.store.run(_update, caller.org, str(vpc_id), body, deps.clock()))


@router.patch("/{vpcId}/virtualization", operation_id="update-vpc-virtualization", response_model=Vpc)
async def update_virtualization(
    deps: Deps, caller: TenantAdmin, vpc_id: VpcId, body: VpcVirtualization
) -> Response:
    """Name another network virtualization for an empty VPC."""
    kind = body.network_virtualization_type
    return respond.ok(await deps.store.run(_virtualize, caller.org, str(vpc_id), kind, deps.clock()))


@router.get(
    "/{vpcId}/status-history", operation_id="get-vpc-status-history", response_model=list[StatusDetail]
)
async def get_history(
    deps: Deps, caller: TenantAdmin, vpc_id: VpcId, query: Annotated[PageQuery, Param()]
) -> Response:
    """How the VPC came to its status, newest first."""

    def check(conn: sa.Connection) -> object:
        return vpcs.get(conn, tenants.of(conn, caller.org).id, str(vpc_id))

    return await histories.answer(deps, query, str(vpc_id), check)


@router.delete("/{vpcId}", operation_id="delete-vpc", response_class=PlainTextResponse, status_code=202)
async def delete(deps: Deps, caller: TenantAdmin, vpc_id: VpcId) -> Response:
    """Delete an empty VPC."""
    await deps.store.run(_delete, caller.org, str(vpc_id), deps.clock())
    return respond.deleting()


def _list(conn: sa.Connection, org: str, query: VpcQuery) -> tuple[list[Json], int]:
    tenant_id = tenants.of(conn, org).id
    listing = sa.select(table).where(table.c.tenant_id == tenant_id)
    if query.name is not None:
        listing = listing.where(table.c.name == query.name)
    listing = narrowed(
        listing,
        (table.c.site_id, query.site_id),
        (table.c.status, query.status),
        (table.c.extra["networkSecurityGroupId"].as_string(), query.network_security_group_id),
    )
    if query.nvlink_logical_partition_id:
        wanted = [str(one) for one in query.nvlink_logical_partition_id]
        _check_partitions(conn, tenant_id, wanted)
        listing = listing.where(table.c.logical_partition_id.in_(wanted))
    if query.query:
        listing = listing.where(matches(query.query, table.c.name, table.c.description, table.c.status))
    rows, total = fetch(conn, listing, query.page, order_of(table, "name", "status"))
    return _shapes(conn, rows, query), total


def _check_partitions(conn: sa.Connection, tenant_id: str, wanted: list[str]) -> None:
    mine = sa.select(logical_partition.c.id).where(
        logical_partition.c.tenant_id == tenant_id, logical_partition.c.id.in_(wanted)
    )
    missing = sorted(set(wanted) - set(conn.execute(mine).scalars()))
    if missing:
        raise invalid(
            "Could not find NVLink Logical Partition of Tenant with ID specified in query",
            nvLinkLogicalPartitionId=", ".join(missing),
        )


def _get(conn: sa.Connection, org: str, vpc_id: str, query: Query) -> Json:
    return _shapes(conn, [vpcs.get(conn, tenants.of(conn, org).id, vpc_id)], query)[0]


def _create(conn: sa.Connection, org: str, body: VpcCreate, now: float, ids: Ids) -> Json:
    partition = body.nvlink_logical_partition_id
    new = vpcs.create(
        conn,
        tenants.of(conn, org).id,
        site_id=str(body.site_id),
        name=body.name,
        description=body.description,
        logical_partition_id=None if partition is None else str(partition),
        extra=body.kept,
        wanted_id=None if body.id is None else str(body.id),
        now=now,
        ids=ids,
    )
    return _get(conn, org, new, Query())


def _update(conn: sa.Connection, org: str, vpc_id: str, body: VpcUpdate, now: float) -> Json:
    partition = body.nvlink_logical_partition_id
    vpcs.update(
        conn,
        tenants.of(conn, org).id,
        vpc_id,
        name=body.name,
        description=body.description,
        logical_partition_id=None if partition is None else str(partition),
        extra=body.kept,
        now=now,
    )
    return _get(conn, org, vpc_id, Query())


def _virtualize(conn: sa.Connection, org: str, vpc_id: str, kind: str, now: float) -> Json:
    vpcs.virtualize(conn, tenants.of(conn, org).id, vpc_id, kind, now)
    return _get(conn, org, vpc_id, Query())


def _delete(conn: sa.Connection, org: str, vpc_id: str, now: float) -> None:
    vpcs.delete(conn, tenants.of(conn, org).id, vpc_id, now)


def _shapes(conn: sa.Connection, rows: Rows, query: Query) -> list[Json]:
    histories = history.of(conn, [row.id for row in rows])
    defaults = {row.logical_partition_id for row in rows if row.logical_partition_id}
    partitions = {
        row.id: partition_summary(row)
        for row in conn.execute(sa.select(logical_partition).where(logical_partition.c.id.in_(defaults)))
    }
    orgs = tenants.orgs(conn, {row.tenant_id for row in rows})
    shapes = [
        {
            **row.extra,
            "org": orgs[row.tenant_id],
            "id": row.id,
            "name": row.name,
            "description": row.description,
            "siteId": row.site_id,
            "tenantId": row.tenant_id,
            "controllerVpcId": row.id,
            "nvLinkLogicalPartitionId": row.logical_partition_id,
            "nvLinkLogicalPartitionSummary": partitions.get(row.logical_partition_id),
            "status": row.status,
            "statusHistory": status_history(histories[row.id]),
            **times(row),
        }
        for row in rows
    ]
    relate(conn, shapes, query.relations(*RELATIONS))
    return shapes
