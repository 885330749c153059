"""REST: NVLink logical partitions, with their VPCs, interfaces and numbers of GPUs on request."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import sqlalchemy as sa
from fastapi import Path
from pydantic import Field
from starlette.responses import Response

from rackloom.carve.api import access, routing, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.instance_wire import InterfaceSummary, interface_summary
from rackloom.carve.api.routing import Deps, DryRun, Page, Params, Row, Rows, TenantAdmin
from rackloom.carve.api.wire import Json
from rackloom.carve.observation import latest
from rackloom.carve.store import journal
from rackloom.carve.store.journal import StatusRecord
from rackloom.carve.store.prepared import owned_by
from rackloom.carve.store.schema import logical_partition as table
from rackloom.carve.store.schema import nvlink_interface, vpc
from rackloom.carve.store.values import Changed, RefusalKind, Rejected, Status, invalid
from rackloom.carve.tenancy import catalog, entitlements, instances, logical_partitions, outdated
from rackloom.carve.tenancy.instances import InterfaceRow
from rackloom.carve.tenancy.logical_partitions import NewLogicalPartition
from rackloom.carve.tenancy.outdated import OutdatedDomains

# Request models.


class LogicalPartitionCreate(wire.Body):
    """A new NVLink logical partition."""

    name: wire.Name
    site_id: UUID
    description: wire.Description | None = None


class LogicalPartitionUpdate(wire.Body):
    """Changes of an NVLink logical partition."""

    name: wire.Name | None = None
    description: wire.Description | None = None


# Query parameters.


class PartitionIncludes(wire.RelationQuery):
    """What to add to a logical partition."""

    include_interfaces: Annotated[bool, Field(json_schema_extra=access.shows("nvlink-interfaces:read"))] = (
        False
    )
    include_vpcs: Annotated[bool, Field(json_schema_extra=access.shows("vpcs:read"))] = False
    include_stats: Annotated[bool, Field(json_schema_extra=access.shows("nvlink-interfaces:read"))] = False


NOTHING_MORE = PartitionIncludes()


class PartitionQuery(wire.PageQuery, PartitionIncludes):
    """Filters on logical partitions."""

    site_id: UUID | None = None
    status: wire.PartitionStatus | None = None
    query: wire.Text | None = None


# Response models.


class PartitionStats(wire.Answer):
    """How many GPUs are, or shall be, in a logical partition, and of how many instances."""

    total_gpus: int
    total_distinct_instances: int


class NVLinkLogicalPartition(wire.Timed):
    """An NVLink logical partition."""

    id: UUID
    name: str
    description: str | None
    site_id: UUID
    tenant_id: UUID
    nvlink_logical_partition_stats: PartitionStats | None = Field(alias="nvLinkLogicalPartitionStats")
    status: wire.PartitionStatus
    status_history: list[wire.StatusDetail]
    site: wire.SiteSummary | None = None
    tenant: wire.Org | None = None
    vpcs: list[wire.Summary] = []
    nvlink_interfaces: list[InterfaceSummary] = Field([], alias="nvLinkInterfaces")


class LogicalPartitionPlan(wire.Answer):
    """A logical partition that would be made; nothing was changed."""

    dry_run: Literal[True]
    name: str
    site_id: UUID


# Routes.


router = routing.Operations("/nvlink-logical-partition")

_OF_TENANT = sa.select(table).where(owned_by(table.c.tenant_id, sa.bindparam("tenant")))
PartitionId = Annotated[UUID, Path(alias="nvLinkLogicalPartitionId")]
ONE = "/{nvLinkLogicalPartitionId}"


@router.page("", "get-all-nvlink-logical-partition", list[NVLinkLogicalPartition])
def list_all(conn: sa.Connection, deps: Deps, caller: TenantAdmin, query: Params[PartitionQuery]) -> Page:
    """The tenant's logical partitions."""
    tenant_id = entitlements.tenant_id_of(conn, caller.org)
    if query.site_id is not None:
        _check_site(conn, tenant_id, str(query.site_id))
    listing = msgspec.structs.replace(LISTING, shapes=partial(_shapes, valid_from=deps.valid_from()))
    total = partial(entitlements.count_objects, conn, tenant_id, entitlements.QuotaKind.LOGICAL_PARTITIONS)
    return listing.page(conn, _OF_TENANT, query, total, tenant=tenant_id)


@router.create("", "create-nvlink-logical-partition", NVLinkLogicalPartition, plan=LogicalPartitionPlan)
async def create(
    deps: Deps, caller: TenantAdmin, body: LogicalPartitionCreate, dry_run: DryRun = False
) -> Response:
    """A new logical partition."""
    wanted = NewLogicalPartition(str(body.site_id), body.name, body.description)

    def check(conn: sa.Connection) -> None:
        tenant_id = entitlements.tenant_id_of(conn, caller.org)
        logical_partitions.check_new_logical_partition(conn, tenant_id, wanted)

    if dry_run:
        await deps.store.read(check)
        return routing.json_response(wire.shape(LogicalPartitionPlan, body, dry_run=True))

    def create(conn: sa.Connection) -> Json:
        tenant_id = entitlements.tenant_id_of(conn, caller.org)
        row, history = logical_partitions.make_logical_partition(
            conn, tenant_id, wanted, deps.clock(), deps.ids
        )
        return _shape(row, history)

    return routing.created_response(await deps.store.run(create))


@router.get(ONE, "get-nvlink-logical-partition", NVLinkLogicalPartition)
def get(
    conn: sa.Connection,
    deps: Deps,
    caller: TenantAdmin,
    partition_id: PartitionId,
    query: Params[PartitionIncludes],
) -> Json:
    """One logical partition."""
    return _shapes(conn, [_row(conn, caller, partition_id)], query, deps.valid_from())[0]


@router.patch(ONE, "update-nvlink-logical-partition", NVLinkLogicalPartition)
def update(
    conn: sa.Connection,
    deps: Deps,
    caller: TenantAdmin,
    partition_id: PartitionId,
    body: LogicalPartitionUpdate,
) -> Json:
    """Change the name or description."""
    tenant_id, now = entitlements.tenant_id_of(conn, caller.org), deps.clock()
    logical_partitions.update_logical_partition(
        conn, tenant_id, str(partition_id), name=body.name, description=body.description, now=now
    )
    return _shown(conn, tenant_id, str(partition_id))


@router.delete(ONE, "delete-nvlink-logical-partition")
def delete(conn: sa.Connection, deps: Deps, caller: TenantAdmin, partition_id: PartitionId) -> Changed[None]:
    """Delete a logical partition that nothing refers to."""
    return logical_partitions.delete_logical_partition(
        conn, None, str(partition_id), deps.clock(), caller.org
    )


@router.page(f"{ONE}/status-history", "get-nvlink-logical-partition-status-history", list[wire.StatusDetail])
def get_history(
    conn: sa.Connection, caller: TenantAdmin, partition_id: PartitionId, query: Params[wire.PageQuery]
) -> list[Json]:
    """How the logical partition came to its status, newest first."""
    return routing.history(conn, _row(conn, caller, partition_id).id)


def _check_site(conn: sa.Connection, tenant_id: str, site_id: str) -> None:
    try:
        catalog.get_site(conn, site_id)
    except Rejected as refusal:
        if refusal.kind is not RefusalKind.NOT_FOUND:
            raise
        raise invalid("Could not find Site with ID specified in query", siteId="does not exist") from None
    entitlements.check_site_access(conn, tenant_id, site_id)


def _row(conn: sa.Connection, caller: Caller, partition_id: UUID | str) -> Row:
    tenant_id = entitlements.tenant_id_of(conn, caller.org)
    return logical_partitions.get_logical_partition(conn, tenant_id, str(partition_id))


def _shown(conn: sa.Connection, tenant_id: str, partition_id: str) -> Json:
    """As the answer to a change shows it."""
    row = logical_partitions.get_logical_partition(conn, tenant_id, partition_id)
    return _shapes(conn, [row], NOTHING_MORE, 0.0)[0]


def _shapes(conn: sa.Connection, rows: Rows, query: PartitionIncludes, valid_from: float) -> list[Json]:
    histories = journal.status_histories(conn, [row.id for row in rows])
    shapes = [_shape(row, histories[row.id]) for row in rows]
    routing.add_relations(conn, shapes, query.relations("Site", "Tenant"))
    if query.include_vpcs:
        by_id = {shape["id"]: shape for shape in shapes}
        referring = sa.select(vpc).where(vpc.c.logical_partition_id.in_(by_id)).order_by(vpc.c.id)
        for row in conn.execute(referring):
            by_id[row.logical_partition_id].setdefault("vpcs", []).append(routing.summary_shape(row))
    if query.include_interfaces or query.include_stats:
        _add_interfaces(conn, shapes, query, latest.outdated_domains(conn, valid_from))
    return shapes


def _shape(row: Any, history: Sequence[StatusRecord]) -> Json:
    return wire.shape(
        NVLinkLogicalPartition,
        row,
        nvlink_logical_partition_stats=None,
        status_history=routing.status_history_shape(history),
    )


def _add_interfaces(
    conn: sa.Connection, shapes: list[Json], query: PartitionIncludes, domains: OutdatedDomains
) -> None:
    by_id: dict[str, list[object]] = {shape["id"]: [] for shape in shapes}
    mine = instances.interface_listing().where(nvlink_interface.c.logical_partition_id.in_(by_id))
    found = conn.execute(mine.order_by(nvlink_interface.c.created, nvlink_interface.c.id)).all()
    rows = [outdated.shown_interface(InterfaceRow._make(row), domains) for row in found]
    for shape in shapes:
        own = [row for row in rows if row.logical_partition_id == shape["id"]]
        live = [row for row in own if row.status != Status.DELETING]
        if query.include_interfaces and own:
            shape["nvLinkInterfaces"] = [interface_summary(row) for row in own]
        if query.include_stats:
            distinct = {row.instance_id for row in live}
            shape["nvLinkLogicalPartitionStats"] = {
                "totalGpus": len(live),
                "totalDistinctInstances": len(distinct),
            }


LISTING = routing.Listing(
    shapes=partial(_shapes, valid_from=0.0),
    order=routing.order_of(table, "name", "status"),
    filters={"site_id": table.c.site_id, "status": table.c.status},
    searched=(table.c.name, table.c.description, table.c.status),
)
