"""Instances as the wire shows them: ours, the fields that are only kept, and the NVLink interfaces."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID, uuid5

import sqlalchemy as sa

from rackloom.carve.api.interfaces import shape as interface_shape
from rackloom.carve.api.queries import KeptInterfaceQuery, Query
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row, Rows, relate, shown_status, status_history, times
from rackloom.carve.site import history, interfaces
from rackloom.carve.site.cautions import Caution
from rackloom.carve.site.history import Past
from rackloom.carve.site.instance_creation import CreationPlan
from rackloom.carve.site.interfaces import Listed
from rackloom.carve.site.knowledge import moment
from rackloom.carve.site.tables import instance as table
from rackloom.carve.site.tables import site
from rackloom.carve.site.values import Status

RELATIONS = (
    "Site", "Tenant", "InfrastructureProvider", "InstanceType", "Vpc", "VPC", "Machine",
    "Allocation", "OperatingSystem", "NetworkSecurityGroup",
)  # fmt: skip

KEPT_DEFAULTS: Json = {
    "operatingSystemId": None,
    "ipxeScript": None,
    "userData": None,
    "phoneHomeEnabled": False,
    "alwaysBootWithCustomIpxe": False,
    "networkSecurityGroupId": None,
    "labels": {},
    "sshKeyGroupIds": [],
    "interfaces": [],
    "infinibandInterfaces": [],
    "serialConsoleUrl": None,
}
"""Fields that clients of the wider API expect to find, when the request did not bring them."""

SETTLED = (Status.READY, Status.UNKNOWN)


class Shown(NamedTuple):
    """What is shown of an instance: the columns of `LISTING`, in their order."""

    id: str
    name: str
    description: str | None
    tenant_id: str
    provider_id: str
    site_id: str
    instance_type_id: str | None
    vpc_id: str
    machine_id: str
    placement: str
    status: str
    extra: Json
    created: float
    updated: float


_columns = {column.name: column for column in (*table.c, site.c.provider_id)}
LISTING: sa.Select[Any] = sa.select(*(_columns[name] for name in Shown._fields)).join(
    site, site.c.id == table.c.site_id
)


def shapes(conn: sa.Connection, rows: Rows, query: Query) -> list[Json]:
    """Instances (rows of `LISTING`) with their interfaces and histories: a fixed number of queries."""
    ids = [row.id for row in rows]
    histories = history.of(conn, ids)
    found = interfaces.listed_of(conn, ids)
    made = [_shape(one, found[one.id], histories[one.id]) for one in map(Shown._make, rows)]
    relate(conn, made, query.relations(*RELATIONS))
    return made


def _shape(row: Shown, nvlink: Sequence[Listed], past: Sequence[Past]) -> Json:
    return {
        **KEPT_DEFAULTS,
        **row.extra,
        "id": row.id,
        "name": row.name,
        "description": row.description,
        "tenantId": row.tenant_id,
        "infrastructureProviderId": row.provider_id,
        "siteId": row.site_id,
        "instanceTypeId": row.instance_type_id,
        "vpcId": row.vpc_id,
        "machineId": row.machine_id,
        "controllerInstanceId": row.id,
        "nvLinkInterfaces": [interface_shape(one) for one in nvlink],
        "isUpdatePending": row.status not in SETTLED,
        "placementReason": row.placement,
        "status": shown_status(row.status),
        "unknownSince": moment(past[0].created) if row.status == Status.UNKNOWN else None,
        "statusHistory": status_history(past),
        **times(row),
    }


def warning_shapes(found: Sequence[Caution]) -> list[Json]:
    """What is allowed and probably not meant."""
    return [{"type": one.matter, "message": one.message} for one in found]


def plan_shape(planned: CreationPlan) -> Json:
    """What a request would make."""
    interfaces = [
        {"nvLinkLogicalPartitionId": wish.logical_partition_id, "deviceInstance": wish.device_instance}
        for wish in planned.wishes
    ]
    return {
        "dryRun": True,
        "reason": planned.reason,
        "nvLinkDomainIds": list(dict.fromkeys(seat.domain for seat in planned.seats)),
        "instances": [
            {
                "name": seat.name,
                "machineId": seat.machine_id,
                "nvLinkDomainId": seat.domain,
                "nvLinkInterfaces": interfaces,
            }
            for seat in planned.seats
        ],
        "warnings": warning_shapes(planned.cautions),
    }


def kept_interfaces(row: Row, field: str, query: KeptInterfaceQuery) -> list[Json]:
    """The network interfaces that the request named, as it named them: Pending, as nothing acts on them."""
    kept = row.extra.get(field)
    if not isinstance(kept, list) or (query.status and Status.PENDING not in query.status):
        return []
    return [
        {
            **(one if isinstance(one, dict) else {}),
            "id": str(uuid5(UUID(row.id), f"{field}/{position}")),
            "instanceId": row.id,
            "status": Status.PENDING,
            **times(row),
        }
        for position, one in enumerate(kept)
    ]
