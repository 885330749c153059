"""The objects and the choices of a tenant, as REST lists them with the tenant's own token.

Lists are read as far as `MOST_LISTED`, because a page with more entries would be of no use.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from rackloom.client import AsyncClient, models, operations
from rackloom.client.call import PagedCall

T = TypeVar("T")
MOST_LISTED = 100
"""The largest page of REST."""
NAMES = "NAME_ASC"


class Listed(msgspec.Struct, Generic[T], frozen=True):
    """The first objects of a list."""

    items: Sequence[T]
    total: int


class OwnObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a tenant."""

    sites: Listed[models.Site]
    types: Listed[models.InstanceType]
    partitions: Listed[models.NVLinkLogicalPartition]
    vpcs: Listed[models.Vpc]
    instances: Listed[models.Instance]

    def vpc_name(self, id_: str) -> str:
        """The name of a VPC, or its id if it is not listed."""
        return next((vpc.name for vpc in self.vpcs.items if vpc.id == id_), id_)

    def type_name(self, id_: str) -> str:
        """The name of an instance type, or its id if it is not listed."""
        return next((type_.name for type_ in self.types.items if type_.id == id_), id_)

    @property
    def site_choices(self) -> list[tuple[str, str]]:
        """Id and name of each site."""
        return [(site.id, site.name) for site in self.sites.items]

    @property
    def type_choices(self) -> list[tuple[str, str]]:
        """Id and name of each instance type."""
        return [(type_.id, type_.name) for type_ in self.types.items]

    @property
    def vpc_choices(self) -> list[tuple[str, str]]:
        """Id and text of each VPC that may be ordered for, with the partition that instances join."""
        return [
            (
                vpc.id,
                f"{vpc.name}, joins {self.partition_name(vpc.nv_link_logical_partition_id) or 'nothing'}",
            )
            for vpc in self.vpcs.items
        ]

    def partition_name(self, id_: str | None) -> str:
        """The name of a logical partition, or its id if it is not listed. Empty for None."""
        return next((found.name for found in self.partitions.items if found.id == id_), id_ or "")


async def objects_of(client: AsyncClient) -> OwnObjects:
    """The objects of the tenant that this client acts for. Raises the errors of the client."""
    return OwnObjects(
        sites=await _first(client, operations.get_all_site()),
        types=await _first(client, operations.get_all_instance_type(order_by=NAMES)),
        partitions=await _first(
            client, operations.get_all_nvlink_logical_partition(include_stats=True, order_by=NAMES)
        ),
        vpcs=await _first(client, operations.get_all_vpc(order_by=NAMES)),
        instances=await _first(client, operations.get_all_instance(order_by=NAMES)),
    )


async def _first(client: AsyncClient, listed: PagedCall[T]) -> Listed[T]:
    async for page in client.pages(listed, size=MOST_LISTED):
        return Listed(page.items, page.total or len(page.items))
    return Listed((), 0)


def status_text(instance: models.Instance) -> str:
    """The status of an instance, or since when it is unknown if the fabric has not confirmed it."""
    if instance.unknown_since is None:
        return instance.status
    return f"unknown since {instance.unknown_since:%H:%M:%S} UTC"
