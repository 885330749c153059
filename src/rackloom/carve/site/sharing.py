"""Who of several replicas reconciles which domains: an equal share for each that is alive.

Endpoints that answer with one domain are one domain and go to one replica together. Every replica runs the
same rule over the same rows, so nobody hands out work.
"""

import math
from collections import defaultdict
from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import endpoints, leases
from rackloom.carve.site.endpoints import Endpoint
from rackloom.carve.site.leases import Lease
from rackloom.carve.site.tables import domain_lease, replica


class Held(msgspec.Struct, frozen=True):
    """An endpoint that this replica reconciles."""

    endpoint: Endpoint
    lease: Lease


def take_share(conn: sa.Connection, holder: str, now: float, until: float) -> tuple[Held, ...]:
    """Say that `holder` is alive until `until`, and return the endpoints that are its to reconcile.

    Its leases are renewed and free ones taken up to its share. Leases beyond the share are left to run:
    `leases.release` them once nothing works under them any more.
    """
    _say_alive(conn, holder, now, until)
    found = endpoints.every(conn)
    mine = _share(conn, found, holder, now)
    held = leases.held_by(conn, holder, now)
    leases.renew(conn, holder, [one.id for one in mine if one.id in held], until)
    return tuple(
        Held(one, lease)
        for one in mine
        if (lease := held.get(one.id) or leases.try_acquire(conn, one.id, holder, now, until))
    )


def held_alone(conn: sa.Connection, holder: str, now: float) -> tuple[Held, ...] | None:
    """What `take_share` would return, where it would change nothing: no replica but `holder` can exist.

    None where an endpoint has no lease yet. Only reads, so that a process alone need not write to say that it
    lives, which nobody hears.
    """
    held = leases.held_by(conn, holder, now)
    found = endpoints.every(conn)
    if any(one.id not in held for one in found):
        return None
    return tuple(Held(one, held[one.id]) for one in found)


def leave(conn: sa.Connection, holder: str) -> None:
    """Let the others have everything of `holder` at once."""
    leases.release(conn, holder, [one.id for one in endpoints.every(conn)])
    conn.execute(sa.delete(replica).where(replica.c.holder == holder))


def start_alone(conn: sa.Connection) -> None:
    """Forget every replica; for a process that knows by other means that no other is left."""
    conn.execute(sa.update(domain_lease).values(until=0.0, epoch=domain_lease.c.epoch + 1))
    conn.execute(sa.delete(replica))


def _say_alive(conn: sa.Connection, holder: str, now: float, until: float) -> None:
    conn.execute(sa.delete(replica).where(replica.c.until <= now))
    known = conn.execute(sa.update(replica).where(replica.c.holder == holder).values(until=until))
    if known.rowcount == 0:
        conn.execute(sa.insert(replica).values(holder=holder, until=until))


def _share(conn: sa.Connection, found: Collection[Endpoint], holder: str, now: float) -> list[Endpoint]:
    """The endpoints of the domains that `holder` keeps or may take."""
    domains: dict[str, list[Endpoint]] = defaultdict(list)
    for one in sorted(found, key=lambda one: one.id):
        domains[one.domain or one.id].append(one)
    holders = _holders(conn, now)
    keeper = {
        domain: next((holders[one.id] for one in members if one.id in holders), None)
        for domain, members in domains.items()
    }
    kept = sorted(domain for domain in domains if keeper[domain] == holder)
    free = sorted(domain for domain in domains if keeper[domain] is None)
    alive = conn.execute(sa.select(sa.func.count()).select_from(replica)).scalar_one()
    share = (kept + free)[: math.ceil(len(domains) / alive)]
    return [one for domain in share for one in domains[domain]]


def _holders(conn: sa.Connection, now: float) -> dict[str, str]:
    rows = conn.execute(sa.select(domain_lease).where(domain_lease.c.until > now))
    return {row.endpoint_id: row.holder for row in rows}
