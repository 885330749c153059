"""Leases: at most one replica reconciles an endpoint, and how replicas share the endpoints.

A lease has an epoch that grows each time the lease is taken (a fencing token). The transaction that
begins an operation checks holder and epoch with `require_lease`, so a replica that was paused, cut off
or declared dead is refused there, whatever its clock says. Clocks only decide how soon a lease is taken
over. Replicas whose clocks differ by more than a lease take domains from each other too early; that
costs time and nothing else. When two endpoints with different holders report the same domain, the one
with the smallest id continues.

Sharing: `take_share` renews this replica's entry, renews its leases and takes free ones, up to an equal
share of the domains for each live replica. Endpoints of one domain go to one replica. Every replica
applies the same rule to the same rows, so there is no coordinator. A lease beyond the share is left to
run until nothing works under it. A process that owns its database alone has leases without end, which
it need not renew.

`LeaseGuard` cancels the task that works under a lease when its deadline passes, measured on the event
loop's clock. A replica that is cut off from the database therefore stops before another one begins.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.carve.store.schema import domain_lease, endpoint, replica
from rackloom.carve.store.schema import domain_lease as table
from rackloom.errors import Refused

# Leases with fencing epochs.


# Built once: every operation asks these.
_of_endpoint = table.c.endpoint_id == sa.bindparam("mine")


_HOLDER = sa.select(table.c.holder, table.c.epoch).where(_of_endpoint)
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


def try_acquire_lease(
    conn: sa.Connection, endpoint_id: str, holder: str, now: float, until: float
) -> Lease | None:
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


def renew_leases(conn: sa.Connection, holder: str, endpoint_ids: Collection[str], until: float) -> None:
    """Let these leases of the holder run until `until`, as long as nobody took them."""
    mine = sa.and_(table.c.holder == holder, table.c.endpoint_id.in_(endpoint_ids), table.c.until < until)
    conn.execute(sa.update(table).where(mine).values(until=until))


def release_leases(conn: sa.Connection, holder: str, endpoint_ids: Collection[str]) -> None:
    """Let the next replica in. The row stays, and with it the epoch, which must never go back."""
    mine = sa.and_(table.c.holder == holder, table.c.endpoint_id.in_(endpoint_ids))
    conn.execute(sa.update(table).where(mine).values(until=0.0, epoch=table.c.epoch + 1))


def leases_held_by(conn: sa.Connection, holder: str, now: float) -> dict[str, Lease]:
    """The running leases of `holder`, by endpoint."""
    rows = conn.execute(sa.select(table).where(table.c.holder == holder, table.c.until > now))
    return {row.endpoint_id: Lease(row.endpoint_id, row.holder, row.epoch) for row in rows}


def require_lease(conn: sa.Connection, lease: Lease, now: float) -> None:
    """Raise LeaseLost unless `lease` is still good for its domain.

    It is not when somebody took the endpoint since, nor when the endpoint turned out to answer for the same
    domain as one that another replica holds: of those the one with the smallest endpoint id goes on.
    """
    row = conn.execute(_HOLDER, {"mine": lease.endpoint_id}).one_or_none()
    if (
        row is None
        or (row.holder, row.epoch) != (lease.holder, lease.epoch)
        or _is_shadowed(conn, lease, now)
    ):
        raise LeaseLost("another replica reconciles this domain now")


def _is_shadowed(conn: sa.Connection, lease: Lease, now: float) -> bool:
    asked = {"mine": lease.endpoint_id, "by": lease.holder, "now": now}
    return conn.execute(_SHADOWING, asked).first() is not None


# Sharing endpoints between replicas.


class HeldEndpoint(msgspec.Struct, frozen=True):
    """An endpoint that this replica reconciles."""

    endpoint: Endpoint
    lease: Lease


def take_share(conn: sa.Connection, holder: str, now: float, until: float) -> tuple[HeldEndpoint, ...]:
    """Say that `holder` is alive until `until`, and return the endpoints that are its to reconcile.

    Its leases are renewed and free ones taken up to its share. Leases beyond the share are left to run:
    `leases.release` them once nothing works under them any more.
    """
    _renew_replica(conn, holder, now, until)
    found = endpoints.all_endpoints(conn)
    mine = _share_of_endpoints(conn, found, holder, now)
    held = leases_held_by(conn, holder, now)
    renew_leases(conn, holder, [one.id for one in mine if one.id in held], until)
    return tuple(
        HeldEndpoint(one, lease)
        for one in mine
        if (lease := held.get(one.id) or try_acquire_lease(conn, one.id, holder, now, until))
    )


def share_of_sole_replica(conn: sa.Connection, holder: str, now: float) -> tuple[HeldEndpoint, ...] | None:
    """What `take_share` would return, where it would change nothing: no replica but `holder` can exist.

    None where an endpoint has no lease yet. Only reads, so that a process alone need not write to say that it
    lives, which nobody hears.
    """
    held = leases_held_by(conn, holder, now)
    found = endpoints.all_endpoints(conn)
    if any(one.id not in held for one in found):
        return None
    return tuple(HeldEndpoint(one, held[one.id]) for one in found)


def leave_replicas(conn: sa.Connection, holder: str) -> None:
    """Let the others have everything of `holder` at once."""
    release_leases(conn, holder, [all_endpoint.id for all_endpoint in endpoints.all_endpoints(conn)])
    conn.execute(sa.delete(replica).where(replica.c.holder == holder))


def start_as_sole_replica(conn: sa.Connection) -> None:
    """Forget every replica; for a process that knows by other means that no other is left."""
    conn.execute(sa.update(domain_lease).values(until=0.0, epoch=domain_lease.c.epoch + 1))
    conn.execute(sa.delete(replica))


def _renew_replica(conn: sa.Connection, holder: str, now: float, until: float) -> None:
    conn.execute(sa.delete(replica).where(replica.c.until <= now))
    known = conn.execute(sa.update(replica).where(replica.c.holder == holder).values(until=until))
    if known.rowcount == 0:
        conn.execute(sa.insert(replica).values(holder=holder, until=until))


def _share_of_endpoints(
    conn: sa.Connection, found: Collection[Endpoint], holder: str, now: float
) -> list[Endpoint]:
    """The endpoints of the domains that `holder` keeps or may take."""
    domains: dict[str, list[Endpoint]] = defaultdict(list)
    for one in sorted(found, key=lambda one: one.id):
        domains[one.domain or one.id].append(one)
    holders = _lease_holders(conn, now)
    keeper = {
        domain: next((holders[member.id] for member in members if member.id in holders), None)
        for domain, members in domains.items()
    }
    kept = sorted(domain for domain in domains if keeper[domain] == holder)
    free = sorted(domain for domain in domains if keeper[domain] is None)
    alive = conn.execute(sa.select(sa.func.count()).select_from(replica)).scalar_one()
    share = (kept + free)[: math.ceil(len(domains) / alive)]
    return [one for domain in share for one in domains[domain]]


def _lease_holders(conn: sa.Connection, now: float) -> dict[str, str]:
    rows = conn.execute(sa.select(domain_lease).where(domain_lease.c.until > now))
    return {row.endpoint_id: row.holder for row in rows}


# The deadline of the work under a lease.


LEASE_SECONDS = 5.0
"""A replica that is silent for so long is replaced."""
RENEW_SECONDS = 1.5
"""Endpoints that are new or gone are noticed at the same time."""
ANSWER_SECONDS = 1.5
"""How long the database may take to renew: two attempts fit into a lease even if the first is lost."""


class LeaseGuard:
    """A lease, and the task that works under it: it is cancelled at the deadline unless that is moved."""

    def __init__(self, lease: Lease, deadline: float) -> None:
        """`deadline` is in seconds of the running event loop's clock; infinite for a lease without end."""
        self.lease = lease
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def guard(self, task: "asyncio.Task[None]") -> None:
        """Cancel `task` at the deadline."""
        self._task = task
        task.add_done_callback(lambda _: self._stop_timer())
        self.extend(self._deadline)

    def extend(self, deadline: float) -> None:
        """Move the deadline."""
        self._stop_timer()
        self._deadline = deadline
        if self._task is not None and deadline < math.inf:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._task.cancel)

    def has_ended(self) -> bool:
        """Whether the deadline has passed, also when this process was stopped and let run on."""
        return asyncio.get_running_loop().time() >= self._deadline

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
