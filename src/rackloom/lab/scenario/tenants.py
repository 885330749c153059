"""Steps of tenants: their REST requests."""

from rackloom.lab.scenario.model import action
from rackloom.lab.scenario.parameters import (
    Group,
    Instance,
    LogicalPartition,
    LogicalPartitionByGpu,
    NewGroup,
    NewLogicalPartition,
    NewVpc,
    TrayCount,
    Vpc,
)
from rackloom.lab.scenario.rest_client import FIRST_FAILURE, NOT_FOUND, Json, MadeInstance, require_below
from rackloom.lab.scenario.stage import Stage


@action(breaks=False)
async def make_logical_partition(stage: Stage, *, name: NewLogicalPartition, tenant: str = "red") -> str:
    """A tenant makes a logical partition."""
    rest = stage.rest
    body = {"name": name, "siteId": await rest.any_id(tenant, "site")}
    made = rest.partitions[name] = await rest.create(tenant, "nvlink-logical-partition", body)
    return f"logical partition {made.id}"


@action(breaks=False)
async def make_vpc(
    stage: Stage, *, name: NewVpc, logical_partition: LogicalPartition = "", tenant: str = "red"
) -> str:
    """A tenant makes a VPC. Its instances join `logical-partition`, or else those of `set-interfaces`."""
    rest = stage.rest
    body = {
        "name": name,
        "siteId": await rest.any_id(tenant, "site"),
        "nvLinkLogicalPartitionId": rest.partitions[logical_partition].id if logical_partition else None,
    }
    made = rest.vpcs[name] = await rest.create(tenant, "vpc", body)
    return f"VPC {made.id}"


@action(breaks=False)
async def make_instances(
    stage: Stage, *, group: NewGroup, vpc: Vpc, count: TrayCount = 1, tenant: str = "red"
) -> str:
    """A tenant requests a batch of whole trays, all or none. `group` names them from then on."""
    rest = stage.rest
    body: Json = {
        "vpcId": rest.vpcs[vpc].id,
        "instanceTypeId": await rest.any_id(tenant, "instance/type"),
    }
    path = "instance"
    if count == 1:
        body["name"] = f"{group}-1"
    else:
        path = "instance/batch"
        body |= {"namePrefix": group, "count": count, "topologyOptimized": True}
    shown = await rest.create_all(tenant, path, "instance", body, lambda name: name.startswith(f"{group}-"))
    shown.sort(key=lambda instance: int(instance["name"].rpartition("-")[2]))
    made = tuple(MadeInstance(instance["id"], tenant, instance["machineId"]) for instance in shown)
    rest.groups[group] = made
    rest.holder |= {instance.machine: tenant for instance in made}
    return f"{len(made)} instances acknowledged, on {', '.join(instance.machine for instance in made)}"


@action(breaks=False)
async def set_interfaces(
    stage: Stage, *, instance: Instance, logical_partitions: LogicalPartitionByGpu
) -> str:
    """A tenant puts each GPU of one instance into a logical partition, or into none if the name is empty."""
    made = stage.rest.instance(instance)
    interfaces = [
        {"deviceInstance": device, "nvLinkLogicalPartitionId": stage.rest.partitions[name].id}
        for device, name in enumerate(logical_partitions)
        if name
    ]
    await stage.rest.must(made.tenant, "PATCH", f"instance/{made.id}", {"nvLinkInterfaces": interfaces})
    return f"{instance} is to have {', '.join(name or 'none' for name in logical_partitions)}"


@action(breaks=False)
async def release_instances(stage: Stage, *, group: Group) -> str:
    """A tenant gives a group back."""
    members = stage.rest.groups[group]
    for member in members:
        path = f"instance/{member.id}"
        answer = await stage.rest.ask(member.tenant, "DELETE", path)
        if answer.status != NOT_FOUND:
            require_below(answer, FIRST_FAILURE, "DELETE", path)
    stage.rest.released.add(group)
    return f"{len(members)} instances are to go"
