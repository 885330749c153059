"""Domains in dispute: several switch controllers are one domain or list the same hardware, and contradict.

Which of them is wrong cannot be told from here, so nothing is known of the domain until they agree or only
one is left. That one of them cannot be read for a moment does not make the other right. A change by another
hand is first seen by one of them: then the domain is in dispute until the others are read, which is at once.
"""

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations, product
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import knowledge, revisions
from rackloom.carve.site.contradictions import Reading, contradiction, doubled
from rackloom.carve.site.knowledge import STANDS_SECONDS
from rackloom.carve.site.operations import OperationState
from rackloom.carve.site.tables import domain_dispute as table
from rackloom.carve.site.tables import endpoint, observation, operation
from rackloom.errors import Refused

_FOREVER = 1e300

_here = table.c.domain == sa.bindparam("domain")
_STANDING = sa.select(table).where(_here)
_READINGS = (
    sa.select(endpoint.c.url, endpoint.c.domain, observation)
    .join(endpoint, endpoint.c.id == observation.c.endpoint_id)
    .where(
        endpoint.c.domain.in_(sa.bindparam("domains", expanding=True)),
        observation.c.facts.is_not(None),
        sa.or_(
            observation.c.unknown_since.is_(None),
            observation.c.observed_at >= sa.bindparam("lost_from", type_=sa.Double),
        ),
    )
    .order_by(endpoint.c.url)
)
_CHANGED = sa.select(
    sa.func.max(sa.case((operation.c.state == OperationState.PENDING, _FOREVER), else_=operation.c.finished))
).where(operation.c.domain == sa.bindparam("domain"))
_OF_ENDPOINT = (
    sa.select(endpoint.c.domain, table.c.reason, table.c.since, table.c.rival)
    .join(table, table.c.domain == endpoint.c.domain, isouter=True)
    .where(endpoint.c.id == sa.bindparam("of"))
)


class Dispute(msgspec.Struct, frozen=True):
    """Two controllers, what of their readings cannot be true, and since when (seconds since the epoch)."""

    domain: str
    reason: str
    since: float
    rival: str | None = None
    """The other domain, where two list the same hardware; None where controllers of one domain differ."""

    @property
    def domains(self) -> frozenset[str]:
        """All in which nothing may be done until it is settled."""
        return frozenset((self.domain,) if self.rival is None else (self.domain, self.rival))


class Contradicted(Refused):
    """Nothing is done in a domain whose controllers contradict one another."""

    def __init__(self, dispute: Dispute) -> None:
        self.dispute = dispute
        super().__init__(
            f"domain {dispute.domain} is unknown since {knowledge.moment(dispute.since)}: {dispute.reason}",
            nearest_fix="repair the controller that is wrong, or delete its endpoint",
        )


def of_endpoint(conn: sa.Connection, endpoint_id: str) -> tuple[str | None, Dispute | None]:
    """Domain that the endpoint last answered with, and the dispute about it."""
    row = conn.execute(_OF_ENDPOINT, {"of": endpoint_id}).one_or_none()
    if row is None or row.domain is None:
        return None, None
    return row.domain, None if row.reason is None else _dispute(row)


def of_domain(conn: sa.Connection, domain: str) -> Dispute | None:
    """The dispute that stands about `domain`."""
    row = conn.execute(_STANDING, {"domain": domain}).one_or_none()
    return None if row is None else _dispute(row)


def every(conn: sa.Connection) -> Mapping[str, Dispute]:
    """All that stand, by domain."""
    return {row.domain: _dispute(row) for row in conn.execute(sa.select(table))}


def judge(
    conn: sa.Connection, domain: str, before: Dispute | None, rivals: Collection[str] = ()
) -> Dispute | None:
    """Compare what the controllers of `domain`, and of `rivals`, show, and keep the outcome for `domain`.

    `before` is what stood. It stands until they agree: it does not end because one of them looked before the
    last change, or was lost after it contradicted. What one showed before that and never again is no
    contradiction. `rivals` are other domains that may list the same hardware.
    """
    found = _within(conn, domain, before) or _across(conn, domain, rivals, before)
    if found is None:
        if before is not None:
            conn.execute(sa.delete(table).where(table.c.domain == domain))
        return None
    if before is None:
        return _begin(conn, found)
    found = msgspec.structs.replace(found, since=before.since)
    if found != before:
        told = {"reason": found.reason, "rival": found.rival}
        conn.execute(sa.update(table).where(table.c.domain == domain).values(told))
    return found


def _begin(conn: sa.Connection, dispute: Dispute) -> Dispute:
    conn.execute(sa.insert(table).values(msgspec.structs.asdict(dispute)))
    # Plans that were made before no longer hold, and whoever reads the other controllers shall look now.
    revisions.touch(conn, [dispute.domain])
    return dispute


def _within(conn: sa.Connection, domain: str, before: Dispute | None) -> Dispute | None:
    """Controllers of one domain that contradict one another."""
    rows = _standing(conn, [domain], before)
    apart = [
        (_reading(one), _reading(other)) for one, other in combinations(rows, 2) if one.facts != other.facts
    ]
    reason = _first_told(apart, 0.0)
    if reason is not None and before is None:
        # Most that differs is measured: only here are all operations of the domain looked through.
        changed = conn.execute(_CHANGED, {"domain": domain}).scalar_one()
        reason = reason if changed is None else _first_told(apart, changed)
    return None if reason is None else Dispute(domain, reason, _newest(rows))


def _first_told(apart: Iterable[tuple[Reading, Reading]], changed_at: float) -> str | None:
    told = (contradiction(one, other, changed_at) for one, other in apart)
    return next((reason for reason in told if reason is not None), None)


def _across(
    conn: sa.Connection, domain: str, rivals: Collection[str], before: Dispute | None
) -> Dispute | None:
    """Controllers of two domains that list the same hardware."""
    for rival in sorted(rivals):
        known = before if before is not None and before.rival == rival else None
        rows = _standing(conn, [domain, rival], known)
        ours, theirs = ([row for row in rows if row.domain == one] for one in (domain, rival))
        for one, other in product(ours, theirs):
            reason = doubled(_reading(one), _reading(other))
            if reason is not None:
                return Dispute(domain, reason, _newest((one, other)), rival)
    return None


def _standing(conn: sa.Connection, domains: Collection[str], before: Dispute | None) -> list[Any]:
    """The readings of `domains` that say something of the present, by address."""
    lost_from = _FOREVER if before is None else before.since
    rows = conn.execute(_READINGS, {"domains": list(domains), "lost_from": lost_from}).all()
    # In a dispute only one that is lost grows too old: one that is not will be read, or be lost then.
    newest = _newest(rows)
    return [
        row
        for row in rows
        if row.observed_at >= newest - STANDS_SECONDS or (before is not None and row.unknown_since is None)
    ]


def _newest(rows: Iterable[Any]) -> float:
    return max((row.observed_at for row in rows), default=0.0)


def _reading(row: Any) -> Reading:
    return Reading(row.url, knowledge.kept(row))


def _dispute(row: Any) -> Dispute:
    return Dispute(row.domain, row.reason, row.since, row.rival)
