"""One counter per NVLink domain that grows with every change of what the site wants of it."""

from collections.abc import Iterable

import sqlalchemy as sa

from rackloom.carve.site.tables import domain_revision as table

CHANNEL = "rackloom_intent"
"""PostgreSQL notification channel on which replicas tell one another of domains whose intent changed."""


def touch(conn: sa.Connection, domains: Iterable[str | None]) -> frozenset[str]:
    """Count a change of intent in each domain, and return those that are known (None is not yet observed)."""
    known = frozenset(domain for domain in domains if domain is not None)
    for domain in sorted(known):
        grown = conn.execute(
            sa.update(table).where(table.c.domain == domain).values(revision=table.c.revision + 1)
        )
        if grown.rowcount == 0:
            conn.execute(sa.insert(table).values(domain=domain, revision=1))
        _notify(conn, domain)
    return known


def current(conn: sa.Connection, domain: str) -> int:
    """The revision of `domain`; 0 when nothing was ever wanted of it."""
    found = conn.execute(sa.select(table.c.revision).where(table.c.domain == domain)).scalar_one_or_none()
    return found or 0


def _notify(conn: sa.Connection, domain: str) -> None:
    # Delivered at the commit, and never for a transaction that is undone. SQLite has no one to tell.
    if conn.dialect.name == "postgresql":
        conn.execute(sa.select(sa.func.pg_notify(CHANNEL, domain)))
