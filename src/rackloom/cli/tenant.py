"""The tenant's commands: `rackloom partition|vpc|instance|machine|type|allocation`.

They call the REST service through `rackloom.client`, as a program of the tenant would. `tenant_objects` has
the code for all kinds. This module has the kinds, and the commands that create and delete objects.

A logical partition gives its name to the NVLink partitions of one tenant. A VPC gives the name to its
instances, and instances are machines. So they are created in that order, and deleted in the opposite one.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from rackloom.cli.common import Format, Output, columns, emit, with_common_flags
from rackloom.cli.tenant_objects import (
    Names,
    ObjectKind,
    ObjectOutput,
    Row,
    SiteAccess,
    age,
    show,
    status_of,
    wait,
    wait_until_gone,
    watch,
)
from rackloom.client import models, operations
from rackloom.client.call import Call
from rackloom.errors import Misuse, Refused

if TYPE_CHECKING:
    from rackloom.client import Client

# The kinds.


def _partition_row(found: models.NVLinkLogicalPartition, _: Names) -> Row:
    stats = found.nv_link_logical_partition_stats
    return found.name, status_of(found), "-" if stats is None else stats.total_gpus, age(found.created)


def _instance_row(found: models.Instance, names: Names) -> Row:
    domains = {interface.nv_link_domain_id for interface in found.nv_link_interfaces} - {None}
    return (
        found.name,
        status_of(found),
        names.of(VPC, found.vpc_id),
        names.of(MACHINE, found.machine_id),
        ",".join(sorted(map(str, domains))) or "-",
        age(found.created),
    )


PARTITION: ObjectKind[models.NVLinkLogicalPartition] = ObjectKind(
    noun="partition",
    plural="partitions",
    headers=("NAME", "STATUS", "GPUS", "AGE"),
    listed=lambda: operations.get_all_nvlink_logical_partition(include_stats=True),
    read=lambda key: operations.get_nvlink_logical_partition(key, include_stats=True),
    name=lambda found: found.name,
    row=_partition_row,
    delete=operations.delete_nvlink_logical_partition,
)
VPC: ObjectKind[models.Vpc] = ObjectKind(
    noun="vpc",
    plural="VPCs",
    headers=("NAME", "STATUS", "PARTITION", "AGE"),
    listed=operations.get_all_vpc,
    read=operations.get_vpc,
    name=lambda found: found.name,
    row=lambda found, names: (
        found.name,
        status_of(found),
        names.of(PARTITION, found.nv_link_logical_partition_id),
        age(found.created),
    ),
    delete=operations.delete_vpc,
)
INSTANCE: ObjectKind[models.Instance] = ObjectKind(
    noun="instance",
    plural="instances",
    headers=("NAME", "STATUS", "VPC", "MACHINE", "NVLINK DOMAIN", "AGE"),
    listed=operations.get_all_instance,
    read=operations.get_instance,
    name=lambda found: found.name,
    row=_instance_row,
    delete=operations.delete_instance,
)
MACHINE: ObjectKind[models.Machine] = ObjectKind(
    noun="machine",
    plural="machines",
    headers=("NAME", "STATUS", "TYPE", "INSTANCE"),
    listed=operations.get_all_machine,
    read=operations.get_machine,
    name=lambda found: found.controller_machine_id,
    row=lambda found, names: (
        found.controller_machine_id,
        status_of(found),
        names.of(TYPE, found.instance_type_id),
        found.instance_id,
    ),
)
TYPE: ObjectKind[models.InstanceType] = ObjectKind(
    noun="type",
    plural="instance types",
    headers=("NAME", "STATUS", "AGE"),
    listed=operations.get_all_instance_type,
    read=operations.get_instance_type,
    name=lambda found: found.name,
    row=lambda found, _: (found.name, status_of(found), age(found.created)),
)
ALLOCATION: ObjectKind[models.Allocation] = ObjectKind(
    noun="allocation",
    plural="allocations",
    headers=("NAME", "STATUS", "MACHINES", "AGE"),
    listed=operations.get_all_allocation,
    read=operations.get_allocation,
    name=lambda found: found.name,
    row=lambda found, names: (
        found.name,
        status_of(found),
        ", ".join(
            f"{part.constraint_value} {names.of(TYPE, part.resource_type_id)}"
            for part in found.allocation_constraints
        ),
        age(found.created),
    ),
)
SITE: ObjectKind[models.Site] = ObjectKind(
    noun="site",
    plural="sites",
    headers=("NAME", "STATUS"),
    listed=operations.get_all_site,
    read=operations.get_site,
    name=lambda found: found.name,
    row=lambda found, _: (found.name, status_of(found)),
)


# Commands of every kind.


EVERYBODY = SiteAccess()
WAIT_SECONDS = 900.0
"""The timeout of commands with --wait. Machines may have to start."""
Watch = Annotated[
    bool, Parameter(name=["--watch", "-w"], negative="", help="Go on, and print what changes, until Ctrl-C.")
]
Wait = Annotated[
    bool, Parameter(name="--wait", negative="", help="Return when it is done, with the progress.")
]


def _named(kind: ObjectKind[Any], text: str, name: str | None = None) -> Parameter:
    """A name or id of an object of this kind, with shell completion."""
    return Parameter(name=name, help=text, completer=kind.complete)


def _app(kind: ObjectKind[Any], what: str) -> App:
    """The commands `list`, `get` and, if tenants delete such objects, `delete`."""
    # Plain text: their help texts are sentences, and Markdown takes long to load.
    made = App(name=kind.noun, help=what, help_format="plaintext")

    @with_common_flags
    def every(
        *, output: ObjectOutput = "table", watching: Watch = False, site: SiteAccess = EVERYBODY
    ) -> None:
        if watching and output != "table":
            raise Misuse(f"--watch prints lines of a table: it has no --output {output}")
        with site.client() as client:
            if watching:
                watch(client, kind)
            # Report an empty list on standard error.
            objects = list(client.items(kind.listed()))
            if objects or output in ("json", "yaml"):
                show(client, kind, objects, output)
            if not objects:
                print(f"organisation {site.org} has no {kind.plural}", file=sys.stderr)

    @with_common_flags
    def get(
        name: Annotated[str, _named(kind, "Its name or id.")],
        /,
        *,
        output: ObjectOutput = "table",
        site: SiteAccess = EVERYBODY,
    ) -> None:
        with site.client() as client:
            show(client, kind, [kind.find(client, name)], output, single=True)

    @with_common_flags
    def delete(
        name: Annotated[str, _named(kind, "Its name or id.")],
        /,
        *names: Annotated[str, _named(kind, "More of them.")],
        waiting: Wait = False,
        output: Output = "table",
        site: SiteAccess = EVERYBODY,
    ) -> None:
        with site.client() as client:
            # Find all of them first, so that a misspelt name deletes nothing.
            _delete(client, kind, [kind.find(client, each) for each in (name, *names)], waiting, output)

    made.command(every, name="list", help=f"List the {kind.plural}.")
    made.command(get, name="get", help=f"Show one {kind.noun}.")
    if kind.delete is not None:
        made.command(delete, name="delete", help=f"Delete {kind.plural}.")
    return made


def _delete(client: "Client", kind: ObjectKind[Any], found: list[Any], waiting: bool, output: Format) -> None:
    assert kind.delete is not None  # noqa: S101 (the command exists only then)
    deleted: list[dict[str, str]] = []
    try:
        for each in found:
            client.call(kind.delete(each.id))
            deleted.append({"id": str(each.id), "name": kind.name(each)})
            if output == "table":
                print(f"{kind.noun} {kind.name(each)} is being deleted", flush=True)
    finally:
        # Also print the objects that were deleted before a failure.
        if output != "table":
            emit(deleted, output, str)
    if waiting:
        wait_until_gone(client, kind, [each.id for each in found], WAIT_SECONDS)


partition_app = _app(PARTITION, "Logical NVLink partitions: whose GPUs share memory.")
vpc_app = _app(VPC, "VPCs: the networks of instances, with the partition that their GPUs join.")
instance_app = _app(INSTANCE, "Instances: machines that you have.")
machine_app = _app(MACHINE, "Machines that you may see.")
type_app = _app(TYPE, "Instance types: kinds of machines to ask for.")
allocation_app = _app(ALLOCATION, "Allocations: how many machines you were given.")


# Making objects.


def _help(text: str, **more: Any) -> Parameter:
    return Parameter(help=text, **more)


NewName = Annotated[str, _help("Its name.")]


@partition_app.command(name="create")
@with_common_flags
def create_partition(
    name: NewName,
    /,
    *,
    place: Annotated[str | None, _named(SITE, "The site, where there are several.", "--site")] = None,
    output: Output = "table",
    site: SiteAccess = EVERYBODY,
) -> None:
    """Create a logical partition. It has no GPUs until an instance joins."""
    with site.client() as client:
        body = models.LogicalPartitionCreate(name=name, site_id=_only(client, SITE, place).id)
        made = client.call(operations.create_nvlink_logical_partition(body))
        emit(made, output, lambda: f"partition {made.name} created ({made.id})")
        site.advise(f"vpc create NAME --partition {made.id}")


@vpc_app.command(name="create")
@with_common_flags
def create_vpc(
    name: NewName,
    /,
    *,
    partition: Annotated[
        str | None, _named(PARTITION, "The logical partition that GPUs of its instances join; default: none.")
    ] = None,
    output: Output = "table",
    site: SiteAccess = EVERYBODY,
) -> None:
    """Create a VPC."""
    with site.client() as client:
        chosen = None if partition is None else PARTITION.find(client, partition)
        body = models.VpcCreate(
            name=name,
            site_id=_only(client, SITE, None).id if chosen is None else chosen.site_id,
            nv_link_logical_partition_id=None if chosen is None else chosen.id,
        )
        made = client.call(operations.create_vpc(body))
        emit(made, output, lambda: f"vpc {made.name} created ({made.id})")
        site.advise(f"instance create NAME --vpc {made.id} --count 2 --wait")


@instance_app.command(name="create")
@with_common_flags
def create_instances(
    name: Annotated[str, _help("Its name; of several, what their names begin with.")],
    /,
    *,
    vpc: Annotated[str, _named(VPC, "The VPC that they join.")],
    kind: Annotated[str | None, _named(TYPE, "The instance type, where there are several.", "--type")] = None,
    count: Annotated[int, _help("How many.", validator=Number(gte=1))] = 1,
    spread: Annotated[
        bool, _help("They may be in several NVLink domains, where their GPUs share no memory.", negative="")
    ] = False,
    dry_run: Annotated[bool, _help("Show where they would be, and change nothing.", negative="")] = False,
    waiting: Wait = False,
    output: Output = "table",
    site: SiteAccess = EVERYBODY,
) -> None:
    """Get the requested number of machines, or none."""
    with site.client() as client:
        vpc_id, type_id = VPC.find(client, vpc).id, _only(client, TYPE, kind).id
        order = _order(name, count, vpc_id, type_id, spread=spread)
        if dry_run:
            plan = client.call(_planned(order))
            emit(plan, output, lambda: _plan_table(plan, Names(client)))
            return
        made = _made(client, order)
        found = wait(client, INSTANCE, [each.id for each in made], "Ready", WAIT_SECONDS) if waiting else made
        show(client, INSTANCE, found, output)


Order = models.InstanceCreate | models.InstanceBatchCreate


def _order(name: str, count: int, vpc_id: str, type_id: str, *, spread: bool) -> Order:
    """The request body. The service takes several instances as a batch, and a single one without."""
    if count == 1:
        return models.InstanceCreate(name=name, vpc_id=vpc_id, instance_type_id=type_id)
    return models.InstanceBatchCreate(
        name_prefix=name,
        count=count,
        vpc_id=vpc_id,
        instance_type_id=type_id,
        topology_optimized=not spread,
    )


def _planned(order: Order) -> Call[models.InstancePlan]:
    if isinstance(order, models.InstanceCreate):
        return operations.create_instance_dry_run(order)
    return operations.batch_create_instance_dry_run(order)


def _made(client: "Client", order: Order) -> list[models.Instance]:
    if isinstance(order, models.InstanceCreate):
        return [client.call(operations.create_instance(order))]
    return client.call(operations.batch_create_instance(order))


def _plan_table(plan: models.InstancePlan, names: Names) -> str:
    rows = (
        (each.name, names.of(MACHINE, each.machine_id), each.nv_link_domain_id or "-")
        for each in plan.instances
    )
    warnings = [f"warning: {warning.message}" for warning in plan.warnings]
    return "\n".join((columns(("NAME", "MACHINE", "NVLINK DOMAIN"), rows), plan.reason, *warnings))


def _only(client: "Client", kind: ObjectKind[Any], wanted: str | None) -> Any:
    """The named object, or without a name, the only one that exists."""
    if wanted is not None:
        return kind.find(client, wanted)
    every = list(client.items(kind.listed()))
    if len(every) != 1:
        names = ", ".join(kind.name(each) for each in every)
        raise Refused(
            f"there are {len(every)} {kind.plural}" + (f": {names}" if names else ""),
            nearest_fix=f"name one with --{kind.noun}" if every else "ask the operator of the site",
        )
    return every[0]
