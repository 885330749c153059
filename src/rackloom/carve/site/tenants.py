"""Organisations as tenants and as infrastructure providers."""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site.problems import invalid
from rackloom.carve.site.tables import provider, tenant
from rackloom.carve.site.values import Ids

# Built once: every request asks this.
_BY_ORG = sa.select(tenant).where(tenant.c.org == sa.bindparam("org"))
_ORGS = sa.select(tenant.c.id, tenant.c.org).where(tenant.c.id.in_(sa.bindparam("tenants", expanding=True)))


def find(conn: sa.Connection, org: str) -> sa.Row[Any] | None:
    """The tenant of `org`, or None."""
    return conn.execute(_BY_ORG, {"org": org}).one_or_none()


def of(conn: sa.Connection, org: str) -> sa.Row[Any]:
    """The tenant of `org`; refused when it has none."""
    found = find(conn, org)
    if found is None:
        raise invalid("Org does not have a Tenant associated")
    return found


def orgs(conn: sa.Connection, tenant_ids: Collection[str]) -> dict[str, str]:
    """The org of each tenant."""
    return {row.id: row.org for row in conn.execute(_ORGS, {"tenants": list(tenant_ids)})}


def ensure(conn: sa.Connection, org: str, now: float, ids: Ids) -> sa.Row[Any]:
    """The tenant of `org`, made now if this is its first use. A provider may choose among its machines."""
    if find(conn, org) is None:
        row = {"id": ids(), "org": org, "created": now, "updated": now}
        provides = find_provider(conn, org) is not None
        conn.execute(sa.insert(tenant).values(**row, targeted_instance_creation=provides))
    return of(conn, org)


def find_provider(conn: sa.Connection, org: str) -> sa.Row[Any] | None:
    """The infrastructure provider of `org`, or None."""
    return conn.execute(sa.select(provider).where(provider.c.org == org)).one_or_none()


def provider_of(conn: sa.Connection, org: str) -> sa.Row[Any]:
    """The infrastructure provider of `org`; refused when it has none."""
    found = find_provider(conn, org)
    if found is None:
        raise invalid("Org does not have an Infrastructure Provider associated")
    return found


def provider_orgs(conn: sa.Connection, provider_ids: Collection[str]) -> dict[str, str]:
    """The org of each infrastructure provider."""
    rows = conn.execute(sa.select(provider.c.id, provider.c.org).where(provider.c.id.in_(provider_ids)))
    return {row.id: row.org for row in rows}


def ensure_provider(conn: sa.Connection, org: str, now: float, ids: Ids) -> sa.Row[Any]:
    """The infrastructure provider of `org`, made now if there is none."""
    if find_provider(conn, org) is None:
        conn.execute(sa.insert(provider).values(id=ids(), org=org, created=now, updated=now))
    return provider_of(conn, org)
