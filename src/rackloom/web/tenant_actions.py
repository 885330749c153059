"""The actions of a tenant on the map: carve a partition, order a batch of machines, release instances.

Each action is planned first and carried out afterwards, both by the operations of REST with the tenant's own
token. So every rule, quota and permission is that of REST, and no rule is repeated here. `planned` only
reads: creations as dry runs, releases by looking the instances up. `carried_out` carries out a plan:

- carve: a logical partition, and a VPC of the same name whose instances join it. If the VPC is refused, the
  partition is deleted again.
- batch: instances within one NVLink domain, all or none. The request names the plan, and the service refuses
  it if the machines, domains, interfaces or warnings would differ now.
- release: instances end one after the other, each by its id.

A plan has an id, a digest of its effects. Before a plan is carried out, it is made again and its id compared.
Steps have the words and effects that the steps of findings have (`repair_steps`).
"""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import StrEnum
from hashlib import sha256
from shlex import quote

import msgspec

from rackloom.client import AsyncClient, models, operations
from rackloom.client.call import PagedCall
from rackloom.client.errors import RequestRefused
from rackloom.core.diagnosis.repair_steps import RepairStep, repair_step
from rackloom.errors import Misuse, Refused
from rackloom.web.forms import Fields
from rackloom.web.tenant_objects import objects_of, status_text

MOST_RELEASED = 64
"""Instances that one form may release."""
_ID = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")


class Action(StrEnum):
    """The kinds of action of a tenant on the map."""

    CARVE = "carve"
    BATCH = "batch"
    RELEASE = "release"


FIELDS: dict[Action, frozenset[str]] = {
    Action.CARVE: frozenset({"name", "site"}),
    Action.BATCH: frozenset({"name", "vpc", "type", "count"}),
    Action.RELEASE: frozenset({"instance"}),
}
"""The fields of each action. Each is required, and only `instance` may appear more than once."""


class ActionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The effects that an action would have. Nothing was changed."""

    action: Action
    fields: Fields
    """The fields of the request."""
    id: str
    summary: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    steps: tuple[RepairStep, ...]
    note: str = ""
    """A note for readers of the rows."""
    reason: str = ""
    """The reason for the choice of machines."""
    warnings: tuple[str, ...] = ()


# The request.


class Asked(msgspec.Struct, frozen=True):
    """The fields of one action."""

    action: Action
    fields: Fields

    def value(self, name: str) -> str:
        """The value of a field that comes once."""
        return next(value for field, value in self.fields if field == name)

    @property
    def instances(self) -> tuple[str, ...]:
        """The ids of the instances that are named, each once."""
        return tuple(dict.fromkeys(value for field, value in self.fields if field == "instance"))


def asked_for(action: Action, fields: Fields) -> Asked:
    """The fields of an action. Raises Misuse if a field is unknown, missing or not valid."""
    allowed = FIELDS[action]
    names = [name for name, _ in fields]
    if unknown := sorted(set(names) - allowed):
        raise Misuse(f"The form has fields that this action does not know: {_shortened(unknown)}")
    if action is Action.RELEASE:
        if not names:
            raise Misuse("No instance is chosen")
        if not all(_ID.fullmatch(value) for _, value in fields):
            raise Misuse("The form names an instance by what is no id")
        if len(set(fields)) > MOST_RELEASED:
            raise Misuse(f"More than {MOST_RELEASED} instances are chosen: release them in parts")
    elif len(names) != len(set(names)):
        raise Misuse("The form has a field twice")
    elif missing := sorted(name for name in allowed if not dict(fields).get(name)):
        raise Misuse(f"Fill in: {', '.join(missing)}")
    return Asked(action, fields)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(name[:40] for name in names[:3])


# Plans.


async def planned(client: AsyncClient, asked: Asked) -> ActionPlan:
    """The plan of an action now. Raises the errors of the client, and Misuse."""
    match asked.action:
        case Action.CARVE:
            return await _planned_carve(client, asked)
        case Action.BATCH:
            return await _planned_batch(client, asked)
        case Action.RELEASE:
            return await _planned_release(client, asked)


async def _planned_carve(client: AsyncClient, asked: Asked) -> ActionPlan:
    name, site = asked.value("name"), asked.value("site")
    await client.call(operations.create_nvlink_logical_partition_dry_run(_partition(asked)))
    await client.call(operations.create_vpc_dry_run(models.VpcCreate(name=name, site_id=site)))
    word = quote(name)
    return ActionPlan(
        action=asked.action,
        fields=asked.fields,
        id=_digest(name, site),
        summary=f"A logical partition and a VPC, both called {name}",
        headers=("Made", "Name", "For"),
        rows=(
            ("logical partition", name, "GPUs that share memory: those of the instances of its VPC"),
            ("VPC", name, "instances that join the partition"),
        ),
        steps=(
            repair_step(f"rackloom partition create {word}"),
            repair_step(f"rackloom vpc create {word} --partition {word}"),
        ),
    )


async def _planned_batch(client: AsyncClient, asked: Asked) -> ActionPlan:
    own = await objects_of(client)
    order = _order(asked)
    if isinstance(order, models.InstanceCreate):
        plan = await client.call(operations.create_instance_dry_run(order))
    else:
        plan = await client.call(operations.batch_create_instance_dry_run(order))
    machines = await _machine_names(client, [instance.machine_id for instance in plan.instances])
    name, count = asked.value("name"), len(plan.instances)
    vpc, type_ = own.vpc_name(order.vpc_id), own.type_name(asked.value("type"))
    domains = ", ".join(sorted(domain or "not yet observed" for domain in plan.nv_link_domain_ids))
    return ActionPlan(
        action=asked.action,
        fields=asked.fields,
        id=plan.plan_id,
        summary=f"{_counted(count, 'machine')} of type {type_} for VPC {vpc}, in NVLink domain {domains}",
        headers=("Instance", "Machine", "GPUs that join"),
        rows=tuple(
            (
                shown,
                machines.get(instance.machine_id, instance.machine_id),
                str(len(instance.nv_link_interfaces)),
            )
            for shown, instance in zip(_names(name, count), plan.instances, strict=True)
        ),
        steps=(
            repair_step(
                f"rackloom instance create {quote(name)} --vpc {quote(vpc)} --type {quote(type_)}"
                f" --count {count}"
            ),
        ),
        note="" if count == 1 else "What stands for … in the names is drawn when they are made.",
        reason=plan.reason,
        warnings=tuple(warning.message for warning in plan.warnings),
    )


async def _planned_release(client: AsyncClient, asked: Asked) -> ActionPlan:
    # Each is looked up by its id, and REST refuses one that is not the tenant's.
    found = [await client.call(operations.get_instance(id_)) for id_ in asked.instances]
    if ended := [instance.name for instance in found if instance.status == "Terminating"]:
        raise Refused(f"Already being released: {', '.join(ended)}", nearest_fix="leave it out")
    machines = await _machine_names(client, [instance.machine_id for instance in found])
    rows = tuple(
        (
            instance.name,
            status_text(instance),
            machines.get(instance.machine_id, instance.machine_id),
            str(len(instance.nv_link_interfaces)),
        )
        for instance in found
    )
    joined = [
        (instance.id, instance.name, instance.machine_id, sorted(_joined(instance))) for instance in found
    ]
    ids = " ".join(quote(instance.id) for instance in found)
    return ActionPlan(
        action=asked.action,
        fields=asked.fields,
        id=_digest(*joined),
        summary=f"{_counted(len(found), 'instance')} to be released",
        headers=("Instance", "Status", "Machine", "GPUs that leave"),
        rows=rows,
        steps=(repair_step(f"rackloom instance delete {ids}"),),
    )


def _joined(instance: models.Instance) -> Iterator[tuple[str, int]]:
    for interface in instance.nv_link_interfaces:
        yield interface.nv_link_logical_partition_id, interface.device_instance


def _partition(asked: Asked) -> models.LogicalPartitionCreate:
    return models.LogicalPartitionCreate(name=asked.value("name"), site_id=asked.value("site"))


def _order(asked: Asked) -> models.InstanceCreate | models.InstanceBatchCreate:
    """The request of an order: a batch for several instances, a single request for one."""
    name, vpc, type_, count = (asked.value(field) for field in ("name", "vpc", "type", "count"))
    if not (count.isascii() and count.isdigit() and 0 < len(count) < 6):
        raise Misuse("The number of machines must be a whole number")
    if int(count) == 1:
        return models.InstanceCreate(name=name, vpc_id=vpc, instance_type_id=type_)
    return models.InstanceBatchCreate(
        name_prefix=name, count=int(count), vpc_id=vpc, instance_type_id=type_, topology_optimized=True
    )


def _names(name: str, count: int) -> Iterator[str]:
    """The names of new instances. In a batch, a part of the names is drawn when it is made."""
    if count == 1:
        yield name
    else:
        yield from (f"{name}-…-{number}" for number in range(1, count + 1))


async def _machine_names(client: AsyncClient, ids: Sequence[str]) -> dict[str, str]:
    """The names of machines by id, of those that the tenant may see."""
    listed: PagedCall[models.Machine] = operations.get_all_machine(id=list(dict.fromkeys(ids)))
    try:
        return {machine.id: machine.controller_machine_id async for machine in client.items(listed)}
    except RequestRefused:
        return {}


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _digest(*parts: object) -> str:
    return sha256(msgspec.json.encode(parts)).hexdigest()


# Carrying out.


async def carried_out(client: AsyncClient, plan: ActionPlan) -> AsyncIterator[str]:
    """Carry out a plan and report each step. Raises the errors of the client if it ends early."""
    asked = Asked(plan.action, plan.fields)
    match plan.action:
        case Action.CARVE:
            steps = _carve(client, asked)
        case Action.BATCH:
            steps = _make_batch(client, asked, plan.id)
        case Action.RELEASE:
            steps = _release(client, asked, [name for name, *_ in plan.rows])
    async for done in steps:
        yield done


async def _carve(client: AsyncClient, asked: Asked) -> AsyncIterator[str]:
    name = asked.value("name")
    partition = await client.call(operations.create_nvlink_logical_partition(_partition(asked)))
    body = models.VpcCreate(name=name, site_id=partition.site_id, nv_link_logical_partition_id=partition.id)
    try:
        await client.call(operations.create_vpc(body))
    except RequestRefused:
        await client.call(operations.delete_nvlink_logical_partition(partition.id))
        raise
    yield f"Logical partition {name} and VPC {name} are made. No GPU is in them until you order machines."


async def _make_batch(client: AsyncClient, asked: Asked, plan_id: str) -> AsyncIterator[str]:
    order = _order(asked)
    if isinstance(order, models.InstanceCreate):
        made = [await client.call(operations.create_instance(order, if_plan=plan_id))]
    else:
        made = await client.call(operations.batch_create_instance(order, if_plan=plan_id))
    names = ", ".join(instance.name for instance in made)
    yield f"{_counted(len(made), 'instance')} ordered: {names}. They are Ready when their GPUs have joined."


async def _release(client: AsyncClient, asked: Asked, names: Sequence[str]) -> AsyncIterator[str]:
    for id_, name in zip(asked.instances, names, strict=True):
        await client.call(operations.delete_instance(id_))
        yield f"Instance {name} is being released."
