"""Instances as the wire shows them: ours, the fields that are only kept, and the NVLink interfaces."""

from collections.abc import Sequence
from uuid import UUID, uuid5

import sqlalchemy as sa

from rackloom.carve.api.interfaces import shape as interface_shape
from rackloom.carve.api.queries import KeptInterfaceQuery, Query
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row, Rows, relate, shown_status, status_history, times
from rackloom.carve.site import history, interfaces
from rackloom.carve.site.cautions import Caution
from rackloom.carve.site.instance_creation import CreationPlan
from rackloom.carve.site.knowledge import moment
from rackloom.carve.site.tables import nvlink_interface
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


def shapes(conn: sa.Connection, rows: Rows, query: Query) -> list[Json]:
    """Instances (rows with provider_id) with their interfaces and histories: a fixed number of queries."""
    ids = [row.id for row in rows]
    histories = history.of(conn, ids)
    found: dict[str, list[Json]] = {}
    mine = interfaces.listing().where(nvlink_interface.c.instance_id.in_(ids))
    ordered = mine.order_by(nvlink_interface.c.device_instance, nvlink_interface.c.created)
    for row in conn.execute(ordered):
        found.setdefault(row.instance_id, []).append(interface_shape(row))
    made = [_shape(row, found.get(row.id, []), histories[row.id]) for row in rows]
    relate(conn, made, query.relations(*RELATIONS))
    return made


def _shape(row: Row, nvlink: list[Json], past: Rows) -> Json:
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
        "nvLinkInterfaces": nvlink,
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
