"""`rackloom admin logical-partition|partition|plan|apply|domain|tray`: partitions and maintenance.

Tenants create logical partitions. Physical partitions are the actual ones of the switch controllers. A
discovered partition has no owner until it is adopted or released. `plan` prints the steps for a domain and
changes nothing. `apply` carries out a saved plan, and refuses it if fabric or intent have changed since. A
domain can be paused. A tray can be cordoned (nothing new is placed on it) or drained (its GPUs leave all
partitions).
"""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin import (
    HERE,
    Connection,
    Domain,
    MachineId,
    Place,
    Reason,
    admin_command,
    as_dict,
    call,
    connect,
    emit_messages,
    id_pages,
    order_tray,
    report,
    send_order,
    utc_time,
)
from rackloom.cli.common import FILE, columns, emit, read_text
from rackloom.errors import Misuse, Refused
from rackloom.runtime.foreign_text import decode_json

# Partitions.


logical = App(name="logical-partition", help="Logical partitions of tenants.")
partition = App(name="partition", help="Physical partitions, as the switch controllers show them.")


@logical.command(name="show")
@admin_command
def logical_show(
    partition_id: Annotated[str | None, Parameter(help="Only this one.")] = None,
    *,
    name: Annotated[str | None, Parameter(name=["--name", "-n"], help="Only those of this name.")] = None,
    at: Place = HERE,
) -> None:
    """Show logical partitions."""
    wanted = pb.NVLinkLogicalPartitionSearchFilter(name=name)
    found = _find_partitions(at, "NVLinkLogicalPartition", wanted, partition_id)
    emit_messages(found, at.output, ("ID", "NAME", "TENANT", "STATUS"), _logical_row)


@logical.command(name="create")
@admin_command
def logical_create(
    *,
    name: Annotated[str, Parameter(name=["--name", "-n"], help="Its name, unique for the tenant.")],
    tenant: Annotated[str, Parameter(name=["--tenant", "-t"], help="Organisation of the tenant.")],
    at: Place = HERE,
) -> None:
    """Make a logical partition for a tenant, and print its id."""
    config = pb.NVLinkLogicalPartitionConfig(metadata=pb.Metadata(name=name), tenant_organization_id=tenant)
    request = pb.NVLinkLogicalPartitionCreationRequest(config=config)
    made = call(at, "CreateNVLinkLogicalPartition", request)
    emit(as_dict(made), at.output, lambda: str(made.id.value))


@logical.command(name="delete")
@admin_command
def logical_delete(partition_id: Annotated[str, Parameter(help="Its id.")], *, at: Place = HERE) -> None:
    """Begin to delete a logical partition that has no references."""
    request = pb.NVLinkLogicalPartitionDeletionRequest()
    request.id.value = partition_id
    call(at, "DeleteNVLinkLogicalPartition", request)
    report(f"deleting {partition_id}", at.output, partition=partition_id)


@partition.command(name="show")
@admin_command
def partition_show(
    partition_id: Annotated[str | None, Parameter(help="Only this one.")] = None,
    *,
    tenant: Annotated[
        str | None, Parameter(name=["--tenant", "-t"], help="Only those of this organisation.")
    ] = None,
    name: Annotated[str | None, Parameter(name=["--name", "-n"], help="Only those of this name.")] = None,
    at: Place = HERE,
) -> None:
    """Show physical partitions. Those without a logical partition were discovered and have no owner."""
    wanted = pb.NVLinkPartitionSearchFilter(tenant_organization_id=tenant, name=name)
    found = _find_partitions(at, "NVLinkPartition", wanted, partition_id)
    heads = ("ID", "NAME", "LOGICAL PARTITION ID", "NMX-C PARTITION ID", "NVLINK DOMAIN UUID")
    emit_messages(found, at.output, heads, _partition_row, tenant=tenant)


@partition.command(name="adopt")
@admin_command
def partition_adopt(
    *,
    domain: Domain,
    name: Annotated[str, Parameter(help="Name of the partition.")],
    reason: Reason,
    logical_partition: Annotated[
        str | None,
        Parameter(help="Id of the logical partition, which must want all the GPUs that are in it."),
    ] = None,
    tenant: Annotated[
        str | None,
        Parameter(
            name=["--tenant", "-t"],
            help="In place of an id: the organisation of the owner. What does not exist of the owner is"
            " created, with an instance on each machine that the partition holds GPUs of.",
        ),
    ] = None,
    vpc: Annotated[str, Parameter(help="With --tenant: name of the VPC of the instances.")] = "adopted",
    logical_partition_name: Annotated[
        str | None, Parameter(help="With --tenant: name of the logical partition; that of the partition.")
    ] = None,
    at: Place = HERE,
) -> None:
    """Assign a discovered partition to a logical partition. No GPU moves."""
    if (logical_partition is None) == (tenant is None):
        raise Misuse("a partition is adopted for one of --logical-partition and --tenant")
    request = ours.AdoptRequest(
        domain=domain, partition_name=name, logical_partition_id=logical_partition or "", reason=reason
    )
    if tenant is not None:
        owner = {"vpc": vpc, "logical_partition": logical_partition_name or name}
        request.owner.CopyFrom(ours.PartitionOwner(tenant_organization_id=tenant, **owner))
    send_order(at, "AdoptPartition", request)


@partition.command(name="release")
@admin_command
def partition_release(
    *,
    domain: Domain,
    name: Annotated[str, Parameter(help="Name of the partition.")],
    reason: Reason,
    at: Place = HERE,
) -> None:
    """Allow a discovered partition to be taken apart."""
    request = ours.ReleaseRequest(domain=domain, partition_name=name, reason=reason)
    send_order(at, "ReleasePartition", request)


def _find_partitions(at: Connection, kind: str, wanted: Any, only: str | None) -> list[Any]:
    """The partitions of a kind that match a search filter, or only the one with the id `only` of them."""
    with connect(at) as call_rpc:
        ids = [id_ for id_ in call_rpc(f"Find{kind}Ids", wanted).partition_ids if only in (None, id_.value)]
        if only is not None and not ids:
            raise Refused(f"there is nothing with id {only}", nearest_fix="leave it out to see all")
        request = getattr(pb, f"{kind}sByIdsRequest")
        pages = [call_rpc(f"Find{kind}sByIds", request(partition_ids=page)) for page in id_pages(ids)]
    return [found for page in pages for found in page.partitions]


def _logical_row(found: Any) -> tuple[str, ...]:
    state = pb.TenantState.Name(found.status.state)
    return found.id.value, found.config.metadata.name, found.config.tenant_organization_id, state


def _partition_row(found: Any) -> tuple[str, ...]:
    logical = found.logical_partition_id.value or "-"
    return found.id.value, found.name, logical, found.nmx_m_id, found.domain_uuid.value


# Plans, domains and trays.


domain = App(name="domain", help="NVLink domains.")
tray = App(name="tray", help="Trays under maintenance.")


@admin_command
def plan(
    domain: Domain,
    *,
    to: Annotated[
        Path | None, Parameter(help="Also write the plan into this file, for `rackloom admin apply`.")
    ] = None,
    at: Place = HERE,
) -> None:
    """Show the steps that are due in a domain. Nothing is changed."""
    text = call(at, "MakePlan", ours.PlanRequest(domain=domain)).plan
    if to is not None:
        try:
            to.write_text(text + "\n")
        except OSError as error:
            raise Refused(f"cannot write {to}: {error.strerror}") from error
    emit(decode_json(text, "the plan"), at.output, lambda: _plan_table(decode_json(text, "the plan")))


@admin_command
def apply(
    file: Annotated[Path, FILE, Parameter(help="A file of `rackloom admin plan --to`.")], *, at: Place = HERE
) -> int:
    """Carry out a plan. It is refused if fabric or intent have changed since the plan."""
    text = read_text(file, "write one with: rackloom admin plan --to FILE")
    outcomes = call(at, "ApplyPlan", ours.ApplyRequest(plan=text)).outcomes
    heads = ("OPERATION", "PARTITION", "RESULT", "MESSAGE")
    row = attrgetter("kind", "partition_name", "state", "message")
    emit_messages(outcomes, at.output, heads, row)
    return 0 if all(outcome.state == "done" for outcome in outcomes) else 1


@domain.command(name="show")
@admin_command
def domain_show(
    domain: Annotated[str | None, Parameter(help="Only this one.")] = None, *, at: Place = HERE
) -> None:
    """Show the state of domains, the blocked GPUs, and the trays that get no instance."""
    found = call(at, "ShowDomains", ours.DomainsRequest(domain=domain or "")).domains
    emit([as_dict(row) for row in found], at.output, lambda: _domains_table(found))


@domain.command(name="pause")
@admin_command
def domain_pause(domain: Domain, *, reason: Reason, at: Place = HERE) -> None:
    """Change nothing in a domain until it is resumed. Observation continues."""
    send_order(at, "PauseDomain", ours.DomainRequest(domain=domain, reason=reason))


@domain.command(name="resume")
@admin_command
def domain_resume(domain: Domain, *, reason: Reason = "", at: Place = HERE) -> None:
    """Resume work on a domain."""
    send_order(at, "ResumeDomain", ours.DomainRequest(domain=domain, reason=reason))


@tray.command(name="cordon")
@admin_command
def tray_cordon(machine_id: MachineId, *, reason: Reason, at: Place = HERE) -> None:
    """Place nothing new on a tray. Running instances stay."""
    order_tray(at, "CordonTray", machine_id, reason)


@tray.command(name="uncordon")
@admin_command
def tray_uncordon(machine_id: MachineId, *, reason: Reason = "", at: Place = HERE) -> None:
    """Use a tray again, and join the GPUs of its instance again if it was drained."""
    order_tray(at, "UncordonTray", machine_id, reason)


@tray.command(name="drain")
@admin_command
def tray_drain(machine_id: MachineId, *, reason: Reason, at: Place = HERE) -> None:
    """Take the GPUs of a tray out of all partitions. Its instance stays, but is not Ready."""
    order_tray(at, "DrainTray", machine_id, reason)


def _plan_table(plan: dict[str, Any]) -> str:
    observed = plan["observation"]
    lines = [f"domain {observed['domain']}, as observed at {utc_time(observed['observed_at'])}"]
    rows = [
        (operation["type"], operation["name"], _guid_list(operation.get("guids", ())))
        for operation in plan["operations"]
    ]
    lines.append(columns(("OPERATION", "PARTITION", "GPUS"), rows) if rows else "nothing to do")
    lines += [f"blocked: GPUs {_guid_list(entry['guids'])}: {entry['reason']}" for entry in plan["blocked"]]
    return "\n".join(lines)


def _domains_table(found: Sequence[Any]) -> str:
    rows = [
        (
            row.domain,
            utc_time(row.observed_at.seconds) if row.HasField("observed_at") else row.doubt,
            row.pause_reason if row.HasField("pause_reason") else "-",
            str(len(row.blocked)),
        )
        for row in found
    ]
    table = columns(("DOMAIN", "OBSERVED", "PAUSED", "BLOCKED"), rows)
    lines = [table, *(_blocked_line(gpu) for row in found for gpu in row.blocked)]
    lines += [_foreign_line(tray) for row in found for tray in row.foreign_trays]
    lines += [_unlisted_line(tray) for row in found for tray in row.unlisted_trays]
    return "\n".join(lines)


def _blocked_line(gpu: Any) -> str:
    fix = f"; fix: {gpu.fix}" if gpu.HasField("fix") else ""
    return f"blocked: GPU {gpu.guid:#x} since {utc_time(gpu.since.seconds)}: {gpu.reason}{fix}"


def _foreign_line(tray: Any) -> str:
    partition = f"partition {tray.partition_name!r} ({tray.partition_id})"
    return f"gets no instance: {tray.machine_id} is in {partition}, which the site did not make"


def _unlisted_line(tray: Any) -> str:
    gpus = " and ".join(f"gpu-{device}" for device in tray.device_instances)
    return f"gets no instance: {tray.machine_id}: its switch controller does not list {gpus}"


def _guid_list(guids: Sequence[int]) -> str:
    return " ".join(f"{guid:#x}" for guid in guids) or "-"
