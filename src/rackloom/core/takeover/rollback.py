"""Obstacles to undoing a plan: everything that was built on imported records since.

A rollback removes only objects that the import created. Before anything is removed, `rollback_obstacles`
names the records and partitions that depend on them and that the import did not create. An imported instance
that its tenant has since joined to another logical partition is such an obstacle: with its record, the GPUs
would leave the memory that they share. It also refuses when an adopted partition has other members than at
its adoption, because then the site has changed it.
"""

from collections.abc import Collection

from rackloom.core.takeover.records import (
    AdoptPartition,
    CreateInstance,
    CreateLogicalPartition,
    CreateVpc,
    PauseDomain,
    RecordedStep,
    SettleDomain,
    SiteInstance,
    SiteReading,
    TakeoverPlan,
    subject_of_step,
)


def imported_steps(plan: TakeoverPlan, site: SiteReading) -> list[RecordedStep]:
    """The steps of the plan that are done and were not undone."""
    return [
        step
        for step in plan.steps
        if not isinstance(step, PauseDomain | SettleDomain) and subject_of_step(step) in site.imported
    ]


def rollback_obstacles(plan: TakeoverPlan, site: SiteReading) -> list[str]:
    """The reasons why the plan cannot be undone now. Empty if it can."""
    done = imported_steps(plan, site)
    instances = {step.id: step for step in done if isinstance(step, CreateInstance)}
    others = [instance for instance in site.instances if instance.id not in instances]
    vpcs = {step.id: step.name for step in done if isinstance(step, CreateVpc)}
    partitions = {step.id: step.name for step in done if isinstance(step, CreateLogicalPartition)}
    adopted = {(step.domain, step.name): step for step in done if isinstance(step, AdoptPartition)}
    obstacles = [
        f"instance {instance.name} of {instance.org} is in the imported VPC {vpcs[instance.vpc]}"
        for instance in others
        if instance.vpc in vpcs
    ]
    obstacles += [
        f"instance {instance.name} of {instance.org} uses the imported logical partition {partitions[used]}"
        for instance in others
        for used in sorted(set(instance.interfaces.values()) & partitions.keys())
    ]
    obstacles += [
        f"the site has made partition {partition.name} in domain {partition.domain} for the imported"
        f" logical partition {partitions[partition.logical_partition]}"
        for partition in site.partitions
        if partition.logical_partition in partitions and (partition.domain, partition.name) not in adopted
    ]
    obstacles += [
        f"the imported instance {instance.name} of {instance.org} has joined logical partition {joined}"
        for instance in site.instances
        if instance.id in instances
        for joined in _joined_since(instances[instance.id], instance, partitions, site)
    ]
    listed = {(partition.domain, partition.name): partition for partition in site.partitions}
    for place, step in adopted.items():
        if place[0] in site.unreadable:
            obstacles.append(f"domain {place[0]} cannot be read, so partition {place[1]} cannot be compared")
        elif place not in listed or set(listed[place].guids) != set(step.guids):
            obstacles.append(f"partition {place[1]} has other GPUs than when it was adopted")
    return obstacles


def _joined_since(
    step: CreateInstance, instance: SiteInstance, imported: Collection[str], site: SiteReading
) -> list[str]:
    """Names of logical partitions that the import did not make and the instance did not have then."""
    planned = {interface.logical_partition for interface in step.interfaces}
    joined = set(instance.interfaces.values()) - planned - set(imported)
    names = {record.id: record.name for record in site.logical_partitions}
    return sorted(names.get(used, used) for used in joined)
