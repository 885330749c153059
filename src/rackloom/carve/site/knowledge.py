"""What the site knows of a domain at this moment: the newest observation, or why there is none.

Endpoints that answer with one domain uuid are one domain, and one endpoint that can be read is enough, unless
another one contradicts it. What the newest shows is what one plans from and looks at; what is promised to
anybody has to hold in every reading that stands: of two controllers, the one that no longer leads may have
accepted a change.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.values import Observation
from rackloom.carve.site import emptied
from rackloom.carve.site.tables import domain_dispute, endpoint
from rackloom.carve.site.tables import observation as table

DISPUTED = "the switch controllers of the domain contradict one another, or those of another domain"
SILENT = "the switch controllers of the domain cannot be read"

STANDS_SECONDS = 600.0
"""A reading that is so much older than another says nothing of the present: nobody reads that controller."""

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Observation)

# Built once: every pass asks these.
_TOLD = (
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
_BESIDE = (
    sa.select(table.c.facts)
    .join(endpoint, endpoint.c.id == table.c.endpoint_id)
    .where(
        endpoint.c.domain == sa.bindparam("domain"),
        endpoint.c.id != sa.bindparam("of"),
        table.c.facts.is_not(None),
    )
)
_mine = table.c.endpoint_id == sa.bindparam("through")
_LOST = sa.select(table.c.unknown_since).where(_mine)
_CHANGE = sa.update(table).where(_mine)


class Knowledge(msgspec.Struct, frozen=True):
    """The observation of a domain that counts; None and a sentence of doubt otherwise."""

    observation: Observation | None
    """The newest."""
    doubt: str
    """As tenants read it: no word of a controller, which may be an address, is in it."""
    unknown_since: float | None = None
    """Since when it cannot be read or is in dispute; None when it is known, or never was read."""
    cause: str | None = None
    """What controllers said or showed, with their addresses: for those who operate the domain."""
    others: tuple[Observation, ...] = ()
    """What other controllers of the domain showed, as far as it still says something of the present."""

    @property
    def shown(self) -> tuple[Observation, ...]:
        """All that was observed of the domain and stands, the newest first."""
        return () if self.observation is None else (self.observation, *self.others)

    @property
    def operators_doubt(self) -> str:
        """The sentence of doubt, for those who operate the domain and for nobody else."""
        if self.cause is None or self.unknown_since is None:
            return self.doubt
        return _since(self.unknown_since, self.cause)


def of_domain(conn: sa.Connection, domain: str | None) -> Knowledge:
    """What is known of `domain`; nothing of machines whose domain no controller has told (None)."""
    if domain is None:
        return Knowledge(None, "no switch controller has reported this machine yet")
    return of_domains(conn, [domain])[domain]


def of_domains(conn: sa.Connection, domains: Collection[str]) -> dict[str, Knowledge]:
    """What is known of each of `domains`, in one query; in two where one of them lists no GPU."""
    found: dict[str, list[sa.Row[Any]]] = {domain: [] for domain in domains}
    for row in conn.execute(_TOLD, {"domains": list(found)}):
        found[row.domain].append(row)
    known = {domain: _weigh(domain, told) for domain, told in found.items()}
    return known | _of_standbys(conn, known)


def _of_standbys(conn: sa.Connection, known: Mapping[str, Knowledge]) -> dict[str, Knowledge]:
    """What is known of the domains of which a reading is left that is none: its leader was given up."""
    seen = {domain: one.observation for domain, one in known.items() if one.observation is not None}
    why_not = emptied.why_no_reading(conn, seen.values())
    return {domain: _unknown(seen[domain].observed_at, SILENT, cause) for domain, cause in why_not.items()}


def _weigh(domain: str, rows: Sequence[sa.Row[Any]]) -> Knowledge:
    good = [row for row in rows if row.unknown_since is None]
    if good and good[0].dispute is not None:
        return _unknown(good[0].disputed_since, DISPUTED, good[0].dispute)
    if not rows:
        return Knowledge(None, f"no switch controller reports domain {domain} any more")
    first, *others = that_stand(rows)
    if first.unknown_since is None:
        return Knowledge(kept(first), "", others=tuple(kept(row) for row in others))
    last = last_lost(rows) or first
    return _unknown(last.unknown_since, SILENT, last.unknown_reason)


def that_counts(rows: Sequence[sa.Row[Any]]) -> sa.Row[Any]:
    """Of rows of the table `observation`, one at least, that which shows their domain as it was last seen."""
    return that_stand(rows)[0]


def that_stand(rows: Sequence[sa.Row[Any]]) -> list[sa.Row[Any]]:
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
        return [row for row in good if row.observed_at >= good[0].observed_at - STANDS_SECONDS]
    return telling[:1] or best_first[:1]


def is_standby(conn: sa.Connection, endpoint_id: str, domain: str) -> bool:
    """Whether another endpoint listed GPUs of `domain`, also one that is lost since."""
    told = conn.execute(_BESIDE, {"domain": domain, "of": endpoint_id}).scalars()
    return any(decoded(facts).gpus for facts in told)


def last_lost(rows: Iterable[sa.Row[Any]]) -> sa.Row[Any] | None:
    """Of rows of the table `observation`, that with which their domain fell silent; None where none is lost.

    Losing a standby, which lists no GPU, takes nothing away, unless all that are lost list none.
    """
    lost = [row for row in rows if row.unknown_since is not None]
    telling = lost if len(lost) == 1 else [row for row in lost if _lists_gpus(row)] or lost
    return max(telling, key=lambda row: row.unknown_since, default=None)


def _lists_gpus(row: sa.Row[Any]) -> bool:
    return row.facts is not None and bool(decoded(row.facts).gpus)


def _unknown(since: float, told: str, cause: str) -> Knowledge:
    return Knowledge(None, _since(since, told), since, cause)


def _since(since: float, reason: str) -> str:
    return f"unknown since {moment(since)}: {reason}"


def learn(conn: sa.Connection, endpoint_id: str, observation: Observation) -> None:
    """Keep a good observation; it ends any doubt about the endpoint."""
    _put(
        conn,
        endpoint_id,
        facts=encoded(observation),
        observed_at=observation.observed_at,
        unknown_since=None,
        unknown_reason=None,
    )


def confirm(conn: sa.Connection, endpoint_id: str, observed_at: float) -> None:
    """Note that the endpoint shows at `observed_at` what it showed before."""
    _put(conn, endpoint_id, observed_at=observed_at)


def encoded(observation: Observation) -> str:
    """What `observation` says, without its time: equal for readings that show the same."""
    return _encoder.encode(msgspec.structs.replace(observation, observed_at=0.0)).decode()


def kept(row: sa.Row[Any]) -> Observation:
    """The observation that a row of the table `observation` keeps."""
    return msgspec.structs.replace(decoded(row.facts), observed_at=row.observed_at)


def decoded(facts: str) -> Observation:
    """What was `encoded`: it has no time."""
    return _decoder.decode(facts)


def lose(conn: sa.Connection, endpoint_id: str, reason: str, now: float) -> None:
    """Note that the endpoint could not be read; the first failure after a good reading dates the doubt."""
    before = conn.execute(_LOST, {"through": endpoint_id}).scalar_one_or_none()
    _put(conn, endpoint_id, unknown_since=now if before is None else before, unknown_reason=reason)


@lru_cache(maxsize=4096)
def moment(seconds: float) -> str:
    """RFC 3339 in UTC. Kept, because what was written together has one time and is shown together."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _put(conn: sa.Connection, endpoint_id: str, **values: object) -> None:
    if conn.execute(_CHANGE, {"through": endpoint_id, **values}).rowcount == 0:
        conn.execute(sa.insert(table).values(endpoint_id=endpoint_id, **values))
