"""Conflicting controllers: split brain within a domain, or two domains that list the same hardware.

`compare_readings` compares two readings of one domain. Operations move no hardware, so differing GPUs
always conflict. Differing partitions conflict only when both readings are newer than the last change by
the site, because an older reading shows an earlier state. Healths and limits are measurements and are
not compared. A reading without GPUs is from a standby and says nothing. `shared_hardware` finds GPUs
that controllers of two domains list in the same place: a GPU is on one NVLink switch fabric, so both
cannot be right.

`update_conflict` records the outcome for a domain. Which controller is wrong cannot be determined here,
so the domain is unknown and no operation begins until the controllers agree or only one is left. A
conflict does not end because one controller became unreadable, or was read before the last change.
Opening a conflict increments the intent revision: earlier plans no longer hold, and the other
controllers are read at once.

`domains_sharing_hardware` and `conflicting_domains` say which other domains have to be compared.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.observation.latest import READING_VALID_SECONDS
from rackloom.carve.store import journal
from rackloom.carve.store.schema import domain_dispute, endpoint, machine, observation, operation
from rackloom.carve.store.schema import domain_dispute as table
from rackloom.carve.store.values import OperationState
from rackloom.core.partitions.domain import DomainObservation, ObservedPartition
from rackloom.errors import Refused

# Comparing two readings. Pure.


MAX_LISTED_PARTITIONS = 3
"""Partitions that are told one by one."""


class ControllerReading(msgspec.Struct, frozen=True):
    """What a switch controller showed when it was last read."""

    url: str
    seen: DomainObservation


def compare_readings(
    controller_reading: ControllerReading, other: ControllerReading, changed_at: float
) -> str | None:
    """What differs between two readings of about the same time; None when nothing does.

    Operations move no hardware, so the GPUs are compared in any case. Partitions are only where both looked
    after `changed_at`, when the site last changed some: before, one of the two shows what was. One that lists
    no GPU at all says nothing: a standby answers for its domain before it knows what is in it.
    """
    if not (controller_reading.seen.gpus and other.seen.gpus):
        return None
    told = _differing_gpus(controller_reading, other)
    if min(controller_reading.seen.observed_at, other.seen.observed_at) > changed_at:
        told += _differing_partitions(controller_reading, other)
    if not told:
        return None
    return f"switch controllers {controller_reading.url} and {other.url} contradict one another: {'; '.join(told)}"


def shared_hardware(controller_reading: ControllerReading, other: ControllerReading) -> str | None:
    """That controllers of two domains list the same GPUs in the same places; None when they do not.

    A GPU is on one switch fabric. One that stands in the same place under another GUID is another GPU.
    """
    both = len(_gpu_locations(controller_reading.seen) & _gpu_locations(other.seen))
    if not both:
        return None
    first, second = (
        f"{reading.url} of domain {reading.seen.domain}"
        for reading in sorted((controller_reading, other), key=lambda reading: reading.url)
    )
    return f"switch controllers {first} and {second} contradict one another: both list the same {both} GPUs"


def _differing_gpus(controller_reading: ControllerReading, other: ControllerReading) -> list[str]:
    first, second = _gpu_locations(controller_reading.seen), _gpu_locations(other.seen)
    pairs = ((controller_reading.url, first - second), (other.url, second - first))
    return [f"only {url} lists {len(more)} of the GPUs" for url, more in pairs if more]


def _gpu_locations(seen: DomainObservation) -> set[tuple[int, str, int, int]]:
    return {(gpu.guid, gpu.chassis_serial, gpu.slot, gpu.module_id) for gpu in seen.gpus}


def _differing_partitions(controller_reading: ControllerReading, other: ControllerReading) -> list[str]:
    first, second = (
        {part.id: part for part in reading.seen.partitions} for reading in (controller_reading, other)
    )
    # By number: the name of a partition says whose it is, and several operate a domain.
    told = [
        f"partition {number} {_describe_difference(first.get(number), second.get(number))}"
        for number in sorted(first.keys() | second.keys())
        if _name_and_members(first.get(number)) != _name_and_members(second.get(number))
    ]
    return _shorten_list(told)


def _name_and_members(partition: ObservedPartition | None) -> tuple[str, frozenset[int]] | None:
    return None if partition is None else (partition.name, partition.members)


def _describe_difference(first: ObservedPartition | None, second: ObservedPartition | None) -> str:
    sizes = [0 if one is None else len(one.members) for one in (first, second)]
    told = f"has {sizes[0]} and {sizes[1]} members"
    if first is None or second is None or sizes[0] != sizes[1]:
        return told
    return f"{told}, of which some differ" if first.members != second.members else f"{told} and two names"


def _shorten_list(told: Sequence[str]) -> list[str]:
    more = len(told) - MAX_LISTED_PARTITIONS
    return [*told[:MAX_LISTED_PARTITIONS], f"{more} more partitions differ"] if more > 0 else list(told)


# The recorded conflict of a domain.


_FOREVER = 1e300

_in_domain = table.c.domain == sa.bindparam("domain")
_CONFLICT_OF_DOMAIN = sa.select(table).where(_in_domain)
_READINGS_WITH_FACTS = (
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
_LAST_CHANGE = sa.select(
    sa.func.max(sa.case((operation.c.state == OperationState.PENDING, _FOREVER), else_=operation.c.finished))
).where(operation.c.domain == sa.bindparam("domain"))
_CONFLICT_OF_ENDPOINT = (
    sa.select(endpoint.c.domain, table.c.reason, table.c.since, table.c.rival)
    .join(table, table.c.domain == endpoint.c.domain, isouter=True)
    .where(endpoint.c.id == sa.bindparam("of"))
)


class ControllerConflict(msgspec.Struct, frozen=True):
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


class ConflictingControllers(Refused):
    """Nothing is done in a domain whose controllers contradict one another."""

    def __init__(self, dispute: ControllerConflict) -> None:
        self.dispute = dispute
        super().__init__(
            f"domain {dispute.domain} is unknown since {latest.rfc3339(dispute.since)}: {dispute.reason}",
            nearest_fix="repair the controller that is wrong, or delete its endpoint",
        )


def conflict_of_endpoint(
    conn: sa.Connection, endpoint_id: str
) -> tuple[str | None, ControllerConflict | None]:
    """Domain that the endpoint last answered with, and the dispute about it."""
    row = conn.execute(_CONFLICT_OF_ENDPOINT, {"of": endpoint_id}).one_or_none()
    if row is None or row.domain is None:
        return None, None
    return row.domain, None if row.reason is None else _conflict_of_row(row)


def conflict_of_domain(conn: sa.Connection, domain: str) -> ControllerConflict | None:
    """The dispute that stands about `domain`."""
    row = conn.execute(_CONFLICT_OF_DOMAIN, {"domain": domain}).one_or_none()
    return None if row is None else _conflict_of_row(row)


def conflicts_by_domain(conn: sa.Connection) -> Mapping[str, ControllerConflict]:
    """All that stand, by domain."""
    return {row.domain: _conflict_of_row(row) for row in conn.execute(sa.select(table))}


def update_conflict(
    conn: sa.Connection, domain: str, before: ControllerConflict | None, rivals: Collection[str] = ()
) -> ControllerConflict | None:
    """Compare what the controllers of `domain`, and of `rivals`, show, and keep the outcome for `domain`.

    `before` is what stood. It stands until they agree: it does not end because one of them looked before the
    last change, or was lost after it contradicted. What one showed before that and never again is no
    contradiction. `rivals` are other domains that may list the same hardware.
    """
    found = _conflict_within_domain(conn, domain, before) or _conflict_across_domains(
        conn, domain, rivals, before
    )
    if found is None:
        if before is not None:
            conn.execute(sa.delete(table).where(table.c.domain == domain))
        return None
    if before is None:
        return _open_conflict(conn, found)
    found = msgspec.structs.replace(found, since=before.since)
    if found != before:
        told = {"reason": found.reason, "rival": found.rival}
        conn.execute(sa.update(table).where(table.c.domain == domain).values(told))
    return found


def _open_conflict(conn: sa.Connection, dispute: ControllerConflict) -> ControllerConflict:
    conn.execute(sa.insert(table).values(msgspec.structs.asdict(dispute)))
    # Plans that were made before no longer hold, and whoever reads the other controllers shall look now.
    journal.increment_revisions(conn, [dispute.domain])
    return dispute


def _conflict_within_domain(
    conn: sa.Connection, domain: str, before: ControllerConflict | None
) -> ControllerConflict | None:
    """Controllers of one domain that contradict one another."""
    rows = _valid_readings(conn, [domain], before)
    apart = [
        (_reading_of_row(one), _reading_of_row(other))
        for one, other in combinations(rows, 2)
        if one.facts != other.facts
    ]
    reason = _first_difference(apart, 0.0)
    if reason is not None and before is None:
        # Most that differs is measured: only here are all operations of the domain looked through.
        changed = conn.execute(_LAST_CHANGE, {"domain": domain}).scalar_one()
        reason = reason if changed is None else _first_difference(apart, changed)
    return None if reason is None else ControllerConflict(domain, reason, _newest_time(rows))


def _first_difference(
    apart: Iterable[tuple[ControllerReading, ControllerReading]], changed_at: float
) -> str | None:
    told = (compare_readings(one, other, changed_at) for one, other in apart)
    return next((reason for reason in told if reason is not None), None)


def _conflict_across_domains(
    conn: sa.Connection, domain: str, rivals: Collection[str], before: ControllerConflict | None
) -> ControllerConflict | None:
    """Controllers of two domains that list the same hardware."""
    for rival in sorted(rivals):
        known = before if before is not None and before.rival == rival else None
        rows = _valid_readings(conn, [domain, rival], known)
        ours, theirs = ([row for row in rows if row.domain == one] for one in (domain, rival))
        for one, other in product(ours, theirs):
            reason = shared_hardware(_reading_of_row(one), _reading_of_row(other))
            if reason is not None:
                return ControllerConflict(domain, reason, _newest_time((one, other)), rival)
    return None


def _valid_readings(
    conn: sa.Connection, domains: Collection[str], before: ControllerConflict | None
) -> list[Any]:
    """The readings of `domains` that say something of the present, by address."""
    lost_from = _FOREVER if before is None else before.since
    rows = conn.execute(_READINGS_WITH_FACTS, {"domains": list(domains), "lost_from": lost_from}).all()
    # In a dispute only one that is lost grows too old: one that is not will be read, or be lost then.
    newest = _newest_time(rows)
    return [
        row
        for row in rows
        if row.observed_at >= newest - READING_VALID_SECONDS
        or (before is not None and row.unknown_since is None)
    ]


def _newest_time(rows: Iterable[Any]) -> float:
    return max((row.observed_at for row in rows), default=0.0)


def _reading_of_row(row: Any) -> ControllerReading:
    return ControllerReading(row.url, latest.observation_of_row(row))


def _conflict_of_row(row: Any) -> ControllerConflict:
    return ControllerConflict(row.domain, row.reason, row.since, row.rival)


# Which other domains to compare with.


# Built once: every pass that learns something asks these.
_MACHINES_ELSEWHERE = sa.select(machine.c.chassis_serial, machine.c.slot, machine.c.domain).where(
    machine.c.chassis_serial.in_(sa.bindparam("serials", expanding=True)),
    machine.c.domain != sa.bindparam("domain"),
)


_rival_column = domain_dispute.c.rival
_domain_param: sa.BindParameter[str] = sa.bindparam("domain")
_CONFLICTING_DOMAINS = sa.union(
    sa.select(domain_dispute.c.rival).where(
        domain_dispute.c.domain == _domain_param, domain_dispute.c.rival.is_not(None)
    ),
    sa.select(domain_dispute.c.domain).where(domain_dispute.c.rival == _domain_param),
)


def domains_sharing_hardware(conn: sa.Connection, seen: DomainObservation) -> frozenset[str]:
    """Other domains that have machines, in the records, where `seen` lists GPUs."""
    places = {(gpu.chassis_serial, gpu.slot) for gpu in seen.gpus}
    serials = {serial for serial, _ in places}
    rows = conn.execute(_MACHINES_ELSEWHERE, {"serials": list(serials), "domain": seen.domain})
    return frozenset(row.domain for row in rows if (row.chassis_serial, row.slot) in places)


def conflicting_domains(conn: sa.Connection, domain: str) -> frozenset[str]:
    """Domains with which `domain` is in dispute about hardware."""
    return frozenset(conn.execute(_CONFLICTING_DOMAINS, {"domain": domain}).scalars())
