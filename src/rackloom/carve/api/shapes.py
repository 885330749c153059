"""Records in the shapes of the wire that more than one kind of object shows."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from rackloom.carve.api.respond import Json
from rackloom.carve.site import tables
from rackloom.carve.site.history import Past
from rackloom.carve.site.interfaces import Listed
from rackloom.carve.site.knowledge import moment
from rackloom.carve.site.values import Status


class Timed(Protocol):
    """A record with a beginning and a last change."""

    @property
    def created(self) -> float:
        """Seconds since the epoch."""
        ...

    @property
    def updated(self) -> float:
        """Seconds since the epoch."""
        ...


Row = sa.Row[Any]
Rows = Sequence[Row]


def times(row: Row | Timed) -> Json:
    """When the object was made and last changed."""
    return {"created": moment(row.created), "updated": moment(row.updated)}


def status_history(past: Sequence[Past]) -> list[Json]:
    """A status history, newest first."""
    return [{"status": one.status, "message": one.message, **times(one)} for one in past]


def partition_summary(row: Row) -> Json:
    """A logical partition in one line."""
    return {"id": row.id, "name": row.name, "siteId": row.site_id, "status": row.status}


def vpc_summary(row: Row) -> Json:
    """A VPC in one line."""
    return {"id": row.id, "name": row.name, "siteId": row.site_id, "status": row.status}


def interface_summary(row: Row | Listed) -> Json:
    """An NVLink interface in one line."""
    return {
        "id": row.id,
        "instanceId": row.instance_id,
        "nvLinkLogicalPartitionId": row.logical_partition_id,
        "nvLinklogicalPartitionId": row.logical_partition_id,
        "deviceInstance": row.device_instance,
        "status": row.status,
    }


class Relation(msgspec.Struct, frozen=True):
    """How an object shows another that it refers to."""

    key: str
    """Field that holds the other's id."""
    shown_as: str
    table: sa.Table
    summary: Callable[[Row], Json]


def _site(row: Row) -> Json:
    return {"id": row.id, "name": row.name, "infrastructureProviderId": row.provider_id, "status": row.status}


def _tenant(row: Row) -> Json:
    return {"id": row.id, "org": row.org, **times(row)}


def _provider(row: Row) -> Json:
    return {"id": row.id, "org": row.org, **times(row)}


def shown_status(status: str) -> str:
    """The status of an instance on this wire, which has no unknown; Configuring claims nothing.

    Clients generated from the published description reject a whole answer for a status that is not in it.
    """
    return Status.CONFIGURING if status == Status.UNKNOWN else status


def _instance(row: Row) -> Json:
    return {"id": row.id, "name": row.name, "siteId": row.site_id, "status": shown_status(row.status)}


def _instance_type(row: Row) -> Json:
    return {"id": row.id, "name": row.name, "siteId": row.site_id, "status": row.status}


def _machine(row: Row) -> Json:
    return {"id": row.id, "controllerMachineId": row.id, "status": row.status}


RELATIONS: Mapping[str, Relation] = {
    "Site": Relation("siteId", "site", tables.site, _site),
    "Tenant": Relation("tenantId", "tenant", tables.tenant, _tenant),
    "InfrastructureProvider": Relation(
        "infrastructureProviderId", "infrastructureProvider", tables.provider, _provider
    ),
    "Instance": Relation("instanceId", "instance", tables.instance, _instance),
    "InstanceType": Relation("instanceTypeId", "instanceType", tables.instance_type, _instance_type),
    "Vpc": Relation("vpcId", "vpc", tables.vpc, vpc_summary),
    "VPC": Relation("vpcId", "vpc", tables.vpc, vpc_summary),
    "Machine": Relation("machineId", "machine", tables.machine, _machine),
    "NVLinkLogicalPartition": Relation(
        "nvLinkLogicalPartitionId", "nvLinkLogicalPartition", tables.logical_partition, partition_summary
    ),
}


def relate(conn: sa.Connection, objects: Sequence[Json], wanted: Collection[str]) -> None:
    """Add the related objects `wanted` to each of `objects`: one query for each kind, not for each row.

    Objects of kinds that do not exist here (security groups, operating systems) have nothing to show.
    """
    for name in sorted(RELATIONS.keys() & wanted):
        _relate(conn, objects, RELATIONS[name])


def _relate(conn: sa.Connection, objects: Sequence[Json], relation: Relation) -> None:
    related = [one for one in objects if one.get(relation.key) is not None]
    if related:
        keys = {one[relation.key] for one in related}
        rows = conn.execute(sa.select(relation.table).where(relation.table.c.id.in_(keys)))
        found = {row.id: relation.summary(row) for row in rows}
        for one in related:
            one[relation.shown_as] = found.get(one[relation.key])
