"""REST: VPCs with an optional default logical partition; subnets and prefixes, always empty.

Clients of the wider API list subnets and prefixes when they start, so these routes answer with empty
lists.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import Field, StrictInt
from starlette.responses import Response

from rackloom.carve.api import routing, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import Deps, DryRun, Page, Params, Row, Rows, TenantAdmin
from rackloom.carve.api.wire import Json
from rackloom.carve.store import journal
from rackloom.carve.store.journal import StatusRecord
from rackloom.carve.store.prepared import PreparedListing, owned_by
from rackloom.carve.store.schema import logical_partition, tenant
from rackloom.carve.store.schema import vpc as table
from rackloom.carve.store.values import invalid
from rackloom.carve.tenancy import entitlements, logical_partitions
from rackloom.carve.tenancy.logical_partitions import NewVpc

# Request models.


class VpcCreate(wire.OpenBody):
    """A new VPC."""

    id: UUID | None = None
    name: wire.Name
    site_id: UUID
    description: wire.Description | None = None
    vni: Annotated[StrictInt, Field(ge=1, le=65535)] | None = None
    labels: wire.Labels | None = None
    network_virtualization_type: Literal["ETHERNET_VIRTUALIZER", "FNN", "FLAT"] | None = None
    nvlink_logical_partition_id: UUID | None = Field(None, alias="nvLinkLogicalPartitionId")

    @property
    def kept(self) -> dict[str, Any]:
        """What is returned but not acted on."""
        ours = {"id", "name", "site_id", "description", "nvlink_logical_partition_id"}
        return self.model_dump(mode="json", by_alias=True, exclude=ours, exclude_none=True)


class VpcUpdate(wire.OpenBody):
    """Changes of a VPC; an empty nvLinkLogicalPartitionId clears the default."""

    name: wire.Name | None = None
    description: wire.Description | None = None
    labels: wire.Labels | None = None
    nvlink_logical_partition_id: UUID | Literal[""] | None = Field(None, alias="nvLinkLogicalPartitionId")

    @property
    def kept(self) -> dict[str, Any]:
        """What is returned but not acted on."""
        ours = {"name", "description", "nvlink_logical_partition_id"}
        return self.model_dump(mode="json", by_alias=True, exclude=ours, exclude_none=True)


class VpcVirtualization(wire.Body):
    """The network virtualization that a VPC is to have; kept, and not acted on."""

    network_virtualization_type: Literal["FNN"]


# Query parameters.


class VpcQuery(wire.PageQuery, wire.RelationQuery):
    """Filters on VPCs."""

    site_id: wire.UuidFilter = []
    name: wire.Text | None = None
    status: list[wire.PartitionStatus] = []
    network_security_group_id: wire.UuidFilter = []
    query: wire.Text | None = None
    nvlink_logical_partition_id: wire.UuidFilter = Field([], alias="nvLinkLogicalPartitionId")


# Response models.


class Vpc(wire.Timed):
    """A VPC."""

    id: UUID
    name: str
    description: str | None
    org: str
    site_id: UUID
    tenant_id: UUID
    controller_vpc_id: UUID
    nvlink_logical_partition_id: UUID | None = Field(alias="nvLinkLogicalPartitionId")
    nvlink_logical_partition_summary: wire.Summary | None = Field(alias="nvLinkLogicalPartitionSummary")
    status: wire.PartitionStatus
    status_history: list[wire.StatusDetail]


class VpcPlan(wire.Answer):
    """A VPC that would be made; nothing was changed."""

    dry_run: Literal[True]
    name: str
    site_id: UUID
    nvlink_logical_partition_id: UUID | None = Field(alias="nvLinkLogicalPartitionId")


# Routes.


router = routing.Operations("/vpc")

RELATIONS = (
    "Site", "Tenant", "NVLinkLogicalPartition", "InfrastructureProvider", "NetworkSecurityGroup",
)  # fmt: skip
_OF_TENANT = sa.select(table).where(owned_by(table.c.tenant_id, sa.bindparam("tenant")))


class _PartitionRow(NamedTuple):
    """What a VPC shows of its default logical partition."""

    id: str
    name: str
    site_id: str
    status: str


_PARTITIONS = PreparedListing(
    sa.select(*(logical_partition.c[name] for name in _PartitionRow._fields)), logical_partition.c.id
)
VpcId = Annotated[UUID, Path(alias="vpcId")]


@router.page("", "get-all-vpc", list[Vpc])
def list_all(conn: sa.Connection, caller: TenantAdmin, query: Params[VpcQuery]) -> Page:
    """The tenant's VPCs."""
    tenant_id = entitlements.tenant_id_of(conn, caller.org)
    if query.nvlink_logical_partition_id:
        _check_partitions(conn, tenant_id, {str(uuid) for uuid in query.nvlink_logical_partition_id})
    total = partial(entitlements.count_objects, conn, tenant_id, entitlements.QuotaKind.VPCS)
    return LISTING.page(conn, _OF_TENANT, query, total, tenant=tenant_id)


@router.create("", "create-vpc", Vpc, plan=VpcPlan)
async def create(deps: Deps, caller: TenantAdmin, body: VpcCreate, dry_run: DryRun = False) -> Response:
    """A new VPC."""
    partition = body.nvlink_logical_partition_id
    wanted = NewVpc(
        site_id=str(body.site_id),
        name=body.name,
        description=body.description,
        logical_partition_id=None if partition is None else str(partition),
        extra=body.kept,
        id=None if body.id is None else str(body.id),
    )

    def check(conn: sa.Connection) -> None:
        tenant_id = entitlements.tenant_id_of(conn, caller.org)
        logical_partitions.check_new_vpc(conn, tenant_id, wanted)

    if dry_run:
        await deps.store.read(check)
        return routing.json_response(wire.shape(VpcPlan, body, dry_run=True))

    def create(conn: sa.Connection) -> Json:
        tenant_id = entitlements.tenant_id_of(conn, caller.org)
        row, history = logical_partitions.make_vpc(conn, tenant_id, wanted, deps.clock(), deps.ids)
        default = None if row.default is None else wire.shape(wire.Summary, row.default)
        return _shape(row, caller.org, default, history)

    return routing.created_response(await deps.store.run(create))


@router.get("/{vpcId}", "get-vpc", Vpc)
def get(conn: sa.Connection, caller: TenantAdmin, vpc_id: VpcId, query: Params[wire.RelationQuery]) -> Json:
    """One VPC."""
    return _shapes(conn, [_row(conn, caller, vpc_id)], query)[0]


@router.patch("/{vpcId}", "update-vpc", Vpc)
def update(conn: sa.Connection, deps: Deps, caller: TenantAdmin, vpc_id: VpcId, body: VpcUpdate) -> Json:
    """Change a VPC."""
    partition = body.nvlink_logical_partition_id
    logical_partitions.update_vpc(
        conn,
        entitlements.tenant_id_of(conn, caller.org),
        str(vpc_id),
        name=body.name,
        description=body.description,
        logical_partition_id=None if partition is None else str(partition),
        extra=body.kept,
        now=deps.clock(),
    )
    return get(conn, caller, vpc_id, routing.NO_QUERY)


@router.patch("/{vpcId}/virtualization", "update-vpc-virtualization", Vpc)
def update_virtualization(
    conn: sa.Connection, deps: Deps, caller: TenantAdmin, vpc_id: VpcId, body: VpcVirtualization
) -> Json:
    """Name another network virtualization for an empty VPC."""
    tenant_id, kind = entitlements.tenant_id_of(conn, caller.org), body.network_virtualization_type
    logical_partitions.set_virtualization(conn, tenant_id, str(vpc_id), kind, deps.clock())
    return get(conn, caller, vpc_id, routing.NO_QUERY)


@router.page("/{vpcId}/status-history", "get-vpc-status-history", list[wire.StatusDetail])
def get_history(
    conn: sa.Connection, caller: TenantAdmin, vpc_id: VpcId, query: Params[wire.PageQuery]
) -> list[Json]:
    """How the VPC came to its status, newest first."""
    return routing.history(conn, _row(conn, caller, vpc_id).id)


@router.delete("/{vpcId}", "delete-vpc")
def delete(conn: sa.Connection, deps: Deps, caller: TenantAdmin, vpc_id: VpcId) -> None:
    """Delete an empty VPC."""
    logical_partitions.delete_vpc(conn, None, str(vpc_id), deps.clock(), caller.org)


def _check_partitions(conn: sa.Connection, tenant_id: str, wanted: set[str]) -> None:
    mine = sa.select(logical_partition.c.id).where(
        owned_by(logical_partition.c.tenant_id, tenant_id), logical_partition.c.id.in_(wanted)
    )
    missing = sorted(wanted - set(conn.execute(mine).scalars()))
    if missing:
        raise invalid(
            "Could not find NVLink Logical Partition of Tenant with ID specified in query",
            nvLinkLogicalPartitionId=", ".join(missing),
        )


def _row(conn: sa.Connection, caller: Caller, vpc_id: UUID) -> Row:
    return logical_partitions.get_vpc(conn, entitlements.tenant_id_of(conn, caller.org), str(vpc_id))


def _shapes(conn: sa.Connection, rows: Rows, query: wire.RelationQuery) -> list[Json]:
    histories = journal.status_histories(conn, [row.id for row in rows])
    defaults = {row.logical_partition_id for row in rows if row.logical_partition_id}
    found = _PARTITIONS.records(conn, _PartitionRow._make, defaults)
    partitions = {row.id: wire.shape(wire.Summary, row) for row in found}
    orgs = entitlements.orgs_by_id(conn, tenant, {row.tenant_id for row in rows})
    shapes = [
        _shape(row, orgs[row.tenant_id], partitions.get(row.logical_partition_id), histories[row.id])
        for row in rows
    ]
    routing.add_relations(conn, shapes, query.relations(*RELATIONS))
    return shapes


def _shape(row: Any, org: str, default: Json | None, history: Sequence[StatusRecord]) -> Json:
    shown = wire.shape(
        Vpc,
        row,
        org=org,
        controller_vpc_id=row.id,
        nvlink_logical_partition_id=row.logical_partition_id,
        nvlink_logical_partition_summary=default,
        status_history=routing.status_history_shape(history),
    )
    return {**row.extra, **shown}


LISTING = routing.Listing(
    shapes=_shapes,
    order=routing.order_of(table, "name", "status"),
    filters={
        "name": table.c.name,
        "site_id": table.c.site_id,
        "status": table.c.status,
        "network_security_group_id": table.c.extra["networkSecurityGroupId"].as_string(),
        "nvlink_logical_partition_id": table.c.logical_partition_id,
    },
    searched=(table.c.name, table.c.description, table.c.status),
)


# Subnets and VPC prefixes.


subnet_router = routing.Operations()


class NetworkQuery(wire.PageQuery, wire.RelationQuery):
    """Filters on networks. There are none, so that nothing has relations or statistics."""

    site_id: wire.UuidFilter = []
    vpc_id: wire.UuidFilter = []
    status: wire.TextFilter = []
    query: wire.Text | None = None
    include_usage_stats: bool = False


@subnet_router.get("/subnet", "get-all-subnet", list[wire.Summary])
async def list_subnets(_caller: TenantAdmin, query: Params[NetworkQuery]) -> Response:
    """No subnet."""
    query.relations("VPC", "Tenant", "IPv4Block", "IPv6Block")
    return routing.page_response([], 0, query)


@subnet_router.get("/vpc-prefix", "get-all-vpc-prefix", list[wire.Summary])
async def list_prefixes(_caller: TenantAdmin, query: Params[NetworkQuery]) -> Response:
    """No VPC prefix."""
    query.relations("VPC", "Tenant", "IPBlock")
    return routing.page_response([], 0, query)
