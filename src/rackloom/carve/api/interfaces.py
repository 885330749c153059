"""NVLink interfaces over REST: read only, and only the caller's own."""

from collections.abc import Sequence
from typing import Annotated
from uuid import UUID

import sqlalchemy as sa
from fastapi import APIRouter, Path
from fastapi import Query as Param
from starlette.responses import Response

from rackloom.carve.api import respond
from rackloom.carve.api.answers import NVLinkInterface
from rackloom.carve.api.deps import Deps, TenantAdmin
from rackloom.carve.api.queries import InstanceInterfaceQuery, InterfaceQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row, interface_summary, relate, times
from rackloom.carve.site import allocations, instances, interfaces, logical_partitions, tenants
from rackloom.carve.site.interfaces import Listed
from rackloom.carve.site.paging import fetch, order_of
from rackloom.carve.site.problems import forbidden
from rackloom.carve.site.tables import instance, machine
from rackloom.carve.site.tables import nvlink_interface as table

router = APIRouter()

RELATIONS = ("Site", "Instance", "NVLinkLogicalPartition")


@router.get(
    "/nvlink-interface", operation_id="get-all-nvlink-interface", response_model=list[NVLinkInterface]
)
async def list_all(deps: Deps, caller: TenantAdmin, query: Annotated[InterfaceQuery, Param()]) -> Response:
    """The interfaces of all instances of the tenant."""
    found, total = await deps.store.read(_list_all, caller.org, query)
    return respond.listing(found, total, query.page)


@router.get(
    "/instance/{instanceId}/nvlink-interface",
    operation_id="get-all-instance-nvlink-interface",
    response_model=list[NVLinkInterface],
)
async def list_of_instance(
    deps: Deps,
    caller: TenantAdmin,
    instance_id: Annotated[UUID, Path(alias="instanceId")],
    query: Annotated[InstanceInterfaceQuery, Param()],
) -> Response:
    """The interfaces of one instance."""
    found, total = await deps.store.read(_list_of_instance, caller.org, str(instance_id), query)
    return respond.listing(found, total, query.page)


def shape(one: Listed) -> Json:
    """An interface, with what the fabric told of its GPU; `statusMessage` says why it is not Ready."""
    return {
        **interface_summary(one),
        "siteId": one.site_id,
        "nvLinkDomainId": one.domain,
        "gpuGuid": one.guid,
        "statusMessage": one.reason,
        **times(one),
    }


def _list_all(conn: sa.Connection, org: str, query: InterfaceQuery) -> tuple[list[Json], int]:
    tenant = _tenant(conn, org)
    for site_id in query.site_id:
        allocations.check_site_access(conn, tenant.id, str(site_id))
    for instance_id in query.instance_id:
        instances.get(conn, tenant.id, str(instance_id))
    listing = interfaces.listing().where(instance.c.tenant_id == tenant.id)
    if query.site_id:
        listing = listing.where(instance.c.site_id.in_(_texts(query.site_id)))
    if query.instance_id:
        listing = listing.where(table.c.instance_id.in_(_texts(query.instance_id)))
    return _page(conn, tenant, listing, query)


def _list_of_instance(
    conn: sa.Connection, org: str, instance_id: str, query: InstanceInterfaceQuery
) -> tuple[list[Json], int]:
    tenant = _tenant(conn, org)
    instances.get(conn, tenant.id, instance_id)
    return _page(conn, tenant, interfaces.listing().where(table.c.instance_id == instance_id), query)


def _page(
    conn: sa.Connection, tenant: Row, listing: sa.Select[tuple[object, ...]], query: InstanceInterfaceQuery
) -> tuple[list[Json], int]:
    for partition_id in query.nvlink_logical_partition_id:
        logical_partitions.get(conn, tenant.id, str(partition_id))
    if query.nvlink_logical_partition_id:
        wanted = _texts(query.nvlink_logical_partition_id)
        listing = listing.where(table.c.logical_partition_id.in_(wanted))
    if query.nvlink_domain_id:
        listing = listing.where(sa.func.lower(machine.c.domain).in_(_texts(query.nvlink_domain_id)))
    if query.status:
        listing = listing.where(table.c.status.in_(query.status))
    rows, total = fetch(conn, listing, query.page, order_of(table, "status"))
    shapes = [shape(Listed._make(row)) for row in rows]
    relate(conn, shapes, query.relations(*RELATIONS))
    return shapes, total


def _tenant(conn: sa.Connection, org: str) -> Row:
    found = tenants.find(conn, org)
    if found is None:
        raise forbidden("Org does not have a Tenant associated")
    return found


def _texts(values: Sequence[UUID]) -> list[str]:
    return [str(value) for value in values]
