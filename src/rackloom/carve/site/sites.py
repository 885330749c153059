"""The site record: is it registered, what can it do, what becomes of its default partitions."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site.problems import forbidden, invalid, not_found
from rackloom.carve.site.tables import site as table
from rackloom.carve.site.values import Status

CAPABILITIES = (
    "nativeNetworking",
    "networkSecurityGroup",
    "nvLinkPartition",
    "flow",
    "imageBasedOperatingSystem",
)


def get(conn: sa.Connection, site_id: str) -> sa.Row[Any]:
    """The site; refused when there is none of that id."""
    found = conn.execute(sa.select(table).where(table.c.id == site_id)).one_or_none()
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


def set_capabilities(
    conn: sa.Connection, provider_id: str, site_id: str, wanted: Mapping[str, bool | None], now: float
) -> None:
    """Switch capabilities on or off; None leaves one as it is."""
    site = get(conn, site_id)
    if site.provider_id != provider_id:
        raise forbidden("Site is not associated with org's Infrastructure Provider")
    changed = site.capabilities | {name: value for name, value in wanted.items() if value is not None}
    conn.execute(sa.update(table).where(table.c.id == site_id).values(capabilities=changed, updated=now))
