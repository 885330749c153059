"""RPCs about NVLink logical partitions, with the same rules as REST.

The caller may choose the id of a new logical partition. An update can carry the version that it is based on.
"""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import (
    AdminDeps,
    check_ids,
    check_version,
    config_version,
    rows_with_org,
    tenant_state,
    timestamp,
)
from rackloom.carve.store.prepared import require
from rackloom.carve.store.schema import logical_partition as table
from rackloom.carve.store.schema import site, tenant
from rackloom.carve.store.values import Changed, check_description, check_name, conflict, invalid
from rackloom.carve.tenancy import entitlements, logical_partitions
from rackloom.carve.tenancy.logical_partitions import NewLogicalPartition

_Row = sa.Row[Any]


async def find_ids(
    deps: AdminDeps, request: pb.NVLinkLogicalPartitionSearchFilter
) -> pb.NVLinkLogicalPartitionIdList:
    """Ids by name, or all."""
    query = rows_with_org(table)
    if request.HasField("name"):
        query = query.where(table.c.name == request.name)
    rows = await deps.store.read(_all, query)
    return pb.NVLinkLogicalPartitionIdList(
        partition_ids=[ids_pb.NVLinkLogicalPartitionId(value=row.id) for row in rows]
    )


async def find_by_ids(
    deps: AdminDeps, request: pb.NVLinkLogicalPartitionsByIdsRequest
) -> pb.NVLinkLogicalPartitionList:
    """Logical partitions by id. Unknown ids are left out."""
    check_ids(request.partition_ids)
    wanted = [partition_id.value for partition_id in request.partition_ids]
    rows = await deps.store.read(_all, rows_with_org(table).where(table.c.id.in_(wanted)))
    return pb.NVLinkLogicalPartitionList(partitions=[_message(row) for row in rows])


async def of_tenant(deps: AdminDeps, request: pb.TenantSearchQuery) -> pb.NVLinkLogicalPartitionList:
    """The logical partitions of a tenant."""
    query = rows_with_org(table).where(tenant.c.org == request.tenantOrganizationId)
    return pb.NVLinkLogicalPartitionList(
        partitions=[_message(row) for row in await deps.store.read(_all, query)]
    )


async def create(
    deps: AdminDeps, request: pb.NVLinkLogicalPartitionCreationRequest
) -> pb.NVLinkLogicalPartition:
    """Create a logical partition of a tenant, ready at once. The caller may choose its id."""
    chosen = request.id.value if request.HasField("id") else ""
    return _message(await deps.store.run(lambda conn: _create(conn, request.config, chosen, deps)))


async def update(
    deps: AdminDeps, request: pb.NVLinkLogicalPartitionUpdateRequest
) -> pb.NVLinkLogicalPartitionUpdateResult:
    """Change the name or the description."""

    def work(conn: sa.Connection) -> None:
        row = _get(conn, request.id.value)
        if request.config.tenant_organization_id not in ("", row.org):
            raise invalid("Tenant organization ID should not be updated")
        check_version(request, row.updated)
        metadata = request.config.metadata
        if metadata.name:
            check_name(metadata.name)
        check_description(metadata.description)
        logical_partitions.update_logical_partition(
            conn,
            row.tenant_id,
            row.id,
            name=metadata.name or None,
            description=metadata.description,
            now=deps.clock(),
        )

    await deps.store.run(work)
    return pb.NVLinkLogicalPartitionUpdateResult()


async def delete(
    deps: AdminDeps, request: pb.NVLinkLogicalPartitionDeletionRequest
) -> pb.NVLinkLogicalPartitionDeletionResult:
    """Begin a deletion. Refused while a VPC or an instance refers to the logical partition."""

    def work(conn: sa.Connection) -> Changed[None]:
        row = _get(conn, request.id.value)
        return logical_partitions.delete_logical_partition(conn, row.tenant_id, row.id, deps.clock())

    await deps.change(work)
    return pb.NVLinkLogicalPartitionDeletionResult()


def _create(
    conn: sa.Connection, config: pb.NVLinkLogicalPartitionConfig, chosen: str, deps: AdminDeps
) -> _Row:
    check_name(config.metadata.name)
    check_description(config.metadata.description)
    if chosen and logical_partitions.find_logical_partition(conn, chosen) is not None:
        raise conflict("a logical partition has this id already", id=chosen)
    tenant_id = entitlements.tenant_id_of(conn, config.tenant_organization_id.lower())
    site_id = conn.execute(sa.select(site.c.id)).scalar_one()
    wanted = NewLogicalPartition(site_id, config.metadata.name, config.metadata.description or None)
    ids = (lambda: chosen) if chosen else deps.ids
    return _get(conn, logical_partitions.create_logical_partition(conn, tenant_id, wanted, deps.clock(), ids))


def _all(conn: sa.Connection, query: sa.Select[Any]) -> list[_Row]:
    return list(conn.execute(query))


def _get(conn: sa.Connection, partition_id: str) -> _Row:
    row = conn.execute(rows_with_org(table).where(table.c.id == partition_id)).one_or_none()
    return require(row, f"there is no NVLink logical partition {partition_id}")


def _message(row: _Row) -> pb.NVLinkLogicalPartition:
    return pb.NVLinkLogicalPartition(
        id=ids_pb.NVLinkLogicalPartitionId(value=row.id),
        config=pb.NVLinkLogicalPartitionConfig(
            metadata=pb.Metadata(name=row.name, description=row.description or ""),
            tenant_organization_id=row.org,
        ),
        config_version=config_version(row.updated),
        status=pb.NVLinkLogicalPartitionStatus(state=tenant_state(row.status)),
        created=timestamp(row.created),
    )
