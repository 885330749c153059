"""RPCs about physical partitions: what the latest observations show, and who owns it.

Partitions that the site did not create are listed as well, without a logical partition: an operator
must see what to adopt or release. A domain that cannot be read lists nothing. A partition's uuid is
derived from domain and name, because controllers number partitions anew.
"""

import uuid
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps, check_ids
from rackloom.carve.inventory import endpoints
from rackloom.carve.partitions import found
from rackloom.carve.store.schema import logical_partition, tenant


class PartitionListing(msgspec.Struct, frozen=True, kw_only=True):
    """An observed partition; `number` is the controller's id for it."""

    domain: str
    name: str
    number: int
    owner: found.Owner
    logical_partition: str | None
    org: str | None

    @property
    def id(self) -> str:
        """A uuid that stays the same as long as domain and name do: controllers number partitions anew."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.domain}/{self.name}"))


async def find_ids(deps: AdminDeps, request: pb.NVLinkPartitionSearchFilter) -> pb.NVLinkPartitionIdList:
    """Ids by tenant or name, or all."""
    found = await deps.store.read(list_partitions)
    if request.HasField("tenant_organization_id"):
        found = [one for one in found if one.org == request.tenant_organization_id]
    if request.HasField("name"):
        found = [one for one in found if one.name == request.name]
    return pb.NVLinkPartitionIdList(partition_ids=[ids_pb.NVLinkPartitionId(value=one.id) for one in found])


async def find_by_ids(deps: AdminDeps, request: pb.NVLinkPartitionsByIdsRequest) -> pb.NVLinkPartitionList:
    """Partitions; ids that mean none are left out."""
    check_ids(request.partition_ids)
    wanted = {partition_id.value for partition_id in request.partition_ids}
    found = await deps.store.read(list_partitions)
    return pb.NVLinkPartitionList(partitions=[_shown(one) for one in found if one.id in wanted])


async def of_tenant(deps: AdminDeps, request: pb.TenantSearchQuery) -> pb.NVLinkPartitionList:
    """The partitions that hold a tenant's GPUs."""
    found = await deps.store.read(list_partitions)
    mine = [one for one in found if one.org == request.tenantOrganizationId]
    return pb.NVLinkPartitionList(partitions=[_shown(one) for one in mine])


def list_partitions(conn: sa.Connection) -> list[PartitionListing]:
    """All partitions in the newest observations of all domains, by domain and id."""
    domains = {endpoint.domain for endpoint in endpoints.all_endpoints(conn) if endpoint.domain is not None}
    orgs = {row.id: row.org for row in conn.execute(_owners())}
    return [
        PartitionListing(
            domain=partition.domain,
            name=partition.seen.name,
            number=partition.seen.id,
            owner=partition.owner,
            logical_partition=partition.logical_partition,
            org=orgs.get(partition.logical_partition or ""),
        )
        for partition in found.partitions_of_domains(conn, domains)
    ]


def _owners() -> sa.Select[Any]:
    query = sa.select(logical_partition.c.id, tenant.c.org)
    return query.join(tenant, tenant.c.id == logical_partition.c.tenant_id)


def _shown(partition_listing: PartitionListing) -> pb.NVLinkPartition:
    owner = partition_listing.logical_partition
    return pb.NVLinkPartition(
        id=ids_pb.NVLinkPartitionId(value=partition_listing.id),
        name=partition_listing.name,
        nmx_m_id=str(partition_listing.number),
        domain_uuid=ids_pb.NVLinkDomainId(value=partition_listing.domain),
        logical_partition_id=ids_pb.NVLinkLogicalPartitionId(value=owner) if owner else None,
    )
