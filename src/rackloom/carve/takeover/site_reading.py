"""The local site as a takeover plan needs it: records, machines, and partitions that controllers show.

`read_site` is one read transaction. Domains without a current observation are named, because
nothing in them can be compared.
"""

from collections import defaultdict
from typing import Any

import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.partitions import found
from rackloom.carve.store import journal
from rackloom.carve.store.schema import (
    allocation,
    cordon,
    endpoint,
    instance,
    instance_type,
    logical_partition,
    machine,
    machine_gpu,
    nvlink_interface,
    site,
    tenant,
    vpc,
)
from rackloom.carve.store.values import Status
from rackloom.core.takeover.records import OwnedRecord, ShownPartition, SiteInstance, SiteMachine, SiteReading


def read_site(conn: sa.Connection, valid_from: float = 0.0) -> SiteReading:
    """Everything of our site that a plan depends on. Readings from before `valid_from` do not count."""
    row = conn.execute(sa.select(site.c.id, site.c.name)).one()
    domains = set(conn.execute(sa.select(endpoint.c.domain)).scalars()) - {None}
    known = latest.latest_of_domains(conn, domains, valid_from)
    return SiteReading(
        id=row.id,
        name=row.name,
        tenants={row.org: row.id for row in conn.execute(sa.select(tenant.c.org, tenant.c.id))},
        types={row.id: row.name for row in conn.execute(sa.select(instance_type.c.id, instance_type.c.name))},
        allocations=_owned_records(conn, allocation),
        logical_partitions=_owned_records(conn, logical_partition),
        vpcs=_owned_records(conn, vpc),
        instances=_instances(conn),
        machines=_machines(conn),
        partitions=tuple(map(_partition, found.partitions_of_domains(conn, domains, valid_from))),
        unreadable=tuple(sorted(domain for domain in domains if known[domain].observation is None)),
        imported=journal.imported_subjects(conn),
    )


def _owned_records(conn: sa.Connection, table: sa.Table) -> tuple[OwnedRecord, ...]:
    rows = sa.select(table.c.id, table.c.name, tenant.c.org).join(tenant, tenant.c.id == table.c.tenant_id)
    return tuple(
        OwnedRecord(id=row.id, org=row.org, name=row.name) for row in conn.execute(rows.order_by(table.c.id))
    )


def _instances(conn: sa.Connection) -> tuple[SiteInstance, ...]:
    interfaces: defaultdict[str, dict[int, str]] = defaultdict(dict)
    staying = sa.select(nvlink_interface).where(nvlink_interface.c.status != Status.DELETING)
    for row in conn.execute(staying):
        interfaces[row.instance_id][row.device_instance] = row.logical_partition_id
    rows = sa.select(instance, tenant.c.org).join(tenant, tenant.c.id == instance.c.tenant_id)
    return tuple(
        SiteInstance(
            id=row.id,
            org=row.org,
            name=row.name,
            vpc=row.vpc_id,
            machine=row.machine_id,
            interfaces=interfaces[row.id],
        )
        for row in conn.execute(rows.order_by(instance.c.id))
    )


def _machines(conn: sa.Connection) -> tuple[SiteMachine, ...]:
    gpus: defaultdict[str, dict[int, str | None]] = defaultdict(dict)
    for row in conn.execute(sa.select(machine_gpu)):
        gpus[row.machine_id][row.module_id] = row.guid
    cordoned = set(conn.execute(sa.select(cordon.c.machine_id)).scalars())
    rows: sa.Select[Any] = sa.select(machine, instance.c.id.label("instance_id"))
    rows = rows.join(instance, instance.c.machine_id == machine.c.id, isouter=True)
    return tuple(
        SiteMachine(
            id=row.id,
            domain=row.domain,
            chassis_serial=row.chassis_serial,
            slot=row.slot,
            type_id=row.instance_type_id,
            instance=row.instance_id,
            is_cordoned=row.id in cordoned,
            gpus=gpus[row.id],
        )
        for row in conn.execute(rows.order_by(machine.c.id))
    )


def _partition(view: found.FoundPartitionView) -> ShownPartition:
    return ShownPartition(
        domain=view.domain,
        name=view.partition.name,
        number=view.partition.id,
        owner=view.owner,
        logical_partition=view.logical_partition,
        is_guid_based=view.partition.guid_based,
        guids=tuple(str(guid) for guid in sorted(view.partition.members)),
    )
