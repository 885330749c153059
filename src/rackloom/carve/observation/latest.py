"""The latest observation of each NVLink domain, or since when and why there is none.

Endpoints that report the same domain uuid are one domain. One readable endpoint is enough, unless a
conflict is recorded for the domain: then it is unknown. A reading that was made before `valid_from` counts
as lost since it was made. `latest_of_domains` chooses in this order:

1. While any controller can be read, a recorded conflict makes the domain unknown since the conflict
   began.
2. Of the readings that list GPUs and are not lost, the newest is the observation. Others are valid as
   well while they are at most `READING_VALID_SECONDS` older. Plans start from the newest, but a status
   must hold in every valid reading: after a failover, the controller that no longer leads may have
   accepted a change.
3. When no controller can be read, the domain is unknown since the last controller that lists GPUs was
   lost.

`outdated_domains` names the domains with records that still rest on outdated readings.

Empty-observation guard: a reading without any GPU, of a domain with recorded GPUs, is no reading.
A controller that has just started, or a standby, answers for its domain before it knows the content.
Losing a standby makes nothing unknown.

Tenants read a generic reason only. The answer of a controller may contain addresses, so that text
(`operators_doubt`) is for those who operate the domain.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store.prepared import PreparedStatement
from rackloom.carve.store.schema import domain_dispute, endpoint, machine, machine_gpu, observation
from rackloom.core.partitions.domain import DomainObservation
from rackloom.core.partitions.status_rules import READING_VALID_SECONDS

CONFLICT_REASON = "the switch controllers of the domain contradict one another, or those of another domain"
UNREADABLE_REASON = "the switch controllers of the domain cannot be read"
OUTDATED_REASON = "no reading of the domain's switch controllers was recorded since"

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(DomainObservation)

_outdated = sa.and_(
    observation.c.unknown_since.is_(None), observation.c.observed_at < sa.bindparam("valid_from", 0.0)
)
"""A reading from before the parameter `valid_from`, with no recorded loss. Without the parameter no
reading qualifies: writers have just read the controller."""
_NO_GPUS = '"gpus":[]'
"""Part of the encoded facts of a reading without GPUs, and of no other: JSON texts have no bare quotes."""
_lists_gpus = sa.func.replace(observation.c.facts, _NO_GPUS, "") == observation.c.facts
LISTS_GPUS: sa.ColumnElement[Any] = _lists_gpus.label("lists_gpus")
"""Whether the reading lists a GPU, without decoding it. NULL without a reading."""
_STATE_COLUMNS: tuple[sa.ColumnElement[Any], ...] = (
    observation.c.endpoint_id,
    observation.c.observed_at,
    LISTS_GPUS,
    sa.case((_outdated, observation.c.observed_at), else_=observation.c.unknown_since).label("unknown_since"),
    sa.case((_outdated, OUTDATED_REASON), else_=observation.c.unknown_reason).label("unknown_reason"),
)
READING_COLUMNS = (*_STATE_COLUMNS, observation.c.facts)
"""The columns of `observation`, in which an outdated reading is lost since it was made. Code that chooses
among readings needs no second rule."""

# Built once: every pass runs these.
_RECORDED_GPUS = (
    sa.select(machine.c.domain, sa.func.count(machine_gpu.c.guid.distinct()))
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(machine.c.domain.in_(sa.bindparam("domains", expanding=True)))
    .group_by(machine.c.domain)
)


def _of_domains(columns: Iterable[sa.ColumnElement[Any]]) -> sa.Select[Any]:
    """These columns of all readings of the parameter `domains`, and the conflicts of the domains."""
    wanted = sa.select(
        *columns,
        endpoint.c.domain,
        domain_dispute.c.since.label("disputed_since"),
        domain_dispute.c.reason.label("dispute"),
    )
    joined = wanted.join(endpoint, endpoint.c.id == observation.c.endpoint_id)
    joined = joined.join(domain_dispute, domain_dispute.c.domain == endpoint.c.domain, isouter=True)
    return joined.where(endpoint.c.domain.in_(sa.bindparam("domains", expanding=True)))


_READINGS_OF_DOMAINS = _of_domains(READING_COLUMNS)
_STATES_OF_DOMAINS = _of_domains(_STATE_COLUMNS)
_REPORTED_DOMAINS = sa.select(endpoint.c.domain).where(endpoint.c.domain.is_not(None)).distinct()
_DOMAINS_WITH_OUTDATED_READINGS = PreparedStatement(
    _REPORTED_DOMAINS.join(observation, endpoint.c.id == observation.c.endpoint_id).where(_outdated)
)
_OTHERS_WITH_GPUS = (
    sa.select(observation.c.endpoint_id)
    .join(endpoint, endpoint.c.id == observation.c.endpoint_id)
    .where(endpoint.c.domain == sa.bindparam("domain"), endpoint.c.id != sa.bindparam("of"), _lists_gpus)
)
_of_endpoint = observation.c.endpoint_id == sa.bindparam("through")
_TIMES = sa.select(observation.c.observed_at, observation.c.unknown_since).where(_of_endpoint)
_UPDATE_READING = sa.update(observation).where(_of_endpoint)


# Empty-observation guard.


def empty_reading_reasons(conn: sa.Connection, empty: Collection[str]) -> dict[str, str]:
    """Domain -> why its reading is no evidence: it lists no GPU, but GPUs of the domain are recorded.

    `empty` contains the domains with a reading that lists no GPU.
    """
    if not empty:
        return {}
    recorded = conn.execute(_RECORDED_GPUS, {"domains": list(empty)}).all()
    return {
        domain: f"the switch controller lists no GPU where {count} are recorded"
        for domain, count in recorded
        if count
    }


# The latest observation.


class LatestObservation(msgspec.Struct, frozen=True):
    """The observation of a domain, or None with a sentence of doubt."""

    observation: DomainObservation | None
    """The newest."""
    doubt: str
    """For tenants: it contains no text of a controller, which may hold addresses."""
    unknown_since: float | None = None
    """The start of unreadability or conflict, or None if the domain is known, or was never read."""
    cause: str | None = None
    """The answers or lists of controllers, with their addresses: for those who operate the domain."""
    others: tuple[DomainObservation, ...] = ()
    """Valid readings of the other controllers of the domain."""

    @property
    def shown(self) -> tuple[DomainObservation, ...]:
        """All valid readings of the domain, the newest first."""
        return () if self.observation is None else (self.observation, *self.others)

    @property
    def uncertain(self) -> frozenset[int]:
        """Fabric GUIDs about which any valid reading contradicts itself."""
        return frozenset().union(*(reading.uncertain for reading in self.shown))

    @property
    def operators_doubt(self) -> str:
        """The sentence of doubt, only for those who operate the domain."""
        if self.cause is None or self.unknown_since is None:
            return self.doubt
        return _unknown_since_text(self.unknown_since, self.cause)


def latest_of_domain(conn: sa.Connection, domain: str | None, valid_from: float = 0.0) -> LatestObservation:
    """The latest observation of `domain`. None is the domain of machines that no controller has listed."""
    if domain is None:
        return LatestObservation(None, "no switch controller has reported this machine yet")
    return latest_of_domains(conn, [domain], valid_from)[domain]


def latest_of_domains(
    conn: sa.Connection, domains: Collection[str], valid_from: float = 0.0
) -> dict[str, LatestObservation]:
    """The latest observation of each domain, in one query, or in two if one of them lists no GPU.

    Readings from before `valid_from` do not count.
    """
    rows = _rows_of_domains(conn, _READINGS_OF_DOMAINS, domains, valid_from)
    unknown = _unknown_domains(conn, rows)
    return {domain: unknown.get(domain) or _observed(readings) for domain, readings in rows.items()}


def outdated_domains(conn: sa.Connection, valid_from: float) -> dict[str, LatestObservation]:
    """The domains that are unknown because no reading of them was made since `valid_from`.

    Their records do not show this yet. Mostly there is none, and this is one small query. The content of the
    readings does not matter.
    """
    suspects = [row[0] for row in _DOMAINS_WITH_OUTDATED_READINGS.all(conn, {"valid_from": valid_from})]
    if not suspects:
        return {}
    return _unknown_domains(conn, _rows_of_domains(conn, _STATES_OF_DOMAINS, suspects, valid_from))


def _rows_of_domains(
    conn: sa.Connection, query: sa.Select[Any], domains: Collection[str], valid_from: float
) -> dict[str, list[sa.Row[Any]]]:
    rows: dict[str, list[sa.Row[Any]]] = {domain: [] for domain in domains}
    for row in conn.execute(query, {"domains": list(rows), "valid_from": valid_from}):
        rows[row.domain].append(row)
    return rows


def _unknown_domains(
    conn: sa.Connection, rows: Mapping[str, Sequence[sa.Row[Any]]]
) -> dict[str, LatestObservation]:
    """The unknown domains among those with these readings, each with the reason."""
    doubts = {domain: _why_unknown(domain, readings) for domain, readings in rows.items()}
    unknown = {domain: doubt for domain, doubt in doubts.items() if doubt is not None}
    newest = {domain: newest_valid_row(rows[domain]) for domain, doubt in doubts.items() if doubt is None}
    # The only reading may be that of a standby: the endpoint of its leader was deleted.
    reasons = empty_reading_reasons(conn, [domain for domain, row in newest.items() if not row.lists_gpus])
    return unknown | {
        domain: _unknown_domain(newest[domain].observed_at, UNREADABLE_REASON, cause)
        for domain, cause in reasons.items()
    }


def _why_unknown(domain: str, rows: Sequence[sa.Row[Any]]) -> LatestObservation | None:
    """The reason why no reading of the domain counts, or None if the newest valid one does."""
    # Every row of a domain carries the conflict of the domain. It counts while any controller can be read:
    # when all are lost, the domain is unknown since then, which is the older and simpler truth.
    readable = [row for row in rows if row.unknown_since is None]
    if readable and readable[0].dispute is not None:
        return _unknown_domain(readable[0].disputed_since, CONFLICT_REASON, readable[0].dispute)
    if not rows:
        return LatestObservation(None, f"no switch controller reports domain {domain} any more")
    newest = newest_valid_row(rows)
    if newest.unknown_since is None:
        return None
    last = last_lost_row(rows) or newest
    reason = OUTDATED_REASON if last.unknown_reason == OUTDATED_REASON else UNREADABLE_REASON
    return _unknown_domain(last.unknown_since, reason, last.unknown_reason)


def _observed(rows: Sequence[sa.Row[Any]]) -> LatestObservation:
    newest, *others = map(observation_of_row, valid_rows(rows))
    return LatestObservation(newest, "", others=tuple(others))


def newest_valid_row(rows: Sequence[sa.Row[Any]]) -> sa.Row[Any]:
    """The row with the latest state of the domain, from at least one row with `LISTS_GPUS`."""
    return valid_rows(rows)[0]


def valid_rows(rows: Sequence[sa.Row[Any]]) -> list[sa.Row[Any]]:
    """The valid readings, newest first, from at least one row with `LISTS_GPUS`.

    These are all that list a GPU and are not lost. Where all that list a GPU are lost, it is the newest of
    these: what remains is the reading of a standby, which lists no GPU and is no evidence.
    """
    if len(rows) == 1:
        return [rows[0]]
    best_first = sorted(
        rows, key=lambda row: (row.unknown_since is None, row.observed_at or 0.0), reverse=True
    )
    with_gpus = [row for row in best_first if row.lists_gpus]
    readable = [row for row in with_gpus if row.unknown_since is None]
    if readable:
        oldest = readable[0].observed_at - READING_VALID_SECONDS
        return [row for row in readable if row.observed_at >= oldest]
    return with_gpus[:1] or best_first[:1]


def is_standby(conn: sa.Connection, endpoint_id: str, domain: str) -> bool:
    """Whether another endpoint listed GPUs of `domain`, even if it is lost by now."""
    return conn.execute(_OTHERS_WITH_GPUS, {"domain": domain, "of": endpoint_id}).first() is not None


def last_lost_row(rows: Iterable[sa.Row[Any]]) -> sa.Row[Any] | None:
    """From rows with `LISTS_GPUS`, the one that made the domain unknown, or None if none is lost.

    The loss of a standby, which lists no GPU, makes nothing unknown, unless all lost ones list none.
    """
    lost = [row for row in rows if row.unknown_since is not None]
    with_gpus = lost if len(lost) == 1 else [row for row in lost if row.lists_gpus] or lost
    return max(with_gpus, key=lambda row: row.unknown_since, default=None)


def _unknown_domain(since: float, reason: str, cause: str) -> LatestObservation:
    return LatestObservation(None, _unknown_since_text(since, reason), since, cause)


def _unknown_since_text(since: float, reason: str) -> str:
    return f"unknown since {rfc3339(since)}: {reason}"


# Recording readings.


def save_reading(conn: sa.Connection, endpoint_id: str, reading: DomainObservation) -> None:
    """Record a complete reading. The endpoint is no longer lost."""
    _upsert_reading(
        conn,
        endpoint_id,
        facts=encode_facts(reading),
        observed_at=reading.observed_at,
        unknown_since=None,
        unknown_reason=None,
    )


def confirm_reading(conn: sa.Connection, endpoint_id: str, observed_at: float) -> None:
    """Record that the endpoint lists at `observed_at` the same as before."""
    _upsert_reading(conn, endpoint_id, observed_at=observed_at)


def encode_facts(reading: DomainObservation) -> str:
    """The reading without its time: equal text for readings that list the same."""
    return _encoder.encode(msgspec.structs.replace(reading, observed_at=0.0)).decode()


def observation_of_row(row: sa.Row[Any]) -> DomainObservation:
    """The reading in a row of the table `observation`."""
    return msgspec.structs.replace(decode_facts(row.facts), observed_at=row.observed_at)


def decode_facts(facts: str) -> DomainObservation:
    """The reading behind `encode_facts`. It has no time."""
    return _decoder.decode(facts)


def read_at(conn: sa.Connection, endpoint_id: str) -> float | None:
    """The time when the newest reading of the endpoint began, or None without a reading."""
    times = conn.execute(_TIMES, {"through": endpoint_id}).one_or_none()
    return None if times is None else times[0]


def mark_unreadable(
    conn: sa.Connection, endpoint_id: str, reason: str, now: float, valid_from: float
) -> None:
    """Record that the endpoint could not be read. It is lost since the first failure after a good reading.

    If nothing was recorded for so long that the reading was outdated (it is from before `valid_from`), it
    is lost since that reading, as readers saw in the meantime.
    """
    times = conn.execute(_TIMES, {"through": endpoint_id}).one_or_none()
    read_at, since = (None, None) if times is None else times
    if since is None:
        is_outdated = read_at is not None and read_at < valid_from
        since = read_at if is_outdated else now
    _upsert_reading(conn, endpoint_id, unknown_since=since, unknown_reason=reason)


def _upsert_reading(conn: sa.Connection, endpoint_id: str, **values: object) -> None:
    if conn.execute(_UPDATE_READING, {"through": endpoint_id, **values}).rowcount == 0:
        conn.execute(sa.insert(observation).values(endpoint_id=endpoint_id, **values))


@lru_cache(maxsize=4096)
def rfc3339(seconds: float) -> str:
    """RFC 3339 in UTC. Cached: records of one transaction have one time, and are shown together."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
