"""The record of the site that a service is configured to be."""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.plan.values import DefaultPartition
from rackloom.carve.site import history, revisions, tenants
from rackloom.carve.site.tables import endpoint, site
from rackloom.carve.site.values import Ids, Status
from rackloom.errors import Refused


def ensure_site(
    conn: sa.Connection, name: str, provider_org: str, policy: DefaultPartition, now: float, ids: Ids
) -> str:
    """The id of the site `name`, made now if the records are empty; its default partition policy is set.

    Refused when the records are those of another site: a database serves one.
    """
    provider = tenants.ensure_provider(conn, provider_org.lower(), now, ids)
    found = conn.execute(sa.select(site)).one_or_none()
    if found is None:
        return _insert(conn, provider.id, name, policy, now, ids)
    if found.name != name:
        raise Refused(
            f"the database holds the records of site {found.name!r}, not of {name!r}",
            nearest_fix=f'set site.name = "{found.name}", or use another database',
        )
    if found.default_partition != policy:
        conn.execute(sa.update(site).values(default_partition=policy, updated=now))
        revisions.touch(conn, conn.execute(sa.select(endpoint.c.domain).distinct()).scalars().all())
    return str(found.id)


def _insert(
    conn: sa.Connection, provider_id: str, name: str, policy: DefaultPartition, now: float, ids: Ids
) -> str:
    new = ids()
    row: dict[str, Any] = {"id": new, "provider_id": provider_id, "name": name, "status": Status.REGISTERED}
    row |= {"capabilities": {"nvLinkPartition": True}, "default_partition": policy}
    conn.execute(sa.insert(site).values(**row, created=now, updated=now))
    history.record(conn, new, Status.REGISTERED, "Site is registered", now)
    return new
