"""One counter per NVLink domain that grows with every change of what the site wants of it."""

from collections.abc import Iterable

import sqlalchemy as sa

from rackloom.carve.site.tables import domain_revision as table

CHANNEL = "rackloom_intent"
"""PostgreSQL notification channel on which replicas tell one another of domains whose intent changed."""

_here = table.c.domain == sa.bindparam("here")
_CURRENT = sa.select(table.c.revision).where(_here)
_GROW = sa.update(table).where(_here).values(revision=table.c.revision + 1)


def touch(conn: sa.Connection, domains: Iterable[str | None]) -> frozenset[str]:
    """Count a change of intent in each domain, and return those that are known (None is not yet observed)."""
    known = frozenset(domain for domain in domains if domain is not None)
    for domain in sorted(known):
        if conn.execute(_GROW, {"here": domain}).rowcount == 0:
            conn.execute(sa.insert(table).values(domain=domain, revision=1))
        _notify(conn, domain)
    return known


def current(conn: sa.Connection, domain: str) -> int:
    """The revision of `domain`; 0 when nothing was ever wanted of it."""
    return conn.execute(_CURRENT, {"here": domain}).scalar_one_or_none() or 0


def _notify(conn: sa.Connection, domain: str) -> None:
    # Delivered at the commit, and never for a transaction that is undone. SQLite has no one to tell.
    if conn.dialect.name == "postgresql":
        conn.execute(sa.select(sa.func.pg_notify(CHANNEL, domain)))
