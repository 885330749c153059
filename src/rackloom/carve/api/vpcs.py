"""VPCs over REST."""

from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import respond
from rackloom.carve.api.bodies import VpcCreate, VpcUpdate
from rackloom.carve.api.deps import Deps, TenantAdmin
from rackloom.carve.api.queries import Query, VpcQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Rows, partition_summary, relate, status_history, times
from rackloom.carve.site import history, tenants, vpcs
from rackloom.carve.site.paging import fetch, matches, order_of
from rackloom.carve.site.problems import invalid
from rackloom.carve.site.tables import logical_partition
from rackloom.carve.site.tables import vpc as table
from rackloom.carve.site.values import Ids

router = APIRouter(prefix="/vpc")

VpcId = Annotated[UUID, Path(alias="vpcId")]


@router.get("", operation_id="get-all-vpc")
async def list_all(deps: Deps, caller: TenantAdmin, query: Annotated[VpcQuery, Param()]) -> Response:
    """The tenant's VPCs."""
    found, total = await deps.store.read(_list, caller.org, query)
    return respond.listing(found, total, query.page)


@router.post("", operation_id="create-vpc", status_code=201)
async def create(deps: Deps, caller: TenantAdmin, body: VpcCreate) -> Response:
    """A new VPC."""
    return respond.created(await deps.store.run(_create, caller.org, body, deps.clock(), deps.ids))


@router.get("/{vpcId}", operation_id="get-vpc")
async def get(deps: Deps, caller: TenantAdmin, vpc_id: VpcId, query: Annotated[Query, Param()]) -> Response:
    """One VPC."""
    return respond.ok(await deps.store.read(_get, caller.org, str(vpc_id), query))


@router.patch("/{vpcId}", operation_id="update-vpc")
async def update(deps: Deps, caller: TenantAdmin, vpc_id: VpcId, body: VpcUpdate) -> Response:
    """Change a VPC."""
    return respond.ok(await deps.store.run(_update, caller.org, str(vpc_id), body, deps.clock()))


@router.delete("/{vpcId}", operation_id="delete-vpc", status_code=202)
async def delete(deps: Deps, caller: TenantAdmin, vpc_id: VpcId) -> Response:
    """Delete an empty VPC."""
    await deps.store.run(_delete, caller.org, str(vpc_id))
    return respond.deleting()


def _list(conn: sa.Connection, org: str, query: VpcQuery) -> tuple[list[Json], int]:
    tenant_id = tenants.of(conn, org).id
    listing = sa.select(table).where(table.c.tenant_id == tenant_id)
    equal = {"site_id": query.site_id, "name": query.name, "status": query.status}
    for column, value in equal.items():
        if value is not None:
            listing = listing.where(table.c[column] == str(value))
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


def _delete(conn: sa.Connection, org: str, vpc_id: str) -> None:
    vpcs.delete(conn, tenants.of(conn, org).id, vpc_id)


def _shapes(conn: sa.Connection, rows: Rows, query: Query) -> list[Json]:
    histories = history.of(conn, [row.id for row in rows])
    defaults = {row.logical_partition_id for row in rows if row.logical_partition_id}
    partitions = {
        row.id: partition_summary(row)
        for row in conn.execute(sa.select(logical_partition).where(logical_partition.c.id.in_(defaults)))
    }
    shapes = [
        {
            **row.extra,
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
    relate(conn, shapes, query.relations("Site", "Tenant", "NVLinkLogicalPartition"))
    return shapes
