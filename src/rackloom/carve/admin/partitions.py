"""RPCs about physical partitions in the latest observations, and their owners.

Partitions that the site did not create are listed as well, without a logical partition: an operator must see
them to adopt or release them. A domain that cannot be read has no partitions in the list. The uuid of a
partition depends only on its domain and name, because controllers renumber partitions.
"""

import uuid
from collections.abc import Callable, Iterable

import msgspec
import sqlalchemy as sa

from rackloom.carve.admin import common_pb2 as ids_pb
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps, check_ids
from rackloom.carve.inventory import endpoints
from rackloom.carve.partitions import found
from rackloom.carve.partitions.found import FoundPartitionView
from rackloom.carve.store.schema import logical_partition, tenant


class PartitionListing(msgspec.Struct, frozen=True):
    """An observed partition, and the org of its tenant."""

    view: FoundPartitionView
    org: str | None

    @property
    def id(self) -> str:
        """A uuid that depends only on domain and name, because controllers renumber partitions."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.view.domain}/{self.view.partition.name}"))


async def find_ids(deps: AdminDeps, request: pb.NVLinkPartitionSearchFilter) -> pb.NVLinkPartitionIdList:
    """Ids by tenant or name, or all."""
    chosen = [
        partition
        for partition in await deps.store.read(list_partitions, deps.valid_from())
        if not request.HasField("tenant_organization_id") or partition.org == request.tenant_organization_id
        if not request.HasField("name") or partition.view.partition.name == request.name
    ]
    ids = [ids_pb.NVLinkPartitionId(value=partition.id) for partition in chosen]
    return pb.NVLinkPartitionIdList(partition_ids=ids)


async def find_by_ids(deps: AdminDeps, request: pb.NVLinkPartitionsByIdsRequest) -> pb.NVLinkPartitionList:
    """Partitions by id. Unknown ids are left out."""
    check_ids(request.partition_ids)
    wanted = {partition_id.value for partition_id in request.partition_ids}
    return _messages(
        await deps.store.read(list_partitions, deps.valid_from()), lambda partition: partition.id in wanted
    )


async def of_tenant(deps: AdminDeps, request: pb.TenantSearchQuery) -> pb.NVLinkPartitionList:
    """The partitions that hold a tenant's GPUs."""
    org = request.tenantOrganizationId
    return _messages(
        await deps.store.read(list_partitions, deps.valid_from()), lambda partition: partition.org == org
    )


def list_partitions(conn: sa.Connection, valid_from: float) -> list[PartitionListing]:
    """All partitions in the newest observations of all domains, by domain and id."""
    domains = {endpoint.domain for endpoint in endpoints.all_endpoints(conn) if endpoint.domain is not None}
    owners = sa.select(logical_partition.c.id, tenant.c.org)
    owners = owners.join(tenant, tenant.c.id == logical_partition.c.tenant_id)
    orgs = {row.id: row.org for row in conn.execute(owners)}
    return [
        PartitionListing(view, orgs.get(view.logical_partition or ""))
        for view in found.partitions_of_domains(conn, domains, valid_from)
    ]


def _messages(
    listed: Iterable[PartitionListing], is_wanted: Callable[[PartitionListing], bool]
) -> pb.NVLinkPartitionList:
    return pb.NVLinkPartitionList(
        partitions=[
            pb.NVLinkPartition(
                id=ids_pb.NVLinkPartitionId(value=partition.id),
                name=partition.view.partition.name,
                nmx_m_id=str(partition.view.partition.id),
                domain_uuid=ids_pb.NVLinkDomainId(value=partition.view.domain),
                logical_partition_id=ids_pb.NVLinkLogicalPartitionId(value=partition.view.logical_partition)
                if partition.view.logical_partition
                else None,
            )
            for partition in listed
            if is_wanted(partition)
        ]
    )
