"""Leases: at most one replica reconciles an endpoint, and one that lost its lease can begin nothing.

The epoch grows each time a lease is taken. Whoever begins an operation shows the epoch of its lease in the
transaction that records the operation, so a replica that was paused, cut off or declared dead is refused
there, whatever its own clock says. Clocks only decide how soon a lease is taken over; replicas whose clocks
disagree by more than a lease take domains from one another too early, which costs time and nothing else.
"""

from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from rackloom.carve.site.tables import domain_lease as table
from rackloom.carve.site.tables import endpoint
from rackloom.errors import Refused

# Built once: every operation asks these.
_mine = table.c.endpoint_id == sa.bindparam("mine")
_HOLDER = sa.select(table.c.holder, table.c.epoch).where(_mine)
_my_domain = sa.select(endpoint.c.domain).where(endpoint.c.id == sa.bindparam("mine")).scalar_subquery()
_SHADOWING = (
    sa.select(table.c.endpoint_id)
    .join(endpoint, endpoint.c.id == table.c.endpoint_id)
    .where(
        endpoint.c.domain == _my_domain,
        table.c.endpoint_id < sa.bindparam("mine"),
        table.c.holder != sa.bindparam("by"),
        table.c.until > sa.bindparam("now"),
    )
    .limit(1)
)


class Lease(msgspec.Struct, frozen=True):
    """The right to reconcile one endpoint, as long as nobody took it since."""

    endpoint_id: str
    holder: str
    epoch: int


class LeaseLost(Refused):
    """The operation was not begun: another replica took the endpoint over."""


def try_acquire(conn: sa.Connection, endpoint_id: str, holder: str, now: float, until: float) -> Lease | None:
    """Take the endpoint's lease until `until`; None while somebody else's runs."""
    row = conn.execute(sa.select(table).where(table.c.endpoint_id == endpoint_id)).one_or_none()
    if row is None:
        conn.execute(sa.insert(table).values(endpoint_id=endpoint_id, holder=holder, until=until, epoch=1))
        return Lease(endpoint_id, holder, 1)
    if row.holder != holder and row.until > now:
        return None
    taken = {"holder": holder, "until": until, "epoch": row.epoch + 1}
    conn.execute(sa.update(table).where(table.c.endpoint_id == endpoint_id).values(**taken))
    return Lease(endpoint_id, holder, row.epoch + 1)


def renew(conn: sa.Connection, holder: str, endpoint_ids: Collection[str], until: float) -> None:
    """Let these leases of the holder run until `until`, as long as nobody took them."""
    mine = sa.and_(table.c.holder == holder, table.c.endpoint_id.in_(endpoint_ids), table.c.until < until)
    conn.execute(sa.update(table).where(mine).values(until=until))


def release(conn: sa.Connection, holder: str, endpoint_ids: Collection[str]) -> None:
    """Let the next replica in. The row stays, and with it the epoch, which must never go back."""
    mine = sa.and_(table.c.holder == holder, table.c.endpoint_id.in_(endpoint_ids))
    conn.execute(sa.update(table).where(mine).values(until=0.0, epoch=table.c.epoch + 1))


def held_by(conn: sa.Connection, holder: str, now: float) -> dict[str, Lease]:
    """The running leases of `holder`, by endpoint."""
    rows = conn.execute(sa.select(table).where(table.c.holder == holder, table.c.until > now))
    return {row.endpoint_id: Lease(row.endpoint_id, row.holder, row.epoch) for row in rows}


def require(conn: sa.Connection, lease: Lease, now: float) -> None:
    """Raise LeaseLost unless `lease` is still good for its domain.

    It is not when somebody took the endpoint since, nor when the endpoint turned out to answer for the same
    domain as one that another replica holds: of those the one with the smallest endpoint id goes on.
    """
    row = conn.execute(_HOLDER, {"mine": lease.endpoint_id}).one_or_none()
    if row is None or (row.holder, row.epoch) != (lease.holder, lease.epoch) or _shadowed(conn, lease, now):
        raise LeaseLost("another replica reconciles this domain now")


def _shadowed(conn: sa.Connection, lease: Lease, now: float) -> bool:
    asked = {"mine": lease.endpoint_id, "by": lease.holder, "now": now}
    return conn.execute(_SHADOWING, asked).first() is not None
