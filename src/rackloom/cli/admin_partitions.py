"""`rackloom admin logical-partition` and `partition`: what tenants want, and what the fabric has."""

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, Parameter

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin_client import HERE, At, Domain, Printed, Reason, as_dict, connect, order, pages
from rackloom.cli.output import columns, emit
from rackloom.errors import Refused

logical = App(name="logical-partition", help="Logical partitions of tenants.")
partition = App(name="partition", help="Physical partitions, as the switch controllers show them.")


@logical.command(name="show")
def logical_show(
    partition_id: Annotated[str | None, Parameter(help="Only this one.")] = None,
    *,
    name: Annotated[str | None, Parameter(name=["--name", "-n"], help="Only those of this name.")] = None,
    at: At = HERE,
    output: Printed = "table",
) -> None:
    """Show logical partitions."""
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
    name: Annotated[str, Parameter(name=["--name", "-n"], help="Its name, unique for the tenant.")],
    tenant: Annotated[str, Parameter(name=["--tenant", "-t"], help="Organisation of the tenant.")],
    at: At = HERE,
) -> None:
    """Make a logical partition for a tenant, and print its id."""
    config = pb.NVLinkLogicalPartitionConfig(metadata=pb.Metadata(name=name), tenant_organization_id=tenant)
    with connect(at) as site:
        request = pb.NVLinkLogicalPartitionCreationRequest(config=config)
        print(site.forge("CreateNVLinkLogicalPartition", request).id.value)


@logical.command(name="delete")
def logical_delete(partition_id: Annotated[str, Parameter(help="Its id.")], *, at: At = HERE) -> None:
    """Begin to delete a logical partition that nothing refers to."""
    with connect(at) as site:
        request = pb.NVLinkLogicalPartitionDeletionRequest()
        request.id.value = partition_id
        site.forge("DeleteNVLinkLogicalPartition", request)
    print(f"deleting {partition_id}")


@partition.command(name="show")
def partition_show(
    partition_id: Annotated[str | None, Parameter(help="Only this one.")] = None,
    *,
    tenant: Annotated[
        str | None, Parameter(name=["--tenant", "-t"], help="Only those of this organisation.")
    ] = None,
    name: Annotated[str | None, Parameter(name=["--name", "-n"], help="Only those of this name.")] = None,
    at: At = HERE,
    output: Printed = "table",
) -> None:
    """Show physical partitions; those without a logical partition were found, and are nobody's."""
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
    domain: Domain,
    name: Annotated[str, Parameter(help="Name of the partition.")],
    logical_partition: Annotated[
        str, Parameter(help="Id of the logical partition, which must want exactly the GPUs that are in it.")
    ],
    reason: Reason,
    at: At = HERE,
) -> None:
    """Make a partition that was found that of a logical partition. No GPU moves."""
    order(
        at,
        "AdoptPartition",
        ours.AdoptRequest(
            domain=domain, partition_name=name, logical_partition_id=logical_partition, reason=reason
        ),
    )


@partition.command(name="release")
def partition_release(
    *,
    domain: Domain,
    name: Annotated[str, Parameter(help="Name of the partition.")],
    reason: Reason,
    at: At = HERE,
) -> None:
    """Let a partition that was found be taken apart."""
    request = ours.ReleaseRequest(domain=domain, partition_name=name, reason=reason)
    order(at, "ReleasePartition", request)


def _only(ids: Sequence[Any], wanted: str | None) -> list[Any]:
    found = [one for one in ids if wanted in (None, one.value)]
    if wanted is not None and not found:
        raise Refused(f"there is nothing with id {wanted}", nearest_fix="leave it out to see all")
    return found
