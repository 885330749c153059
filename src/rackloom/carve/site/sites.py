"""The site record: is it registered, what can it do, what becomes of its default partitions."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site.problems import conflict, forbidden, invalid, not_found
from rackloom.carve.site.tables import site as table
from rackloom.carve.site.values import Status

CAPABILITIES = (
    "nativeNetworking",
    "networkSecurityGroup",
    "nvLinkPartition",
    "flow",
    "imageBasedOperatingSystem",
)


_BY_ID = sa.select(table).where(table.c.id == sa.bindparam("id"))


def get(conn: sa.Connection, site_id: str) -> sa.Row[Any]:
    """The site; refused when there is none of that id."""
    found = conn.execute(_BY_ID, {"id": site_id}).one_or_none()
    if found is None:
        raise not_found("Could not find Site with specified ID")
    return found


def check_registered(site: sa.Row[Any]) -> None:
    """Refuse work on a site that is not in service."""
    if site.status != Status.REGISTERED:
        raise invalid("Site specified in request is not in Registered state")


def check_nvlink(site: sa.Row[Any]) -> None:
    """Refuse NVLink partitions where the site has them switched off."""
    if not site.capabilities.get("nvLinkPartition"):
        raise invalid("Site specified in request does not have NVLink Partition capability enabled")


def update(
    conn: sa.Connection,
    provider_id: str,
    site_id: str,
    *,
    name: str | None,
    description: str | None,
    capabilities: Mapping[str, bool | None],
    extra: Mapping[str, Any],
    now: float,
) -> None:
    """Change a site; None leaves a field or a capability as it is."""
    site = get(conn, site_id)
    if site.provider_id != provider_id:
        raise forbidden("Site is not associated with org's Infrastructure Provider")
    changes: dict[str, Any] = {"extra": site.extra | dict(extra), "updated": now}
    changes["capabilities"] = site.capabilities | _given(capabilities)
    changes |= _given({"name": name, "description": description})
    if name not in (None, site.name):
        _check_name(conn, str(name))
    conn.execute(sa.update(table).where(table.c.id == site_id).values(**changes))


def _given(values: Mapping[str, object]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _check_name(conn: sa.Connection, name: str) -> None:
    existing = conn.execute(sa.select(table.c.id).where(table.c.name == name)).scalar_one_or_none()
    if existing is not None:
        raise conflict("A Site with specified name already exists", id=existing)
