"""What stands in the way of wishes, GPU by GPU, as the newest plan of each domain found it.

Written by the reconciler, and read by whoever asks why something is not done.
"""

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.plan.values import Blocked
from rackloom.carve.site.tables import blocked_gpu as table

_HERE = sa.select(table).where(table.c.domain == sa.bindparam("domain"))
_HERE = _HERE.order_by(table.c.guid, table.c.reason)
"""Built once: every pass asks it."""


def replace(conn: sa.Connection, domain: str, blocked: Sequence[Blocked], now: float) -> bool:
    """Make `blocked` what stands in the way in `domain`; False if it is known. What stays keeps its time."""
    wanted = {(str(guid), one.reason): one.fix for one in blocked for guid in one.guids}
    known = {(row.guid, row.reason): row.fix for row in of_domain(conn, domain)}
    if known == wanted:
        return False
    for guid, reason in known.keys() - wanted.keys():
        mine = sa.and_(table.c.domain == domain, table.c.guid == guid, table.c.reason == reason)
        conn.execute(sa.delete(table).where(mine))
    new = [
        {"domain": domain, "guid": guid, "reason": reason, "fix": fix, "since": now}
        for (guid, reason), fix in sorted(wanted.items())
        if (guid, reason) not in known
    ]
    if new:
        conn.execute(sa.insert(table), new)
    return True


def of_domain(conn: sa.Connection, domain: str) -> Sequence[sa.Row[Any]]:
    """What stands in the way in `domain`: rows of domain, guid, reason, fix and since, by GPU and reason."""
    return conn.execute(_HERE, {"domain": domain}).all()


def of_domains(conn: sa.Connection, domains: Collection[str]) -> dict[str, list[sa.Row[Any]]]:
    """As `of_domain` for each of `domains`, in one query."""
    told: dict[str, list[sa.Row[Any]]] = {domain: [] for domain in domains}
    found = sa.select(table).where(table.c.domain.in_(told)).order_by(table.c.guid, table.c.reason)
    for row in conn.execute(found):
        told[row.domain].append(row)
    return told


def reasons(conn: sa.Connection, domain: str | None) -> dict[int, str]:
    """Fabric GUID -> everything that stands in its way, in one sentence."""
    if domain is None:
        return {}
    told: dict[int, list[str]] = {}
    for row in of_domain(conn, domain):
        told.setdefault(int(row.guid), []).append(row.reason)
    return {guid: "; ".join(why) for guid, why in told.items()}


def forget(conn: sa.Connection, domain: str) -> None:
    """Nothing is known to stand in the way in `domain`, which has another uuid now."""
    conn.execute(sa.delete(table).where(table.c.domain == domain))
