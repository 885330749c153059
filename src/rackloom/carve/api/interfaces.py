"""REST: NVLink interfaces, read only. They change with their instance.

The listing of all interfaces and that of one instance share their filters. An id in a filter must be
one that the tenant may see. The wire format of an interface is in `instance_wire`.
"""

from functools import partial
from typing import Annotated
from uuid import UUID

import msgspec
import sqlalchemy as sa
from fastapi import Path
from pydantic import Field

from rackloom.carve.api import routing
from rackloom.carve.api.instance_wire import NVLinkInterface, interface_shape
from rackloom.carve.api.routing import Deps, Page, Params, Row, Rows, TenantAdmin
from rackloom.carve.api.wire import InterfaceStatus, Json, PageQuery, RelationQuery, UuidFilter
from rackloom.carve.observation import latest
from rackloom.carve.store.prepared import owned_by
from rackloom.carve.store.schema import instance, machine
from rackloom.carve.store.schema import nvlink_interface as table
from rackloom.carve.store.values import forbidden
from rackloom.carve.tenancy import entitlements, instances, logical_partitions, outdated
from rackloom.carve.tenancy.instances import InterfaceRow
from rackloom.carve.tenancy.outdated import OutdatedDomains

# Query parameters.


class InstanceInterfaceQuery(PageQuery, RelationQuery):
    """Filters on the interfaces of one instance."""

    nvlink_logical_partition_id: UuidFilter = Field([], alias="nvLinkLogicalPartitionId")
    nvlink_domain_id: UuidFilter = Field([], alias="nvLinkDomainId")
    status: list[InterfaceStatus] = []


class InterfaceQuery(InstanceInterfaceQuery):
    """Filters on all interfaces of a tenant."""

    site_id: UuidFilter = []
    instance_id: UuidFilter = []


# Routes.


router = routing.Operations()

INTERFACE_RELATIONS = ("Site", "Instance", "NVLinkLogicalPartition")


@router.page("/nvlink-interface", "get-all-nvlink-interface", list[NVLinkInterface])
def list_all(conn: sa.Connection, deps: Deps, caller: TenantAdmin, query: Params[InterfaceQuery]) -> Page:
    """The interfaces of all instances of the tenant."""
    tenant = _tenant(conn, caller.org)
    for site_id in query.site_id:
        entitlements.check_site_access(conn, tenant.id, str(site_id))
    for instance_id in query.instance_id:
        instances.get_instance(conn, tenant.id, str(instance_id))
    visible = instances.interface_listing().where(owned_by(instance.c.tenant_id, tenant.id))
    wanted = (instance.c.site_id, query.site_id), (table.c.instance_id, query.instance_id)
    return _page(conn, tenant, routing.filter_rows(visible, *wanted), query, deps.valid_from())


@router.page(
    "/instance/{instanceId}/nvlink-interface", "get-all-instance-nvlink-interface", list[NVLinkInterface]
)
def list_of_instance(
    conn: sa.Connection,
    deps: Deps,
    caller: TenantAdmin,
    instance_id: Annotated[UUID, Path(alias="instanceId")],
    query: Params[InstanceInterfaceQuery],
) -> Page:
    """The interfaces of one instance."""
    tenant = _tenant(conn, caller.org)
    instances.get_instance(conn, tenant.id, str(instance_id))
    mine = instances.interface_listing().where(table.c.instance_id == str(instance_id))
    return _page(conn, tenant, mine, query, deps.valid_from())


def _page(
    conn: sa.Connection,
    tenant: Row,
    visible: routing.AnySelect,
    query: InstanceInterfaceQuery,
    valid_from: float,
) -> Page:
    for partition_id in query.nvlink_logical_partition_id:
        logical_partitions.get_logical_partition(conn, tenant.id, str(partition_id))
    domains = latest.outdated_domains(conn, valid_from)
    status = outdated.shown_status_column(table, domains)
    listing = msgspec.structs.replace(LISTING, shapes=partial(_shapes, domains=domains))
    listing = listing.by(status, instead_of=table.c.status)
    return listing.page(conn, routing.filter_rows(visible, (status, query.status)), query)


def _shapes(
    conn: sa.Connection, rows: Rows, query: InstanceInterfaceQuery, domains: OutdatedDomains
) -> list[Json]:
    known = [InterfaceRow._make(row) for row in rows]
    shapes = [interface_shape(outdated.shown_interface(row, domains)) for row in known]
    routing.add_relations(conn, shapes, query.relations(*INTERFACE_RELATIONS))
    for shape, row in zip(shapes, known, strict=True):
        if shape.get("instance"):
            status = outdated.shown_status(shape["instance"]["status"], domains.get(row.domain or ""))
            shape["instance"] = {**shape["instance"], "status": routing.shown_instance_status(status)}
    return shapes


LISTING = routing.Listing(
    shapes=partial(_shapes, domains={}),
    order=routing.order_of(table, "status"),
    filters={
        "nvlink_logical_partition_id": table.c.logical_partition_id,
        "nvlink_domain_id": sa.func.lower(machine.c.domain),
    },
)


def _tenant(conn: sa.Connection, org: str) -> Row:
    found = entitlements.find_tenant(conn, org)
    if found is None:
        raise forbidden("Org does not have a Tenant associated")
    return found
