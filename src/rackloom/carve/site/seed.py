"""The records of an embedded site: everything a newcomer needs, from a topology and a list of endpoints.

What only the fabric can tell (the domain and GUIDs of a machine) is left unknown, and learnt from the first
observation like anywhere else.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.plan.values import DefaultPartition, GpuHealth
from rackloom.carve.site import allocations, endpoints, history, instance_types, tenants
from rackloom.carve.site.tables import allocation, instance_type, machine, machine_gpu
from rackloom.carve.site.tables import site as site_table
from rackloom.carve.site.values import Ids, Status
from rackloom.topology.rack import RackProfile, Site, Tray

DEMO_ORG = "demo"


def seed_embedded_site(
    conn: sa.Connection,
    site: Site,
    profile: RackProfile,
    endpoint_urls: Mapping[str, str],
    *,
    now: float,
    ids: Ids,
    org: str = DEMO_ORG,
) -> str:
    """Make the records of `site`, whose trays are all of `profile`; returns the site id.

    `endpoint_urls` maps domain uuid to the URL of its controller. Repeating it adds what is new and
    changes nothing else.
    """
    provider = tenants.ensure_provider(conn, org, now, ids)
    site_id = _site(conn, provider.id, site.name, now, ids)
    type_id = _instance_type(conn, provider.id, site_id, profile, now, ids)
    _machines(conn, site_id, type_id, [tray for domain in site.domains for tray in domain.trays], now)
    for domain in site.domains:
        serials = {tray.chassis_serial for tray in domain.trays}
        endpoints.register(conn, endpoint_urls[domain.uuid], serials, now, ids)
    tenants.ensure(conn, org, now, ids)
    for tenant_id in _entitled(conn, org):
        allocations.grant_everything(conn, tenant_id, now, ids)
    return site_id


def machine_id(tray: Tray) -> str:
    """The machine id of a tray: where it sits, as letters that are safe in a URL."""
    return f"{tray.chassis_serial}-{tray.slot}".lower()


def _site(conn: sa.Connection, provider_id: str, name: str, now: float, ids: Ids) -> str:
    found = conn.execute(sa.select(site_table.c.id).where(site_table.c.name == name)).scalar_one_or_none()
    if found is not None:
        return str(found)
    new = ids()
    row: dict[str, Any] = {"id": new, "provider_id": provider_id, "name": name, "status": Status.REGISTERED}
    row |= {"capabilities": {"nvLinkPartition": True}, "default_partition": DefaultPartition.NONE}
    conn.execute(sa.insert(site_table).values(**row, created=now, updated=now))
    history.record(conn, new, Status.REGISTERED, "Site is registered", now)
    return new


def _instance_type(
    conn: sa.Connection, provider_id: str, site_id: str, profile: RackProfile, now: float, ids: Ids
) -> str:
    same = sa.and_(instance_type.c.site_id == site_id, instance_type.c.name == profile.name)
    found = conn.execute(sa.select(instance_type.c.id).where(same)).scalar_one_or_none()
    if found is not None:
        return str(found)
    gpus = {"type": "GPU", "name": profile.product, "count": profile.gpus_per_tray, "deviceType": "NVLink"}
    return instance_types.create(
        conn,
        provider_id,
        site_id=site_id,
        name=profile.name,
        description=profile.note,
        labels={},
        capabilities=[gpus],
        now=now,
        ids=ids,
    )


def _machines(conn: sa.Connection, site_id: str, type_id: str, trays: list[Tray], now: float) -> None:
    known = set(conn.execute(sa.select(machine.c.id).where(machine.c.site_id == site_id)).scalars())
    new = [tray for tray in trays if machine_id(tray) not in known]
    if not new:
        return
    rows = [
        {
            "id": machine_id(tray),
            "site_id": site_id,
            "instance_type_id": type_id,
            "status": Status.READY,
            "chassis_serial": tray.chassis_serial,
            "slot": tray.slot,
            "tray_index": tray.tray_index,
            "rack": tray.rack,
            "created": now,
            "updated": now,
        }
        for tray in new
    ]
    conn.execute(sa.insert(machine), rows)
    gpus = [
        {"machine_id": machine_id(tray), "module_id": module, "health": GpuHealth.UNKNOWN}
        for tray in new
        for module in range(1, len(tray.gpus) + 1)
    ]
    conn.execute(sa.insert(machine_gpu), gpus)


def _entitled(conn: sa.Connection, org: str) -> list[str]:
    """The embedding org, and every tenant that was given everything before there were new machines."""
    held = sa.select(allocation.c.tenant_id).where(allocation.c.name == allocations.EVERYTHING).distinct()
    return sorted({tenants.of(conn, org).id, *conn.execute(held).scalars()})
