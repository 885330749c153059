"""Paused domains: they are observed as ever, and nothing is done to them until they are resumed."""

import sqlalchemy as sa

from rackloom.carve.site import operator_steps, revisions
from rackloom.carve.site.operator_steps import Order, Step
from rackloom.carve.site.problems import conflict, not_found
from rackloom.carve.site.tables import domain_pause as table
from rackloom.carve.site.tables import endpoint, machine
from rackloom.carve.site.values import Changed

_REASON = sa.select(table.c.reason).where(table.c.domain == sa.bindparam("domain"))
"""Built once: every pass asks it."""


def reason(conn: sa.Connection, domain: str) -> str | None:
    """Why `domain` is paused; None when it is not."""
    return conn.execute(_REASON, {"domain": domain}).scalar_one_or_none()


def pause(conn: sa.Connection, domain: str, order: Order) -> Changed[None]:
    """Do nothing to `domain` from now on; a second pause keeps the first reason."""
    _check_known(conn, domain)
    if reason(conn, domain) is not None:
        return Changed(None, frozenset())
    row = {"domain": domain, "reason": order.reason, "asked_by": order.by, "created": order.now}
    conn.execute(sa.insert(table).values(**row))
    operator_steps.record(conn, Step.PAUSE, domain, domain, order)
    return Changed(None, revisions.touch(conn, [domain]))


def resume(conn: sa.Connection, domain: str, order: Order) -> Changed[None]:
    """Work on `domain` again."""
    _check_known(conn, domain)
    if conn.execute(sa.delete(table).where(table.c.domain == domain)).rowcount == 0:
        raise conflict("NVLink Domain is not paused")
    operator_steps.record(conn, Step.RESUME, domain, domain, order)
    return Changed(None, revisions.touch(conn, [domain]))


def follow(conn: sa.Connection, domain: str, successor: str) -> None:
    """Pause `successor` too when `domain` is paused: its chassis answer there now."""
    row = conn.execute(sa.select(table).where(table.c.domain == domain)).mappings().one_or_none()
    if row is not None and reason(conn, successor) is None:
        conn.execute(sa.insert(table).values(**{**row, "domain": successor}))


def _check_known(conn: sa.Connection, domain: str) -> None:
    for column in (endpoint.c.domain, machine.c.domain):
        if conn.execute(sa.select(column).where(column == domain).limit(1)).first() is not None:
            return
    raise not_found("Could not find NVLink Domain with specified ID")
