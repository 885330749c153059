"""`rackloom admin logical-partition` and `partition`: what tenants want, and what the fabric has."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, Parameter

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin_client import HERE, At, as_dict, connect, order, pages
from rackloom.cli.output import Output, columns, emit
from rackloom.errors import Refused

logical = App(name="logical-partition", help="Logical partitions of tenants.")
partition = App(name="partition", help="Physical partitions, as the switch controllers show them.")
Reason = Annotated[str, Parameter(name="--reason")]


@logical.command(name="show")
def logical_show(
    partition_id: str | None = None,
    *,
    name: Annotated[str | None, Parameter(name=["--name", "-n"])] = None,
    at: At = HERE,
    output: Output = "table",
) -> None:
    """Show logical partitions.

    Parameters
    ----------
    partition_id
        Only this one.
    name
        Only those of this name.
    output
        How to print.
    at
        Which site, and who we are.
    """
    wanted = pb.NVLinkLogicalPartitionSearchFilter(name=name)
    with connect(at) as site:
        ids = site.forge("FindNVLinkLogicalPartitionIds", wanted).partition_ids
        found = [
            one
            for page in pages(_only(ids, partition_id))
            for one in site.forge(
                "FindNVLinkLogicalPartitionsByIds",
                pb.NVLinkLogicalPartitionsByIdsRequest(partition_ids=page),
            ).partitions
        ]
    rows = [
        (
            one.id.value,
            one.config.metadata.name,
            one.config.tenant_organization_id,
            pb.TenantState.Name(one.status.state),
        )
        for one in found
    ]
    heads = ("ID", "NAME", "TENANT", "STATUS")
    emit([as_dict(one) for one in found], output, lambda: columns(heads, rows))


@logical.command(name="create")
def logical_create(
    *,
    name: Annotated[str, Parameter(name=["--name", "-n"])],
    tenant: Annotated[str, Parameter(name=["--tenant", "-t"])],
    at: At = HERE,
) -> None:
    """Make a logical partition for a tenant, and print its id.

    Parameters
    ----------
    name
        Its name, unique for the tenant.
    tenant
        Organisation of the tenant.
    at
        Which site, and who we are.
    """
    config = pb.NVLinkLogicalPartitionConfig(metadata=pb.Metadata(name=name), tenant_organization_id=tenant)
    with connect(at) as site:
        request = pb.NVLinkLogicalPartitionCreationRequest(config=config)
        print(site.forge("CreateNVLinkLogicalPartition", request).id.value)


@logical.command(name="delete")
def logical_delete(partition_id: str, *, at: At = HERE) -> None:
    """Begin to delete a logical partition that nothing refers to.

    Parameters
    ----------
    partition_id
        Its id.
    at
        Which site, and who we are.
    """
    with connect(at) as site:
        request = pb.NVLinkLogicalPartitionDeletionRequest()
        request.id.value = partition_id
        site.forge("DeleteNVLinkLogicalPartition", request)
    print(f"deleting {partition_id}")


@partition.command(name="show")
def partition_show(
    partition_id: str | None = None,
    *,
    tenant: Annotated[str | None, Parameter(name=["--tenant", "-t"])] = None,
    name: Annotated[str | None, Parameter(name=["--name", "-n"])] = None,
    at: At = HERE,
    output: Output = "table",
) -> None:
    """Show physical partitions; those without a logical partition were found, and are nobody's.

    Parameters
    ----------
    partition_id
        Only this one.
    tenant
        Only those of this organisation.
    name
        Only those of this name.
    output
        How to print.
    at
        Which site, and who we are.
    """
    wanted = pb.NVLinkPartitionSearchFilter(tenant_organization_id=tenant, name=name)
    with connect(at) as site:
        ids = site.forge("FindNVLinkPartitionIds", wanted).partition_ids
        found = [
            one
            for page in pages(_only(ids, partition_id))
            for one in site.forge(
                "FindNVLinkPartitionsByIds", pb.NVLinkPartitionsByIdsRequest(partition_ids=page)
            ).partitions
        ]
    rows = [
        (one.id.value, one.name, one.logical_partition_id.value or "-", one.nmx_m_id, one.domain_uuid.value)
        for one in found
    ]
    heads = ("ID", "NAME", "LOGICAL PARTITION ID", "NMX-C PARTITION ID", "NVLINK DOMAIN UUID")
    emit([as_dict(one) for one in found], output, lambda: columns(heads, rows))


@partition.command(name="adopt")
def partition_adopt(
    *,
    domain: str,
    name: str,
    logical_partition: str,
    reason: Reason,
    at: At = HERE,
) -> None:
    """Make a partition that was found that of a logical partition. No GPU moves.

    Parameters
    ----------
    domain
        Domain uuid.
    name
        Name of the partition.
    logical_partition
        Id of the logical partition, which must want exactly the GPUs that are in it.
    reason
        Why; it is recorded.
    at
        Which site, and who we are.
    """
    order(
        at,
        "AdoptPartition",
        ours.AdoptRequest(
            domain=domain, partition_name=name, logical_partition_id=logical_partition, reason=reason
        ),
    )


@partition.command(name="release")
def partition_release(*, domain: str, name: str, reason: Reason, at: At = HERE) -> None:
    """Let a partition that was found be taken apart.

    Parameters
    ----------
    domain
        Domain uuid.
    name
        Name of the partition.
    reason
        Why; it is recorded.
    at
        Which site, and who we are.
    """
    request = ours.ReleaseRequest(domain=domain, partition_name=name, reason=reason)
    order(at, "ReleasePartition", request)


def _only(ids: Sequence[Any], wanted: str | None) -> list[Any]:
    found = [one for one in ids if wanted in (None, one.value)]
    if wanted is not None and not found:
        raise Refused(f"there is nothing with id {wanted}", nearest_fix="leave it out to see all")
    return found
