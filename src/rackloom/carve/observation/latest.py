"""The latest observation of each NVLink domain, or since when and why there is none.

Endpoints that report the same domain uuid are one domain. One readable endpoint is enough, unless a
conflict is recorded for the domain: then it is unknown. `latest_of_domains` chooses in this order:

1. While any controller can be read, a recorded conflict makes the domain unknown since the conflict
   began.
2. Of the readings that list GPUs and are not lost, the newest is the observation. Others are valid as
   well while they are at most `READING_VALID_SECONDS` older. Plans start from the newest, but a status
   must hold in every valid reading: after a failover, the controller that no longer leads may have
   accepted a change.
3. When no controller can be read, the domain is unknown since the last controller that lists GPUs was
   lost.

Empty-observation guard: a reading without any GPU, of a domain where GPUs are recorded, is no reading.
A controller that has just started, or a standby, answers for its domain before it knows what is in it.
Losing a standby makes nothing unknown.

Tenants read a generic reason only. What a controller said may contain addresses, so that text
(`operators_doubt`) is for those who operate the domain.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store.schema import domain_dispute, endpoint, machine, machine_gpu
from rackloom.carve.store.schema import observation as table
from rackloom.core.partitions.domain import DomainObservation

# Empty-observation guard.


_RECORDED_GPUS = (
    sa.select(machine.c.domain, sa.func.count(machine_gpu.c.guid.distinct()))
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(machine.c.domain.in_(sa.bindparam("domains", expanding=True)))
    .group_by(machine.c.domain)
)
"""Built once: every pass over a standby asks it."""


def empty_reading_reasons(conn: sa.Connection, seen: Iterable[DomainObservation]) -> dict[str, str]:
    """Why what was seen tells nothing of its domain, by domain; of those where it does, nothing."""
    empty = [one.domain for one in seen if not one.gpus]
    if not empty:
        return {}
    recorded = conn.execute(_RECORDED_GPUS, {"domains": empty}).all()
    return {
        domain: f"the switch controller lists no GPU where {count} are recorded"
        for domain, count in recorded
        if count
    }


CONFLICT_REASON = "the switch controllers of the domain contradict one another, or those of another domain"
UNREADABLE_REASON = "the switch controllers of the domain cannot be read"

READING_VALID_SECONDS = 600.0
"""A reading that is so much older than another says nothing of the present: nobody reads that controller."""

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(DomainObservation)

# Built once: every pass asks these.
_READINGS_OF_DOMAINS = (
    sa.select(
        table,
        endpoint.c.domain,
        domain_dispute.c.since.label("disputed_since"),
        domain_dispute.c.reason.label("dispute"),
    )
    .join(endpoint, endpoint.c.id == table.c.endpoint_id)
    .join(domain_dispute, domain_dispute.c.domain == endpoint.c.domain, isouter=True)
    .where(endpoint.c.domain.in_(sa.bindparam("domains", expanding=True)))
)
_OTHER_READINGS = (
    sa.select(table.c.facts)
    .join(endpoint, endpoint.c.id == table.c.endpoint_id)
    .where(
        endpoint.c.domain == sa.bindparam("domain"),
        endpoint.c.id != sa.bindparam("of"),
        table.c.facts.is_not(None),
    )
)
_of_endpoint = table.c.endpoint_id == sa.bindparam("through")
_UNKNOWN_SINCE = sa.select(table.c.unknown_since).where(_of_endpoint)
_UPDATE_READING = sa.update(table).where(_of_endpoint)


class LatestObservation(msgspec.Struct, frozen=True):
    """The observation of a domain that counts; None and a sentence of doubt otherwise."""

    observation: DomainObservation | None
    """The newest."""
    doubt: str
    """As tenants read it: no word of a controller, which may be an address, is in it."""
    unknown_since: float | None = None
    """Since when it cannot be read or is in dispute; None when it is known, or never was read."""
    cause: str | None = None
    """What controllers said or showed, with their addresses: for those who operate the domain."""
    others: tuple[DomainObservation, ...] = ()
    """What other controllers of the domain showed, as far as it still says something of the present."""

    @property
    def shown(self) -> tuple[DomainObservation, ...]:
        """All that was observed of the domain and stands, the newest first."""
        return () if self.observation is None else (self.observation, *self.others)

    @property
    def operators_doubt(self) -> str:
        """The sentence of doubt, for those who operate the domain and for nobody else."""
        if self.cause is None or self.unknown_since is None:
            return self.doubt
        return _unknown_since_text(self.unknown_since, self.cause)


def latest_of_domain(conn: sa.Connection, domain: str | None) -> LatestObservation:
    """What is known of `domain`; nothing of machines whose domain no controller has told (None)."""
    if domain is None:
        return LatestObservation(None, "no switch controller has reported this machine yet")
    return latest_of_domains(conn, [domain])[domain]


def latest_of_domains(conn: sa.Connection, domains: Collection[str]) -> dict[str, LatestObservation]:
    """What is known of each of `domains`, in one query; in two where one of them lists no GPU."""
    found: dict[str, list[sa.Row[Any]]] = {domain: [] for domain in domains}
    for row in conn.execute(_READINGS_OF_DOMAINS, {"domains": list(found)}):
        found[row.domain].append(row)
    known = {domain: _choose_reading(domain, told) for domain, told in found.items()}
    return known | _unknown_behind_standbys(conn, known)


def _unknown_behind_standbys(
    conn: sa.Connection, known: Mapping[str, LatestObservation]
) -> dict[str, LatestObservation]:
    """What is known of the domains of which a reading is left that is none: its leader was given up."""
    seen = {domain: one.observation for domain, one in known.items() if one.observation is not None}
    why_not = empty_reading_reasons(conn, seen.values())
    return {
        domain: _unknown_domain(seen[domain].observed_at, UNREADABLE_REASON, cause)
        for domain, cause in why_not.items()
    }


def _choose_reading(domain: str, rows: Sequence[sa.Row[Any]]) -> LatestObservation:
    good = [row for row in rows if row.unknown_since is None]
    if good and good[0].dispute is not None:
        return _unknown_domain(good[0].disputed_since, CONFLICT_REASON, good[0].dispute)
    if not rows:
        return LatestObservation(None, f"no switch controller reports domain {domain} any more")
    first, *others = valid_rows(rows)
    if first.unknown_since is None:
        return LatestObservation(
            observation_of_row(first), "", others=tuple(observation_of_row(row) for row in others)
        )
    last = last_lost_row(rows) or first
    return _unknown_domain(last.unknown_since, UNREADABLE_REASON, last.unknown_reason)


def newest_valid_row(rows: Sequence[sa.Row[Any]]) -> sa.Row[Any]:
    """Of rows of the table `observation`, one at least, that which shows their domain as it was last seen."""
    return valid_rows(rows)[0]


def valid_rows(rows: Sequence[sa.Row[Any]]) -> list[sa.Row[Any]]:
    """Of rows of the table `observation`, one at least, those that say how their domain is, newest first.

    These are all that list a GPU and are not lost. Where all that list one are lost it is the newest of
    these: a reading that lists none is of a standby then, and says nothing.
    """
    if len(rows) == 1:
        return [rows[0]]
    best_first = sorted(
        rows, key=lambda row: (row.unknown_since is None, row.observed_at or 0.0), reverse=True
    )
    telling = [row for row in best_first if _lists_gpus(row)]
    good = [row for row in telling if row.unknown_since is None]
    if good:
        return [row for row in good if row.observed_at >= good[0].observed_at - READING_VALID_SECONDS]
    return telling[:1] or best_first[:1]


def is_standby(conn: sa.Connection, endpoint_id: str, domain: str) -> bool:
    """Whether another endpoint listed GPUs of `domain`, also one that is lost since."""
    told = conn.execute(_OTHER_READINGS, {"domain": domain, "of": endpoint_id}).scalars()
    return any(decode_facts(facts).gpus for facts in told)


def last_lost_row(rows: Iterable[sa.Row[Any]]) -> sa.Row[Any] | None:
    """Of rows of the table `observation`, that with which their domain fell silent; None where none is lost.

    Losing a standby, which lists no GPU, takes nothing away, unless all that are lost list none.
    """
    lost = [row for row in rows if row.unknown_since is not None]
    telling = lost if len(lost) == 1 else [row for row in lost if _lists_gpus(row)] or lost
    return max(telling, key=lambda row: row.unknown_since, default=None)


def _lists_gpus(row: sa.Row[Any]) -> bool:
    return row.facts is not None and bool(decode_facts(row.facts).gpus)


def _unknown_domain(since: float, told: str, cause: str) -> LatestObservation:
    return LatestObservation(None, _unknown_since_text(since, told), since, cause)


def _unknown_since_text(since: float, reason: str) -> str:
    return f"unknown since {rfc3339(since)}: {reason}"


def save_reading(conn: sa.Connection, endpoint_id: str, observation: DomainObservation) -> None:
    """Keep a good observation; it ends any doubt about the endpoint."""
    _upsert_reading(
        conn,
        endpoint_id,
        facts=encode_facts(observation),
        observed_at=observation.observed_at,
        unknown_since=None,
        unknown_reason=None,
    )


def confirm_reading(conn: sa.Connection, endpoint_id: str, observed_at: float) -> None:
    """Note that the endpoint shows at `observed_at` what it showed before."""
    _upsert_reading(conn, endpoint_id, observed_at=observed_at)


def encode_facts(observation: DomainObservation) -> str:
    """What `observation` says, without its time: equal for readings that show the same."""
    return _encoder.encode(msgspec.structs.replace(observation, observed_at=0.0)).decode()


def observation_of_row(row: sa.Row[Any]) -> DomainObservation:
    """The observation that a row of the table `observation` keeps."""
    return msgspec.structs.replace(decode_facts(row.facts), observed_at=row.observed_at)


def decode_facts(facts: str) -> DomainObservation:
    """What was `encoded`: it has no time."""
    return _decoder.decode(facts)


def mark_unreadable(conn: sa.Connection, endpoint_id: str, reason: str, now: float) -> None:
    """Note that the endpoint could not be read; the first failure after a good reading dates the doubt."""
    before = conn.execute(_UNKNOWN_SINCE, {"through": endpoint_id}).scalar_one_or_none()
    _upsert_reading(conn, endpoint_id, unknown_since=now if before is None else before, unknown_reason=reason)


@lru_cache(maxsize=4096)
def rfc3339(seconds: float) -> str:
    """RFC 3339 in UTC. Kept, because what was written together has one time and is shown together."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _upsert_reading(conn: sa.Connection, endpoint_id: str, **values: object) -> None:
    if conn.execute(_UPDATE_READING, {"through": endpoint_id, **values}).rowcount == 0:
        conn.execute(sa.insert(table).values(endpoint_id=endpoint_id, **values))
