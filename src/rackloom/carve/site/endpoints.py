"""Switch controller endpoints: one URL, and the chassis that it speaks for."""

from collections.abc import Collection, Sequence

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import operations, settle, taking_over
from rackloom.carve.site.tables import domain_dispute, endpoint, endpoint_chassis, observation
from rackloom.carve.site.values import Ids

# Built once: every pass asks these.
_mine = endpoint.c.id == sa.bindparam("of")
_DOMAIN = sa.select(endpoint.c.domain).where(_mine)
_other = endpoint.alias()
_concerned = (endpoint.c.domain, sa.bindparam("answered", type_=sa.Text))
_STANDING = (
    sa.select(
        endpoint.c.domain,
        observation.c.observed_at,
        sa.or_(
            sa.exists().where(_other.c.domain.in_(_concerned), _other.c.id != endpoint.c.id),
            sa.exists().where(domain_dispute.c.domain.in_(_concerned)),
        ).label("is_shared"),
    )
    .join(observation, observation.c.endpoint_id == endpoint.c.id, isouter=True)
    .where(_mine, sa.exists().where(endpoint_chassis.c.endpoint_id == endpoint.c.id))
)
_CHANGE = sa.update(endpoint).where(_mine)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A switch controller that the site speaks to."""

    id: str
    url: str
    chassis_serials: tuple[str, ...]
    domain: str | None
    """Domain uuid that it last answered with; None until it has answered."""


class Standing(msgspec.Struct, frozen=True):
    """What the records know of an endpoint before its newest answer is written down."""

    domain: str | None
    """Domain uuid that it last answered with."""
    observed_at: float | None
    """When its newest reading was taken."""
    is_shared: bool
    """Whether others answer for one of its domains too, or one of those is in dispute."""


def every(conn: sa.Connection) -> tuple[Endpoint, ...]:
    """All endpoints that speak for a chassis, by URL."""
    serials: dict[str, list[str]] = {}
    for row in conn.execute(sa.select(endpoint_chassis).order_by(endpoint_chassis.c.chassis_serial)):
        serials.setdefault(row.endpoint_id, []).append(row.chassis_serial)
    return tuple(
        Endpoint(id=row.id, url=row.url, chassis_serials=tuple(serials[row.id]), domain=row.domain)
        for row in conn.execute(sa.select(endpoint).order_by(endpoint.c.url))
        if row.id in serials
    )


def domain_of(conn: sa.Connection, endpoint_id: str) -> str | None:
    """Domain uuid that the endpoint last answered with; None until it has answered."""
    return conn.execute(_DOMAIN, {"of": endpoint_id}).scalar_one_or_none()


def standing(conn: sa.Connection, endpoint_id: str, domain: str | None = None) -> Standing | None:
    """How an endpoint stands that was just asked, and answered for `domain` (None: it did not answer).

    None for one that no longer speaks for a chassis.
    """
    row = conn.execute(_STANDING, {"of": endpoint_id, "answered": domain}).one_or_none()
    return None if row is None else Standing(row.domain, row.observed_at, bool(row.is_shared))


def set_domain(conn: sa.Connection, endpoint_id: str, domain: str, now: float) -> None:
    """Note which domain the endpoint answers for."""
    conn.execute(_CHANGE, {"of": endpoint_id, "domain": domain, "updated": now})


def register(conn: sa.Connection, url: str, chassis_serials: Collection[str], now: float, ids: Ids) -> None:
    """Make `url` the endpoint of these chassis, whichever endpoint they had.

    A controller that moved keeps its row, and with it its history; an endpoint that is left without any
    chassis is no longer spoken to.
    """
    before = [one for one in every(conn) if not set(one.chassis_serials).isdisjoint(chassis_serials)]
    emptied = [one for one in before if set(one.chassis_serials) <= set(chassis_serials)]
    chosen = _at(conn, url) or _move(conn, emptied[:1], url, now) or _insert(conn, url, now, ids)
    _give(conn, chosen, chassis_serials)
    for one in emptied:
        if one.id != chosen:
            retire(conn, one.id, one.domain, chosen, now)


def retire(
    conn: sa.Connection, endpoint_id: str, domain: str | None, successor: str | None, now: float
) -> None:
    """Forget what an endpoint told of `domain`; its row stays for the audit.

    Its successor closes what it left unanswered; without one that is closed here, as unknown.
    """
    if successor is None:
        operations.close_interrupted(conn, endpoint_id, now, now)
    else:
        operations.hand_over(conn, endpoint_id, successor)
    conn.execute(sa.delete(observation).where(observation.c.endpoint_id == endpoint_id))
    conn.execute(sa.update(endpoint).where(endpoint.c.id == endpoint_id).values(domain=None, updated=now))
    if domain is None:
        settle.settle(conn, None, now)
    else:
        taking_over.give_up(conn, domain, now)


def _at(conn: sa.Connection, url: str) -> str | None:
    return conn.execute(sa.select(endpoint.c.id).where(endpoint.c.url == url)).scalar_one_or_none()


def _move(conn: sa.Connection, old: Sequence[Endpoint], url: str, now: float) -> str | None:
    for one in old:
        conn.execute(sa.update(endpoint).where(endpoint.c.id == one.id).values(url=url, updated=now))
        return one.id
    return None


def _insert(conn: sa.Connection, url: str, now: float, ids: Ids) -> str:
    new = ids()
    conn.execute(sa.insert(endpoint).values(id=new, url=url, created=now, updated=now))
    return new


def _give(conn: sa.Connection, endpoint_id: str, chassis_serials: Collection[str]) -> None:
    chosen = endpoint_chassis.c.chassis_serial.in_(chassis_serials)
    conn.execute(sa.delete(endpoint_chassis).where(chosen))
    rows = [{"chassis_serial": serial, "endpoint_id": endpoint_id} for serial in sorted(chassis_serials)]
    conn.execute(sa.insert(endpoint_chassis), rows)
