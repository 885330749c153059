"""Leases: at most one replica reconciles an endpoint, and how replicas share the endpoints.

A lease has an epoch that grows each time the lease is taken (a fencing token). The transaction that
begins an operation checks holder and epoch (`records.require_lease`), so a replica that was paused, cut off
or declared dead is refused there, whatever its clock says. Clocks only decide how soon a lease is taken
over. Replicas whose clocks differ by more than a lease take domains from each other too early; that
costs time and nothing else. When two endpoints with different holders report the same domain, the one
with the smallest id continues.

Sharing: `take_share` renews this replica's entry, renews its leases and takes free ones, up to an equal
share of the domains for each live replica. Endpoints of one domain go to one replica. Every replica
applies the same rule to the same rows, so there is no coordinator. A lease beyond the share is left to
run until nothing works under it. A process that owns its database alone has leases without end, which
it need not renew.
"""

import math
from collections import defaultdict
from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.carve.reconcile.records import Lease
from rackloom.carve.store.prepared import delete_rows, find_row, insert_row, update_and_count, update_rows
from rackloom.carve.store.schema import domain_lease as lease_table
from rackloom.carve.store.schema import replica

# Leases with fencing epochs.


def try_acquire_lease(
    conn: sa.Connection, endpoint_id: str, holder: str, now: float, until: float
) -> Lease | None:
    """Take the endpoint's lease until `until`. Returns None while another holder's lease runs.

    Invariant: the epoch grows with each acquisition and release, and never shrinks. Each lease value that
    was ever handed out is therefore valid in at most one period.
    """
    row = find_row(conn, lease_table, endpoint_id=endpoint_id)
    if row is None:
        insert_row(conn, lease_table, endpoint_id=endpoint_id, holder=holder, until=until, epoch=1)
        return Lease(endpoint_id, holder, 1)
    if row.holder != holder and row.until > now:
        return None
    # The epoch grows even if the holder stays: work under the old lease value must not go on.
    lease = {"holder": holder, "until": until, "epoch": row.epoch + 1}
    update_rows(conn, lease_table, {"endpoint_id": endpoint_id}, **lease)
    return Lease(endpoint_id, holder, row.epoch + 1)


def renew_leases(conn: sa.Connection, holder: str, endpoint_ids: Collection[str], until: float) -> None:
    """Extend those of these leases that `holder` still has. The epoch stays: the same work goes on."""
    mine = sa.and_(
        lease_table.c.holder == holder,
        lease_table.c.endpoint_id.in_(endpoint_ids),
        lease_table.c.until < until,
    )
    conn.execute(sa.update(lease_table).where(mine).values(until=until))


def release_leases(conn: sa.Connection, holder: str, endpoint_ids: Collection[str]) -> None:
    """Release the leases at once. The row stays, because it holds the epoch, which must never shrink."""
    mine = sa.and_(lease_table.c.holder == holder, lease_table.c.endpoint_id.in_(endpoint_ids))
    conn.execute(sa.update(lease_table).where(mine).values(until=0.0, epoch=lease_table.c.epoch + 1))


def leases_held_by(conn: sa.Connection, holder: str, now: float) -> dict[str, Lease]:
    """The running leases of `holder`, by endpoint."""
    rows = conn.execute(
        sa.select(lease_table).where(lease_table.c.holder == holder, lease_table.c.until > now)
    )
    return {row.endpoint_id: Lease(row.endpoint_id, row.holder, row.epoch) for row in rows}


# Sharing endpoints between replicas.


class HeldEndpoint(msgspec.Struct, frozen=True):
    """An endpoint that this replica reconciles."""

    endpoint: Endpoint
    lease: Lease


def take_share(conn: sa.Connection, holder: str, now: float, until: float) -> tuple[HeldEndpoint, ...]:
    """Record that `holder` is alive until `until`, and return the endpoints that it reconciles.

    Renews its leases and takes free ones, up to its share. A lease beyond the share is left to run:
    `release_leases` it once no work runs under it, or two replicas would work on one domain.
    """
    # Silent replicas go first, so that the share counts only those that are alive.
    conn.execute(sa.delete(replica).where(replica.c.until <= now))
    if not update_and_count(conn, replica, {"holder": holder}, until=until):
        insert_row(conn, replica, holder=holder, until=until)
    mine = _share_of_endpoints(conn, endpoints.all_endpoints(conn), holder, now)
    held = leases_held_by(conn, holder, now)
    renew_leases(conn, holder, [endpoint.id for endpoint in mine if endpoint.id in held], until)
    # A lease that another replica still has stays out of the share until it ends.
    return tuple(
        HeldEndpoint(endpoint, lease)
        for endpoint in mine
        if (lease := held.get(endpoint.id) or try_acquire_lease(conn, endpoint.id, holder, now, until))
    )


def share_of_sole_replica(conn: sa.Connection, holder: str, now: float) -> tuple[HeldEndpoint, ...] | None:
    """The result of `take_share` where it would change nothing, because only `holder` can exist.

    None where an endpoint has no lease yet. Only reads: a process alone need not write to show that it lives.
    """
    held = leases_held_by(conn, holder, now)
    found = endpoints.all_endpoints(conn)
    # A new endpoint needs a lease, and only `take_share` writes one.
    if any(endpoint.id not in held for endpoint in found):
        return None
    return tuple(HeldEndpoint(endpoint, held[endpoint.id]) for endpoint in found)


def leave_replicas(conn: sa.Connection, holder: str) -> None:
    """Release everything of `holder`, so that the other replicas take it over at once."""
    release_leases(conn, holder, [endpoint.id for endpoint in endpoints.all_endpoints(conn)])
    delete_rows(conn, replica, holder=holder)


def start_as_sole_replica(conn: sa.Connection) -> None:
    """End every lease and delete every replica; the caller knows by other means that no other is left."""
    conn.execute(sa.update(lease_table).values(until=0.0, epoch=lease_table.c.epoch + 1))
    conn.execute(sa.delete(replica))


def _share_of_endpoints(
    conn: sa.Connection, found: Collection[Endpoint], holder: str, now: float
) -> list[Endpoint]:
    """The endpoints of the domains that `holder` keeps or may take."""
    # An endpoint that never answered counts as a domain, under its own id.
    domains: dict[str, list[Endpoint]] = defaultdict(list)
    for candidate in sorted(found, key=lambda candidate: candidate.id):
        domains[candidate.domain or candidate.id].append(candidate)
    running = conn.execute(sa.select(lease_table).where(lease_table.c.until > now))
    holders = {row.endpoint_id: row.holder for row in running}
    # The holder of a domain is that of its first endpoint with a lease: all endpoints of a domain end up
    # with one replica, because every replica sorts the same rows the same way.
    keeper = {
        domain: next((holders[member.id] for member in members if member.id in holders), None)
        for domain, members in domains.items()
    }
    kept = sorted(domain for domain in domains if keeper[domain] == holder)
    free = sorted(domain for domain in domains if keeper[domain] is None)
    alive = conn.execute(sa.select(sa.func.count()).select_from(replica)).scalar_one()
    # Kept domains come first, so that none changes hands while there is room. Rounded up, so that the shares
    # of all replicas together cover all domains.
    share = (kept + free)[: math.ceil(len(domains) / alive)]
    return [member for domain in share for member in domains[domain]]


# Periods of a lease.


LEASE_SECONDS = 5.0
"""A replica that is silent for so long is replaced."""
RENEW_SECONDS = 1.5
"""Endpoints that are new or gone are noticed at the same time."""
ANSWER_SECONDS = 1.5
"""How long the database may take to renew: two attempts fit into a lease even if the first is lost."""
