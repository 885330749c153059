"""Switch controller endpoints: one URL, and the chassis that it speaks for."""

from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from rackloom.carve.site.tables import endpoint, endpoint_chassis
from rackloom.carve.site.values import Ids


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A switch controller that the site speaks to."""

    id: str
    url: str
    chassis_serials: tuple[str, ...]
    domain: str | None
    """Domain uuid that it last answered with; None until it has answered."""


def every(conn: sa.Connection) -> tuple[Endpoint, ...]:
    """All endpoints, by URL."""
    serials: dict[str, list[str]] = {}
    for row in conn.execute(sa.select(endpoint_chassis).order_by(endpoint_chassis.c.chassis_serial)):
        serials.setdefault(row.endpoint_id, []).append(row.chassis_serial)
    return tuple(
        Endpoint(id=row.id, url=row.url, chassis_serials=tuple(serials.get(row.id, ())), domain=row.domain)
        for row in conn.execute(sa.select(endpoint).order_by(endpoint.c.url))
    )


def domain_of(conn: sa.Connection, endpoint_id: str) -> str | None:
    """Domain uuid that the endpoint last answered with; None until it has answered."""
    found = sa.select(endpoint.c.domain).where(endpoint.c.id == endpoint_id)
    return conn.execute(found).scalar_one_or_none()


def set_domain(conn: sa.Connection, endpoint_id: str, domain: str, now: float) -> None:
    """Note which domain the endpoint answers for."""
    mine = endpoint.c.id == endpoint_id
    conn.execute(sa.update(endpoint).where(mine).values(domain=domain, updated=now))


def register(conn: sa.Connection, url: str, chassis_serials: Collection[str], now: float, ids: Ids) -> None:
    """Make `url` the endpoint of these chassis, whichever endpoint they had."""
    found = conn.execute(sa.select(endpoint.c.id).where(endpoint.c.url == url)).scalar_one_or_none()
    if found is None:
        found = ids()
        conn.execute(sa.insert(endpoint).values(id=found, url=url, created=now, updated=now))
    chosen = endpoint_chassis.c.chassis_serial.in_(chassis_serials)
    conn.execute(sa.delete(endpoint_chassis).where(chosen))
    rows = [{"chassis_serial": serial, "endpoint_id": found} for serial in sorted(chassis_serials)]
    conn.execute(sa.insert(endpoint_chassis), rows)
